"""The matrix-vector kernel ``dequant_gemv_simd``, and what it can do before and after the product."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits

KERNEL = Kernel(
    "dequant_gemv_simd",
    inputs=("w", "scales", "biases", "x", "norm_weight", "bias", "residual"),
    outputs=("y",),
    headers=("affine",),
)
ROWS = 8
"""Rows of x up to which the kernel is used: more belong to a matrix product."""
TOGETHER = {"metal": (1, 2, 4, 8), "cuda": (1, 2, 4, 8), "host": (1, 4)}
"""Numbers of rows that are read together. Each is a variant to compile, which takes the host a second."""
STAGED_BYTES = {"metal": 30 << 10, "cuda": 44 << 10, "host": 256 << 10}
"""Threadgroup memory for activations: under 32 KB on Metal and 48 KB on CUDA; on the host it is a thread's stack."""
PRODUCTS_PER_GROUP = 1 << 16
"""Products that are worth a hand-over to another core: some microseconds."""


def serves(x: mx.array, weight: mx.array, backend: Backend) -> bool:
    """Whether the kernel takes this product. Metal gives arrays under eight elements another address space."""
    return (
        backend.launch is not None
        and x.size <= ROWS * x.shape[-1]
        and weight.size >= 8
        and (backend.device == "gpu" or x.dtype == mx.float32)
    )


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    most: int,
    out: int,
    bits: int,
    group_size: int,
    gated: bool,
    eps: float,
    residual: bool,
    companion: mx.Dtype,
    dtype: mx.Dtype,
    norm_dtype: mx.Dtype | None,
    bias_dtype: mx.Dtype | None,
) -> Launch:
    """The launch for ``x`` of ``shape``, whose rows, at most ``most``, are read together."""
    columns = shape[-1]
    blocks, host = columns // 32, backend == "host"
    tile = min(blocks, STAGED_BYTES[backend] // (most * (32 * (4 if host else dtype.size) + 4)))
    if host:
        # A few threadgroups a core, so that one that is busy elsewhere does not hold the others up.
        rows_at_once, simdgroups = 1, 1
        groups = max(1, min(out, 4 * thread_count(), most * out * columns // PRODUCTS_PER_GROUP))
    else:
        tile = tile if tile == blocks else tile // SIMD_WIDTH * SIMD_WIDTH
        # Two rows of W share what is read of x, as long as their sums fit into registers.
        rows_at_once, simdgroups = 2 if most * (2 if gated else 1) < 8 else 1, 8
        groups = -(-out // (rows_at_once * simdgroups))
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("K", columns),
            ("N", 2 * out if gated else out),
            ("M", most),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", rows_at_once),
            ("TILE", tile),
            ("NORM", norm_dtype is not None),
            ("EPSILON_BITS", float_bits(eps)),
            ("GATED", gated),
            ("BIAS", bias_dtype is not None),
            ("RESIDUAL", residual),
        ),
        groups=(groups, 1),
        simdgroups=simdgroups,
        input_dtypes=(mx.uint32, companion, companion, dtype, norm_dtype, bias_dtype, dtype if residual else None),
        output_shapes=((*shape[:-1], out),),
        output_dtypes=(dtype,),
    )


def gemv(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    gated: bool,
    norm_weight: mx.array | None,
    eps: float | None,
    bias: mx.array | None,
    residual: mx.array | None,
    backend: Backend,
) -> mx.array:
    """The product that `affine.affine_matmul` and `affine.gated_affine_matmul` define, for what `serves` accepts."""
    columns = x.shape[-1]
    rows, out = x.size // columns, weight.shape[0] // (2 if gated else 1)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(x.dtype)
    matrix = (out, bits, group_size, gated, eps or 0.0, residual is not None, scales.dtype, x.dtype)
    dtypes = (None if norm_weight is None else norm_weight.dtype, None if bias is None else bias.dtype)
    if rows == 1:
        call = plan(backend.name, x.shape, 1, *matrix, *dtypes)
        return backend.launch(call, (weight, scales, biases, x, norm_weight, bias, residual))[0]
    # The kernel takes the number of rows from the first axis.
    flat, added = x.reshape(rows, columns), None if residual is None else residual.reshape(rows, out)
    # On the host activations are staged as a whole; GPUs take them in tiles.
    sizes = [
        n for n in TOGETHER[backend.name] if backend.name != "host" or 4 * n * columns <= STAGED_BYTES["host"]
    ] or [1]
    parts = []
    for start in range(0, rows, sizes[-1]):
        chosen = slice(start, min(start + sizes[-1], rows))
        part, most = flat[chosen], next(size for size in sizes if size >= chosen.stop - start)
        call = plan(backend.name, part.shape, most, *matrix, *dtypes)
        inputs = (weight, scales, biases, part, norm_weight, bias, None if added is None else added[chosen])
        parts += backend.launch(call, inputs)
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(*x.shape[:-1], out)
