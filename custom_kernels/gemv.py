"""The matrix-vector kernel ``dequant_gemv_simd``, and what it can do before and after the product."""

from __future__ import annotations

import struct
from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch

KERNEL = Kernel(
    "dequant_gemv_simd",
    inputs=("w", "scales", "biases", "x", "norm_weight", "bias", "residual"),
    outputs=("y",),
    headers=("affine",),
)
ROWS = 8
"""Rows of x up to which the kernel is used: more belong to a matrix product."""
STAGED_BYTES = {"metal": 30 << 10, "cuda": 44 << 10, "host": 256 << 10}
"""Threadgroup memory for activations: under 32 KB on Metal and 48 KB on CUDA; on the host it is a thread's stack."""
WEIGHTS_PER_GROUP = 1 << 16
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
def _launch(
    name, rows, out, columns, bits, group_size, gated, eps, companion, dtype, norm_dtype, bias_dtype, residual
) -> Launch:
    blocks = columns // 32
    block_bytes = rows * (32 * (dtype.size if name != "host" else 4) + 4)
    tile = min(blocks, STAGED_BYTES[name] // block_bytes)
    if name == "host":
        # A few threadgroups a core, so that one that is busy elsewhere does not hold the others up.
        rows_at_once, simdgroups = 1, 1
        groups = max(1, min(out, 4 * thread_count(), rows * out * columns // WEIGHTS_PER_GROUP))
    else:
        tile = tile if tile == blocks else tile // 32 * 32
        rows_at_once, simdgroups = 2, 8
        groups = -(-out // (rows_at_once * simdgroups))
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("K", columns),
            ("N", 2 * out if gated else out),
            ("M", rows),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", rows_at_once),
            ("TILE", tile),
            ("NORM", norm_dtype is not None),
            ("EPSILON_BITS", 0 if norm_dtype is None else struct.unpack("<i", struct.pack("<f", eps))[0]),
            ("GATED", gated),
            ("BIAS", bias_dtype is not None),
            ("RESIDUAL", residual),
        ),
        groups=(groups, 1),
        simdgroups=simdgroups,
        input_dtypes=(mx.uint32, companion, companion, dtype, norm_dtype or dtype, bias_dtype or dtype, dtype),
        output_shapes=((rows, out),),
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
    columns, out = x.shape[-1], weight.shape[0] // (2 if gated else 1)
    rows = x.size // columns
    flat = x if x.ndim == 2 else x.reshape(rows, columns)
    added = None if residual is None else residual.reshape(rows, out).astype(x.dtype)
    parts = []
    start = 0
    while start < rows:
        take = 1 << ((rows - start).bit_length() - 1)
        while take > 1 and take * columns * 4 > STAGED_BYTES["host"]:
            take //= 2
        call = _launch(
            backend.name,
            take,
            out,
            columns,
            bits,
            group_size,
            gated,
            eps,
            scales.dtype,
            x.dtype,
            None if norm_weight is None else norm_weight.dtype,
            None if bias is None else bias.dtype,
            added is not None,
        )
        part = flat if take == rows else flat[start : start + take]
        more = part if added is None else added if take == rows else added[start : start + take]
        norm, offset = (part if a is None else a for a in (norm_weight, bias))
        parts += backend.launch(call, (weight, scales, biases, part, norm, offset, more))
        start += take
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], out)
