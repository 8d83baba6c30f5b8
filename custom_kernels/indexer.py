"""What an indexer keeps of tokens for block-sparse attention (`sparse`): their keys, and those of whole blocks."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op, spell_arrays
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotate_reference
from turbospark_mlx.errors import OptionError

POOL = Kernel("pool_blocks", inputs=("keys", "weight", "rotation"), outputs=("y",), headers=("pooled_key",))
APPEND = Kernel(
    "index_append",
    inputs=("rows", "q_norm", "k_norm", "rotation", "block_rotation", "keys", "blocks", "start"),
    outputs=("q",),
    headers=("rotated_head", "pooled_key"),
    writes=("keys", "blocks"),
)
POOL_BLOCKS = Op("pool_blocks", (POOL,))
INDEX_APPEND = Op("index_append", (APPEND,), rows=1, instead=POOL_BLOCKS.name)
BLOCKS_PER_GROUP = 512
"""Blocks that are worth a hand-over to another core."""
_SIMDGROUPS = 8


def pool_blocks_reference(keys, weight, rotation, *, eps: float, centered: bool) -> mx.array:
    """Definition of `pool_blocks`."""
    mean = keys.astype(mx.float32).mean(axis=-2).astype(keys.dtype)
    return rotate_reference(rms_norm_reference(mean, weight, eps=eps, centered=centered)[:, None], rotation)[:, 0]


def index_append_reference(
    rows, rotation, block_rotation, keys, blocks, start, *, q_norm, k_norm, block: int, eps: float, centered: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Definition of `index_append`: the queries, and ``keys`` and ``blocks`` with what was written."""
    token, width, batch = start.item(), q_norm.shape[0], rows.shape[0]
    heads = rows.reshape(batch, 1, -1, width).swapaxes(1, 2)
    wide = rms_norm_reference(heads[:, :-1].astype(mx.float32), q_norm, eps=eps, centered=centered)
    keys, blocks = mx.array(keys), mx.array(blocks)
    keys[0, :, 0, token] = heads[:, -1, 0]
    if (token + 1) % block == 0:
        own = keys[0, :, 0, token + 1 - block : token + 1][:, None]
        pooled = pool_blocks_reference(own, k_norm, block_rotation, eps=eps, centered=centered)
        blocks[0, :, 0, token // block] = pooled[:, 0]
    return rotate_reference(wide, rotation).astype(rows.dtype), keys, blocks


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
        groups=(-(-units // (BLOCKS_PER_GROUP if host else _SIMDGROUPS)), 1),
        simdgroups=1 if host else _SIMDGROUPS,
        input_dtypes=dtypes,
        output_shapes=((batch, count, width),),
        output_dtypes=dtypes[:1],
    )


@lru_cache(maxsize=1024)
def _plan_append(
    backend: str,
    batch: int,
    heads: int,
    width: int,
    pairs: int,
    block: int,
    eps: float,
    centered: bool,
    dtype: mx.Dtype,
    norms: tuple[mx.Dtype, mx.Dtype],
) -> Launch:
    host = backend == "host"
    return Launch(
        APPEND,
        template=(
            ("T", dtype),
            ("HEADS", heads),
            ("D", width),
            ("PAIRS", pairs),
            ("BLOCK", block),
            ("CENTERED", centered),
            ("EPSILON_BITS", float_bits(eps)),
        ),
        groups=(1 if host else batch * (heads + 1), 1),
        simdgroups=1,
        input_dtypes=(dtype, *norms, mx.float32, mx.float32, dtype, dtype, mx.int32),
        output_shapes=((batch, heads, 1, width),),
        output_dtypes=(dtype,),
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
    # Metal gives arrays under eight elements another address space.
    if keys.size >= 8 and POOL_BLOCKS.serves(backend, keys.dtype):
        backend.count(POOL_BLOCKS.name, "kernel")
        dtypes = (keys.dtype, weight.dtype, rotation.dtype)
        call = _plan_pool(backend.name, keys.shape, rotation.shape[1], eps, centered, dtypes)
        return backend.launch(call, (keys, weight, rotation))[0]
    backend.count(POOL_BLOCKS.name, "mlx")
    return pool_blocks_reference(keys, weight, rotation, eps=eps, centered=centered)


def index_appends(rows: mx.array, backend: Backend) -> bool:
    """Whether `index_append` takes these rows: one a sequence, in a dtype that the back end computes in."""
    return rows.size >= 8 and INDEX_APPEND.serves(backend, rows.dtype, rows=rows.shape[1])


def index_append(
    rows: mx.array,
    rotation: mx.array,
    block_rotation: mx.array,
    keys: mx.array,
    blocks: mx.array,
    start: mx.array,
    *,
    q_norm: mx.array,
    k_norm: mx.array,
    block: int,
    eps: float,
    centered: bool,
    backend: Backend,
) -> mx.array:
    """An indexer's queries, normalised and rotated, and what it keeps of one token, for what `index_appends` accepts.

    ``rows [B, 1, (heads + 1) * D]`` are its queries and its key; ``q_norm``, ``k_norm [D]`` are stored less 1 where
    ``centered``; ``rotation [1, P, 2]`` is that of position ``start``, an int32 array ``[1]``, ``block_rotation`` that
    of the first one of its block. Returns ``[B, heads, 1, D]``.

    ``keys [1, B, 1, S, D]`` and ``blocks [1, B, 1, N, D]``, evaluated or not, are changed: row ``start`` of keys is
    written, and where it completes a block of ``block``, row ``start // block`` of blocks, as `pool_blocks` makes it.
    MLX does not know of it: wait for the result, or for what is computed from it, before they are read by anything but
    `score_blocks` of these queries. Raises OptionError for parts that do not fit.
    """
    (batch, _, wide), width = rows.shape, q_norm.shape[-1]
    heads, rest = wide // width - 1, wide % width
    pairs = rotation.shape[1]
    if (
        rest
        or heads < 1
        or q_norm.shape != (width,)
        or k_norm.shape != (width,)
        or rotation.shape != (1, pairs, 2)
        or block_rotation.shape != rotation.shape
        or 2 * pairs > width
        or any(held.shape != (1, batch, 1, held.shape[3], width) or held.dtype != rows.dtype for held in (keys, blocks))
    ):
        given = {"rows": rows, "q_norm": q_norm, "k_norm": k_norm, "rotation": rotation}
        given |= {"block_rotation": block_rotation, "keys": keys, "blocks": blocks}
        raise OptionError(
            f"index_append: {spell_arrays(given)} do not fit [B, 1, (heads + 1) D], [D] twice, [1, P, 2] twice with"
            " P at most D / 2, and [1, B, 1, S, D] twice"
        )
    backend.count(INDEX_APPEND.name, "kernel")
    norms = q_norm.dtype, k_norm.dtype
    call = _plan_append(backend.name, batch, heads, width, pairs, block, eps, centered, rows.dtype, norms)
    return backend.launch(call, (rows, q_norm, k_norm, rotation, block_rotation, keys, blocks, start))[0]
