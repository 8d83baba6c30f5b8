"""A run of kernels on an NVIDIA GPU, recorded once and repeated as one CUDA graph.

MLX encodes each kernel of a graph anew for every token, which takes the host longer than the GPU needs to run it. Here
one call of the driver launches all of them, on a stream of its own beside MLX's. So nothing orders the two but the
host: whoever launches has waited for what MLX computes of the arrays that are known, and whoever lets MLX read what was
written waits for the `Ticket` first.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import cuda, nvrtc
from turbospark_mlx.custom_kernels.backends.cuda_driver import (
    DeviceMemory,
    Event,
    Graph,
    Handle,
    PinnedMemory,
    Stream,
    capability,
    enter,
    function,
    prefetch,
)
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Launch, given
from turbospark_mlx.custom_kernels.backends.replay import Known, NotRecordable, Place, Recording
from turbospark_mlx.errors import BackendError

ALIGNMENT = 256
NOWHERE = 1 << 62
"""Outputs have addresses from here on until it is known how much memory they need."""
IN_FLIGHT = 4
"""Launches that may be under way, or whose results were not asked for yet; another waits for the first of them."""
SMALL_TYPES = {mx.float32: np.float32, mx.int32: np.int32, mx.uint32: np.uint32}
_functions: dict[Launch, Handle] = {}
"""What was loaded of compiled kernels, which stays until the end of the process."""
_stand_ins: dict[tuple[tuple[int, ...], mx.Dtype], list[mx.array]] = {}
"""Arrays that stand for outputs while kernels are recorded, for one recording after the other."""


def bring(known: Known) -> None:
    """Have arrays of the host's memory on the GPU before kernels want them, a page at a time."""
    enter()
    for start, end, _ in known.extents:
        prefetch(start, end - start)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def blank(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros in memory of the host, which a GPU sees too."""
    made = mx.zeros(shape, dtype, stream=mx.cpu)
    mx.eval(made)
    return made


@dataclass
class _Node:
    """A kernel with the values of its arguments in memory of its own."""

    call: Launch
    values: list[ctypes.Array]
    function: Handle | None = None

    def __post_init__(self) -> None:
        self._pointers = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))

    @property
    def arguments(self) -> tuple[object, tuple[int, int], int, ctypes.Array]:
        """As `Graph` takes them."""
        return self.function, self.call.groups, self.call.simdgroups * SIMD_WIDTH, self._pointers


class _Turn:
    """Where the host finds the results of one launch, until it is this turn's again."""

    def __init__(self, told: int, small: int, large: mx.array):
        self.told, self.small, self.large = PinnedMemory(told), PinnedMemory(small), large
        self.large_address = Place.of(large).address
        self.event = Event()
        self.ticket: Ticket | None = None


class Ticket:
    """One launch of a `GraphRecording`, which may be under way."""

    def __init__(self, turn: _Turn, shapes: Sequence[tuple[int, tuple[int, ...], type]], recording: GraphRecording):
        self._turn = turn
        # Whose memory it works on.
        self._recording: GraphRecording | None = recording
        self._event, self._shapes = turn.event, shapes
        self._small: list[np.ndarray] | None = None
        self._large: mx.array | None = None

    def wait(self) -> None:
        """Return when all that the launch writes is written. Raises BackendError."""
        if self._small is None:
            self._event.wait()
            self._recording = None
            memory = self._turn.small.view
            self._small = [
                np.frombuffer(memory, dtype, prod(shape), start).reshape(shape).copy()
                for start, shape, dtype in self._shapes
            ]

    @property
    def small(self) -> list[np.ndarray]:
        """The results that come to the host."""
        self.wait()
        return self._small

    @property
    def large(self) -> mx.array:
        """A copy of the result that stays on the GPU, in float32. Not to be asked for the first time when `IN_FLIGHT`
        more launches were begun."""
        self.wait()
        if self._large is None:
            if self._turn.ticket is not self:
                raise BackendError("the result of a launch was asked for after others had taken its place")
            source = self._turn.large
            self._large = source * 1 if source.dtype == mx.float32 else source.astype(mx.float32)
            mx.eval(self._large)
        return self._large


class GraphRecording(Recording):
    """Notes the launches of its thread on the CUDA back end instead of running them (`noting`); kernels give zeros
    meanwhile. `finish` makes a graph of them, `begin` launches it."""

    def __init__(self, known: Known | Iterable[mx.array], lent: Iterable[mx.array], told: Sequence[np.ndarray]):
        """See `Recording`. ``told`` are like what each launch is told: ``inputs`` are arrays that stand for them.
        Raises BackendError."""
        enter()
        super().__init__(known, lent)
        self._nodes: list[_Node] = []
        self._node_of: list[int] = []
        self._end = NOWHERE
        self._used: Counter[tuple[tuple[int, ...], mx.Dtype]] = Counter()
        # Sizes of outputs, by their addresses.
        self._outputs: dict[int, int] = {}
        # Arrays whose addresses are taken while this is recorded.
        self._met: list[object] = []
        self.inputs = [mx.array(array) for array in told]
        mx.eval(self.inputs)
        self._told_at, size = [], 0
        for array in told:
            self._told_at.append(size)
            size += _aligned(array.nbytes)
        self._told = DeviceMemory(size)
        for array, start in zip(self.inputs, self._told_at, strict=True):
            self._know(Place.of(array), self._told.address + start)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, launches are noted. What else MLX is asked for, it does on the host, which sees all there is."""
        with cuda.observed(self._note), mx.stream(mx.cpu):
            yield

    def _note(self, call: Launch, inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
        values: list[ctypes.Array] = []
        for (name, _), array in zip(call.present_inputs, given(inputs), strict=True):
            place, kernel = Place.of(array), call.kernel
            if not kernel.strided and not place.is_contiguous:
                raise NotRecordable(f"input {name} of {kernel.name} had to be copied")
            address = self._replaced(place.address, f"input {name} of {kernel.name}")
            if name in kernel.weights and address >= NOWHERE:
                raise NotRecordable(f"the weights {name} of {kernel.name} come from another kernel")
            self._hold(values, address)
            for fact, kind in (("shape", ctypes.c_int32), ("strides", ctypes.c_int64)):
                if kernel.reads(name, fact):
                    values.append((kind * nvrtc.DIMENSIONS)(*getattr(place, fact)))
        outputs = []
        for _, shape, dtype in call.present_outputs:
            self._hold(values, self._end)
            used = self._used[shape, dtype]
            self._used[shape, dtype] += 1
            if used == len(alike := _stand_ins.setdefault((shape, dtype), [])):
                alike.append(blank(shape, dtype))
            outputs.append(alike[used])
            place = Place.of(outputs[-1])
            self._know(place, self._end)
            self._outputs[self._end] = place.end - place.address
            self._end += _aligned(max(1, place.end - place.address))
        self._nodes.append(_Node(call, values))
        self._met.append(inputs)
        return outputs

    def _hold(self, values: list[ctypes.Array], address: int) -> None:
        values.append((ctypes.c_uint64 * 1)(address))
        self._slots.append(values[-1])
        self._node_of.append(len(self._nodes))

    def finish(self, large: mx.array, small: Sequence[mx.array], *, instead: GraphRecording | None = None) -> None:
        """Compile the kernels, and lay them out for `begin`. ``large`` is the result that stays on the GPU, ``small``
        are those that come to the host; the first of these may become the first of what the next launch is told.
        ``instead`` of another, which is not used any more, what that has for its results is used again. Raises
        NotRecordable unless a kernel wrote them, and BackendError."""
        self._shapes, moved, size = [], [], 0
        for array in small:
            start, end = self._result(array)
            moved.append((start, end, size))
            self._shapes.append((size, tuple(array.shape), SMALL_TYPES[array.dtype]))
            size += _aligned(array.nbytes)
        start, end = self._result(large)
        self._small, self._memory = DeviceMemory(size), DeviceMemory(self._end - NOWHERE)
        self._large, self._large_bytes = self._memory.address + start - NOWHERE, large.nbytes
        self._put((start, end, self._small.address + at) for start, end, at in moved)
        self._put([(NOWHERE, self._end, self._memory.address)])
        self._kind = self._told.nbytes, size, tuple(large.shape), large.dtype
        if instead is not None and instead._kind == self._kind:
            self._stream, self._turns, self._number = instead._stream, instead._turns, instead._number
        else:
            turns = (_Turn(self._told.nbytes, size, blank(large.shape, large.dtype)) for _ in range(IN_FLIGHT))
            self._stream, self._turns, self._number = Stream(), list(turns), 0
        self._graph = self._laid_out()
        self._met.clear()

    def _result(self, array: mx.array) -> tuple[int, int]:
        """The addresses of what one kernel wrote."""
        start = self._replaced(Place.of(array).address, "a result")
        if self._outputs.get(start) != array.nbytes:
            raise NotRecordable("a result is not all that a kernel wrote")
        return start, start + array.nbytes

    def _laid_out(self) -> Graph:
        # Layers share their launches.
        missing = [call for call in dict.fromkeys(node.call for node in self._nodes) if call not in _functions]
        texts = {call: nvrtc.source_text(call) for call in missing}
        names = {text: call.kernel.name for call, text in texts.items()}
        codes = nvrtc.compile_all(names, "sm_{}{}".format(*capability()))
        loaded = {text: function(code, names[text]) for text, code in codes.items()}
        _functions.update((call, loaded[text]) for call, text in texts.items())
        graph = Graph(overlapping=capability() >= nvrtc.OVERLAPS)
        for node in self._nodes:
            node.function = _functions[node.call]
            graph.add(*node.arguments)
        graph.finish()
        return graph

    def move(self, old: list[mx.array], new: list[mx.array]) -> list[int]:
        changed = super().move(old, new)
        for index in {self._node_of[number] for number in changed}:
            self._graph.change(index, *self._nodes[index].arguments)
        return changed

    def wait(self) -> None:
        """Return when all launches have ended, those too that `begin` was interrupted in. Raises BackendError."""
        enter()
        self._stream.wait()

    def begin(self, told: Sequence[np.ndarray | None]) -> Ticket:
        """Launch the kernels with ``told``; None for the first takes the first small result of the last launch."""
        enter()
        self._number += 1
        turn = self._turns[self._number % IN_FLIGHT]
        if turn.ticket is not None:
            turn.ticket.wait()
        memory = np.frombuffer(turn.told.view, np.uint8)
        first = 0
        for array, start, place in zip(told, self._told_at, self.inputs, strict=True):
            if array is None:
                first = _aligned(place.nbytes)
            else:
                memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        stream = self._stream
        if first:
            stream.on_device(self._told.address, self._small.address, self.inputs[0].nbytes)
        if self._told.nbytes > first:
            stream.to_device(self._told.address + first, turn.told.address + first, self._told.nbytes - first)
        stream.launch(self._graph)
        stream.on_device(turn.large_address, self._large, self._large_bytes)
        if self._shapes:
            stream.to_host(turn.small.address, self._small.address, self._small.nbytes)
        stream.record(turn.event)
        turn.ticket = Ticket(turn, self._shapes, self)
        return turn.ticket
