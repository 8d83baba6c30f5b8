"""Experts read where the operating system maps them: no slots, the page cache is the cache.

On a CPU the mapped file is read in place, and on Apple GPUs too where Metal takes its memory. Other GPUs get one copy
of the experts that a chunk wants. Fast once the pages are warm; page faults make a cold start slower than reading.
"""

from __future__ import annotations

import mmap
from math import gcd

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import ExpertArena, ExpertBlob, Mixture, expert_mixture
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.expert_arena import WORD
from turbospark_mlx.custom_kernels.expert_phases import ALIGNMENT
from turbospark_mlx.errors import InstallError
from turbospark_mlx.experts.chunks import SCRATCH_BYTES, mix_in_parts
from turbospark_mlx.experts.in_place import InPlace
from turbospark_mlx.gturbo import ExpertLayer
from turbospark_mlx.gturbo.files import OpenFile
from turbospark_mlx.gturbo.resident_index import align
from turbospark_mlx.protocols import Experts


def map_experts(file: OpenFile, place: ExpertLayer, blob: ExpertBlob, backend: Backend) -> Experts:
    """The experts of one layer over a read-only map of its file. Raises InstallError where it cannot be mapped."""
    try:
        memory = np.frombuffer(mmap.mmap(file.fd, file.state.size, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise InstallError(f"{file.label}: cannot be mapped: {error}. Choose residency='streamed'.") from error
    blobs = [memory[offset : offset + place.size] for offset in place.offsets]
    if backend.device == "cpu":
        view = _viewed(memory, place)
        if view is None:
            return _Copied(blob, blobs, backend, file)
        return InPlace(ExpertArena(blob, blobs, *view), backend, file.check_unchanged)
    whole = _adopted(memory, place)
    if whole is None:
        return _Copied(blob, blobs, backend, file)
    arena = ExpertArena(blob, blobs, whole)
    return InPlace(arena, backend, file.check_unchanged)


def _adopted(memory: np.ndarray, place: ExpertLayer) -> mx.array | None:
    """The experts as one array over the mapped memory itself; None where that cannot be."""
    if any(offset != expert * place.stride for expert, offset in enumerate(place.offsets)):
        return None
    nbytes = len(place.offsets) * place.stride
    if len(memory) < nbytes:
        return None
    try:
        return mx.asarray(memory[:nbytes].view(np.uint32).reshape(-1, place.stride // WORD), copy=False)
    except (TypeError, ValueError):
        return None


def _viewed(memory: np.ndarray, place: ExpertLayer) -> tuple[np.ndarray, np.ndarray] | None:
    """The mapped memory as rows of words, and the row where each expert begins; None where experts lie at odd places.

    The last row may reach past the end of the file, but no expert does.
    """
    unit = gcd(place.stride, *place.offsets)
    if unit % ALIGNMENT:
        return None
    shape = (max(place.offsets) // unit + 1, unit // WORD)
    words = memory[: len(memory) // WORD * WORD].view(np.uint32)
    view = np.lib.stride_tricks.as_strided(words, shape, (unit, WORD), writeable=False)
    return view, np.array(place.offsets) // unit


class _Copied:
    """The experts that a chunk wants are copied from the map into an array of that moment."""

    idle = False
    """See ``ExpertStore.idle``."""

    def __init__(self, blob: ExpertBlob, blobs: list[np.ndarray], backend: Backend, file: OpenFile):
        self._blob, self._blobs, self._backend, self._file = blob, blobs, backend, file
        self._most = max(1, SCRATCH_BYTES // blobs[0].nbytes)

    def begin(self, indices: mx.array) -> mx.array:
        mx.async_eval(indices)
        return indices

    def finish(
        self,
        pending: mx.array,
        x: mx.array,
        weights: mx.array,
        *,
        meanwhile: tuple[mx.array, ...] = (),
        residual: mx.array | None = None,
    ) -> mx.array:
        if self.idle or x.shape[0] == 0:
            return mx.zeros(x.shape, x.dtype)
        self._file.check_unchanged()
        mx.async_eval(*meanwhile, x, weights)
        return mix_in_parts(self._mix, np.array(pending), x, weights, residual)

    def _mix(self, chosen: np.ndarray, x: mx.array, weights: mx.array, residual: mx.array | None) -> mx.array:
        wanted = np.unique(chosen)
        if len(wanted) <= self._most or len(x) == 1:
            # A single row is computed in one piece, as wherever else experts live.
            slots = mx.array(np.searchsorted(wanted, chosen).astype(np.uint32))
            return expert_mixture(self._copy(wanted), slots, x, weights, residual=residual, backend=self._backend)
        mixture, flat = Mixture(x, weights, residual=residual, blob=self._blob, backend=self._backend), chosen.ravel()
        for start in range(0, len(wanted), self._most):
            group = wanted[start : start + self._most]
            pairs = np.flatnonzero(np.isin(flat, group))
            # Evaluated, so that no more than one group's copy is held.
            mx.eval(mixture.add(self._copy(group), pairs, np.searchsorted(group, flat[pairs])))
        return mixture.result()

    def _copy(self, experts: np.ndarray) -> ExpertArena:
        copied = np.zeros((len(experts), align(self._blobs[0].nbytes, ALIGNMENT)), np.uint8)
        for row, expert in zip(copied, experts, strict=True):
            row[: self._blobs[expert].nbytes] = self._blobs[expert]
        return ExpertArena(self._blob, list(copied), mx.array(copied.view(np.uint32)))
