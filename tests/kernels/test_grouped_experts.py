"""Experts of rows in their order: whoever gets how many rows, and whatever stands in the same tile."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.variants import INT4, MXFP4, experts, normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels.backends import Backend, compiler, select
from turbospark_mlx.errors import OptionError

pytestmark = pytest.mark.usefixtures("on_the_cpu")
KINDS = {
    "int4": (7, 192, 64, INT4, mx.float16, "silu"),
    "int8": (7, 128, 160, ((8, 32), (8, 32)), mx.bfloat16, "gelu_tanh"),
    "mxfp4": (7, 64, 96, MXFP4, mx.bfloat16, "clamped_swiglu"),
}
COUNTS = [
    (1, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 2),
    (0, 16, 0, 17, 0, 15, 0),
    (33, 0, 0, 0, 0, 0, 0),
    (3, 1, 4, 1, 5, 9, 2),
]


@pytest.fixture
def backend():
    if not compiler.candidates():
        pytest.skip("no C++ compiler on this machine")
    return select("host")


def arena_of(kind):
    blob, blobs = experts(*KINDS[kind], biased=kind != "int4")
    return ck.ExpertArena(blob, [], blobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", COUNTS)
def test_however_rows_are_shared_out(backend, kind, counts):
    arena, slots = arena_of(kind), np.repeat(np.arange(7), counts).astype(np.int32)
    x = normal(len(slots), arena.blob.gate.columns)
    found = np.array(ck.grouped_experts(arena, mx.array(slots), x, backend=backend))
    assert set(backend.counters) == {("grouped_experts", "kernel")}
    reference = Backend("reference", "cpu", "")
    expected = ck.grouped_experts(arena, mx.array(slots), x, backend=reference)
    assert oracle.relative_error(mx.array(found), np.array(expected, np.float64)) < 1e-5
    for rows in (slice(1, None), slice(None, None, 3), slice(-1, None)):
        if len(slots[rows]):
            part = ck.grouped_experts(arena, mx.array(slots[rows]), x[rows], backend=backend)
            assert np.array_equal(part, found[rows])


def test_what_does_not_fit_is_refused(backend):
    arena = arena_of("mxfp4")
    assert ck.grouped_experts(arena, mx.zeros((0,), mx.int32), mx.zeros((0, 64)), backend=backend).shape == (0, 64)
    for slots, x in ((mx.zeros((2,), mx.int32), mx.zeros((3, 64))), (mx.zeros((2, 1), mx.int32), mx.zeros((2, 64)))):
        with pytest.raises(OptionError, match=r"do not fit \[rows\] and \[rows, 64\]"):
            ck.grouped_experts(arena, slots, x, backend=backend)
    with pytest.raises(OptionError, match="do not lie in one array"):
        ck.grouped_experts(ck.ExpertArena(arena.blob, []), mx.zeros((2,), mx.int32), mx.zeros((2, 64)), backend=backend)
