"""Which marks are still part of what a state has seen.

A state grows token by token and is sometimes cut back. A mark is at a position on the way; it stays valid as long as
the state has never since been cut to below that position, because from then on it went, or may go, another way.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from turbospark_mlx.errors import ContextError


@dataclass(frozen=True)
class Stamp:
    """A position in one history, and when it was taken."""

    owner: object
    position: int
    time: int


class History:
    """The cuts of one state, as far as they can still make a mark invalid."""

    def __init__(self) -> None:
        self._owner = object()
        self._time = 0
        # Times and positions both ascend: a cut makes every earlier cut to the same or a later position irrelevant.
        self._cut_times: list[int] = []
        self._cut_positions: list[int] = []

    def stamp(self, position: int) -> Stamp:
        return Stamp(self._owner, position, self._time)

    def cut(self, position: int) -> None:
        """Note that the state went back to ``position``."""
        self._time += 1
        while self._cut_positions and self._cut_positions[-1] >= position:
            self._cut_positions.pop()
            self._cut_times.pop()
        self._cut_positions.append(position)
        self._cut_times.append(self._time)

    def check(self, stamp: Stamp) -> None:
        """Raise ContextError for a stamp of another history, or of a past that was left."""
        if stamp.owner is not self._owner:
            raise ContextError("rollback: this mark was taken from another state, or before a reset.")
        later = bisect_right(self._cut_times, stamp.time)
        if later < len(self._cut_positions) and self._cut_positions[later] < stamp.position:
            raise ContextError(
                f"rollback: the mark at position {stamp.position} is no longer part of the history, which went back to"
                f" position {self._cut_positions[later]} after the mark was taken. Take a new mark."
            )
