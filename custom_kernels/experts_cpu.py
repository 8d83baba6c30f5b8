"""Experts on the CPU, one after another: our compiled kernel for few rows, dequantized tiles and the BLAS for more.

Everything is float32 and in numpy, over views of the blobs, so that a blob may lie in an array, in a slot that is read
anew, or in a mapped file.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import gemv, lookup
from turbospark_mlx.custom_kernels.backends import Backend, blas, host
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.expert_arena import BlobMatrix, ExpertArena, ExpertBlob

ROWS = 32
"""Rows of one expert up to which the kernel is faster than dequantizing its matrices for the BLAS."""
EXPERT_MIXTURE = Op("expert_mixture", (gemv.KERNEL,), rows=ROWS, only="of packed matrices", cpu="blas", device="cpu")
WARM_UP_ROWS = (ROWS + 1, gemv.ROWS, 1)
"""Rows of one expert that take each way there is."""
GELU_SCALE = np.float32(np.sqrt(2 / np.pi))


def expert(arena: ExpertArena, slot: int, x: np.ndarray, backend: Backend) -> np.ndarray:
    """The expert in ``slot`` of ``x [rows, hidden]`` -> ``[rows, hidden]``."""
    (gate, up, down), views = arena.blob.matrices, arena.views(slot)
    inner = activate(arena.blob, _product(gate, views[0], x, backend), _product(up, views[1], x, backend))
    return _product(down, views[2], inner, backend)


def activate(blob: ExpertBlob, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """``protocols.Activation`` of ``gate`` and ``up``, in float32."""
    if blob.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(GELU_SCALE * (gate + np.float32(0.044715) * gate * gate * gate))) * up
    slope = np.float32(1)
    if blob.activation == "clamped_swiglu":
        gate, up = np.minimum(gate, blob.limit), np.clip(up, -blob.limit, blob.limit) + 1
        slope = np.float32(blob.alpha)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-slope * gate)) * up


def weighted_sum(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``sum_k weights[:, k] * products[:, k]`` in that order: ``[rows, top_k, hidden]`` -> ``[rows, hidden]``, in the
    memory of ``products``, which are lost."""
    for rank in range(products.shape[1]):
        products[:, rank] *= weights[:, rank : rank + 1]
    for rank in range(1, products.shape[1]):
        products[:, 0] += products[:, rank]
    return products[:, 0]


def _product(matrix: BlobMatrix, views: list[np.ndarray], x: np.ndarray, backend: Backend) -> np.ndarray:
    compiled = backend.name == "host" and matrix.bits is not None and matrix.mode == "affine"
    if compiled and EXPERT_MIXTURE.serves(backend, mx.float32, rows=len(x)):
        backend.count(EXPERT_MIXTURE.name, "kernel")
        y = _gemv(matrix, views, x)
    else:
        backend.count(EXPERT_MIXTURE.name, "blas")
        y = np.empty((len(x), matrix.rows), np.float32)
        step = max(1, blas.SCRATCH_BYTES // (4 * matrix.columns))
        for start in range(0, matrix.rows, step):
            stop = min(start + step, matrix.rows)
            np.matmul(x, _rows(matrix, views, start, stop, compiled).T, out=y[:, start:stop])
    if matrix.bias is not None:
        y += _float32(views[-1], matrix.bias_dtype)
    return y


def _gemv(matrix: BlobMatrix, views: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    sizes = gemv.TOGETHER["host"] if len(x) > 1 else (1,)
    most = max(size for size in sizes if size == 1 or gemv.fits("host", size, matrix.columns, mx.float32))
    options = (matrix.rows, matrix.bits, matrix.group_size, gemv.Form(), matrix.dtype)
    parts = []
    for start in range(0, len(x), most):
        part = x[start : start + most]
        call = gemv.plan("host", part.shape, most, *options, gemv.Dtypes.alike(mx.float32), None, None)
        parts.append(host.run(call, (*views[:3], part, None, None, None))[0])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rows(matrix: BlobMatrix, views: list[np.ndarray], start: int, stop: int, compiled: bool) -> np.ndarray:
    """Rows ``start`` to ``stop`` of the matrix in float32."""
    if matrix.bits is None:
        return _float32(views[0][start:stop], matrix.dtype)
    if compiled:
        ids = np.arange(start, stop, dtype=np.int32)
        sizes = (matrix.rows, matrix.columns, matrix.bits, matrix.group_size)
        call = lookup.plan("host", ids.shape, *sizes, matrix.dtype, mx.float32)
        return blas.in_scratch(call, (ids, *views[:3]))
    if matrix.mode == "mxfp4":
        words, exponents = (mx.array(view[start:stop]) for view in views[:2])
        return blas.view(mx.dequantize(words, exponents, mode="mxfp4", dtype=mx.float32))
    scales, biases = (mx.array(_float32(view[start:stop], matrix.dtype)) for view in views[1:3])
    words = mx.array(views[0][start:stop])
    return blas.view(mx.dequantize(words, scales, biases, group_size=matrix.group_size, bits=matrix.bits))


def _float32(stored: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.bfloat16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)
