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
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotate_reference
from turbospark_mlx.custom_kernels.sdpa import attention_reference
from turbospark_mlx.errors import OptionError

POOL = Kernel("pool_blocks", inputs=("keys", "weight", "rotation"), outputs=("y",))
SCORE = Kernel("score_blocks", inputs=("queries", "keys", "start"), outputs=("scores",), headers=("attention",))
CHOOSE = Kernel("choose_positions", inputs=("scores", "start"), outputs=("positions",), headers=("reduce", "order"))
POOL_BLOCKS = Op("pool_blocks", (POOL,))
SCORE_BLOCKS = Op("score_blocks", (SCORE,), rows=8)
CHOOSE_POSITIONS = Op("choose_positions", (CHOOSE,))
INDEXED_ATTENTION = Op("indexed_attention", (decode_attention.PARTIAL, decode_attention.COMBINE))
BLOCKS_PER_GROUP = {"host": 512, "gpu": 64}
"""Blocks whose scores are worth a threadgroup."""
_SIMDGROUPS = 8
_MOST_SIMDGROUPS = 32


def pool_blocks_reference(keys, weight, rotation, *, eps: float, centered: bool) -> mx.array:
    """Definition of `pool_blocks`."""
    mean = keys.astype(mx.float32).mean(axis=-2).astype(keys.dtype)
    return rotate_reference(rms_norm_reference(mean, weight, eps=eps, centered=centered)[:, None], rotation)[:, 0]


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


