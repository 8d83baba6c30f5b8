"""Products and look-ups with affine-quantized matrices.

A matrix ``[N, K]`` is stored as MLX stores it: ``weight [N, K * bits / 32]`` uint32, values in little-endian bit order,
and companions ``scales, biases [N, K / group_size]``; ``w = scale * q + bias``. On a GPU the words begin at a multiple
of 16 bytes, as those of any array of its own and any slice of its rows do.
"""

from __future__ import annotations

import math
from functools import lru_cache

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import gemv, lookup
from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.norm import rms_norm, rms_norm_reference
from turbospark_mlx.errors import OptionError

AFFINE_MATMUL = Op("affine_matmul", (gemv.KERNEL,), rows=gemv.ROWS, cpu="blas")
GATED_AFFINE_MATMUL = Op("gated_affine_matmul", (gemv.KERNEL,), rows=gemv.ROWS, cpu="blas")
AFFINE_EMBEDDING = Op("affine_embedding", (lookup.KERNEL,))
BITS = (1, 2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
GPU_PRODUCT_COLUMNS = 128
"""Below this, MLX 0.32.4's ``quantized_matmul`` of many rows is wrong on an H200 (by 100 %, or NaN); from 128 on, where
it was tried, it is right to 2e-6."""
BLAS_ROWS = 3
"""Rows from which dequantizing a matrix for the BLAS costs less than MLX's CPU product, whose time grows with them."""


@lru_cache(maxsize=4096)
def check(
    op: str,
    x: tuple[int, ...] | None,
    weight: tuple[int, ...],
    dtype: mx.Dtype,
    scales: tuple[int, ...],
    biases: tuple[int, ...],
    companion_dtypes: tuple[mx.Dtype, mx.Dtype],
    bits: int,
    group_size: int,
    bias: tuple[int, ...] | None = None,
    residual: tuple[int, ...] | None = None,
    norm_weight: tuple[int, ...] | None = None,
    row_gate: tuple[int, ...] | None = None,
    eps: float | None = None,
) -> int:
    """Check that the shapes and dtypes of a packed matrix belong together; returns K. Raises OptionError."""
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise OptionError(
            f"{op}: bits {bits} in groups of {group_size}; matrices have {', '.join(map(str, BITS))} bits in groups of "
            f"{', '.join(map(str, GROUP_SIZES))}"
        )
    columns = weight[-1] * 32 // bits
    if dtype != mx.uint32 or len(weight) != 2 or weight[-1] * 32 % bits or columns % group_size:
        raise OptionError(
            f"{op}: weight is {dtype} {list(weight)}; a matrix of {bits} bits in groups of {group_size} is uint32 "
            "[N, K * bits / 32] with K a multiple of the group"
        )
    companions = (weight[0], columns // group_size)
    for name, companion in (("scales", scales), ("biases", biases)):
        if companion != companions:
            raise OptionError(
                f"{op}: {name} are {list(companion)}, but weight {list(weight)} with {bits} bits in groups of "
                f"{group_size} needs {list(companions)}"
            )
    # One kernel argument says how both are read, so that a mixture would be read as other numbers, past its end.
    if companion_dtypes[0] != companion_dtypes[1]:
        raise OptionError(
            f"{op}: scales are {companion_dtypes[0]} and biases {companion_dtypes[1]}; they need one dtype"
        )
    if x is None:
        return columns
    if not x or x[-1] != columns:
        raise OptionError(f"{op}: x is {list(x)}, but the matrix has {columns} columns")
    if (norm_weight is None) != (eps is None):
        raise OptionError(f"{op}: norm_weight and eps belong together")
    if norm_weight is not None and norm_weight != (columns,):
        raise OptionError(f"{op}: norm_weight is {list(norm_weight)}, but x has {columns} columns")
    around = (
        ("bias", bias, weight[:1]),
        ("residual", residual, (*x[:-1], weight[0])),
        ("row_gate", row_gate, (*x[:-1], 1)),
    )
    for name, added, shape in around:
        if added is not None and added != shape:
            raise OptionError(f"{op}: {name} is {list(added)}, but the result needs {list(shape)}")
    return columns


def check_parts(
    op: str,
    x: mx.array | None,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    norm_weight: mx.array | None = None,
    row_gate: mx.array | None = None,
    eps: float | None = None,
) -> int:
    """`check` of the parts themselves."""
    optional = (None if part is None else part.shape for part in (bias, residual, norm_weight, row_gate))
    matrix = (weight.shape, weight.dtype, scales.shape, biases.shape, (scales.dtype, biases.dtype))
    return check(op, None if x is None else x.shape, *matrix, bits, group_size, *optional, eps)


def affine_matmul_reference(
    x,
    weight,
    scales,
    biases,
    *,
    bits: int,
    group_size: int,
    bias=None,
    norm_weight=None,
    eps=None,
    centered=False,
    row_gate=None,
    residual=None,
    scale: float = 1.0,
    softcap=None,
    dtype=None,
) -> mx.array:
    """Definition of `affine_matmul`."""
    y = x.astype(mx.float32)
    if norm_weight is not None:
        y = rms_norm_reference(y, norm_weight, eps=eps, centered=centered)
    y = mx.quantized_matmul(
        y,
        weight,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        transpose=True,
        group_size=group_size,
        bits=bits,
    )
    if bias is not None:
        y = y + bias.astype(mx.float32)
    y = scale * y
    if softcap is not None:
        y = softcap * mx.tanh(y / softcap)
    if row_gate is not None:
        y = y * mx.sigmoid(row_gate.astype(mx.float32))
    if residual is not None:
        y = y + residual.astype(mx.float32)
    return y.astype(residual.dtype if residual is not None else dtype or x.dtype)


def affine_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    bias: mx.array | None = None,
    norm_weight: mx.array | None = None,
    eps: float | None = None,
    centered: bool = False,
    row_gate: mx.array | None = None,
    residual: mx.array | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> mx.array:
    """``softcap(scale * (norm(x) @ W.T + bias)) + residual`` for an affine-quantized ``W [N, K]``; what is None is left
    out.

    ``x [..., K]`` -> ``[..., N]`` in the dtype of ``residual``, else in ``dtype``, which is also what is multiplied and
    by default that of ``x``; ``bias [N]``, ``residual [..., N]``. ``norm_weight [K]`` with ``eps`` stands for
    `norm.rms_norm` of ``x``, stored less 1 where ``centered``; ``softcap`` c for c tanh(y / c), as on Gemma's logits.
    ``row_gate [..., 1]`` are logits by whose sigmoids rows are multiplied before ``residual`` is added. Up to 8 rows
    run in our kernel. Without it and for more rows, GPUs use MLX's product, and a CPU MLX's for one or two rows in
    float32 and numpy's BLAS on dequantized tiles for more. Raises OptionError for parts that do not fit.
    """
    matrix = {"bits": bits, "group_size": group_size}
    around = {"bias": bias, "residual": residual, "norm_weight": norm_weight, "row_gate": row_gate, "eps": eps}
    check_parts("affine_matmul", x, weight, scales, biases, **matrix, **around)
    dtype = dtype or x.dtype
    result = dtype if residual is None else residual.dtype
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype=result)
    if softcap is not None and not softcap > 0:
        raise OptionError(f"affine_matmul: softcap is {softcap}; it is a positive number, or None for none")
    if gemv.serves(AFFINE_MATMUL, x, weight, backend, dtype, result):
        backend.count(AFFINE_MATMUL.name, "kernel")
        form = gemv.Form(eps or 0.0, centered, scale=scale, softcap=softcap, residual=residual is not None)
        options = {"norm_weight": norm_weight, "bias": bias, "row_gate": row_gate, "residual": residual, "dtype": dtype}
        return gemv.gemv(x, weight, scales, biases, **matrix, form=form, **options, backend=backend)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps=eps, centered=centered, dtype=dtype, backend=backend)
    x = x.astype(dtype)
    if backend.device == "cpu" and x.size // x.shape[-1] >= BLAS_ROWS:
        backend.count(AFFINE_MATMUL.name, "blas")
        y = blas.affine_matmul(x, weight, scales, biases, **matrix, bias=bias, compiled=backend.name == "host")
    else:
        backend.count(AFFINE_MATMUL.name, "mlx")
        if backend.device == "cpu":
            options = {"bias": bias, "row_gate": row_gate, "residual": residual, "scale": scale, "softcap": softcap}
            return affine_matmul_reference(x, weight, scales, biases, **matrix, **options)
        # MLX's GPU products accumulate in float32, so the activations stay in their own dtype there.
        if x.shape[-1] < GPU_PRODUCT_COLUMNS:
            wide = (companion.astype(mx.float32) for companion in (scales, biases))
            y = x @ mx.dequantize(weight, *wide, **matrix).astype(x.dtype).T
        else:
            y = mx.quantized_matmul(x, weight, scales, biases, transpose=True, **matrix)
        y = y if bias is None else y + bias
    y = y if scale == 1.0 else scale * y
    if softcap is not None:
        y = softcap * mx.tanh(y / softcap)
    if row_gate is not None:
        y = y * mx.sigmoid(row_gate.astype(mx.float32)).astype(y.dtype)
    return (y if residual is None else y + residual).astype(result)


