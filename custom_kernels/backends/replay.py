"""A run of kernels on the CPU, recorded once and repeated with other contents of the same arrays.

While a `Recording` is open, launches are noted as addresses. That is right only where kernels are all that happens, so
each address must be known: an array that stays, or the output of an earlier launch of the recording. An input that
anything else computed is refused.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import host
from turbospark_mlx.custom_kernels.backends.kernel import Launch, given
from turbospark_mlx.errors import TurbosparkError

MAX_ARRAYS = 16


class NotRecordable(TurbosparkError):
    """What was run is more than kernels over known arrays."""


class Recording:
    """A context manager that notes the launches of its thread, for `replay`."""

    def __init__(self, known: Iterable[mx.array], lent: Iterable[mx.array] = ()):
        """``known`` and ``lent`` are evaluated arrays that stay where they are and may change. Those that are ``lent``
        are the caller's to keep, and can be replaced by `move`."""
        self._library, self._threads = host.runtime()
        self._kept: list[object] = []
        self._calls: list[ctypes.Array] = []
        # Where the calls hold the addresses of their inputs.
        self._slots: list[ctypes.Array] = []
        # (first address, past the last, what replaces the first)
        self._extents: list[tuple[int, int, int]] = []
        self._kept += (known := list(known))
        for array in (*known, *lent):
            address, size = self._extent(array)
            insort(self._extents, (address, address + size, address))
        self._result: np.ndarray | None = None

    def __enter__(self) -> Recording:
        host.watch.observer = self._note
        return self

    def __exit__(self, *_: object) -> None:
        host.watch.observer = None

    def finish(self, result: mx.array) -> None:
        """Make ``result``, float32, what `replay` returns. Raises NotRecordable unless a kernel wrote it."""
        address, size = self._extent(mx.contiguous(result))
        memory = (ctypes.c_float * (size // 4)).from_address(self._replaced(address, "the result"))
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

    def move(self, old: list[mx.array], new: list[mx.array]) -> None:
        """Read and write ``new`` where ``old`` was lent: evaluated arrays of the same shapes and dtypes."""
        extents = sorted((*self._extent(one), self._extent(other)[0]) for one, other in zip(old, new, strict=True))
        starts = [start for start, *_ in extents]
        for slot in self._slots:
            index = bisect_right(starts, slot[0]) - 1
            if index >= 0 and slot[0] < extents[index][0] + extents[index][1]:
                slot[0] += extents[index][2] - extents[index][0]

    def _extent(self, array: object) -> tuple[int, int]:
        found = (ctypes.c_uint64 * 2)()
        self._library.extent(ctypes.py_object(array), found)
        return found[0], found[1]

    def _replaced(self, address: int, what: str) -> int:
        index = bisect_right(self._extents, (address, float("inf"), 0)) - 1
        if index >= 0 and address < self._extents[index][1]:
            first, _, replacement = self._extents[index]
            return replacement + address - first
        raise NotRecordable(f"{what} comes from an operation that is no kernel")

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
            (mine, size), (theirs, _) = self._extent(output), self._extent(array)
            insort(self._extents, (theirs, theirs + size, mine))
        self._calls.append(call)
        # The MLX copies stay until the end of the recording, so that no address is used twice.
        self._kept += [outputs, arrays]
