"""Stand-alone rotation, on every back end of a CPU, against complex numbers in float64 and against MLX's own."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import rotation
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference"])
def backend(request):
    return ck.backends.select(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(9)


def turned(x, angles, pairs):
    """Float64 ``x [B, H, L, D]`` with each pair of dimensions, given as ``(first, second)``, turned by its angle."""
    y = x.copy()
    for i, (first, second) in enumerate(pairs):
        z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles[:, i])
        y[..., first], y[..., second] = z.real, z.imag
    return y


# What families do, as (D, options of rotate, the pairs): see the model cards of the families named.
KINDS = {
    "whole heads in halves": (24, {}, [(i, i + 12) for i in range(12)]),
    "interleaved": (24, {"interleaved": True}, [(2 * i, 2 * i + 1) for i in range(12)]),
    "partial, as in Qwen3.5": (40, {}, [(i, i + 5) for i in range(5)]),
    "proportional, as in Gemma 4": (40, {"span": 40}, [(i, i + 20) for i in range(5)]),
    "the last dimensions interleaved, as in DeepSeek V2": (
        24,
        {"interleaved": True, "start": 16},
        [(16 + 2 * i, 17 + 2 * i) for i in range(4)],
    ),
    "in the middle": (40, {"start": 6, "span": 20}, [(6 + i, 16 + i) for i in range(3)]),
}


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_pairing(backend, rng, kind, shape):
    head_dim, options, pairs = KINDS[kind]
    x = normal(rng, *shape, head_dim)
    frequencies = 100.0 ** -(np.arange(len(pairs)) / len(pairs))
    positions = np.arange(5, 5 + shape[2])
    table = mx.array(ck.rotations(frequencies, positions))
    expected = turned(oracle.float64(x), positions[:, None] * frequencies, pairs)
    for y in (
        ck.rotate(x, table, **options, backend=backend),
        rotation.rotate_reference(x, table, **options),
    ):
        assert oracle.relative_error(y, expected) < 1e-6
        still = np.setdiff1d(np.arange(head_dim), np.array(pairs))
        np.testing.assert_array_equal(np.array(y)[..., still], np.array(x)[..., still])
    assert backend.counters == {("rotate", "kernel" if backend.name == "host" else "mlx"): 1}


@pytest.mark.parametrize("traditional", [False, True])
def test_as_mlx_does_it(backend, rng, traditional):
    x = normal(rng, 2, 4, 9, 32)
    frequencies = 10000.0 ** (-np.arange(0, 32, 2) / 32)
    theirs = mx.fast.rope(x, 32, traditional=traditional, base=10000.0, scale=1.0, offset=1000)
    table = mx.array(ck.rotations(frequencies, np.arange(1000, 1009)))
    ours = ck.rotate(x, table, interleaved=traditional, backend=backend)
    # MLX's angles are float32, which at position 1000 are good to 6e-5.
    assert oracle.relative_error(ours, oracle.float64(theirs)) < 1e-4


def test_views_are_read_in_place(backend, rng):
    rows = normal(rng, 2, 5, 3, 20)
    x, table = rows.swapaxes(1, 2)[..., 2:18], normal(rng, 9, 8, 2)[3:8]
    expected = oracle.float64(rotation.rotate_reference(mx.contiguous(x), mx.contiguous(table)))
    assert oracle.relative_error(ck.rotate(x, table, backend=backend), expected) < 1e-6
    assert (
        oracle.relative_error(
            ck.rotate(x, table[:, ::2], span=16, backend=backend),
            oracle.float64(rotation.rotate_reference(mx.contiguous(x), mx.contiguous(table[:, ::2]), span=16)),
        )
        < 1e-6
    )
    backwards = mx.contiguous(x)[..., ::-1]
    expected = oracle.float64(rotation.rotate_reference(mx.contiguous(backwards), table))
    assert oracle.relative_error(ck.rotate(backwards, table, backend=backend), expected) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_its_dtype(backend, rng, dtype):
    x, table = normal(rng, 1, 2, 3, 16, dtype=dtype), mx.array(ck.rotations(np.ones(4), np.arange(3)))
    y = ck.rotate(x, table, backend=backend)
    assert y.dtype == dtype
    expected = turned(oracle.float64(x), np.arange(3)[:, None] * np.ones(4), [(i, i + 4) for i in range(4)])
    assert oracle.relative_error(y, expected) < 5e-3
    np.testing.assert_array_equal(*(np.array(a.astype(mx.float32))[..., 8:] for a in (x, y)))


def test_tables(rng):
    frequencies = np.array([1.0, 0.1, 0.01])
    table = ck.rotations(frequencies, np.array([0, 90000]))
    angles = np.array([0, 90000])[:, None] * frequencies
    np.testing.assert_allclose(table, np.stack([np.cos(angles), np.sin(angles)], -1), atol=1e-7)
    # YaRN's magnitude lengthens what is turned.
    np.testing.assert_allclose(
        np.linalg.norm((ck.rotations(frequencies, np.arange(4), magnitude=1.3466)), axis=-1), 1.3466, rtol=1e-6
    )
    # mRoPE: each pair follows one of three positions.
    positions = np.array([[3, 5, 7], [4, 4, 4]])
    table = ck.rotations(frequencies, positions)
    np.testing.assert_allclose(table[0, :, 1], np.sin([3.0, 0.5, 0.07]), atol=1e-7)
    np.testing.assert_array_equal(table[1], (ck.rotations(frequencies, np.array([4])))[0])


def test_what_does_not_fit_is_named(backend):
    x, table = mx.zeros((1, 2, 3, 16)), mx.zeros((3, 4, 2))
    for arguments, options, message in (
        ((x[0], table), {}, r"x \[2, 3, 16\]"),
        ((x, table[:2]), {}, r"rotation \[2, 4, 2\]"),
        ((x, mx.zeros((3, 9, 2))), {}, "18 dimensions from 0 on are not within the 16"),
        ((x, table), {"start": 9}, "8 dimensions from 9 on"),
        ((x, table), {"start": -1}, "8 dimensions from -1 on"),
        ((x, table), {"span": 6}, "4 pairs cannot span 6"),
        ((x, table), {"span": 9}, "4 pairs cannot span 9"),
        ((x, table), {"span": 16, "interleaved": True}, "4 interleaved pairs cannot span 16"),
    ):
        with pytest.raises(OptionError, match=message):
            ck.rotate(*arguments, **options, backend=backend)
    assert ck.rotate(x[:0], table, backend=backend).shape == (0, 2, 3, 16)
