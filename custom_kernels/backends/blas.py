"""Products and attention through numpy's BLAS, for the CPU.

MLX's CPU back end multiplies one or two orders of magnitude slower than the BLAS that numpy brings. Arrays are read
through views of their memory, so these functions evaluate their inputs and cannot be traced.
"""

from __future__ import annotations

import threading
from math import prod

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import lookup
from turbospark_mlx.custom_kernels.backends import host
from turbospark_mlx.custom_kernels.backends.kernel import Launch

SCRATCH_BYTES = 8 << 20
QUERY_TILE = 128
"""Queries whose scores are taken together: smaller tiles skip more of the keys that a causal mask hides."""


def view(a: mx.array) -> np.ndarray:
    """A float32 view of ``a``; a copy only where its dtype is another."""
    return np.array(a if a.dtype == mx.float32 else a.astype(mx.float32), copy=False)


def empty(shape: tuple[int, ...]) -> tuple[mx.array, np.ndarray]:
    """A float32 array to be filled, and a view of it to be written. MLX makes an array of numpy's memory by copying."""
    array = mx.zeros(shape)
    return array, np.array(array, copy=False)


_scratch = threading.local()


def in_scratch(call: Launch, inputs: tuple[mx.array | np.ndarray | None, ...]) -> np.ndarray:
    """The float32 output of a kernel, in memory that this thread's next call writes again. Memory anew for every tile
    would cost the system more than the tile costs us."""
    shape = call.output_shapes[0]
    if getattr(_scratch, "tile", np.empty(0)).size < prod(shape):
        _scratch.tile = np.empty(max(prod(shape), SCRATCH_BYTES // 4), np.float32)
    return host.run(call, inputs, into=(_scratch.tile[: prod(shape)].reshape(shape),))[0]


def _tiles(rows: int, row_bytes: int):
    step = max(1, SCRATCH_BYTES // max(1, row_bytes))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _product(x: mx.array, rows: int, width: int, tile, bias: mx.array | None) -> mx.array:
    """``x @ W.T + bias`` in float32, where ``tile(start, stop)`` gives float32 rows of ``W [rows, width]``."""
    if host.rehearsing():
        for start, stop in {stop - start: (start, stop) for start, stop in _tiles(rows, width * 4)}.values():
            tile(start, stop)
        return mx.zeros((*x.shape[:-1], rows), x.dtype)
    flat = view(x).reshape(-1, width)
    y, out = empty((flat.shape[0], rows))
    for start, stop in _tiles(rows, width * 4):
        np.matmul(flat, tile(start, stop).T, out=out[:, start:stop])
    if bias is not None:
        out += view(bias)
    return y.reshape(*x.shape[:-1], rows).astype(x.dtype)


def affine_matmul(x, weight, scales, biases, *, bits: int, group_size: int, bias, compiled: bool) -> mx.array:
    """`affine.affine_matmul` with the matrix dequantized tile by tile; ``compiled`` chooses our kernel for that."""
    rows, columns = weight.shape[0], x.shape[-1]

    def tile(start: int, stop: int) -> np.ndarray:
        if compiled:
            ids = mx.array(np.arange(start, stop, dtype=np.int32))
            shape = (stop - start,)
            call = lookup.plan("host", shape, rows, columns, bits, group_size, scales.dtype, mx.float32)
            return in_scratch(call, (ids, weight, scales, biases))
        # mx.dequantize computes in the companions' dtype, which is both wrong and slow in half precision.
        s, b = (a[start:stop].astype(mx.float32) for a in (scales, biases))
        return view(mx.dequantize(weight[start:stop], s, b, group_size=group_size, bits=bits))

    return _product(x, rows, columns, tile, bias)


def dense_matmul(x, weight, *, bias) -> mx.array:
    """`dense.dense_matmul`; a matrix in half precision is cast tile by tile."""
    if weight.dtype == mx.float32:
        whole = view(weight)
        return _product(x, weight.shape[0], x.shape[-1], lambda start, stop: whole[start:stop], bias)
    return _product(x, weight.shape[0], x.shape[-1], lambda start, stop: view(weight[start:stop]), bias)


def attention(q, k, v, *, scale: float, mask, window: int | None, sinks) -> mx.array:
    """`sdpa.attention`, one KV head and one tile of queries at a time; hidden keys are not read."""
    batch, heads, length, head_dim = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    queries, key_rows, value_rows = (view(a) for a in (q, k, v))
    queries = queries.reshape(batch, kv_heads, group, length, head_dim)
    sink_logits = None if sinks is None else view(sinks).reshape(kv_heads, group, 1, 1)
    causal = isinstance(mask, str)
    array = None if mask is None or causal else _mask_view(mask, (batch, heads, length, keys))
    y, out = empty((batch, kv_heads, group, length, value_dim))
    step = max(1, min(QUERY_TILE, SCRATCH_BYTES // max(1, group * keys * 4)))
    for first in range(0, length, step):
        last = min(first + step, length)
        position = np.arange(keys - length + first, keys - length + last)[:, None]
        low = 0 if window is None else max(0, int(position[0, 0]) - window + 1)
        high = int(position[-1, 0]) + 1 if causal else keys
        hidden = None
        if last - first > 1 and (causal or window is not None):
            key = np.arange(low, high)
            hidden = np.zeros((last - first, high - low), dtype=bool)
            if causal:
                hidden |= key > position
            if window is not None:
                hidden |= key <= position - window
        for b in range(batch):
            for h in range(kv_heads):
                rows = queries[b, h, :, first:last].reshape(-1, head_dim) * np.float32(scale)
                scores = (rows @ key_rows[b, h, low:high].T).reshape(group, last - first, high - low)
                if array is not None:
                    part = array[b, h * group : (h + 1) * group, first:last, low:high]
                    if part.dtype == bool:
                        np.copyto(scores, -np.inf, where=~part)
                    else:
                        scores += part
                if hidden is not None:
                    np.copyto(scores, -np.inf, where=hidden)
                total = _exponentials(scores, None if sink_logits is None else sink_logits[h])
                product = scores.reshape(-1, high - low) @ value_rows[b, h, low:high]
                out[b, h, :, first:last] = product.reshape(group, last - first, value_dim) / total
    return y.reshape(batch, heads, length, value_dim).astype(q.dtype)


def _mask_view(mask: mx.array, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.array(mask, copy=False) if mask.dtype == mx.bool_ else view(mask), shape)


def _exponentials(scores: np.ndarray, sink: np.ndarray | None) -> np.ndarray:
    """Replace scores by exp(score - max) and return the sums, sinks included; rows that see no key become 0 / 1."""
    peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        peak = np.maximum(peak, sink)
    peak[np.isneginf(peak)] = 0
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - peak)
    total[total == 0] = 1
    return total