def choose_positions_reference(scores, *, keys: int, block: int, top_k: int) -> mx.array:
    """Definition of `choose_positions`."""
    blocks = scores.shape[-1]
    numbers = mx.sort(mx.where(chosen_blocks(scores, top_k), mx.arange(blocks), blocks), axis=-1)[:, :top_k]
    positions = (numbers[..., None] * block + mx.arange(block)).reshape(scores.shape[0], -1)
    tail = mx.broadcast_to(mx.arange(keys // block * block, keys), (scores.shape[0], keys % block))
    return mx.concatenate([positions, tail], axis=-1).astype(mx.int32)


def indexed_attention_reference(q, k, v, positions, *, scale: float) -> mx.array:
    """Definition of `indexed_attention`."""
    index = positions[:, None, :, None].astype(mx.int64)
    k, v = (mx.take_along_axis(a, mx.broadcast_to(index, (*a.shape[:2], index.shape[2], 1)), axis=2) for a in (k, v))
    return attention_reference(q, k, v, scale=scale)


@lru_cache(maxsize=1024)
def _plan_pool(
    backend: str,
    shape: tuple[int, ...],
    pairs: int,
    eps: float,
    centered: bool,
    dtypes: tuple[mx.Dtype, ...],
) -> Launch:
    batch, count, block, width = shape
    units, host = batch * count, backend == "host"
    return Launch(
        POOL,
        template=(
            ("T", dtypes[0]),
            ("BLOCK", block),
            ("D", width),
            ("PAIRS", pairs),
            ("CENTERED", centered),
            ("EPSILON_BITS", float_bits(eps)),
        ),
        groups=(-(-units // (BLOCKS_PER_GROUP["host"] if host else _SIMDGROUPS)), 1),
        simdgroups=1 if host else _SIMDGROUPS,
        input_dtypes=dtypes,
        output_shapes=((batch, count, width),),
        output_dtypes=dtypes[:1],
    )


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
def _plan_choose(backend: str, shape: tuple[int, int], width: int, block: int, top_k: int) -> Launch:
    batch, blocks = shape
    simdgroups = 1 if backend == "host" else min(_MOST_SIMDGROUPS, -(-blocks // SIMD_WIDTH))
    return Launch(
        CHOOSE,
        template=(("BLOCK", block), ("TOP", top_k)),
        groups=(batch, 1),
        simdgroups=simdgroups,
        input_dtypes=(mx.float32, mx.int32),
        output_shapes=((batch, width),),
        output_dtypes=(mx.int32,),
    )


def pool_blocks(
    keys: mx.array, weight: mx.array, rotation: mx.array, *, eps: float, centered: bool, backend: Backend
) -> mx.array:
    """The keys of blocks: the means of their tokens' keys, in the dtype of these, normalised and rotated.

    ``keys [B, N, block, D]``, ``weight [D]``, ``rotation [N, P, 2]`` (`rotations` of the blocks' first positions) ->
    ``[B, N, D]``. ``centered`` weights are stored less 1. Raises OptionError for parts that do not fit.
    """
    if weight.shape != keys.shape[-1:] or rotation.shape[0] != keys.shape[1] or 2 * rotation.shape[1] > keys.shape[-1]:
        raise OptionError(
            f"pool_blocks: keys {list(keys.shape)}, weight {list(weight.shape)}, rotation {list(rotation.shape)} do not"
            " fit [B, N, block, D], [D], [N, P, 2] with P at most D / 2"
        )
    if keys.size and POOL_BLOCKS.serves(backend, keys.dtype):
        backend.count(POOL_BLOCKS.name, "kernel")
        dtypes = (keys.dtype, weight.dtype, rotation.dtype)
        call = _plan_pool(backend.name, keys.shape, rotation.shape[1], eps, centered, dtypes)
        return backend.launch(call, (keys, weight, rotation))[0]
    backend.count(POOL_BLOCKS.name, "mlx")
    return pool_blocks_reference(keys, weight, rotation, eps=eps, centered=centered)


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
    scores: mx.array, start: mx.array, *, keys: int, block: int, top_k: int, backend: Backend
) -> mx.array:
    """The tokens that the last of ``keys`` tokens sees, ascending: int32 ``[B, top_k * block + keys % block]``.

    ``scores [B, N]`` are those of its blocks, of which there are at least ``top_k``; the lower one of equals comes
    first. ``start`` is an int32 array ``[1]`` with its position, ``keys - 1``. Nothing waits for the device. Raises
    OptionError for fewer blocks.
    """
    if scores.shape[-1] < top_k or scores.shape[-1] != keys // block:
        raise OptionError(
            f"choose_positions: {scores.shape[-1]} scores are no choice of {top_k} blocks of {block} for {keys} tokens"
        )
    if CHOOSE_POSITIONS.serves(backend, scores.dtype):
        backend.count(CHOOSE_POSITIONS.name, "kernel")
        call = _plan_choose(backend.name, scores.shape, top_k * block + keys % block, block, top_k)
        return backend.launch(call, (scores, start))[0]
    backend.count(CHOOSE_POSITIONS.name, "mlx")
    return choose_positions_reference(scores, keys=keys, block=block, top_k=top_k)


def indexed_attention(
    q: mx.array, k: mx.array, v: mx.array, positions: mx.array, *, scale: float, backend: Backend
) -> mx.array:
    """Attention of one query to the keys at ``positions``: ``q [B, H, 1, D]``, ``k``, ``v [B, KV, S, D]``,
    ``positions [B, P]``, int32 and each below S -> ``[B, H, 1, D]`` in the dtype of ``q``. Raises OptionError for parts
    that do not fit."""
    if q.shape[2] != 1 or k.shape != v.shape or positions.shape[0] != q.shape[0] or q.shape[1] % k.shape[1]:
        raise OptionError(
            f"indexed_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, positions"
            f" {list(positions.shape)} do not fit [B, H, 1, D], [B, KV, S, D] twice and [B, P]"
        )
    if INDEXED_ATTENTION.serves(backend, q.dtype):
        backend.count(INDEXED_ATTENTION.name, "kernel")
        y = decode_attention.decode_attention(q, k, v, None, scale=scale, positions=positions, backend=backend)
        return y.reshape(q.shape[0], 1, q.shape[1], -1).swapaxes(1, 2)
    backend.count(INDEXED_ATTENTION.name, "mlx")
    return indexed_attention_reference(q, k, v, positions, scale=scale)
