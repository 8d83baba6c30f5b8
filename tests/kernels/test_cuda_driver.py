"""What is told of NVIDIA's driver where it fails; nothing else of it can be tried without one."""

import ctypes
from types import SimpleNamespace

import pytest

from turbospark_mlx.custom_kernels.backends import cuda_driver
from turbospark_mlx.errors import BackendError


def named(status, to):
    to._obj.value = b"out of memory" if status == 2 else None
    return 0


@pytest.fixture
def driver(monkeypatch):
    library = SimpleNamespace(cuGetErrorString=named)
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    return library


def test_an_error_is_spelled(driver):
    driver.cuGraphCreate = lambda to, flags: 2
    with pytest.raises(BackendError, match=r"cuGraphCreate: out of memory \(2\)"):
        cuda_driver.Graph(overlapping=True)
    driver.cuGraphCreate = lambda to, flags: 9999
    with pytest.raises(BackendError, match=r"cuGraphCreate: an error without a name \(9999\)"):
        cuda_driver.Graph(overlapping=True)


def test_a_driver_that_lacks_a_function_is_too_old(driver):
    with pytest.raises(BackendError, match=r"libcuda\.so\.1 has no cuGraphCreate: NVIDIA's driver is too old"):
        cuda_driver.Graph(overlapping=True)


def test_memory_that_cannot_be_brought_stays_where_it_is(driver):
    driver.cuMemPrefetchAsync_v2 = lambda *arguments: 1
    cuda_driver.prefetch(4096, 64)


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_driver._library.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"libcuda\.so\.1, NVIDIA's driver, could not be loaded: no such file"):
            cuda_driver.Stream()
    finally:
        cuda_driver._library.cache_clear()
