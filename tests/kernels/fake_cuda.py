"""A stand-in for NVIDIA's driver: graphs of the kernels that the host's compiler makes, over memory of the host.

What is put on a stream is done when somebody waits for an event behind it, or never: whoever forgets to wait finds that
nothing has happened. ``progress`` makes a device that hurries instead, for those who take it for slow. Memory of the
device begins as NaN, and what kernels write is NaN again before each launch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.backends import cuda, cuda_graph, host, nvrtc
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Launch
from turbospark_mlx.errors import BackendError

GARBAGE = 0xFF
"""Every byte of memory that was not written: NaN as a float."""
Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)


class Memory:
    """``address`` and ``nbytes``, in the list of its kind for as long as it lives."""

    def __init__(self, kind: dict[int, int], nbytes: int):
        self.nbytes = nbytes
        room = np.full(max(1, nbytes) + cuda_graph.ALIGNMENT, GARBAGE, np.uint8)
        skipped = -room.ctypes.data % cuda_graph.ALIGNMENT
        self._room, self.address = room, room.ctypes.data + skipped
        self.view = (ctypes.c_uint8 * nbytes).from_address(self.address)
        kind[self.address] = nbytes
        weakref.finalize(self, kind.pop, self.address)


@dataclass(eq=False)
class Loaded:
    """A kernel in the device's memory."""

    call: Launch

    @cached_property
    def run(self) -> Callable[..., None]:
        return Run(host.prepared(self.call)[0])

    @cached_property
    def sizes(self) -> list[tuple[int, bool, bool]]:
        """Of each argument: its bytes, whether they are an address, and whether that is written."""
        found = []
        for name, _ in self.call.present_inputs:
            found.append((8, True, False))
            for fact, nbytes in (("shape", 4), ("strides", 8)):
                found += [(nbytes * nvrtc.DIMENSIONS, False, False)] * self.call.kernel.reads(name, fact)
        return found + [(8, True, True)] * len(self.call.present_outputs)


class Node:
    """One kernel with its arguments as they were when it was given them."""

    def __init__(
        self, device: Device, function: Loaded, grid: Sequence[int], threads: int, arguments: Sequence[int | None]
    ):
        assert threads == function.call.simdgroups * SIMD_WIDTH
        assert len(arguments) == len(function.sizes)
        self.function, self.count = function, grid[0] * grid[1]
        self._groups = (ctypes.c_uint32 * 2)(*grid)
        self.written: set[int] = set()
        self._kept, pointers = [], []
        for address, (nbytes, is_address, written) in zip(arguments, function.sizes, strict=True):
            value = ctypes.string_at(address, nbytes)
            if is_address:
                pointers.append(int.from_bytes(value, "little"))
                assert pointers[-1] < cuda_graph.NOWHERE, f"{function.call.kernel.name} has no memory yet"
                if written:
                    self.written.add(device.start_of(pointers[-1], 1))
            else:
                self._kept.append(ctypes.create_string_buffer(value, nbytes))
                pointers.append(ctypes.addressof(self._kept[-1]))
        self._buffers = (ctypes.c_void_p * len(pointers))(*pointers)

    def run(self) -> None:
        self.function.run(ctypes.addressof(self._buffers), ctypes.addressof(self._groups), 0, self.count)


class Graph:
    def __init__(self, device: Device, *, overlapping: bool):
        device.called("graph")
        self._device, self.overlapping, self.nodes, self.finished = device, overlapping, [], False

    def add(self, *arguments: object) -> None:
        assert not self.finished
        self.nodes.append(Node(self._device, *arguments))

    def change(self, index: int, *arguments: object) -> None:
        """For launches to come: those on their way keep the nodes that they began with."""
        self._device.called("change")
        assert self.finished
        assert self.nodes[index].function is arguments[0]
        self.nodes[index] = Node(self._device, *arguments)

    def finish(self) -> None:
        self.finished = True


class Event:
    def __init__(self, device: Device):
        self._device = device
        self.after: tuple[Stream, int] | None = None

    def wait(self) -> None:
        self._device.called("wait")
        if self.after is not None:
            stream, number = self.after
            stream.advance(number - stream.done)


