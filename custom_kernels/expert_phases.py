"""Routed experts of a decode step in two kernels: gates, ups and activation; then downs, summed in the router's order.

Both read experts where they lie, by the number of their slot. What they compute for a row and an expert depends on
nothing else, so that it is the same to the bit wherever the expert lies and in however many parts the first is called.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi, sqrt

import mlx.core as mx

from turbospark_mlx.custom_kernels import gemv
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.expert_arena import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.errors import OptionError

_HEADERS = ("eight", "affine", "affine_block", "fp4", "activation", "expert_rows")
PHASE1 = Kernel(
    "moe_phase1_gate_up_act", inputs=("blobs", "slots", "slot_of", "x"), outputs=("inner",), headers=_HEADERS
)
PHASE2 = Kernel(
    "moe_phase2_down_reduce",
    inputs=("blobs", "slots", "slot_of", "inner", "weights", "residual"),
    outputs=("y",),
    headers=_HEADERS,
)
MOE_PHASE1 = Op(PHASE1.name, (PHASE1,), rows=gemv.ROWS, only="of INT4, INT8 or MXFP4 experts")
MOE_PHASE2 = Op(PHASE2.name, (PHASE2,), rows=gemv.ROWS, only="of INT4, INT8 or MXFP4 experts")
FORMATS = (("affine", 4), ("affine", 8), ("mxfp4", 4))
MOST = 32
"""Experts a row: a simdgroup each on GPUs."""
ROWS1, ROWS2 = 2, 4
"""Rows of a matrix that a simdgroup takes together in either kernel."""
ALIGNMENT = 16
"""Bytes at multiples of which packed words begin: GPUs load four of them at a time."""


@lru_cache(maxsize=256)
def readable(blob: ExpertBlob) -> bool:
    """Whether the kernels read experts of this kind."""
    gate, up = blob.gate, blob.up
    alike = all(
        getattr(gate, name) == getattr(up, name) for name in ("mode", "bits", "group_size", "dtype", "bias_dtype")
    ) and (gate.bias is None) == (up.bias is None)
    return alike and all((m.mode, m.bits) in FORMATS and m.offset % ALIGNMENT == 0 for m in blob.matrices)


def serves(blob: ExpertBlob, dtype: mx.Dtype, rows: int, top_k: int, backend: Backend) -> bool:
    """Whether both kernels take ``top_k`` experts for each of ``rows`` rows of ``dtype``."""
    return rows > 0 and 0 < top_k <= MOST and MOE_PHASE1.serves(backend, dtype, rows=rows) and readable(blob)


def parts_of(prefix: str, matrix: BlobMatrix) -> tuple[tuple[str, int], ...]:
    """Where the parts of a matrix begin, as template parameters."""
    return (
        (prefix, matrix.offset),
        (f"{prefix}_SCALES", matrix.scales),
        (f"{prefix}_BIASES", matrix.biases),
        (f"{prefix}_BIAS", matrix.bias or 0),
    )


def _groups(products: int, together: int, most: int) -> int:
    """Threadgroups on a CPU for each of ``together`` that are there anyway: a few a core, if they are worth it."""
    wanted = min(4 * thread_count(), products // gemv.PRODUCTS_PER_GROUP)
    return max(1, min(most, -(-wanted // together)))


@lru_cache(maxsize=4096)
def plan1(backend: str, blob: ExpertBlob, words: int, rows: int, top_k: int, dtype: mx.Dtype, mapped: bool) -> Launch:
    """The launch of the first kernel over blobs of ``words`` words; ``mapped`` with a map of slots."""
    matrix, up, pairs, at_once = blob.gate, blob.up, rows * top_k, ROWS1
    host = backend == "host"
    simdgroups = 1 if host else 4
    groups = -(-matrix.rows // (at_once * simdgroups))
    if host:
        groups = _groups(2 * pairs * matrix.rows * matrix.columns, pairs, groups)
    return Launch(
        PHASE1,
        template=(
            ("T", dtype),
            ("S", matrix.dtype),
            ("B", matrix.bias_dtype),
            ("K", matrix.columns),
            ("F", matrix.rows),
            ("WORDS", words),
            ("BITS", matrix.bits),
            ("GROUP", matrix.group_size),
            ("ROWS", at_once),
            *parts_of("GATE", matrix),
            *parts_of("UP", up),
            ("BIAS", matrix.bias is not None),
            ("MAPPED", mapped),
            ("ACTIVATION", gemv.ACTIVATIONS.index(blob.activation)),
            ("LIMIT_BITS", float_bits(blob.limit)),
            ("ALPHA_BITS", float_bits(blob.alpha)),
        ),
        groups=(groups, pairs),
        simdgroups=simdgroups,
        input_dtypes=(mx.uint32, mx.int32, mx.int32 if mapped else None, dtype),
        output_shapes=((pairs, matrix.rows),),
        output_dtypes=(dtype,),
    )


@lru_cache(maxsize=4096)
def plan2(
    backend: str,
    blob: ExpertBlob,
    words: int,
    rows: int,
    top_k: int,
    dtype: mx.Dtype,
    mapped: bool,
    residual: mx.Dtype | None,
) -> Launch:
    """The launch of the second kernel."""
    matrix, at_once = blob.down, ROWS2
    host = backend == "host"
    groups = -(-matrix.rows // at_once)
    if host:
        groups = _groups(rows * top_k * matrix.rows * matrix.columns, rows, groups)
    return Launch(
        PHASE2,
        template=(
            ("T", dtype),
            ("S", matrix.dtype),
            ("B", matrix.bias_dtype),
            ("K", matrix.columns),
            ("N", matrix.rows),
            ("WORDS", words),
            ("BITS", matrix.bits),
            ("GROUP", matrix.group_size),
            ("ROWS", at_once),
            ("MOST", MOST),
            *parts_of("DOWN", matrix),
            ("BIAS", matrix.bias is not None),
            ("MAPPED", mapped),
            ("RESIDUAL", residual is not None),
        ),
        groups=(groups, rows),
        simdgroups=1 if host else top_k,
        input_dtypes=(mx.uint32, mx.int32, mx.int32 if mapped else None, dtype, mx.float32, residual),
        output_shapes=((rows, matrix.rows),),
        output_dtypes=(dtype,),
    )


def moe_phase1_reference(arena: ExpertArena, slots, x, slot_of=None) -> mx.array:
    """Definition of `moe_phase1_gate_up_act`."""
    slots = slots if slot_of is None else slot_of[slots]
    rows = mx.repeat(x.astype(mx.float32), slots.shape[1], axis=0)
    gate, up = (
        _products(matrix, parts, slots, rows)
        for matrix, parts in zip(arena.blob.matrices[:2], arena.stacked[:2], strict=True)
    )
    return activate(arena.blob, gate, up).astype(x.dtype)


def moe_phase2_reference(arena: ExpertArena, slots, inner, weights, residual=None, slot_of=None) -> mx.array:
    """Definition of `moe_phase2_down_reduce`."""
    slots = slots if slot_of is None else slot_of[slots]
    products = _products(arena.blob.down, arena.stacked[2], slots, inner.astype(mx.float32))
    total = (products.reshape(*slots.shape, -1) * weights[..., None]).sum(axis=1)
    return (total if residual is None else total + residual.astype(mx.float32)).astype(inner.dtype)


def _products(matrix: BlobMatrix, parts: list[mx.array], slots: mx.array, rows: mx.array) -> mx.array:
    """``W_s x + bias_s`` in float32 for each slot ``s``, in turn, and row of ``rows``."""
    flat = slots.reshape(-1)
    chosen = [part[flat] for part in parts]
    wide = [part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in chosen]
    if matrix.mode == "mxfp4":
        wide[:2] = [mx.dequantize(*chosen[:2], mode="mxfp4", dtype=mx.float32)]
    elif matrix.bits is not None:
        wide[:3] = [mx.dequantize(*wide[:3], group_size=matrix.group_size, bits=matrix.bits)]
    y = (wide[0] @ rows[..., None])[..., 0]
    return y if matrix.bias is None else y + wide[-1]


def activate(blob: ExpertBlob, gate: mx.array, up: mx.array) -> mx.array:
    """``protocols.Activation`` of float32 arrays."""
    if blob.activation == "gelu_tanh":
        cubic = gate + 0.044715 * gate * gate * gate
        return 0.5 * gate * (1 + mx.tanh(sqrt(2 / pi) * cubic)) * up
    slope = 1.0
    if blob.activation == "clamped_swiglu":
        gate, up, slope = mx.minimum(gate, blob.limit), mx.clip(up, -blob.limit, blob.limit) + 1, blob.alpha
    return gate * mx.sigmoid(slope * gate) * up


def _check(op: str, arena: ExpertArena, slots: mx.array, given: mx.array, shape: tuple[int, int], more=()) -> None:
    expected = ((given, shape), *more)
    if slots.ndim != 2 or any(array.shape != wanted for array, wanted in expected):
        found = ", ".join(str(list(array.shape)) for array, _ in expected)
        needed = ", ".join(str(list(wanted)) for _, wanted in expected)
        raise OptionError(f"{op}: with slots {list(slots.shape)}, arrays are {found}; needed are {needed}")
    if arena.array is None:
        raise OptionError(f"{op}: the experts do not lie in one array")


def moe_phase1_gate_up_act(
    arena: ExpertArena, slots: mx.array, x: mx.array, *, slot_of: mx.array | None = None, backend: Backend
) -> mx.array:
    """``activation(gate(x[r]), up(x[r]))`` of the expert in ``slots[r, k]``, for each row ``r`` and then each ``k``.

    ``slots [rows, top_k]`` integer are rows of the arena's ``array``, or with ``slot_of [experts]`` int32 the numbers
    of experts, which says where they lie; nobody checks either. ``x [rows, hidden]`` -> ``[rows * top_k,
    intermediate]`` in the dtype of ``x``. Up to 8 rows of INT4, INT8 and MXFP4 experts run in our kernel. Raises
    OptionError for shapes that do not fit.
    """
    _check(MOE_PHASE1.name, arena, slots, x, (slots.shape[0], arena.blob.gate.columns))
    if not serves(arena.blob, x.dtype, *slots.shape, backend):
        backend.count(MOE_PHASE1.name, "mlx")
        return moe_phase1_reference(arena, slots, x, slot_of)
    backend.count(MOE_PHASE1.name, "kernel")
    call = plan1(backend.name, arena.blob, arena.array.shape[1], *slots.shape, x.dtype, slot_of is not None)
    return backend.launch(call, (arena.array, slots.astype(mx.int32), slot_of, x))[0]


def moe_phase2_down_reduce(
    arena: ExpertArena,
    slots: mx.array,
    inner: mx.array,
    weights: mx.array,
    *,
    residual: mx.array | None = None,
    slot_of: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """``sum_k weights[r, k] * down(inner[r * top_k + k]) + residual[r]``, added in float32 in the order of ``k``.

    ``slots [rows, top_k]`` and ``slot_of`` as in `moe_phase1_gate_up_act`, which gives ``inner [rows * top_k,
    intermediate]``; ``weights [rows, top_k]`` float32, ``residual [rows, hidden]`` -> ``[rows, hidden]`` in the dtype
    of ``inner``.
    Raises OptionError for shapes that do not fit.
    """
    down, (rows, top_k) = arena.blob.down, slots.shape
    more = [(weights, (rows, top_k))] + ([] if residual is None else [(residual, (rows, down.rows))])
    _check(MOE_PHASE2.name, arena, slots, inner, (rows * top_k, down.columns), more)
    if not serves(arena.blob, inner.dtype, rows, top_k, backend):
        backend.count(MOE_PHASE2.name, "mlx")
        return moe_phase2_reference(arena, slots, inner, weights, residual, slot_of)
    backend.count(MOE_PHASE2.name, "kernel")
    dtype = None if residual is None else residual.dtype
    call = plan2(backend.name, arena.blob, arena.array.shape[1], rows, top_k, inner.dtype, slot_of is not None, dtype)
    return backend.launch(call, (arena.array, slots.astype(mx.int32), slot_of, inner, weights, residual))[0]
