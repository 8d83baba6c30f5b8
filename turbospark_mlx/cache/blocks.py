"""Keys by which a sparse layer chooses blocks of tokens: one a token, and one for each block that is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from turbospark_mlx.cache.kv import Mark
from turbospark_mlx.cache.latent import LatentKV


class BlockKeys:
    """The keys of all tokens, and those of whole blocks of ``block`` tokens from the first one on.

    A block's key is made once, by the token that completes it. Tokens' own keys stay, because a block that is left on
    the way back has to be made again.
    """

    def __init__(self, block: int, max_length: int | None = None) -> None:
        """``max_length`` bounds the capacity in tokens; None lets it grow."""
        self._block = block
        self._tokens = LatentKV(max_length)
        self._blocks = LatentKV(None if max_length is None else max(1, max_length // block))

    def append(self, keys: mx.array, pool: Callable[[mx.array, int], mx.array]) -> mx.array:
        """Append ``keys [B, L, D]``; returns those of all whole blocks ``[B, blocks, D]``.

        ``pool(keys [B, n, block, D], first)`` makes the keys ``[B, n, D]`` of blocks from number ``first`` on.
        """
        rows, total = self._tokens.append(keys[None, :, None])
        first, end = self._blocks.offset, total // self._block
        if end == first:
            return keys[:, :0] if end == 0 else self._blocks_now()
        fresh = rows[0, :, 0, first * self._block : end * self._block]
        fresh = fresh.reshape(keys.shape[0], end - first, self._block, -1)
        self._blocks.append(pool(fresh, first)[None, :, None])
        return self._blocks_now()

    def _blocks_now(self) -> mx.array:
        buffer, end = self._blocks.state
        return buffer[0, :, 0, :end]

    @property
    def offset(self) -> int:
        """The number of tokens seen."""
        return self._tokens.offset

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for this state to be complete."""
        return self._tokens.arrays + self._blocks.arrays

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._blocks.nbytes

    def places(self, length: int) -> bool:
        """Whether a kernel may write ``length`` more keys itself: one, and that of the block which it may complete."""
        return length == 1

    def place(self, length: int, shape: Sequence[int] = (), dtype: mx.Dtype | None = None) -> tuple[mx.array, mx.array]:
        """Make room for one more token; returns the buffers of tokens' keys ``[1, B, 1, capacity, D]`` and of blocks'.

        ``shape (B, D)`` and ``dtype`` are for the first of all. A kernel then writes position ``p`` into row ``p`` of
        the first and, where ``p`` is the last of block ``n``, row ``n`` of the second; an output of it is given to
        `written`.
        """
        tokens = self._tokens.place(length, (*shape[:1], 1, *shape[1:]), dtype)
        fresh = self._tokens.offset // self._block - self._blocks.offset
        return tokens, self._blocks.place(fresh, (tokens.shape[1], 1, tokens.shape[4]), tokens.dtype)

    def written(self, output: mx.array) -> None:
        """``output`` exists once the rows of `place` do."""
        self._tokens.written(output)
        self._blocks.written(output)

    @property
    def state(self) -> tuple:
        return self._tokens.state, self._blocks.state

    @state.setter
    def state(self, state: tuple) -> None:
        self._tokens.state, self._blocks.state = state

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them, and the blocks that they belong to; returns how many."""
        n = self._tokens.trim(n)
        self._trim_blocks()
        return n

    def _trim_blocks(self) -> None:
        self._blocks.trim(max(0, self._blocks.offset - self.offset // self._block))

    def reusable(self, prefix_len: int) -> int:
        return self._tokens.reusable(prefix_len)

    def mark(self) -> Mark:
        return self._tokens.mark()

    def check(self, mark: Mark) -> None:
        """Raise ContextError unless ``rollback(mark)`` will succeed."""
        self._tokens.check(mark)

    def rollback(self, mark: Mark) -> None:
        self._tokens.rollback(mark)
        self._trim_blocks()
