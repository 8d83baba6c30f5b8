"""Routed experts of many rows in the order of the experts they go to: rows of one expert share its weights."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels import expert_phases, gemv
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.expert_arena import ExpertArena, ExpertBlob
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "moe_grouped_products",
    inputs=("blobs", "ends", "tiles", "x"),
    outputs=("y",),
    headers=("eight", "affine", "staged_chunk", "affine_block", "fp4", "activation", "expert_rows", "expert_tile"),
)
GROUPED_EXPERTS = Op("grouped_experts", (KERNEL,), only="of INT4, INT8 or MXFP4 experts")
TILE = 16
"""Rows of one expert that are multiplied together."""
BATCH = 4
"""Blocks of 32 columns that are staged at a time."""
SIMDGROUPS = 4
ROWS = {True: 1, False: 2}
"""Outputs of a lane, of gates and ups alike or of downs: as many sums as registers hold."""


def serves(blob: ExpertBlob, dtype: mx.Dtype, backend: Backend) -> bool:
    """Whether the kernel takes such experts."""
    return GROUPED_EXPERTS.serves(backend, dtype) and expert_phases.readable(blob)


@lru_cache(maxsize=4096)
def plan(backend: str, blob: ExpertBlob, gated: bool, words: int, slots: int, rows: int, dtype: mx.Dtype) -> Launch:
    """The launch for ``rows`` rows over ``slots`` blobs of ``words`` words: gates, ups and activation, or downs."""
    first, second = (blob.gate, blob.up) if gated else (blob.down, blob.down)
    host = backend == "host"
    simdgroups, at_once = 1 if host else SIMDGROUPS, ROWS[gated]
    result = dtype if gated else mx.float32
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("O", result),
            ("S", first.dtype),
            ("B", first.bias_dtype),
            ("K", first.columns),
            ("N", first.rows),
            ("WORDS", words),
            ("BITS", first.bits),
            ("GROUP", first.group_size),
            ("M", TILE),
            ("ROWS", at_once),
            ("BATCH", BATCH),
            ("SIMDS", simdgroups),
            *expert_phases.parts_of("FIRST", first),
            *expert_phases.parts_of("SECOND", second),
            ("BIAS", first.bias is not None),
            ("GATED", gated),
            ("ACTIVATION", gemv.ACTIVATIONS.index(blob.activation)),
            ("LIMIT_BITS", float_bits(blob.limit)),
            ("ALPHA_BITS", float_bits(blob.alpha)),
        ),
        # Tiles are not full where the rows of an expert end, and there are no more of those than experts or rows.
        groups=(
            1 if host else -(-first.rows // (at_once * simdgroups * SIMD_WIDTH)),
            rows // TILE + min(slots, rows),
        ),
        simdgroups=simdgroups,
        input_dtypes=(mx.uint32, mx.int32, mx.int32, dtype),
        output_shapes=((rows, first.rows),),
        output_dtypes=(result,),
    )


def grouped_experts_reference(arena: ExpertArena, slots, x) -> mx.array:
    """Definition of `grouped_experts`."""
    slots = slots[:, None]
    inner = expert_phases.moe_phase1_reference(arena, slots, x.astype(mx.float32))
    return expert_phases.moe_phase2_reference(arena, slots, inner, mx.ones(slots.shape))


def grouped_experts(arena: ExpertArena, slots: mx.array, x: mx.array, *, backend: Backend) -> mx.array:
    """``expert(slots[p])(x[p])`` for rows in the order of their experts.

    ``slots [rows]`` integer, ascending, are rows of the arena's ``array``, which nobody checks; ``x [rows, hidden]`` ->
    ``[rows, hidden]`` float32. What a row gives does not depend on the others, to the bit. INT4, INT8 and MXFP4 experts
    run in our kernel, others as the reference. Raises OptionError for shapes that do not fit.
    """
    rows, hidden = slots.size, arena.blob.gate.columns
    if slots.ndim != 1 or x.shape != (rows, hidden):
        raise OptionError(
            f"grouped_experts: slots {list(slots.shape)} and x {list(x.shape)} do not fit [rows] and [rows, {hidden}]"
        )
    if arena.array is None:
        raise OptionError("grouped_experts: the experts do not lie in one array")
    if rows == 0:
        return mx.zeros((0, hidden))
    if not serves(arena.blob, x.dtype, backend):
        backend.count(GROUPED_EXPERTS.name, "mlx")
        return grouped_experts_reference(arena, slots, x)
    backend.count(GROUPED_EXPERTS.name, "kernel")
    count, words = arena.array.shape
    ends = (slots[None] <= mx.arange(count, dtype=slots.dtype)[:, None]).sum(axis=1).astype(mx.int32)
    counts = mx.concatenate([ends[:1], ends[1:] - ends[:-1]])
    tiles = mx.cumsum((counts + (TILE - 1)) // TILE).astype(mx.int32)
    for gated in (True, False):
        call = plan(backend.name, arena.blob, gated, words, count, rows, x.dtype)
        (x,) = backend.launch(call, (arena.array, ends, tiles, x))
    return x
