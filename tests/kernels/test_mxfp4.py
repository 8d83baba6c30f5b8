"""MXFP4 experts to the bit: every code under every exponent."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import emulator
from turbospark_mlx.custom_kernels.backends import compiler

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))
CLANG = any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates())
EMULATED = pytest.param("emulated", marks=pytest.mark.skipif(not CLANG, reason="needs clang: pip install ziglang"))
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
"""Of e2m1, as the specification lists them (OCP Microscaling Formats 1.0, table 4)."""

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("name", [HOST, EMULATED])
def test_every_weight_that_there_is(name):
    """Row e of one matrix has exponent e, and its columns all codes twice; a product with one column is the weight."""
    codes = np.arange(32) % 16
    word = (codes.reshape(4, 8) << (4 * np.arange(8))).sum(axis=1).astype(np.uint32)
    parts = [np.tile(word, (256, 1)).view(np.uint8).ravel(), np.arange(256, dtype=np.uint8)]
    blobs = mx.array(np.concatenate(parts).view(np.uint32).reshape(1, -1))
    down = ck.BlobMatrix(256, 32, 0, mx.uint8, bits=4, group_size=32, scales=parts[0].size, mode="mxfp4")
    arena = ck.ExpertArena(ck.ExpertBlob(down, down, down, "silu", 1.0, 1.0), [], blobs)
    backend = emulator.backend() if name == "emulated" else ck.backends.select(name)
    slots, weight = mx.zeros((1, 1), mx.int32), mx.ones((1, 1))
    for column in (*range(16), 31):
        x = mx.zeros((1, 32))
        x[0, column] = 1.0
        found = np.array(ck.moe_phase2_down_reduce(arena, slots, x, weight, backend=backend))[0]
        with np.errstate(over="ignore"):
            expected = (CODES[column % 16] * 2.0 ** (np.arange(1, 255) - 127.0)).astype(np.float32)
        np.testing.assert_array_equal(found[1:255], expected)
        # The least one is no normal float32, which hardware may take for 0.
        assert found[0] in (0, CODES[column % 16] * 2.0**-127)
        assert np.isnan(found[255])
    assert set(backend.counters) == {("moe_phase2_down_reduce", "kernel")}
