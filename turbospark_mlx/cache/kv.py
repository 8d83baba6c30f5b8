"""Keys and values of one attention layer: ``LinearKV`` keeps all of them, ``RingKV`` those of a sliding window.

Both keep K and V in one buffer ``[2, B, KV, capacity, D]`` in the dtype that they are given, so that a layer needs one
update a step. Buffers grow in buckets. The rows of several tokens are appended as MLX does it, which makes a new array;
few rows are written in place, by the kernel that computes them (`place`), because an update of its own costs more than
the row. A buffer that someone else holds is never written: neither way changes what a mark or ``state`` gave out.

Neither knows how attention is computed, nor quantized keys, nor that K and V can differ in width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import mlx.core as mx

from turbospark_mlx.cache.history import History, Stamp
from turbospark_mlx.cache.masks import causal_mask
from turbospark_mlx.errors import ContextError

BUCKET = 256
"""Rows by which buffers grow."""


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in a cache's history, with the buffer where the cache could not rebuild it."""

    stamp: Stamp
    buffer: mx.array | None = None
    oldest: int = 0


class _KV:
    """What both kinds share. ``offset`` is the number of tokens seen, which is the position of the next one."""

    _planes = 2
    """The first axis of the buffer: keys and values."""

    def __init__(self, most: int | None) -> None:
        """``most`` bounds the rows of the buffer; None lets it grow."""
        self.offset = 0
        self._most = most
        self._buffer: mx.array | None = None
        self._history = History()
        self._given_out = False
        self._writer: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for this state to be complete. Not to be kept: later tokens are written into it."""
        return [array for array in (self._buffer, self._writer) if array is not None]

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def empty(self) -> bool:
        return self.offset == 0

    def size(self) -> int:
        return self.offset

    def check(self, mark: Mark) -> None:
        """Raise ContextError unless ``rollback(mark)`` will succeed."""
        self._history.check(mark.stamp)

    def _capacity(self) -> int:
        return 0 if self._buffer is None else self._buffer.shape[3]

    def _reserve(self, rows: int, update: Sequence[int], dtype: mx.Dtype) -> None:
        """Make room for ``rows`` rows; ``update`` is the shape ``[2, B, KV, L, D]`` of those that need it."""
        capacity = self._capacity()
        if rows <= capacity:
            return
        self._settle()
        wanted = -(-rows // BUCKET) * BUCKET
        wanted = wanted if self._most is None else min(wanted, self._most)
        room = mx.zeros((*update[:3], wanted - capacity, update[4]), dtype)
        self._buffer = room if self._buffer is None else mx.concatenate([self._buffer, room], axis=3)

    def place(self, length: int, shape: Sequence[int] = (), dtype: mx.Dtype | None = None) -> mx.array:
        """Make room for ``length`` more tokens where `places` allows it; returns the buffer.

        ``shape (B, KV, D)`` and ``dtype`` are for the first of all; later ones are like it. A kernel then writes
        position ``p`` into row ``p % capacity`` of the buffer ``[2, B, KV, capacity, D]`` itself, and an output of that
        kernel is given to `written`.
        """
        end = self._end(length)
        if self._buffer is not None and self._held():
            self._settle()
            self._buffer, self._given_out = self._buffer * mx.array(1, self._buffer.dtype), False
        # A kernel that writes no row this time is given a buffer all the same.
        rows = max(1, end) if self._most is None else min(max(1, end), self._most)
        if rows > self._capacity():
            like = self._buffer
            update = (self._planes, *shape[:2], length, shape[2]) if like is None else like.shape
            self._reserve(rows, update, dtype if like is None else like.dtype)
        self._advance(end)
        return self._buffer

    def _held(self) -> bool:
        """Whether someone else holds the buffer."""
        return self._given_out

    def written(self, output: mx.array) -> None:
        """``output`` exists once the rows of `place` do. Nothing else tells MLX that the buffer has changed."""
        self._writer = output

    def __deepcopy__(self, memo: dict) -> _KV:
        # A copy of an array shares its memory.
        self._give_out()
        twin = copy.copy(self)
        twin._history = copy.deepcopy(self._history, memo)
        return twin

    def _give_out(self) -> None:
        self._settle()
        self._given_out = True

    def _settle(self) -> None:
        """Wait for rows that a kernel writes, before MLX reads the buffer."""
        if self._writer is not None:
            mx.eval(self._writer)
            self._writer = None

    def _write(self, rows: mx.array, slot: int) -> None:
        # Assigning to a slice would change the array that marks hold; slice_update makes a new one, in place where
        # nobody else holds the old.
        self._settle()
        self._buffer = mx.slice_update(self._buffer, rows, mx.array([slot]), axes=(3,))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`append` with ``keys``, ``values [B, KV, L, D]`` apart; what they may see comes as ``[B, KV, S, D]`` each."""
        buffer, rows = self.append(mx.stack([keys, values]))
        return buffer[0, :, :, :rows], buffer[1, :, :, :rows]


