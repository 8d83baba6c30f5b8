"""Reading experts: several threads read pieces at once, straight into the memory where they are used.

One large read keeps a solid-state disk waiting for its requests one after another; pieces in flight at the same time
are what it is fast at. Everything here is bytes; no thread but the runner's ever touches MLX.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np

from turbospark_mlx.errors import InstallError
from turbospark_mlx.experts.checksums import Checksums
from turbospark_mlx.gturbo import Install
from turbospark_mlx.readers import start_readers

PIECE_BYTES = 840 << 10
THREADS = 8


class Reads:
    """Experts of one layer on their way into memory."""

    def __init__(self, reader: ExpertReader, position: int, experts: Sequence[int], buffers: Sequence[np.ndarray]):
        self._reader, self._position = reader, position
        self._file = reader.install.expert_file(position)
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self._started = self._ended = 0.0
        self._lock = threading.Lock()
        self._jobs = list(zip(experts, buffers, strict=True))
        self._futures: list[Future[None]] = []

    def start(self) -> None:
        """Hand the pieces to the threads."""
        self._started = self._ended = time.perf_counter()
        for expert, buffer in self._jobs:
            starts = range(0, buffer.nbytes, PIECE_BYTES)
            left = [len(starts)]
            for start in starts:
                self._futures.append(self._reader.submit(self._read, expert, buffer, start, left))

    @property
    def seconds(self) -> float:
        """From the request to the last byte, once ``wait`` has returned."""
        return self._ended - self._started

    def _read(self, expert: int, buffer: np.ndarray, start: int, left: list[int]) -> None:
        place = self._reader.install.experts.layers[self._position]
        piece = memoryview(buffer[start : start + PIECE_BYTES])
        try:
            self._file.read_into(place.offsets[expert] + start, piece)
            with self._lock:
                left[0] -= 1
                complete = left[0] == 0
            if complete and self._reader.checksums is not None:
                self._reader.checksums.check(self._position, expert, buffer, self._file.label)
        except InstallError as error:
            raise InstallError(f"Expert {expert} of layer {place.layer} could not be read. {error}") from error
        with self._lock:
            self._ended = max(self._ended, time.perf_counter())

    def wait(self) -> None:
        """Return when everything has been read. Raises InstallError for the first read that failed, and where the file
        was changed since it was opened; no thread writes into the memory any more then."""
        errors = self._settle()
        if errors:
            raise errors[0]
        try:
            self._file.check_unchanged()
        except InstallError as error:
            layer = self._reader.install.experts.layers[self._position].layer
            raise InstallError(f"Experts of layer {layer} could not be read. {error}") from error

    def abandon(self) -> None:
        """Return when no thread writes into the memory any more."""
        for future in self._futures:
            future.cancel()
        self._settle()

    def _settle(self) -> list[BaseException]:
        wait(self._futures)
        return [error for future in self._futures if not future.cancelled() and (error := future.exception())]


class ExpertReader:
    """The reading threads of one runner. ``threads`` is their number; with ``read_ahead`` advice is passed on to
    the system; with ``checksum`` each expert is checked as
    it is read (see ``checksums``). Raises InstallError."""

    def __init__(self, install: Install, *, threads: int = THREADS, read_ahead: bool = False, checksum: bool = False):
        self.install, self._read_ahead = install, read_ahead
        self._pool = start_readers(threads)
        self.submit = self._pool.submit
        self.checksums = Checksums(install, self._pool) if checksum else None

    def reads(self, position: int, experts: Sequence[int], buffers: Sequence[np.ndarray]) -> Reads:
        """Reads, still to be started, of ``experts`` of a layer into ``buffers``: writable bytes, at most as many as a
        blob has."""
        return Reads(self, position, experts, buffers)

    def advise(self, position: int, experts: Sequence[int]) -> None:
        """Tell the system that ``experts`` of a layer will be read soon, where it takes such advice (Linux)."""
        if not self._read_ahead or not hasattr(os, "posix_fadvise"):
            return
        place, file = self.install.experts.layers[position], self.install.expert_file(position)
        ranges: list[list[int]] = []
        for start in sorted(place.offsets[expert] for expert in experts):
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = start + place.stride
            else:
                ranges.append([start, start + place.stride])
        for start, end in ranges:
            os.posix_fadvise(file.fd, start, end - start, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Stop the threads, once they have read what was asked for."""
        self._pool.shutdown()
