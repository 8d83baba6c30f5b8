"""Every op in every variant that models use: the emulated kernel, or Metal's own where there is a Mac, against the
reference and against the same kernel compiled for the CPU."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.parity import errors, outputs, reference
from tests.kernels.variants import affine, attend, variants
from turbospark_mlx.custom_kernels import backends, emulator
from turbospark_mlx.custom_kernels.backends import Backend, compiler, metal

CLANG = any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates())
EMULATED = pytest.param("emulated", marks=pytest.mark.skipif(not CLANG, reason="needs clang: pip install ziglang"))
METAL = pytest.param("metal", marks=pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU"))
COUNT = sum(1 for _ in variants(Backend("metal", "gpu", "counted, not run", metal.launch)))


@pytest.fixture(autouse=True)
def _device(request):
    device = mx.default_device()
    mx.set_default_device(mx.gpu if "metal" in request.node.name else mx.cpu)
    yield
    mx.set_default_device(device)


def chosen(name: str, **options) -> Backend:
    return emulator.backend(**options) if name == "emulated" else backends.select(name)


def check(call, backend_call, arrays, *others):
    """``call`` and ``others`` in float32 agree with each other, and ``backend_call`` with them."""
    found = outputs(backend_call(*arrays))
    mx.eval(found)
    expected = reference(call, arrays)
    for other in others:
        for one, value in zip(reference(other, arrays), expected, strict=True):
            assert np.abs(one - value).max() <= 2e-5 * np.abs(value).max()
    for error, allowed in errors(found, expected, arrays):
        assert error <= allowed


@pytest.fixture(scope="module")
def calls():
    """``calls(name) -> (back end, its calls of all variants)``, made once: the arrays take a while."""
    made = {}

    def calls(name):
        if name not in made:
            backend = chosen(name)
            made[name] = backend, list(variants(backend))
        return made[name]

    return calls


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("name", [EMULATED, METAL])
def test_every_variant(calls, name, number):
    backend, every = calls(name)
    backend.counters.clear()
    others = ["host"] if name == "emulated" and compiler.candidates() else []
    definition, *more = (calls(other)[1][number][0] for other in ("reference", *others))
    check(definition, *every[number], *more)
    assert {path for _, path in backend.counters} == {"kernel"}


@pytest.mark.parametrize("name", [EMULATED, METAL])
def test_a_float32_residual_stream_is_added_to_without_rounding(name):
    """What is added to 10000 is far below the steps of bfloat16 there, which is what is multiplied."""
    sizes = (1, 128, 45, 4, 64, mx.bfloat16, mx.bfloat16)
    around = {"residual": (1, 45), "stream": mx.float32}
    arrays = affine(backends.select("reference"), *sizes, **around)[1]
    arrays[-1] = arrays[-1] + 10000
    found = affine(chosen(name), *sizes, **around)[0](*arrays)
    product = reference(affine(backends.select("reference"), *sizes)[0], arrays[:-1])[0]
    assert found.dtype == mx.float32
    assert np.abs(product).max() < 64
    assert np.abs(np.array(found - arrays[-1]) - product).max() < 1e-2 * np.abs(product).max()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", [EMULATED, METAL])
def test_products_at_every_format(name, bits, group_size, dtype, rows):
    sizes = (rows, 384, 45, bits, group_size, dtype, mx.float16)
    expected = affine(backends.select("reference"), *sizes)[0]
    check(expected, *affine(chosen(name, orders=3), *sizes))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 31, 33, 700])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 2)])
@pytest.mark.parametrize(("length", "window"), [(1, None), (1, 7), (3, 40), (8, None)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("name", [EMULATED, METAL])
def test_attention_everywhere(name, keys, heads, kv_heads, length, window, dtype):
    if length <= keys:
        sizes = (heads, kv_heads, length, keys, 64, 64, dtype, dtype)
        options = {"sinks": heads == 3, "mask": "causal", "window": window}
        expected = attend(backends.select("reference"), *sizes, **options)[0]
        check(expected, *attend(chosen(name, orders=3), *sizes, **options))
