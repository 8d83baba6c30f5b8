"""Block-sparse attention with an indexer, as Qwen4-Exp has it: a query sees the blocks that score best, and its tail.

Keys of ``block`` tokens from position 0 on make a block, once all of them are there. The query at position ``p`` sees
what it sees of whole blocks up to ``p`` through their scores, and the ``(p + 1) % block`` newest tokens, itself among
them, always.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels import decode_attention
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.sdpa import cache_attention_reference
from turbospark_mlx.errors import OptionError

SCORE = Kernel("score_blocks", inputs=("queries", "keys", "start"), outputs=("scores",), headers=("attention",))
CHOOSE = Kernel(
    "choose_positions", inputs=("scores", "start"), outputs=("positions", "last"), headers=("reduce", "order")
)
SCORE_BLOCKS = Op("score_blocks", (SCORE,), rows=8)
CHOOSE_POSITIONS = Op("choose_positions", (CHOOSE,))
INDEXED_ATTENTION = Op("indexed_attention", (decode_attention.PARTIAL, decode_attention.COMBINE))
BLOCKS_PER_GROUP = {"host": 512, "gpu": 64}
"""Blocks whose scores are worth a threadgroup."""
_SIMDGROUPS = 8
_MOST_SIMDGROUPS = 32


def score_blocks_reference(queries, keys, start, *, block: int) -> mx.array:
    """Definition of `score_blocks`."""
    length, width = queries.shape[2], queries.shape[3]
    keys, scores = keys.astype(mx.float32).swapaxes(-1, -2), 0
    for head in range(queries.shape[1]):
        scores = scores + mx.maximum(queries[:, head].astype(mx.float32) @ keys, 0)
    whole = (start + mx.arange(1, length + 1)) // block
    return mx.where(mx.arange(keys.shape[-1]) < whole[:, None], scores * width**-0.5, -mx.inf)


def chosen_blocks(scores: mx.array, top_k: int) -> mx.array:
    """Which blocks are among the ``top_k`` best, the lower one of equals first: boolean, like ``scores [..., blocks]``.
    One whose score is -inf is no block."""
    blocks = scores.shape[-1]
    if blocks <= top_k:
        return scores > -mx.inf
    # By the score of the last one that is kept, so that nothing depends on the order in which a sort leaves equals.
    last = mx.sort(scores, axis=-1)[..., blocks - top_k, None]
    better, equal = scores > last, scores == last
    room = top_k - better.sum(axis=-1, keepdims=True)
    return (better | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))) & (scores > -mx.inf)


def sparse_mask(scores: mx.array, start: int, keys: int, *, block: int, top_k: int) -> mx.array:
    """Which of ``keys`` tokens the queries of ``scores [B, L, blocks]``, the first of them at ``start``, see: boolean
    ``[B, 1, L, keys]``."""
    _, length, blocks = scores.shape
    seen = mx.repeat(chosen_blocks(scores, top_k), block, axis=-1)
    seen = mx.pad(seen, [(0, 0), (0, 0), (0, keys - blocks * block)])
    query = (start + mx.arange(length))[:, None]
    token = mx.arange(keys)
    tail = (token <= query) & (token >= (query + 1) // block * block)
    return (seen | tail)[:, None]


def choose_positions_reference(scores, start, *, block: int, top_k: int) -> tuple[mx.array, mx.array]:
    """Definition of `choose_positions`."""
    keys = start.item() + 1
    blocks, batch = keys // block, scores.shape[0]
    chosen = chosen_blocks(scores[:, :blocks], top_k)
    numbers = mx.sort(mx.where(chosen, mx.arange(blocks), blocks), axis=-1)[:, :top_k]
    positions = (numbers[..., None] * block + mx.arange(block)).reshape(batch, -1)
    tail = mx.broadcast_to(mx.arange(blocks * block, keys), (batch, keys % block))
    listed = mx.concatenate([positions, tail], axis=-1).astype(mx.int32)
    room = top_k * block + block - 1 - listed.shape[1]
    return mx.pad(listed, [(0, 0), (0, room)]), mx.array([listed.shape[1] - 1], mx.int32)


def indexed_attention_reference(q, kv, positions, last, *, scale: float, gates=None) -> mx.array:
    """Definition of `indexed_attention`."""
    index = positions[None, :, None, :, None].astype(mx.int64)
    index = mx.broadcast_to(index, (*kv.shape[:3], positions.shape[1], 1))
    return cache_attention_reference(q, mx.take_along_axis(kv, index, axis=3), last, scale=scale, gates=gates)


@lru_cache(maxsize=1024)
def _plan_score(
    backend: str, shape: tuple[int, ...], blocks: int, block: int, dtypes: tuple[mx.Dtype, mx.Dtype]
) -> Launch:
    batch, heads, length, width = shape
    host = backend == "host"
    return Launch(
        SCORE,
        template=(("HEADS", heads), ("D", width), ("BLOCK", block), ("SCALE_BITS", float_bits(width**-0.5))),
        groups=(-(-blocks // BLOCKS_PER_GROUP["host" if host else "gpu"]), batch * length),
        simdgroups=1 if host else _SIMDGROUPS,
        input_dtypes=(*dtypes, mx.int32),
        output_shapes=((batch, length, blocks),),
        output_dtypes=(mx.float32,),
    )


@lru_cache(maxsize=1024)
def _plan_choose(backend: str, shape: tuple[int, int], block: int, top_k: int) -> Launch:
    batch, blocks = shape
    simdgroups = 1 if backend == "host" else min(_MOST_SIMDGROUPS, -(-blocks // SIMD_WIDTH))
    return Launch(
        CHOOSE,
        template=(("BLOCK", block), ("TOP", top_k)),
        groups=(batch, 1),
        simdgroups=simdgroups,
        input_dtypes=(mx.float32, mx.int32),
        output_shapes=((batch, top_k * block + block - 1), (1,)),
        output_dtypes=(mx.int32, mx.int32),
    )


def score_blocks(queries: mx.array, keys: mx.array, start: mx.array, *, block: int, backend: Backend) -> mx.array:
    """``sum_h max(0, q_h . k) / sqrt(D)``, float32 ``[B, L, N]``; -inf for a block that a query does not see whole.

    ``queries [B, heads, L, D]``, ``keys [B, N, D]``; ``start`` is an int32 array ``[1]``, the position of the first
    query. Raises OptionError for parts that do not fit.
    """
    if queries.shape[0] != keys.shape[0] or queries.shape[-1] != keys.shape[-1]:
        raise OptionError(
            f"score_blocks: queries {list(queries.shape)} and keys {list(keys.shape)} do not fit [B, heads, L, D] and"
            " [B, N, D]"
        )
    if keys.size and SCORE_BLOCKS.serves(backend, queries.dtype, keys.dtype, rows=queries.shape[2]):
        backend.count(SCORE_BLOCKS.name, "kernel")
        call = _plan_score(backend.name, queries.shape, keys.shape[1], block, (queries.dtype, keys.dtype))
        return backend.launch(call, (queries, keys, start))[0]
    backend.count(SCORE_BLOCKS.name, "mlx")
    return score_blocks_reference(queries, keys, start, block=block)


def choose_positions(
    scores: mx.array, start: mx.array, *, block: int, top_k: int, backend: Backend
) -> tuple[mx.array, mx.array]:
    """The tokens that the one at position ``start``, an int32 array ``[1]``, sees: those of its ``top_k`` best blocks,
    the lower one of equals, or of all where there are no more, and those behind the last whole block.

    ``scores [B, N]`` are those of blocks from the first on, of which those that are not whole yet are not read; N is at
    least the number of those that are. Gives int32 ``[B, top_k * block + block - 1]``, ascending, then zeros; and int32
    ``[1]``, the place of the last token in that list. Shapes do not depend on ``start``, and nothing waits for the
    device.
    """
    if CHOOSE_POSITIONS.serves(backend, scores.dtype):
        backend.count(CHOOSE_POSITIONS.name, "kernel")
        positions, last = backend.launch(_plan_choose(backend.name, scores.shape, block, top_k), (scores, start))
        return positions, last
    backend.count(CHOOSE_POSITIONS.name, "mlx")
    return choose_positions_reference(scores, start, block=block, top_k=top_k)


def indexed_attention(
    q: mx.array,
    kv: mx.array,
    positions: mx.array,
    last: mx.array,
    *,
    scale: float,
    gates: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """`sdpa.cache_attention` of one query to the keys at ``positions``, of which the one at ``last`` is the last.

    ``q [B, H, 1, D]``, ``kv [2, B, KV, S, D]``, ``positions [B, P]``, int32 and each below S, ``last`` int32 ``[1]`` ->
    ``[B, 1, H * D]`` in the dtype of ``q``, times the sigmoids of ``gates``. Raises OptionError for parts that do not
    fit.
    """
    batch, heads, length, width = q.shape
    if (
        length != 1
        or kv.shape != (2, batch, *kv.shape[2:4], width)
        or positions.shape[0] != batch
        or heads % kv.shape[2]
        or (gates is not None and (gates.shape[:2] != (batch, 1) or gates.shape[2] < 2 * heads * width))
    ):
        raise OptionError(
            f"indexed_attention: q {list(q.shape)}, kv {list(kv.shape)}, positions {list(positions.shape)}, gates"
            f" {None if gates is None else list(gates.shape)} do not fit [B, H, 1, D], [2, B, KV, S, D], [B, P] and"
            " [B, 1, at least 2 * H * D]"
        )
    if INDEXED_ATTENTION.serves(backend, q.dtype):
        backend.count(INDEXED_ATTENTION.name, "kernel")
        options = {"scale": scale, "gates": gates, "positions": positions, "backend": backend}
        return decode_attention.decode_attention(q, kv, None, last, **options)
    backend.count(INDEXED_ATTENTION.name, "mlx")
    return indexed_attention_reference(q, kv, positions, last, scale=scale, gates=gates)
