"""The largest of many values by its kernel, compiled for the CPU, beside numpy."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.custom_kernels import backends, head, largest
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not compiler.candidates(), reason="needs a CPU's kernels, and a C++ compiler"
)
SIZES = (1, 7, 8, 8192, 8193, 20000)


@pytest.fixture
def backend():
    """The kernel is worth it on a GPU alone."""
    return replace(backends.select("host"), device="gpu")


def found(values, backend):
    index, peak = largest(mx.array(values, mx.float32), backend=backend)
    assert (index.shape, index.dtype, peak.shape, peak.dtype) == ((1, 1), mx.int32, (1,), mx.float32)
    return index.item(), peak.item()


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_largest_wherever_it_is(backend, size):
    rng = np.random.default_rng(size)
    values = rng.normal(size=size).astype(np.float32)
    assert found(values, backend) == (values.argmax(), values.max())
    for place in {0, size // 3, max(0, size - 9), size - 1, min(size - 1, 8191), min(size - 1, 8192)}:
        for others in ((), (place + 1,), (size - 1,), (place + 8, place + 9, place + 8192)):
            changed = values.copy()
            changed[[place, *(other for other in others if other < size)]] = 9.0
            assert found(changed, backend) == (place, 9.0)
    assert found(np.zeros(size), backend) == (0, 0.0)
    assert backend.counters[head.LARGEST.name, "kernel"] == sum(backend.counters.values())


@pytest.mark.parametrize("size", SIZES)
def test_numbers_that_are_none(backend, size):
    assert found(np.full(size, -np.inf), backend) == (0, -np.inf)
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    for place in {0, size // 2, size - 1}:
        changed = values.copy()
        changed[place] = np.inf
        assert found(changed, backend) == (place, np.inf)
        for others in ([], [size - 1], range(size)):
            changed[[place, *others]] = np.nan
            assert np.isnan(found(changed, backend)[1])
            assert 0 <= found(changed, backend)[0] < size
        lowest = np.full(size, -np.inf, np.float32)
        lowest[place] = -3e38
        assert found(lowest, backend) == (place, np.float32(-3e38))


def test_more_than_a_slice_takes_two_launches(backend):
    launched = []

    def launch(call, inputs):
        launched.append(call.groups)
        return backend.launch(call, inputs)

    for size, groups in ((8192, [(1, 1)]), (8193, [(2, 1), (1, 1)]), (20000, [(3, 1), (1, 1)])):
        launched.clear()
        largest(mx.zeros(size), backend=replace(backend, launch=launch))
        assert launched == groups


@pytest.mark.parametrize("shape", [(0,), (), (1, 4)])
def test_what_has_no_largest_is_refused(backend, shape):
    with pytest.raises(OptionError, match="one axis, and something in it"):
        largest(mx.zeros(shape), backend=backend)


def test_more_than_two_launches_can_compare_is_refused(backend, monkeypatch):
    monkeypatch.setattr(head, "SLICE", 4)
    head._plan.cache_clear()
    try:
        assert found(np.arange(16), backend) == (15, 15.0)
        with pytest.raises(OptionError, match="x has 17 values; up to 16 are compared"):
            largest(mx.zeros(17), backend=backend)
    finally:
        head._plan.cache_clear()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_cpu_and_the_reference_take_mlx_operations(dtype):
    x = mx.array(np.random.default_rng(1).normal(size=9000)).astype(dtype)
    for name in ("host", "reference"):
        backend = replace(backends.select(name))
        backend.counters.clear()
        index, peak = largest(x, backend=backend)
        assert (index.item(), peak.item()) == (mx.argmax(x).item(), mx.max(x).item())
        assert set(backend.counters) == {("largest", "mlx")}