def gated(gate: mx.array, up: mx.array, activation: gemv.Activation, limit: float | None) -> mx.array:
    """What `gated_affine_matmul` does with the two halves of its product."""
    if activation == "clamped_swiglu":
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
        return gate * mx.sigmoid(1.702 * gate) * (up + 1)
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + mx.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "gelu_erf":
        return 0.5 * gate * (1 + mx.erf(gate / math.sqrt(2))) * up
    return (1 if activation == "sigmoid" else gate) * mx.sigmoid(gate) * up


def gated_affine_matmul_reference(
    x,
    weight,
    scales,
    biases,
    *,
    bits: int,
    group_size: int,
    activation="silu",
    limit=None,
    bias=None,
    norm_weight=None,
    eps=None,
    centered=False,
    dtype=None,
) -> mx.array:
    """Definition of `gated_affine_matmul`."""
    options = {"bits": bits, "group_size": group_size, "bias": bias}
    options |= {"norm_weight": norm_weight, "eps": eps, "centered": centered}
    both = affine_matmul_reference(x.astype(mx.float32), weight, scales, biases, **options)
    return gated(*mx.split(both, 2, axis=-1), activation, limit).astype(dtype or x.dtype)


def gated_affine_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    activation: gemv.Activation = "silu",
    limit: float | None = None,
    bias: mx.array | None = None,
    norm_weight: mx.array | None = None,
    eps: float | None = None,
    centered: bool = False,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> mx.array:
    """``act(norm(x) @ G.T) * (norm(x) @ U.T)``, where ``W [2 F, K]`` holds the rows of ``G`` and then those of ``U``.

    ``x [..., K]`` -> ``[..., F]`` in ``dtype``, by default that of ``x``; ``bias [2 F]`` is added before the
    activation; see `affine_matmul` for the rest. ``activation`` is ``"silu"`` (SwiGLU, Shazeer, 2020), ``"gelu_tanh"``
    or ``"gelu_erf"`` (GEGLU), ``"sigmoid"`` (GLU, Dauphin et al., 2017), or ``"clamped_swiglu"`` (gpt-oss): g
    sigmoid(1.702 g) (u + 1) with g at most ``limit`` and u within plus and minus ``limit``.
    """
    options = {"bits": bits, "group_size": group_size, "bias": bias, "norm_weight": norm_weight}
    check_parts("gated_affine_matmul", x, weight, scales, biases, **options, eps=eps)
    if weight.shape[0] % 2:
        raise OptionError(f"gated_affine_matmul: {weight.shape[0]} rows cannot be as many gate rows as up rows")
    gemv.check_activation(GATED_AFFINE_MATMUL.name, activation, limit)
    dtype = dtype or x.dtype
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0] // 2), dtype=dtype)
    if gemv.serves(GATED_AFFINE_MATMUL, x, weight, backend, dtype):
        backend.count(GATED_AFFINE_MATMUL.name, "kernel")
        form = gemv.Form(eps or 0.0, centered, activation=activation, limit=limit or 0.0)
        return gemv.gemv(x, weight, scales, biases, **options, form=form, dtype=dtype, backend=backend)
    around = {"eps": eps, "centered": centered, "dtype": dtype}
    both = affine_matmul(x, weight, scales, biases, **options, **around, backend=backend)
    return gated(*mx.split(both, 2, axis=-1), activation, limit).astype(dtype)


