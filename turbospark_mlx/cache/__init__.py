"""Per-layer state that can be marked and rolled back.

The functions here act on the states of all layers together: all go back, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turbospark_mlx.cache.blocks import BlockKeys
from turbospark_mlx.cache.joint import JointState, reusable_prefix
from turbospark_mlx.cache.kv import LinearKV, RingKV
from turbospark_mlx.cache.latent import LatentKV
from turbospark_mlx.cache.masks import causal_mask
from turbospark_mlx.cache.recurrent import RecurrentState
from turbospark_mlx.protocols import LayerCache

__all__ = [
    "BlockKeys",
    "JointState",
    "LatentKV",
    "LinearKV",
    "RecurrentState",
    "RingKV",
    "causal_mask",
    "mark_all",
    "reusable_prefix",
    "rollback_all",
    "trim_all",
]


def mark_all(layers: Sequence[LayerCache]) -> list[Any]:
    """A mark of every layer, for ``rollback_all``."""
    return [layer.mark() for layer in layers]


def rollback_all(layers: Sequence[LayerCache], marks: Sequence[Any]) -> None:
    """Go back to ``marks``. Raises ContextError, and changes nothing, where one of them is no longer valid."""
    for layer, mark in zip(layers, marks, strict=True):
        layer.check(mark)
    for layer, mark in zip(layers, marks, strict=True):
        layer.rollback(mark)


def trim_all(layers: Sequence[LayerCache], length: int) -> None:
    """Go back to the first ``length`` tokens, which ``reusable_prefix`` has found possible."""
    for layer in layers:
        layer.trim(layer.offset - length)
