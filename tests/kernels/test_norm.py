"""The norms, on every back end of a CPU, against numpy float64 written from the equations."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import norm
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

EPS = 0.25
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference"])
def backend(request):
    return ck.backends.select(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def normalized(x, weight=None, centered=False):
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return y if weight is None else y * (weight + 1 if centered else weight)


def check(found, expected, dtype=mx.float32):
    assert found.dtype == dtype
    assert oracle.relative_error(found, expected) < (1e-6 if dtype == mx.float32 else 5e-3)


def path(backend, op):
    way = "kernel" if backend.name == "host" else "mlx"
    assert set(backend.counters) == {(op, way)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(577,), (3, 1), (1, 1, 4099), (2, 3, 5, 80), (70, 1024)])
def test_rms_norm(backend, rng, shape, dtype):
    x, weight = normal(rng, *shape) * 3, normal(rng, shape[-1], dtype=dtype)
    wide, learned = oracle.float64(x), oracle.float64(weight)
    check(ck.rms_norm(x, None, eps=EPS, backend=backend), normalized(wide))
    check(norm.rms_norm_reference(x, None, eps=EPS), normalized(wide))
    for centered in (False, True):
        expected = normalized(wide, learned, centered)
        check(ck.rms_norm(x, weight, eps=EPS, centered=centered, backend=backend), expected)
        check(norm.rms_norm_reference(x, weight, eps=EPS, centered=centered), expected)
    path(backend, "rms_norm")


@pytest.mark.parametrize("centered", [False, True])
def test_groups_have_weights_of_their_own(backend, rng, centered):
    x, weight = normal(rng, 2, 5, 4, 96), normal(rng, 4, 96)
    expected = normalized(oracle.float64(x), oracle.float64(weight), centered)
    check(ck.rms_norm(x, weight, eps=EPS, centered=centered, backend=backend), expected)


def test_views_and_half_precision(backend, rng):
    x, weight = normal(rng, 2, 7, 3, 64), normal(rng, 64)
    expected = normalized(oracle.float64(x.swapaxes(1, 2)[:, :, 1:]), oracle.float64(weight))
    check(ck.rms_norm(x.swapaxes(1, 2)[:, :, 1:], weight, eps=EPS, backend=backend), expected)
    for dtype in DTYPES[1:]:
        half = x.astype(dtype)
        expected = normalized(oracle.float64(half), oracle.float64(weight), True)
        check(ck.rms_norm(half, weight, eps=EPS, centered=True, backend=backend), expected, dtype)
    assert backend.counters["rms_norm", "mlx"] >= 2


@pytest.mark.parametrize("activation", norm.ACTIVATIONS)
def test_gated_rms_norm(backend, rng, activation):
    x, gate, weight = normal(rng, 2, 3, 8, 128), normal(rng, 2, 3, 8, 128) * 5, normal(rng, 128, dtype=mx.bfloat16)
    wide, z = oracle.float64(x), oracle.float64(gate)
    opened = 1 / (1 + np.exp(-z)) * (z if activation == "silu" else 1)
    expected = normalized(wide, oracle.float64(weight)) * opened
    options = {"eps": EPS, "activation": activation}
    check(ck.gated_rms_norm(x, gate, weight, **options, backend=backend), expected)
    check(norm.gated_rms_norm_reference(x, gate, weight, **options), expected)
    path(backend, "gated_rms_norm")
    shut = ck.gated_rms_norm(x, mx.full(x.shape, -1000.0), weight, **options, backend=backend)
    assert not np.any(np.array(shut))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 2304), (2, 9, 160)])
def test_norms_around_the_residual_stream(backend, rng, shape, centered):
    x, residual, weight = normal(rng, *shape), normal(rng, *shape) * 20, normal(rng, shape[-1])
    scale = normal(rng, 1, dtype=mx.bfloat16)
    wide, stream, learned = map(oracle.float64, (x, residual, weight))
    options = {"eps": EPS, "centered": centered}

    expected = stream + normalized(wide, learned, centered)
    check(ck.rms_norm_add(x, weight, residual, **options, backend=backend), expected)
    check(norm.rms_norm_add_reference(x, weight, residual, **options), expected)
    expected *= oracle.float64(scale)
    check(ck.rms_norm_add(x, weight, residual, scale=scale, **options, backend=backend), expected)
    check(norm.rms_norm_add_reference(x, weight, residual, scale=scale, **options), expected)
    path(backend, "rms_norm_add")
    backend.counters.clear()

    for total, y in (
        ck.add_rms_norm(x, residual, weight, **options, backend=backend),
        norm.add_rms_norm_reference(x, residual, weight, **options),
    ):
        check(total, stream + wide)
        check(y, normalized(stream + wide, learned, centered))
    path(backend, "add_rms_norm")


def test_a_wide_residual_stream_takes_narrow_activations(backend, rng):
    x, residual, weight = normal(rng, 4, 64, dtype=mx.bfloat16), normal(rng, 4, 64) * 100, normal(rng, 64)
    wide, stream = oracle.float64(x), oracle.float64(residual)
    check(ck.rms_norm_add(x, None, residual, eps=EPS, backend=backend), stream + normalized(wide))
    total, y = ck.add_rms_norm(x, residual, weight, eps=EPS, backend=backend)
    check(total, stream + wide)
    check(y, normalized(stream + wide, oracle.float64(weight)), mx.bfloat16)


def test_nan_stays_in_its_row(backend, rng):
    x = mx.where(mx.arange(6)[:, None] == 2, mx.nan, normal(rng, 6, 40))
    y = np.isnan(np.array(ck.rms_norm(x, None, eps=EPS, backend=backend)))
    assert y[2].all()
    assert not np.delete(y, 2, axis=0).any()


def test_nothing_in_nothing_out(backend):
    x, weight = mx.zeros((0, 3, 16)), mx.zeros(16)
    assert ck.rms_norm(x, weight, eps=EPS, backend=backend).shape == x.shape
    assert ck.gated_rms_norm(x, x, weight, eps=EPS, activation="silu", backend=backend).shape == x.shape
    assert ck.rms_norm_add(x, weight, x, eps=EPS, backend=backend).shape == x.shape
    assert [a.shape for a in ck.add_rms_norm(x, x, weight, eps=EPS, backend=backend)] == [x.shape] * 2


def test_what_does_not_fit_is_named(backend):
    x, weight, options = mx.zeros((2, 5, 16)), mx.zeros(16), {"eps": EPS, "backend": backend}
    with pytest.raises(OptionError, match=r"rms_norm: weight is \[15\], but x is \[2, 5, 16\]"):
        ck.rms_norm(x, weight[1:], **options)
    with pytest.raises(OptionError, match=r"rms_norm: weight is \[2, 16\]"):
        ck.rms_norm(x, mx.zeros((2, 16)), **options)
    with pytest.raises(OptionError, match=r"rms_norm: x is \[2, 0\]"):
        ck.rms_norm(mx.zeros((2, 0)), None, **options)
    with pytest.raises(OptionError, match=r"gated_rms_norm: gate is \[5, 16\]"):
        ck.gated_rms_norm(x, x[0], weight, activation="silu", **options)
    with pytest.raises(OptionError, match=r"activation='gelu'.*silu, sigmoid"):
        ck.gated_rms_norm(x, x, weight, activation="gelu", **options)
    with pytest.raises(OptionError, match=r"rms_norm_add: residual is \[1, 5, 16\]"):
        ck.rms_norm_add(x, weight, x[:1], **options)
    with pytest.raises(OptionError, match=r"rms_norm_add: scale is \[\]"):
        ck.rms_norm_add(x, weight, x, scale=mx.array(2.0), **options)
    with pytest.raises(OptionError, match=r"add_rms_norm: weight is \[5, 16\]; it must be \[16\]"):
        ck.add_rms_norm(x, x, mx.zeros((5, 16)), **options)
