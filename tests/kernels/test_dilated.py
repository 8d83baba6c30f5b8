"""The dilated convolution of one token, against the equation in float64 over a whole sequence."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import dilated
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

pytestmark = pytest.mark.usefixtures("on_the_cpu")
SHAPES = [(1, 10240, 4, 3), (2, 77, 3, 2), (3, 16, 2, 1)]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def convolved(rows, weight, apart):
    """``rows [B, L, W]`` with nothing before them."""
    rows, weight = oracle.float64(rows), oracle.float64(weight)
    y, taps = np.zeros(rows.shape), weight.shape[1]
    for tap in range(taps):
        back = (taps - 1 - tap) * apart
        y[:, back:] += rows[:, : rows.shape[1] - back] * weight[:, tap]
    return y / (1 + np.exp(-y))


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
@pytest.mark.parametrize(("batch", "width", "taps", "apart"), SHAPES)
def test_token_by_token(rng, batch, width, taps, apart):
    """Each finds what is behind the last in its slot, and leaves the one before alone."""
    backend, length = ck.backends.select("host"), (taps - 1) * apart + 4
    x, told, residual = (normal(rng, batch, length, width) for _ in range(3))
    weight = normal(rng, width, taps)
    expected = oracle.float64(residual) + oracle.float64(told) + convolved(x, weight, apart)
    tail = mx.zeros((3, batch, (taps - 1) * apart, width))
    mx.eval(tail)
    for t in range(length):
        row = slice(t, t + 1)
        given = x[:, row], told[:, row], residual[:, row], tail, mx.array([t], mx.int32), weight
        before = np.array(tail[t % 3])
        defined = dilated.dilated_convolution_step_reference(*given, apart=apart)
        y = ck.dilated_convolution_step(*given, apart=apart, backend=backend)
        assert oracle.relative_error(y, expected[:, row]) < 1e-5
        assert oracle.relative_error(defined[0], expected[:, row]) < 1e-5
        np.testing.assert_array_equal(np.array(tail), np.array(defined[1]))
        np.testing.assert_array_equal(np.array(tail[t % 3]), before)
    assert backend.counters == {("dilated_convolution_step", "kernel"): length}


@pytest.mark.parametrize(("batch", "width", "taps", "apart"), SHAPES)
def test_several_tokens(rng, batch, width, taps, apart):
    x, weight = normal(rng, batch, 11, width), normal(rng, width, taps)
    history = mx.concatenate([mx.zeros((batch, (taps - 1) * apart, width)), x], axis=1)
    y = ck.dilated_convolution(history, weight, apart=apart)
    assert oracle.relative_error(y, convolved(x, weight, apart)) < 1e-5


def test_what_does_not_fit_is_named():
    x, tail, start = mx.zeros((1, 1, 8)), mx.zeros((3, 1, 6, 8)), mx.array([0], mx.int32)
    backend = ck.backends.select("reference")
    for told, other, weight in ((x, tail[:1], 4), (x, tail[:, :, 1:], 4), (x[..., 1:], tail, 4), (x, tail, 3)):
        with pytest.raises(OptionError, match=r"dilated_convolution_step: x .* do not fit \[B, 1, W\] three times"):
            ck.dilated_convolution_step(x, told, x, other, start, mx.zeros((8, weight)), apart=2, backend=backend)
    assert not ck.convolves(x, backend)
