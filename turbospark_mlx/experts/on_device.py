"""Decode steps over experts in slots that are laid out before they run.

A step whose choices come to the host waits for a GPU in every layer. While all that a text wants is in slots, there is
no need to: such a step is told where experts are, computes with whatever lies there, and says what it chose. Whoever
ran it asks afterwards whether all of that was there (`SlotMaps.settle`). If it was, the tables count what they would
have counted on the way; if not, its results are worth nothing, and the token is run again, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark_mlx.experts.streamed import Streamed

_UNEVALUATED = 4
"""Steps that may be waiting to be evaluated: more than a runner has on their way."""


@dataclass
class Routed:
    """What a step chose, by the ``maps`` that it was given: ``chosen()`` waits for it and gives all layers' ids, one
    layer after the other. ``right`` is known once it was settled. ``array`` is what MLX has to evaluate for it."""

    chosen: Callable[[], np.ndarray]
    maps: Sequence[mx.array]
    array: mx.array | None = None
    right: bool | None = None


class SlotMaps:
    """Where the experts of all ``layers`` are, as inputs of a step. One for all who run them."""

    def __init__(self, layers: Sequence[Streamed]):
        self._layers = layers
        self._sizes: list[int] = []
        self._misses = 0
        self._steps: list[Callable[[], object]] = []
        for layer in layers:
            layer.steps = self._steps

    @property
    def hold_all(self) -> bool:
        """Whether every expert of every layer has a slot, so that no step can be wrong any more."""
        return all(layer.table.holds_all for layer in self._layers)

    def expect_hits(self) -> bool:
        """Whether the next token is worth running as a whole: the last one, of which this was asked before, had nothing
        to read. One miss is likely followed by another."""
        misses = sum(layer.counters.misses for layer in self._layers)
        missed, self._misses = misses > self._misses, misses
        return not missed or self.hold_all

    def arrays(self) -> list[mx.array]:
        """The map of each layer: int32 ``[experts]``, the same array until it has one more expert."""
        return [layer.slot_map for layer in self._layers]

    def laid_out(self, maps: Sequence[mx.array], compute: Callable[[], mx.array]) -> tuple[mx.array, list[mx.array]]:
        """``compute()`` with experts where ``maps`` say, and what each layer chose. Nothing is read, counted or waited
        for."""
        try:
            for layer, slot_map in zip(self._layers, maps, strict=True):
                layer.lay_out(slot_map)
            result = compute()
        finally:
            chosen = [layer.laid_out() for layer in self._layers]
        self._sizes = [each.size for each in chosen]
        return result, chosen

    def launched(self, routed: Routed, wait: Callable[[], object]) -> Routed | None:
        """What has to be settled of a step; None where all is there for good. ``wait`` returns once it has read its
        slots. Until then, none is written."""
        if self.hold_all:
            return None
        self._steps.append(wait)
        if len(self._steps) > _UNEVALUATED:
            self._steps.pop(0)()
        return routed

    def settle(self, routed: Routed) -> bool:
        """Whether a step had all the experts that it chose; then they are counted, once."""
        if routed.right is None:
            wanted = self._wanted(routed)
            routed.right = wanted is not None
            for layer, experts in zip(self._layers, wanted or (), strict=routed.right):
                layer.count_hits(experts)
        return routed.right

    def _wanted(self, routed: Routed) -> list[list[int]] | None:
        """The experts of each layer; None unless all were in slots. One that does not exist never is: where the token
        is run again, it is refused."""
        if any(then is not now for then, now in zip(routed.maps, self.arrays(), strict=True)):
            return None
        chosen, start, wanted = routed.chosen().tolist(), 0, []
        for layer, size in zip(self._layers, self._sizes, strict=True):
            experts, start = list(dict.fromkeys(chosen[start : start + size])), start + size
            if not all(expert in layer.table for expert in experts):
                return None
            wanted.append(experts)
        return wanted
