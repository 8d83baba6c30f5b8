"""The little of CUDA's driver that graphs of our own need, called through ctypes, in MLX's own context."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from turbospark_mlx.errors import BackendError

LIBRARY = "libcuda.so.1"
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC and CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

Handle = ctypes.c_void_p


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", Handle),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", Handle),
        ("context", Handle),
    ]


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendError(f"{LIBRARY}, NVIDIA's driver, could not be loaded: {error}") from error


def _call(name: str, *arguments: object) -> None:
    library = _library()
    try:
        function = getattr(library, name)
    except AttributeError:
        raise BackendError(
            f"{LIBRARY} has no {name}: NVIDIA's driver is too old; version 545 or newer has it"
        ) from None
    if status := function(*arguments):
        words = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(words))
        raise BackendError(f"{name}: {(words.value or b'an error without a name').decode()} ({status})")


def _made(name: str, *arguments: object) -> Handle:
    """What a function makes that gives it through its first argument."""
    handle = Handle()
    _call(name, ctypes.byref(handle), *arguments)
    return handle


@cache
def _context(number: int) -> tuple[int, Handle]:
    _call("cuInit", 0)
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), number)
    return device.value, _made("cuDevicePrimaryCtxRetain", device)


def enter(number: int = 0) -> None:
    """Work with GPU ``number`` on this thread, in the context that MLX uses, too. Raises BackendError."""
    _call("cuCtxSetCurrent", _context(number)[1])


@cache
def capability(number: int = 0) -> tuple[int, int]:
    """The compute capability of GPU ``number``: (9, 0) of an H200."""
    device, _ = _context(number)
    value, numbers = ctypes.c_int(), []
    for attribute in (MAJOR, MINOR):
        _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return tuple(numbers)


def function(code: bytes, name: str) -> Handle:
    """A function of compiled code, which is unloaded with the process."""
    return _made("cuModuleGetFunction", _made("cuModuleLoadData", ctypes.c_char_p(code)), name.encode())


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("number", ctypes.c_int)]


def prefetch(address: int, nbytes: int, number: int = 0) -> None:
    """Bring memory that the host sees, too, to the GPU before a kernel wants it, a page at a time. Other memory stays
    where it is."""
    where = _Location(ON_DEVICE, number)
    with suppress(BackendError):
        _call("cuMemPrefetchAsync_v2", Handle(address), ctypes.c_size_t(nbytes), where, 0, None)


class DeviceMemory:
    """Memory of the GPU: ``address`` and ``nbytes``."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        pointer = _made("cuMemAlloc_v2", ctypes.c_size_t(max(1, nbytes)))
        self.address: int = pointer.value
        weakref.finalize(self, _forgiving, "cuMemFree_v2", pointer)


class PinnedMemory:
    """Memory of the host that the GPU copies from and to by itself: ``address``, and ``view`` as writable bytes."""

    def __init__(self, nbytes: int):
        pointer = _made("cuMemHostAlloc", ctypes.c_size_t(max(1, nbytes)), 0)
        self.address: int = pointer.value
        self.view = (ctypes.c_uint8 * nbytes).from_address(self.address)
        weakref.finalize(self, _forgiving, "cuMemFreeHost", pointer)


class Event:
    """What a stream has come to."""

    def __init__(self) -> None:
        self.handle = _made("cuEventCreate", NO_TIMING)
        weakref.finalize(self, _forgiving, "cuEventDestroy_v2", self.handle)

    def wait(self) -> None:
        _call("cuEventSynchronize", self.handle)


class Stream:
    """Work in order, beside MLX's."""

    def __init__(self) -> None:
        self._handle = _made("cuStreamCreate", NON_BLOCKING)
        weakref.finalize(self, _forgiving, "cuStreamDestroy_v2", self._handle)

    def to_device(self, to: int, from_: int, nbytes: int) -> None:
        _call("cuMemcpyHtoDAsync_v2", Handle(to), Handle(from_), ctypes.c_size_t(nbytes), self._handle)

    def to_host(self, to: int, from_: int, nbytes: int) -> None:
        _call("cuMemcpyDtoHAsync_v2", Handle(to), Handle(from_), ctypes.c_size_t(nbytes), self._handle)

    def on_device(self, to: int, from_: int, nbytes: int) -> None:
        _call("cuMemcpyDtoDAsync_v2", Handle(to), Handle(from_), ctypes.c_size_t(nbytes), self._handle)

    def launch(self, graph: Graph) -> None:
        _call("cuGraphLaunch", graph.executable, self._handle)

    def record(self, event: Event) -> None:
        _call("cuEventRecord", event.handle, self._handle)

    def wait(self) -> None:
        _call("cuStreamSynchronize", self._handle)


class Graph:
    """Kernels that are launched together, one after the other."""

    def __init__(self, *, overlapping: bool):
        """``overlapping`` starts a kernel before the one in front of it has ended, for which it has to wait itself."""
        self._graph = _made("cuGraphCreate", 0)
        weakref.finalize(self, _forgiving, "cuGraphDestroy", self._graph)
        self._edge = _Edge(from_port=PROGRAMMATIC, type=PROGRAMMATIC) if overlapping else _Edge()
        self._nodes: list[Handle] = []
        self.executable: Handle | None = None

    def add(self, function: Handle, grid: Sequence[int], threads: int, arguments: ctypes.Array) -> None:
        """``arguments`` are addresses of values, which are copied."""
        node = _node(function, grid, threads, arguments)
        made = _made("cuGraphAddKernelNode_v2", self._graph, None, ctypes.c_size_t(0), ctypes.byref(node))
        if self._nodes:
            ends = (Handle * 1)(self._nodes[-1]), (Handle * 1)(made)
            _call("cuGraphAddDependencies_v2", self._graph, *ends, ctypes.byref(self._edge), ctypes.c_size_t(1))
        self._nodes.append(made)

    def finish(self) -> None:
        self.executable = _made("cuGraphInstantiateWithFlags", self._graph, ctypes.c_ulonglong(0))
        weakref.finalize(self, _forgiving, "cuGraphExecDestroy", self.executable)

    def change(self, index: int, function: Handle, grid: Sequence[int], threads: int, arguments: ctypes.Array) -> None:
        """Give the kernel that was added as number ``index`` other arguments, for launches to come."""
        node = _node(function, grid, threads, arguments)
        _call("cuGraphExecKernelNodeSetParams_v2", self.executable, self._nodes[index], ctypes.byref(node))


def _node(function: Handle, grid: Sequence[int], threads: int, arguments: ctypes.Array) -> _KernelNode:
    pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
    return _KernelNode(function, (*grid, 1), (threads, 1, 1), 0, pointers, None, None, None)


def _forgiving(name: str, handle: Handle) -> None:
    """Whatever thread collects garbage; at the end of the process the driver may be gone before its objects."""
    with suppress(BackendError):
        enter()
        _call(name, handle)
