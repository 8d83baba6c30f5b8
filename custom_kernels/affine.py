"""Products and look-ups with affine-quantized matrices.

A matrix ``[N, K]`` is stored as MLX stores it: ``weight [N, K * bits / 32]`` uint32, values in little-endian bit order,
and companions ``scales, biases [N, K / group_size]``; ``w = scale * q + bias``.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.errors import OptionError

BLAS_ROWS = 3
"""Rows from which dequantizing a matrix for the BLAS costs less than MLX's CPU product, whose time grows with them."""


def check_affine(op: str, width: int | None, weight, scales, biases, *, bits: int, group_size: int) -> int:
    """Check that the parts of one quantized matrix belong together; returns K. Raises OptionError."""
    columns = weight.shape[-1] * 32 // bits
    if weight.dtype != mx.uint32 or weight.ndim != 2 or weight.shape[-1] * 32 % bits or columns % group_size:
        raise OptionError(
            f"{op}: weight is {weight.dtype} {list(weight.shape)}; a matrix of {bits} bits in groups of {group_size} "
            "is uint32 [N, K * bits / 32] with K a multiple of the group"
        )
    for name, companion in (("scales", scales), ("biases", biases)):
        if companion.shape != (weight.shape[0], columns // group_size):
            raise OptionError(
                f"{op}: {name} are {list(companion.shape)}, but weight {list(weight.shape)} with {bits} bits in groups "
                f"of {group_size} needs {[weight.shape[0], columns // group_size]}"
            )
    if width is not None and width != columns:
        raise OptionError(f"{op}: x has {width} columns, but the matrix has {columns}")
    return columns


def affine_matmul_reference(x, weight, scales, biases, *, bits: int, group_size: int, bias=None) -> mx.array:
    """Definition of `affine_matmul`."""
    y = mx.quantized_matmul(
        x.astype(mx.float32),
        weight,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        transpose=True,
        group_size=group_size,
        bits=bits,
    )
    return (y if bias is None else y + bias.astype(mx.float32)).astype(x.dtype)


def affine_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    bias: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """``x @ W.T + bias`` for an affine-quantized ``W [N, K]``.

    ``x [..., K]`` -> ``[..., N]`` in the dtype of ``x``; ``bias [N]``. Uses MLX's product on GPUs; on a CPU, MLX's for
    one or two rows in float32 and numpy's BLAS on dequantized tiles for more. Raises OptionError for parts that do not
    fit.
    """
    columns = check_affine("affine_matmul", x.shape[-1], weight, scales, biases, bits=bits, group_size=group_size)
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    if backend.device == "cpu":
        if x.size // columns >= BLAS_ROWS:
            backend.count("affine_matmul", "blas")
            return blas.affine_matmul(x, weight, scales, biases, bits=bits, group_size=group_size, bias=bias)
        backend.count("affine_matmul", "mlx")
        return affine_matmul_reference(x, weight, scales, biases, bits=bits, group_size=group_size, bias=bias)
    # MLX's GPU products accumulate in float32, so the activations stay in their own dtype there.
    backend.count("affine_matmul", "mlx")
    y = mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
    return (y if bias is None else y + bias).astype(x.dtype)


def affine_embedding_reference(ids, weight, scales, biases, *, bits: int, group_size: int, dtype) -> mx.array:
    """Definition of `affine_embedding`."""
    s, b = scales[ids].astype(mx.float32), biases[ids].astype(mx.float32)
    return mx.dequantize(weight[ids], s, b, group_size=group_size, bits=bits).astype(dtype)


def affine_embedding(
    ids: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    backend: Backend,
) -> mx.array:
    """Rows ``ids`` of an affine-quantized matrix: integer ``ids [...]`` -> ``[..., K]`` in ``dtype``.

    MLX does not check ids. On a CPU they are checked here and OptionError is raised; on a GPU the check would wait for
    the device, so the caller checks ids that come from outside.
    """
    columns = check_affine("affine_embedding", None, weight, scales, biases, bits=bits, group_size=group_size)
    if ids.size == 0:
        return mx.zeros((*ids.shape, columns), dtype=dtype)
    if backend.device == "cpu":
        known = np.array(ids, copy=False)
        if known.min() < 0 or known.max() >= weight.shape[0]:
            raise OptionError(
                f"affine_embedding: ids run from {known.min()} to {known.max()}, but the table has "
                f"{weight.shape[0]} rows"
            )
    backend.count("affine_embedding", "mlx")
    return affine_embedding_reference(ids, weight, scales, biases, bits=bits, group_size=group_size, dtype=dtype)
