"""The state of one recurrent layer: what a convolution still needs of the last rows, and the state proper.

A recurrent state is a function of all tokens before it: tokens cannot be taken out again. Going back means having kept
the state of then, which costs no copy, because MLX's arrays are values and a layer replaces them. Here the states that
the last `KEPT` tokens came from are kept, so that a step can be taken back; marks keep theirs for as long as they live.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import mlx.core as mx

from turbospark_mlx.cache.history import History, Stamp
from turbospark_mlx.errors import ContextError

KEPT = 2
"""A step that was begun ahead of another can fail before that one counts."""

_Arrays = tuple[mx.array | None, mx.array | None]
_EMPTY: _Arrays = (None, None)


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in a state's history, with what the state was there."""

    stamp: Stamp
    arrays: _Arrays


class RecurrentState:
    """``state[0]`` are the rows that a convolution needs again, ``state[1]`` is the recurrent state; None before the
    first token. A layer sets both to new arrays and calls `advance`, as with mlx-lm's ``ArraysCache``.

    ``offset`` is the number of tokens seen.
    """

    lengths = None
    """mlx-lm's lengths of the rows of a batch: all tokens count here."""

    def __init__(self) -> None:
        self.offset = 0
        self._now: list[mx.array | None] = list(_EMPTY)
        self._points: list[tuple[int, _Arrays]] = [(0, _EMPTY)]
        self._history = History()

    def __getitem__(self, index: int) -> mx.array | None:
        return self._now[index]

    def __setitem__(self, index: int, array: mx.array) -> None:
        self._now[index] = array

    def advance(self, n: int) -> None:
        """The arrays that were set are those after ``n`` more tokens."""
        self.offset += n
        self._points = [*self._points[-KEPT:], (self.offset, tuple(self._now))]

    def places(self, length: int) -> bool:
        """Never: a state that is written in place would change the one that a mark holds."""
        return False

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for this state to be complete, which includes the states that are kept: until then
        they hold all that they are computed from."""
        return [array for _, arrays in self._points for array in arrays if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def empty(self) -> bool:
        return self.offset == 0

    def size(self) -> int:
        return self.offset

    def make_mask(self, N: int) -> None:
        """No mask: every token counts."""

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        return (*self._now, self.offset)

    @state.setter
    def state(self, state: tuple[mx.array | None, mx.array | None, int]) -> None:
        *self._now, self.offset = state
        self._points = [(self.offset, tuple(self._now))]
        self._history = History()

    def is_trimmable(self) -> bool:
        """Whether every number of tokens can be forgotten: only while there are none."""
        return self.offset == 0

    def _point(self, length: int) -> _Arrays | None:
        """The state after ``length`` tokens, where it is known."""
        return _EMPTY if length == 0 else dict(self._points).get(length)

    def reusable(self, prefix_len: int) -> int:
        return max((at for at, _ in self._points if at <= prefix_len), default=0)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them; returns how many.

        Raises ContextError where the state of then was not kept.
        """
        target = self.offset - min(n, self.offset)
        arrays = self._point(target)
        if arrays is None:
            raise ContextError(
                f"a recurrent state after {self.offset} tokens cannot go back to {target}: that state was not kept."
                " Run the prompt again, or roll back to a mark."
            )
        n = self.offset - target
        self._return(target, arrays)
        return n

    def _return(self, target: int, arrays: _Arrays) -> None:
        self.offset, self._now = target, list(arrays)
        self._points = [*(point for point in self._points if point[0] < target), (target, arrays)]
        self._history.cut(target)

    def mark(self) -> Mark:
        return Mark(self._history.stamp(self.offset), tuple(self._now))

    def check(self, mark: Mark) -> None:
        """Raise ContextError unless ``rollback(mark)`` will succeed."""
        self._history.check(mark.stamp)

    def rollback(self, mark: Mark) -> None:
        self.check(mark)
        self._return(mark.stamp.position, mark.arrays)

    def __deepcopy__(self, memo: dict) -> RecurrentState:
        # Copies share arrays, which nobody writes.
        twin = copy.copy(self)
        twin._now, twin._points = list(self._now), list(self._points)
        twin._history = copy.deepcopy(self._history, memo)
        return twin
