"""The state of one recurrent layer: what a convolution still needs of the last rows, and the state proper.

A recurrent state is a function of all tokens before it: tokens cannot be taken out again. Going back means having kept
the state of then. The states that the last `KEPT` tokens came from are kept, so that a step can be taken back; marks
keep theirs for as long as they live.

States come about in two ways. A layer may set new arrays, which replace the old and cost no copy, because MLX's arrays
are values. Or a kernel writes the state behind one token into a buffer of `SLOTS` states (`place`), where the next one
finds it: an array of its own for every token would be other memory for every token, and a recorded step knows one. Who
wants such a state as arrays is given a copy, because its slot is written again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from turbospark_mlx.cache.history import History, Stamp
from turbospark_mlx.errors import ContextError

KEPT = 2
"""A step that was begun ahead of another can fail before that one counts."""
SLOTS = KEPT + 1
"""States of a buffer: that after ``n`` tokens lies in slot ``n % SLOTS``."""

_Arrays = tuple[mx.array | None, ...]


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in a state's history, with what the state was there."""

    stamp: Stamp
    arrays: _Arrays


@dataclass(frozen=True, eq=False)
class _Point:
    """The state after ``offset`` tokens: ``arrays``, or in its slot of them where ``placed``."""

    offset: int
    arrays: _Arrays
    placed: bool = False


class RecurrentState:
    """``state[0]`` are the rows that a convolution needs again, ``state[1]`` is the recurrent state where there is one;
    None before the first token. A layer sets them to new arrays and calls `advance`, as with mlx-lm's ``ArraysCache``,
    or has a kernel write them (`place`).

    ``offset`` is the number of tokens seen.
    """

    lengths = None
    """mlx-lm's lengths of the rows of a batch: all tokens count here."""

    def __init__(self, count: int = 2) -> None:
        """``count`` is the number of arrays."""
        self.offset = 0
        # What was set, or taken out of a slot, of the state after ``offset`` tokens; None where neither has happened.
        self._now: list[mx.array | None] | None = None
        self._empty: _Arrays = (None,) * count
        self._points = [_Point(0, self._empty)]
        self._history = History()
        self._writer: mx.array | None = None

    def _current(self) -> list[mx.array | None]:
        if self._now is None:
            self._now = list(self._taken(self._points[-1]))
        return self._now

    def __getitem__(self, index: int) -> mx.array | None:
        return self._current()[index]

    def __setitem__(self, index: int, array: mx.array) -> None:
        self._current()[index] = array

    def advance(self, n: int) -> None:
        """The arrays that were set are those after ``n`` more tokens."""
        self.offset += n
        self._points = [*self._points[-KEPT:], _Point(self.offset, tuple(self._current()))]

    def _taken(self, point: _Point) -> _Arrays:
        """The state at ``point`` as arrays that nobody writes."""
        if not point.placed:
            return point.arrays
        if self._writer is not None:
            mx.eval(self._writer)
            self._writer = None
        slot = mx.array(point.offset % SLOTS)
        # A slice would be the slot's own memory.
        copies = tuple(mx.take(buffer, slot, axis=0) for buffer in point.arrays)
        mx.eval(copies)
        return copies

    def places(self, length: int) -> bool:
        """Whether a kernel may write the state behind ``length`` more tokens itself: of one, so that it can be taken
        back."""
        return length == 1

    def place(
        self, length: int, shapes: Sequence[Sequence[int]] = (), dtypes: Sequence[mx.Dtype] = ()
    ) -> tuple[mx.array, ...]:
        """Make room for the state behind one more token; returns the buffers ``[SLOTS, ...]`` of the arrays.

        ``shapes`` and ``dtypes`` of the arrays are for the first token of all. A kernel then reads slot ``offset %
        SLOTS``, with the offset of before, and writes the next one itself; an output of that kernel is given to
        `written`.
        """
        last = self._points[-1]
        if last.placed:
            buffers = last.arrays
        elif last.arrays[0] is None:
            buffers = tuple(mx.zeros((SLOTS, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        else:
            buffers = self._placed()
        self.offset += 1
        self._points = [*self._points[-KEPT:], _Point(self.offset, buffers, placed=True)]
        self._now = None
        return buffers

    def _placed(self) -> tuple[mx.array, ...]:
        """New buffers with the last states in their slots, so that no other memory is held for them."""
        recent = [p for p in self._points if self.offset - p.offset < KEPT and p.arrays[0] is not None]
        states = {point.offset % SLOTS: self._taken(point) for point in recent}
        # A slot that no state is known for is written before it is read.
        each = [states.get(slot, self._points[-1].arrays) for slot in range(SLOTS)]
        buffers = tuple(mx.stack(arrays) for arrays in zip(*each, strict=True))
        self._points = [_Point(p.offset, buffers, placed=True) if p in recent else p for p in self._points]
        return buffers

    def written(self, output: mx.array) -> None:
        """``output`` exists once the state of `place` does. Nothing else tells MLX that the buffers have changed."""
        self._writer = output

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for this state to be complete, which includes the states that are kept: until then
        they hold all that they are computed from."""
        every = [array for point in self._points for array in point.arrays]
        every += [self._writer] * any(point.placed for point in self._points)
        return list({id(array): array for array in every if array is not None}.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not self._writer)

    def empty(self) -> bool:
        return self.offset == 0

    def size(self) -> int:
        return self.offset

    def make_mask(self, N: int) -> None:
        """No mask: every token counts."""

    @property
    def state(self) -> tuple[mx.array | int | None, ...]:
        return (*self._current(), self.offset)

    @state.setter
    def state(self, state: tuple[mx.array | int | None, ...]) -> None:
        *arrays, self.offset = state
        self._now, self._points = None, [_Point(self.offset, tuple(arrays))]
        self._history, self._writer = History(), None

    def is_trimmable(self) -> bool:
        """Whether every number of tokens can be forgotten: only while there are none."""
        return self.offset == 0

    def reusable(self, prefix_len: int) -> int:
        return max((point.offset for point in self._points if point.offset <= prefix_len), default=0)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them; returns how many.

        Raises ContextError where the state of then was not kept.
        """
        target = self.offset - min(n, self.offset)
        kept = [point for point in self._points if point.offset == target] or [_Point(0, self._empty)] * (target == 0)
        if not kept:
            raise ContextError(
                f"a recurrent state after {self.offset} tokens cannot go back to {target}: that state was not kept."
                " Run the prompt again, or roll back to a mark."
            )
        n = self.offset - target
        self._return(kept[0])
        return n

    def _return(self, point: _Point) -> None:
        self.offset, self._now = point.offset, None
        self._points = [*(each for each in self._points if each.offset < point.offset), point]
        self._history.cut(point.offset)

    def mark(self) -> Mark:
        return Mark(self._history.stamp(self.offset), tuple(self._current()))

    def check(self, mark: Mark) -> None:
        """Raise ContextError unless ``rollback(mark)`` will succeed."""
        self._history.check(mark.stamp)

    def rollback(self, mark: Mark) -> None:
        self.check(mark)
        self._return(_Point(mark.stamp.position, mark.arrays))

    def __deepcopy__(self, memo: dict) -> RecurrentState:
        # Copies share arrays, which nobody writes, and no buffers.
        twin = copy.copy(self)
        twin._now = None if self._now is None else list(self._now)
        twin._points = [_Point(point.offset, self._taken(point)) for point in self._points]
        twin._history = copy.deepcopy(self._history, memo)
        return twin
