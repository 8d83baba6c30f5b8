"""Keys and values of one attention layer: ``LinearKV`` keeps all of them, ``RingKV`` those of a sliding window.

Both keep K and V in one buffer ``[2, B, KV, capacity, D]`` in the dtype that they are given, so that a layer needs one
update a step. Buffers grow in buckets and are never written through a name that someone else holds: MLX arrays are
values, so a mark that holds a buffer keeps it as it was.

Neither knows how attention is computed, nor quantized keys, nor that K and V can differ in width.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark_mlx.cache.history import History, Stamp
from turbospark_mlx.cache.masks import causal_mask
from turbospark_mlx.errors import ContextError

BUCKET = 256
"""Rows by which buffers grow."""


@dataclass(frozen=True)
class Mark:
    """A point in a cache's history, with the buffer where the cache could not rebuild it."""

    stamp: Stamp
    buffer: mx.array | None = None
    oldest: int = 0


class _KV:
    """What both kinds share. ``offset`` is the number of tokens seen, which is the position of the next one."""

    def __init__(self) -> None:
        self.offset = 0
        self._buffer: mx.array | None = None
        self._history = History()

    @property
    def position(self) -> mx.array:
        """``offset`` as a 0-d int32 array, for steps that read it on the device."""
        return mx.array(self.offset, dtype=mx.int32)

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

    def _reserve(self, rows: int, most: int | None, like: mx.array) -> None:
        """Make room for ``rows`` rows; ``like`` is the update ``[2, B, KV, L, D]`` that needs them."""
        capacity = self._capacity()
        if rows <= capacity:
            return
        wanted = -(-rows // BUCKET) * BUCKET
        wanted = wanted if most is None else min(wanted, most)
        room = mx.zeros((*like.shape[:3], wanted - capacity, like.shape[4]), like.dtype)
        self._buffer = room if self._buffer is None else mx.concatenate([self._buffer, room], axis=3)

    def _write(self, rows: mx.array, slot: int) -> None:
        # Assigning to a slice would change the array that marks hold; slice_update makes a new one, in place where
        # nobody else holds the old.
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
        super().__init__()
        self.max_length = max_length

    def append(self, update: mx.array) -> tuple[mx.array, int]:
        """Append ``update [2, B, KV, L, D]``, keys first, and return ``(buffer, S)``: the first ``S`` rows of ``buffer
        [2, B, KV, capacity, D]`` are those of all tokens in time order.

        Raises ContextError where they do not fit ``max_length``.
        """
        end = self.offset + update.shape[3]
        if self.max_length is not None and end > self.max_length:
            raise ContextError(
                f"the cache holds {self.max_length} tokens; {end} are wanted. Open with a larger max_context."
            )
        self._reserve(end, self.max_length, update)
        self._write(update, self.offset)
        self.offset = end
        return self._buffer, end

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next ``N`` tokens in mlx-lm's terms: None, ``"causal"``, or boolean ``[N, S]``."""
        keys = self.offset + N
        if (window_size is not None and keys > window_size) or (return_array and N > 1):
            return causal_mask(N, keys, window_size)
        return None if N == 1 else "causal"

    @property
    def state(self) -> tuple[mx.array | None, int]:
        return self._buffer, self.offset

    @state.setter
    def state(self, state: tuple[mx.array | None, int]) -> None:
        self._buffer, self.offset = state
        self._history = History()

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
        super().__init__()
        self.window = window
        self._oldest = 0

    def append(self, update: mx.array) -> tuple[mx.array, int]:
        """Append ``update [2, B, KV, L, D]``, keys first, and return ``(buffer, S)``: the first ``S`` rows of ``buffer
        [2, B, KV, capacity, D]`` are what these ``L`` tokens may see.

        ``S`` is ``min(offset, window - 1) + L``. In time order where ``L > 1`` or nothing was overwritten.
        """
        length = update.shape[3]
        end = self.offset + length
        if length == 1 or end <= self.window:
            self._reserve(min(end, self.window), self.window, update)
            self._write(update, self.offset % self.window)
            visible = self._buffer, min(end, self.window)
        else:
            rows = mx.concatenate([*self._last(min(self.offset, self.window - 1)), update], axis=3)
            newest = rows[..., -self.window :, :]
            turn = self.window - end % self.window
            self._buffer = mx.concatenate([newest[..., turn:, :], newest[..., :turn, :]], axis=3)
            visible = rows, rows.shape[3]
        self.offset = end
        self._oldest = max(0, end - self.window)
        return visible

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
        return self._buffer, self.offset, self.window, self._oldest

    @state.setter
    def state(self, state: tuple[mx.array | None, int, int, int]) -> None:
        self._buffer, self.offset, self.window, self._oldest = state
        self._history = History()

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

    def mark(self) -> Mark:
        return Mark(self._history.stamp(self.offset), self._buffer, self._oldest)

    def rollback(self, mark: Mark) -> None:
        self.check(mark)
        self._buffer, self.offset, self._oldest = mark.buffer, mark.stamp.position, mark.oldest
        self._history.cut(self.offset)