class LinearKV(_KV):
    """Keys and values of every token so far.

    A mark costs nothing: rows before it are never written again while it is valid.
    """

    def __init__(self, max_length: int | None = None) -> None:
        """``max_length`` bounds the capacity in tokens; None lets it grow."""
        super().__init__(max_length)

    def append(self, update: mx.array) -> tuple[mx.array, int]:
        """Append ``update [2, B, KV, L, D]``, keys first, and return ``(buffer, S)``: the first ``S`` rows of ``buffer
        [2, B, KV, capacity, D]`` are those of all tokens in time order.

        Raises ContextError where they do not fit ``max_length``.
        """
        end = self._end(update.shape[3])
        self._reserve(end, update.shape, update.dtype)
        self._write(update, self.offset)
        self._advance(end)
        return self._buffer, end

    def places(self, length: int) -> bool:
        """Whether the rows of ``length`` more tokens may be written in place."""
        return True

    def _end(self, length: int) -> int:
        end = self.offset + length
        if self._most is not None and end > self._most:
            raise ContextError(
                f"the cache holds {self._most} tokens; {end} are wanted. Open with a larger max_context."
            )
        return end

    def _advance(self, end: int) -> None:
        self.offset = end

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next ``N`` tokens in mlx-lm's terms: None, ``"causal"``, or boolean ``[N, S]``."""
        keys = self.offset + N
        if (window_size is not None and keys > window_size) or (return_array and N > 1):
            return causal_mask(N, keys, window_size)
        return None if N == 1 else "causal"

    @property
    def state(self) -> tuple[mx.array | None, int]:
        self._give_out()
        return self._buffer, self.offset

    @state.setter
    def state(self, state: tuple[mx.array | None, int]) -> None:
        self._buffer, self.offset = state
        self._history, self._given_out, self._writer = History(), True, None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them; returns how many."""
        n = min(n, self.offset)
        self.offset -= n
        self._history.cut(self.offset)
        return n

    def reusable(self, prefix_len: int) -> int:
        return min(prefix_len, self.offset)

    def mark(self) -> Mark:
        return Mark(self._history.stamp(self.offset))

    def rollback(self, mark: Mark) -> None:
        self.check(mark)
        self.trim(self.offset - mark.stamp.position)


class RingKV(_KV):
    """Keys and values of the last ``window`` tokens; that of position ``p`` lies in slot ``p % window``.

    Several tokens at once attend before they overwrite: they are given the ``window - 1`` tokens before them and
    themselves, in time order, so attention needs the window too. A single token is given the ring as it lies: every row
    is visible to it, and rotary positions are already in the keys, so order does not matter.

    A mark holds the buffer. The next update then copies it once, because MLX may not write into it.
    """

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.window = window
        self._marks: WeakSet[Mark] = WeakSet()
        self._oldest = 0

    def append(self, update: mx.array) -> tuple[mx.array, int]:
        """Append ``update [2, B, KV, L, D]``, keys first, and return ``(buffer, S)``: the first ``S`` rows of ``buffer
        [2, B, KV, capacity, D]`` are what these ``L`` tokens may see.

        ``S`` is ``min(offset, window - 1) + L``. In time order where ``L > 1`` or nothing was overwritten.
        """
        length = update.shape[3]
        end = self._end(length)
        if self.places(length):
            self._reserve(min(end, self.window), update.shape, update.dtype)
            self._write(update, self.offset % self.window)
            visible = self._buffer, min(end, self.window)
        else:
            self._settle()
            rows = mx.concatenate([*self._last(min(self.offset, self.window - 1)), update], axis=3)
            newest = rows[..., -self.window :, :]
            turn = self.window - end % self.window
            self._buffer = mx.concatenate([newest[..., turn:, :], newest[..., :turn, :]], axis=3)
            # Whoever evaluates the rows evaluates the buffer: alone, it would keep them until the end of the pass.
            visible = mx.depends(rows, self._buffer), rows.shape[3]
        self._advance(end)
        return visible

    def places(self, length: int) -> bool:
        """Whether the rows of ``length`` more tokens may be written in place: those of several tokens only where they
        overwrite nothing that the first of them sees."""
        return length == 1 or self.offset + length <= self.window

    def _end(self, length: int) -> int:
        return self.offset + length

    def _advance(self, end: int) -> None:
        self.offset = end
        self._oldest = max(0, end - self.window)

    def _last(self, count: int) -> list[mx.array]:
        """The last ``count`` rows in time order, as up to two slices of the buffer."""
        if count == 0:
            return []
        first, end = (self.offset - count) % self.window, self.offset % self.window
        if first < end:
            return [self._buffer[..., first:end, :]]
        return [self._buffer[..., first:, :], self._buffer[..., :end, :]]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next ``N`` tokens in mlx-lm's terms: None, ``"causal"``, or boolean ``[N, S]``."""
        if window_size is not None and window_size != self.window:
            raise ContextError(f"the cache keeps a window of {self.window}; a mask for {window_size} was asked for.")
        keys = min(self.offset, self.window - 1) + N
        if N > 1 and (return_array or keys > self.window):
            return causal_mask(N, keys, self.window)
        return None if N == 1 else "causal"

    @property
    def state(self) -> tuple[mx.array | None, int, int, int]:
        self._give_out()
        return self._buffer, self.offset, self.window, self._oldest

    @state.setter
    def state(self, state: tuple[mx.array | None, int, int, int]) -> None:
        self._buffer, self.offset, self.window, self._oldest = state
        self._history, self._given_out, self._writer = History(), True, None

    def is_trimmable(self) -> bool:
        """Whether every number of tokens can be forgotten, which ends when the first row is overwritten."""
        return self._oldest == 0

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them; returns how many.

        Raises ContextError where rows that the window would need again are overwritten.
        """
        target = self.offset - min(n, self.offset)
        if self.reusable(target) != target:
            raise ContextError(
                f"the cache keeps a window of {self.window} and has overwritten what position {target} needs."
                " Run the prompt again, or roll back to a mark."
            )
        n, self.offset = self.offset - target, target
        if target == 0:
            self._oldest = 0
        self._history.cut(target)
        return n

    def reusable(self, prefix_len: int) -> int:
        target = min(prefix_len, self.offset)
        return target if max(0, target - self.window + 1) >= self._oldest else 0

    def _held(self) -> bool:
        return self._given_out or any(mark.buffer is self._buffer for mark in self._marks)

    def __deepcopy__(self, memo: dict) -> RingKV:
        twin = super().__deepcopy__(memo)
        twin._marks = WeakSet()
        return twin

    def mark(self) -> Mark:
        mark = Mark(self._history.stamp(self.offset), self._buffer, self._oldest)
        self._marks.add(mark)
        return mark

    def rollback(self, mark: Mark) -> None:
        self.check(mark)
        self._settle()
        self._buffer, self.offset, self._oldest = mark.buffer, mark.stamp.position, mark.oldest
        self._history.cut(self.offset)
