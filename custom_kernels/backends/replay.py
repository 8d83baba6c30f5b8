"""A run of kernels, recorded once and repeated with other contents of the same memory.

While a `Recording` is open, launches are noted as addresses. That is right only where kernels are all that happens, so
each address must be known: an array that stays, or the output of an earlier launch of the recording. An input that
anything else computed is refused.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import host
from turbospark_mlx.custom_kernels.backends.kernel import Launch, given
from turbospark_mlx.errors import TurbosparkError

MAX_ARRAYS = 16
_STRIDED = 0x0018  # PyBUF_STRIDES


class NotRecordable(TurbosparkError):
    """What was run is more than kernels over known arrays."""


class _Buffer(ctypes.Structure):
    """Py_buffer of Python's stable interface."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("object", ctypes.c_void_p),
        ("bytes", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Place:
    """Where an array lies. ``strides`` are in elements."""

    address: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: mx.array | np.ndarray) -> Place:
        """Evaluates the array. Its address is good for a GPU, too: MLX moves what the host looks at into memory that
        both see, for good."""
        view = _Buffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(array), ctypes.byref(view), _STRIDED)
        try:
            shape = tuple(view.shape[: view.dimensions])
            strides = tuple(stride // view.item_bytes for stride in view.strides[: view.dimensions])
            return cls(view.memory or 0, view.item_bytes, shape, strides)
        finally:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))

    @property
    def end(self) -> int:
        """Past the last element."""
        if 0 in self.shape:
            return self.address
        last = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return self.address + (last + 1) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


class Known:
    """Evaluated arrays that stay where they are, however often kernels over them are recorded."""

    def __init__(self, arrays: Iterable[mx.array]):
        # Handles of our own: who assigns to a part of an array gives it other memory.
        self._kept = [copy(array) if isinstance(array, mx.array) else array for array in arrays]
        places = sorted((Place.of(array) for array in self._kept), key=lambda place: place.address)
        self.extents = [(place.address, place.end, place.address) for place in places]
        """(first address, past the last, the first once more)"""


class Recording:
    """What is known of memory while kernels are recorded, and where they hold addresses of it."""

    def __init__(self, known: Known | Iterable[mx.array], lent: Iterable[mx.array] = ()):
        """``known`` and ``lent`` are evaluated arrays that stay where they are and may change. Those that are ``lent``
        are the caller's to keep, and can be replaced by `move`."""
        self._known = known if isinstance(known, Known) else Known(known)
        # Each holds the address of an array that a call is given.
        self._slots: list[ctypes.Array] = []
        # (first address, past the last, what replaces the first)
        self._extents = list(self._known.extents)
        for place in map(Place.of, lent):
            self._know(place, place.address)

    def _know(self, place: Place, address: int) -> None:
        """What lies at ``place`` while this is recorded is at ``address`` when it is replayed."""
        insort(self._extents, (place.address, place.end, address))

    def _replaced(self, address: int, what: str) -> int:
        index = bisect_right(self._extents, (address, float("inf"), 0)) - 1
        if index >= 0 and address < self._extents[index][1]:
            first, _, replacement = self._extents[index]
            return replacement + address - first
        raise NotRecordable(f"{what} comes from an operation that is no kernel")

    def move(self, old: list[mx.array], new: list[mx.array]) -> list[int]:
        """Read and write ``new`` where ``old`` was lent: evaluated arrays of the same shapes and dtypes. Returns which
        of the addresses that calls hold have changed."""
        places = [(Place.of(one), Place.of(other).address) for one, other in zip(old, new, strict=True)]
        return self._put((place.address, place.end, address) for place, address in places)

    def _put(self, extents: Iterable[tuple[int, int, int]]) -> list[int]:
        extents, changed = sorted(extents), []
        starts = [start for start, *_ in extents]
        for number, slot in enumerate(self._slots):
            index = bisect_right(starts, slot[0]) - 1
            if index >= 0 and slot[0] < extents[index][1]:
                slot[0] += extents[index][2] - extents[index][0]
                changed.append(number)
        return changed


class HostRecording(Recording):
    """A context manager that notes the launches of its thread on the CPU, for `replay`."""

    def __init__(self, known: Iterable[mx.array], lent: Iterable[mx.array] = ()):
        super().__init__(known, lent)
        self._library, self._threads = host.runtime()
        self._calls: list[ctypes.Array] = []
        self._met: list[object] = []
        self._result: np.ndarray | None = None

    def __enter__(self) -> HostRecording:
        host.watch.observer = self._note
        return self

    def __exit__(self, *_: object) -> None:
        host.watch.observer = None

    def finish(self, result: mx.array) -> None:
        """Make ``result``, float32, what `replay` returns. Raises NotRecordable unless a kernel wrote it."""
        place = Place.of(mx.contiguous(result))
        memory = (ctypes.c_float * result.size).from_address(self._replaced(place.address, "the result"))
        self._result = np.frombuffer(memory, np.float32).reshape(result.shape)
        self._pointers = (ctypes.c_void_p * len(self._calls))(*map(ctypes.addressof, self._calls))
        self._replay = ctypes.CDLL(self._library._name).replay

    @property
    def result(self) -> np.ndarray:
        """The memory that holds the last run's result."""
        return self._result

    def replay(self) -> np.ndarray:
        """Run the kernels again; returns `result`."""
        self._replay(self._pointers, len(self._calls), self._threads)
        return self._result

    def _note(self, launch: Launch, inputs: tuple, outputs: tuple[np.ndarray, ...], arrays: list[mx.array]) -> None:
        address, reads, _ = host.prepared(launch)
        call = ctypes.create_string_buffer(self._library.call_bytes())
        present = tuple(given(inputs))
        if self._library.record(
            call, ctypes.c_void_p(address), ctypes.py_object(present), reads, ctypes.py_object(outputs), *launch.groups
        ):
            raise NotRecordable(f"an input of {launch.kernel.name} had to be copied")
        slots = (ctypes.POINTER(ctypes.c_void_p) * MAX_ARRAYS)()
        count = self._library.memory_arguments(call, slots)
        for slot, (name, _) in zip(slots[: count - len(outputs)], launch.present_inputs, strict=True):
            slot[0] = self._replaced(slot[0], f"input {name} of {launch.kernel.name}")
            self._slots.append(slot)
        for output, array in zip(outputs, arrays, strict=True):
            self._know(Place.of(array), Place.of(output).address)
        self._calls.append(call)
        # The MLX copies stay, so that no address is used twice.
        self._met += [outputs, arrays]