class Stream:
    def __init__(self, device: Device):
        self._device, self._work, self.done = device, deque(), 0
        weakref.finalize(self, device.abandon, self._work)

    @property
    def waiting(self) -> int:
        """Parts of the work that are not done."""
        return len(self._work)

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._work.popleft()()
            self.done += 1

    def _add(self, name: str, work: Callable[[], None]) -> None:
        self._device.called(name)
        self._work.append(work)
        self.advance(min(len(self._work), self._device.progress()))

    def _copy(self, name: str, to: int, from_: int, nbytes: int, kinds: Sequence[dict[int, int] | None]) -> None:
        def copy() -> None:
            for address, kind in zip((to, from_), kinds, strict=True):
                if kind is not None:
                    self._device.start_of(address, nbytes, kind)
            ctypes.memmove(to, from_, nbytes)

        self._add(name, copy)

    def to_device(self, to: int, from_: int, nbytes: int) -> None:
        self._copy("to_device", to, from_, nbytes, (self._device.memory, self._device.pinned))

    def to_host(self, to: int, from_: int, nbytes: int) -> None:
        self._copy("to_host", to, from_, nbytes, (self._device.pinned, self._device.memory))

    def on_device(self, to: int, from_: int, nbytes: int) -> None:
        """Where MLX's own arrays lie is not known here."""
        self._copy("on_device", to, from_, nbytes, (None, self._device.memory))

    def launch(self, graph: Graph) -> None:
        assert graph.finished
        nodes, memory = list(graph.nodes), self._device.memory

        def run() -> None:
            for start in set().union(*(node.written for node in nodes)):
                ctypes.memset(start, GARBAGE, memory[start])
            for node in nodes:
                node.run()

        self._add("launch", run)

    def wait(self) -> None:
        self._device.called("wait")
        self.advance(len(self._work))

    def record(self, event: Event) -> None:
        self._add("record", lambda: None)
        event.after = self, self.done + len(self._work)


class Device:
    """What there is of a GPU, and how often each of its calls was made; ``failing`` names those that fail, and from
    which time on."""

    def __init__(self, progress: Callable[[], int]):
        self.progress, self.calls = progress, Counter()
        self.failing: dict[str, int] = {}
        self.memory: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.prefetched: list[tuple[int, int]] = []
        self.compiled: list[str] = []
        self.capability = (9, 0)
        self.abandoned = 0
        """Parts of work on streams that were let go before anyone had waited for them."""
        self._launches: dict[str, Launch] = {}

    def fails_at(self, name: str, time: int = 1) -> None:
        """From now on all calls of this name fail but the first ones."""
        self.failing[name] = self.calls[name] + time

    def called(self, name: str) -> None:
        self.calls[name] += 1
        if self.calls[name] >= self.failing.get(name, 1 << 30):
            raise BackendError(f"{name}: no such luck")

    def abandon(self, work: Sequence[Callable[[], None]]) -> None:
        self.abandoned += len(work)

    def start_of(self, address: int, nbytes: int, kind: dict[int, int] | None = None) -> int:
        """Where the memory begins that has these bytes and is still there."""
        for start, size in (self.memory if kind is None else kind).items():
            if start <= address and address + nbytes <= start + size:
                return start
        raise AssertionError(f"{nbytes} bytes at {address:#x} are no memory of this device")

    def source_text(self, call: Launch) -> str:
        text = _source_text(call)
        self._launches.setdefault(text, call)
        return text

    def compile_all(self, texts: dict[str, str], architecture: str) -> dict[str, bytes]:
        self.called("compile")
        assert architecture == "sm_{}{}".format(*self.capability)
        self.compiled += texts
        return {text: text.encode() for text in texts}

    def function(self, code: bytes, name: str) -> Loaded:
        self.called("function")
        call = self._launches[code.decode()]
        assert call.kernel.name == name
        return Loaded(call)


_source_text = nvrtc.source_text


def late() -> int:
    """A device that does nothing before it is waited for."""
    return 0


def early() -> int:
    """A device that has done all before its call returns."""
    return 1 << 30


def anyhow(seed: int) -> Callable[[], int]:
    """One that does this and that."""
    rng = np.random.default_rng(seed)
    return lambda: int(rng.integers(9)) * int(rng.integers(2))


def on(patch, progress: Callable[[], int] = late) -> Device:
    """Put a stand-in into `cuda_graph`'s place of a driver, until ``patch``, pytest's, is undone."""
    device = Device(progress)
    patch.setattr(cuda_graph, "enter", partial(device.called, "enter"))
    patch.setattr(cuda_graph, "prefetch", lambda *extent: device.prefetched.append(extent))
    patch.setattr(cuda_graph, "capability", lambda: device.capability)
    patch.setattr(cuda_graph, "DeviceMemory", partial(Memory, device.memory))
    patch.setattr(cuda_graph, "PinnedMemory", partial(Memory, device.pinned))
    patch.setattr(cuda_graph, "_functions", {})
    for name, made in (("Graph", Graph), ("Event", Event), ("Stream", Stream)):
        patch.setattr(cuda_graph, name, partial(made, device))
    patch.setattr(cuda_graph, "function", device.function)
    patch.setattr(nvrtc, "source_text", device.source_text)
    patch.setattr(nvrtc, "compile_all", device.compile_all)
    patch.setattr(cuda, "_bound", lambda call: lambda inputs: host.launch(call, inputs))
    return device


def installed(patch, progress: Callable[[], int] = late) -> Device:
    """The same, and "auto" selects a back end that records graphs on it. Steps that would be traced are run as they
    are, because the host's kernels cannot be."""
    device, select = on(patch, progress), backends.select
    made = replace(select("host"), device="gpu", rehearse=None, launch=cuda.launch, graphs=True)
    patch.setattr(backends, "select", lambda kernels="auto": made if kernels == "auto" else select(kernels))
    patch.setattr(mx, "compile", lambda function: function)
    return device
