"""Gated attention to the blocks of tokens that an indexer chooses for each query.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head, N blocks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from turbospark_mlx.cache import BlockKeys, JointState
from turbospark_mlx.custom_kernels import (
    choose_positions,
    index_append,
    indexed_attention,
    pool_blocks,
    qkv_append,
    rotate,
    score_blocks,
    sparse_mask,
)
from turbospark_mlx.families.gated_attention import GatedAttention
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE
from turbospark_mlx.families.qwen4.config import Qwen4Config


class BlockRoPE(RoPE):
    """A block turns as its first token does: by whole blocks a position."""

    def __init__(self, frequencies: np.ndarray, block: int):
        super().__init__(frequencies * block)
        self._block = block

    def table(self, offset: int, length: int) -> np.ndarray:
        """Of the blocks that ``length`` tokens from ``offset`` on belong to, one a token."""
        blocks = np.arange(offset, offset + length) // self._block
        return self.of_blocks(blocks[0], blocks[-1] + 1 - blocks[0])[blocks - blocks[0]]

    def of_blocks(self, first: int, count: int) -> np.ndarray:
        """Of ``count`` blocks from number ``first`` on."""
        return super().table(first, count)


class Indexer(Module):
    """Scores blocks of tokens for each query, by keys and queries of its own."""

    def __init__(self, config: Qwen4Config, path: str, rope: RoPE, block_rope: BlockRoPE, build: Builder):
        super().__init__()
        width, eps, centered = config.indexer_head_dim, config.rms_norm_eps, config.centered_norms
        self._width, self._block, self._backend = width, config.indexer_compress_ratio, build.backend
        self._rope, self._block_rope = rope, block_rope
        self._options = {"eps": eps, "centered": centered, "backend": build.backend}
        self.index_qk_proj = build.linear(
            f"{path}.index_qk_proj", config.hidden_size, (config.indexer_n_heads + 1) * width
        )
        self.q_layernorm = build.norm(f"{path}.q_layernorm", width, eps, centered=centered)
        self.k_layernorm = build.norm(f"{path}.k_layernorm", width, eps, centered=centered)

    def __call__(self, x: mx.array, cache: BlockKeys | None) -> tuple[mx.array, mx.array]:
        """``x [B, L, H]``, whose keys are added to ``cache`` -> queries ``[B, heads, L, D]``, not normalised yet, and
        the keys of all whole blocks ``[B, N, D]``."""
        batch, length, _ = x.shape
        rows = self.index_qk_proj(x).reshape(batch, length, -1, self._width)
        queries, keys = rows[:, :, :-1].transpose(0, 2, 1, 3), rows[:, :, -1]
        if cache is not None:
            return queries, cache.append(keys, self._pool)
        count = length // self._block
        blocks = keys[:, : count * self._block].reshape(batch, count, self._block, self._width)
        return queries, self._pool(blocks, 0) if count else keys[:, :0]

    def _pool(self, keys: mx.array, first: int) -> mx.array:
        rotation = mx.array(self._block_rope.of_blocks(first, keys.shape[1]))
        return pool_blocks(keys, self.k_layernorm["weight"], rotation, **self._options)

    def scores(self, queries: mx.array, blocks: mx.array, positions: Positions) -> mx.array:
        """Float32 ``[B, L, N]`` of what a call gave."""
        queries = rotate(self.q_layernorm(queries), positions.rotation(self._rope), backend=self._backend)
        return score_blocks(queries, blocks, positions.start, block=self._block, backend=self._backend)

    def score_in_place(self, x: mx.array, positions: Positions, cache: BlockKeys) -> mx.array:
        """The scores of one token ``x [B, 1, H]``, whose key a kernel writes into ``cache``: ``[B, 1, N]``, where N is
        as many blocks as ``cache`` has room for."""
        rows = self.index_qk_proj(x)
        keys, blocks = cache.place(1, (x.shape[0], self._width), rows.dtype)
        rotations = (positions.rotation(rope) for rope in (self._rope, self._block_rope))
        norms = {"q_norm": self.q_layernorm["weight"], "k_norm": self.k_layernorm["weight"]}
        queries = index_append(
            rows, *rotations, keys, blocks, positions.start, **norms, block=self._block, **self._options
        )
        blocks = blocks.reshape(blocks.shape[1], -1, self._width)
        return score_blocks(queries, blocks, positions.start, block=self._block, backend=self._backend)


class SparseAttention(GatedAttention):
    """Gated attention to the blocks that an indexer chooses and to the tokens behind the last whole one.

    Where there are no more blocks than may be chosen, and where ``sparse`` is set to False, it sees everything.
    """

    sparse = True

    def __init__(self, config: Qwen4Config, path: str, rope: RoPE, block_rope: BlockRoPE, length: int, build: Builder):
        """For contexts of up to ``length`` tokens; longer ones have steps of other sizes."""
        super().__init__(config, path, rope, build)
        self._block, self._top_k = config.indexer_compress_ratio, config.block_top_k
        self._most_blocks = length // self._block
        self.indexer = Indexer(config, f"{path}.indexer", rope, block_rope, build)

    def attend_in_place(
        self, x: mx.array, qkv: mx.array, positions: Positions, cache: JointState, sizes: dict[str, Any]
    ) -> mx.array:
        """See `GatedAttention`; one token, and ``cache`` has keys and values, and the indexer's keys. The operations
        are the same for every position: while all blocks may be chosen, all are."""
        own, index = cache.parts
        kv = own.place(1, (x.shape[0], self._kv_heads, self.head_dim), qkv.dtype)
        q = qkv_append(qkv, positions.rotation(self.rope), kv, positions.start, **sizes)
        scores = self.indexer.score_in_place(x, positions, index)[:, 0]
        room = scores.shape[1]
        # A list has room for no more blocks than there can be, whatever the budget.
        top_k = min(self._top_k, max(self._most_blocks, room)) if self.sparse else room
        chosen = choose_positions(scores, positions.start, block=self._block, top_k=top_k, backend=self._backend)
        return indexed_attention(q, kv, *chosen, scale=self.head_dim**-0.5, gates=qkv, backend=self._backend)

    def attend(
        self, x: mx.array, q: mx.array, k: mx.array, v: mx.array, positions: Positions, cache: JointState | None
    ) -> mx.array:
        """See `GatedAttention`; ``cache`` has keys and values, and the indexer's keys."""
        own, index = (None, None) if cache is None else cache.parts
        if own is not None:
            k, v = own.update_and_fetch(k, v)
        queries, blocks = self.indexer(x, index)
        length, keys, scale = q.shape[2], k.shape[2], self.head_dim**-0.5
        if not self.sparse or blocks.shape[1] <= self._top_k:
            return self._attention(q, k, v, scale=scale, mask="causal" if length > 1 else None)
        scores = self.indexer.scores(queries, blocks, positions)
        mask = sparse_mask(scores, positions.offset, keys, block=self._block, top_k=self._top_k)
        return self._attention(q, k, v, scale=scale, mask=mask)
