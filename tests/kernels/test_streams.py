"""Residual streams and the gate of n-grams, on every back end of a CPU, against the equations in float64."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import streams
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))
SHAPES = [((1, 1, 4 * 2560), 4), ((2, 5, 3 * 7), 3), ((70, 2 * 300), 2)]

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference"])
def backend(request):
    return ck.backends.select(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_mix(backend, rng, shape, count):
    gate, x = normal(rng, *shape), normal(rng, *shape)
    parts = (sigmoid(oracle.float64(gate)) * oracle.float64(x)).reshape(*shape[:-1], count, -1)
    for y in (
        ck.stream_mix(gate, x, streams=count, backend=backend),
        streams.stream_mix_reference(gate, x, streams=count),
    ):
        assert oracle.relative_error(y, sum(parts[..., s, :] for s in range(count)) / count) < 1e-6
    assert backend.counters == {("stream_mix", "kernel" if backend.name == "host" else "mlx"): 1}


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_inject(backend, rng, shape, count):
    x, y, logits = normal(rng, *shape), normal(rng, *shape[:-1], shape[-1] // count), normal(rng, *shape[:-1], count)
    wide = oracle.float64(x).reshape(*shape[:-1], count, -1)
    expected = wide + 2 * sigmoid(oracle.float64(logits) / count)[..., None] * oracle.float64(y)[..., None, :]
    for found in (ck.stream_inject(x, y, logits, backend=backend), streams.stream_inject_reference(x, y, logits)):
        assert oracle.relative_error(found, expected.reshape(shape)) < 1e-6
    # Without a preference every stream is given the whole.
    same = ck.stream_inject(x, y, mx.zeros_like(logits), backend=backend)
    np.testing.assert_allclose(np.array(same), (wide + oracle.float64(y)[..., None, :]).reshape(shape), atol=1e-6)


@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_ngram_gate(backend, rng, shape, count):
    key, query, value = normal(rng, *shape), normal(rng, *shape), normal(rng, *shape[:-1], shape[-1] // count)
    width = shape[-1] // count
    split = (*shape[:-1], count, width)
    alike = (oracle.float64(key) * oracle.float64(query)).reshape(split).sum(-1) / np.sqrt(width)
    root = np.sign(alike) * np.sqrt(np.abs(alike))
    expected = (sigmoid(root)[..., None] * oracle.float64(value)[..., None, :]).reshape(shape)
    for found in (ck.ngram_gate(key, query, value, backend=backend), streams.ngram_gate_reference(key, query, value)):
        assert oracle.relative_error(found, expected) < 1e-5


def test_a_gate_that_hardly_opens(backend):
    """The root of at least 1e-6, with the sign of what it is the root of, and none of nothing: by hand."""
    key = mx.array([[1e-4, 0, -1e-4, 0, 0, 0, 3, 0, -3, 0]])
    query = mx.array([[1e-4, 0, 1e-4, 0, 0, 0, 3, 0, 3, 0]])
    y = np.array(ck.ngram_gate(key, query, mx.array([[1.0, -2.0]]), backend=backend)).reshape(5, 2)
    opened = sigmoid(np.array([1e-3, -1e-3, 0, np.sqrt(9 / np.sqrt(2)), -np.sqrt(9 / np.sqrt(2))]))
    np.testing.assert_allclose(y[:, 0], opened, atol=1e-6)
    np.testing.assert_allclose(y[:, 1], -2 * y[:, 0], atol=1e-7)
    assert y[2, 0] == 0.5


def test_what_does_not_fit_is_named(backend):
    x, y = mx.zeros((2, 12)), mx.zeros((2, 4))
    with pytest.raises(OptionError, match=r"stream_mix: gate \[2, 4\]"):
        ck.stream_mix(y, x, streams=3, backend=backend)
    with pytest.raises(OptionError, match="of 5 streams"):
        ck.stream_mix(x, x, streams=5, backend=backend)
    with pytest.raises(OptionError, match=r"stream_inject: x \[2, 12\], y \[2, 4\], logits \[2, 4\]"):
        ck.stream_inject(x, y, mx.zeros((2, 4)), backend=backend)
    with pytest.raises(OptionError, match=r"ngram_gate: key \[2, 12\], query \[2, 4\]"):
        ck.ngram_gate(x, y, y, backend=backend)
