"""Experts that are all in memory, or all mapped: nothing is moved, and slots are the experts' own numbers."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from turbospark_mlx.custom_kernels import ExpertArena, expert_mixture
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.experts.chunks import mix_in_parts


class InPlace:
    """Experts over an arena that holds all of them. On a GPU their numbers never come to the host.

    ``check`` is called before they are read: it raises where their memory may no longer be what it was.
    """

    idle = False
    """See ``ExpertStore.idle``."""

    def __init__(self, arena: ExpertArena, backend: Backend, check: Callable[[], None] | None = None):
        self.arena, self._backend, self._check = arena, backend, check

    @property
    def fixed(self) -> bool:
        """Whether a decode step may be laid out before it runs: on a CPU, only where nothing is checked on the way."""
        return self._backend.device == "gpu" or self._check is None

    def begin(self, indices: mx.array) -> mx.array:
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
        if self.idle:
            return mx.zeros(x.shape, x.dtype)
        if self._check is not None:
            self._check()
        return mix_in_parts(self._mix, pending, x, weights, residual)

    def _mix(self, indices: mx.array, x: mx.array, weights: mx.array, residual: mx.array | None) -> mx.array:
        return expert_mixture(self.arena, indices, x, weights, residual=residual, backend=self._backend)