def affine_embedding_reference(
    ids, weight, scales, biases, *, bits: int, group_size: int, dtype, scale: float = 1.0, copies: int = 1
) -> mx.array:
    """Definition of `affine_embedding`."""
    s, b = scales[ids].astype(mx.float32), biases[ids].astype(mx.float32)
    rows = (mx.dequantize(weight[ids], s, b, group_size=group_size, bits=bits) * scale).astype(dtype)
    return mx.concatenate([rows] * copies, axis=-1)


def affine_embedding(
    ids: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    scale: float = 1.0,
    copies: int = 1,
    backend: Backend,
) -> mx.array:
    """``scale`` times rows ``ids`` of an affine-quantized matrix, ``copies`` of each side by side: integer ``ids
    [...]`` -> ``[..., copies * K]`` in ``dtype``.

    MLX does not check ids. On a CPU they are checked here and OptionError is raised; on a GPU the check would wait for
    the device, so the caller checks ids that come from outside.
    """
    columns = check_parts("affine_embedding", None, weight, scales, biases, bits=bits, group_size=group_size)
    if ids.size == 0:
        return mx.zeros((*ids.shape, copies * columns), dtype=dtype)
    if backend.device == "cpu":
        known = np.array(ids, copy=False)
        if known.min() < 0 or known.max() >= weight.shape[0]:
            raise OptionError(
                f"affine_embedding: ids run from {known.min()} to {known.max()}, but the table has "
                f"{weight.shape[0]} rows"
            )
    flat = ids.astype(mx.int32).reshape(-1)
    if weight.size >= 8 and AFFINE_EMBEDDING.serves(backend, dtype):
        backend.count(AFFINE_EMBEDDING.name, "kernel")
        sizes = (weight.shape[0], columns, bits, group_size)
        call = lookup.plan(backend.name, ids.shape, *sizes, scales.dtype, dtype, scale, copies)
        return backend.launch(call, (flat, weight, scales, biases))[0]
    backend.count(AFFINE_EMBEDDING.name, "mlx")
    options = {"bits": bits, "group_size": group_size, "dtype": dtype, "scale": scale, "copies": copies}
    return affine_embedding_reference(ids, weight, scales, biases, **options)
