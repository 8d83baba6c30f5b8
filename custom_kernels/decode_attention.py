"""The kernels ``attention_decode_partial`` and ``_combine``: few query rows over all keys of a cache."""

from __future__ import annotations

import struct
from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch

PARTIAL = Kernel(
    "attention_decode_partial",
    inputs=("q", "k", "v", "sinks"),
    outputs=("out", "peaks", "totals"),
    headers=("attention",),
    strided=True,
)
COMBINE = Kernel(
    "attention_decode_combine", inputs=("parts", "peaks", "totals", "sinks"), outputs=("y",), headers=("attention",)
)
ROWS = 8
"""Query rows up to which the kernels are used: more belong to a matrix product."""
CHUNK_KEYS = {"metal": 256, "cuda": 128, "host": 64}
"""Keys that are worth a threadgroup of their own."""
MAX_CHUNKS = 32


def serves(q: mx.array, k: mx.array, v: mx.array, mask, backend: Backend) -> bool:
    """Whether the kernels take this attention: few rows, no mask array, no tiny arrays (see `gemv`)."""
    return (
        backend.launch is not None
        and q.shape[2] <= ROWS
        and (mask is None or isinstance(mask, str))
        and k.dtype == v.dtype
        and min(q.size, k.size, v.size) >= 8
        and (backend.device == "gpu" or q.dtype == mx.float32)
    )


@lru_cache(maxsize=4096)
def _launches(name, shape, kv_heads, value_dim, chunks, scale, causal, window, dtype, kv_dtype, sink_dtype):
    batch, heads, length, head_dim = shape
    share, rows = heads // kv_heads * length, batch * heads * length
    if name == "host":
        queries, keys, simdgroups = min(share, 8), 16, 1
    else:
        queries, keys, simdgroups = max(1, min(share, 4, 512 // max(head_dim, value_dim))), 4, 8
    partial = Launch(
        PARTIAL,
        template=(
            ("T", dtype),
            ("KV_T", kv_dtype),
            ("O", dtype if chunks == 1 else mx.float32),
            ("H", heads),
            ("KV", kv_heads),
            ("L", length),
            ("D", head_dim),
            ("E", value_dim),
            ("QUERIES", queries),
            ("KEYS", keys),
            ("SIMDGROUPS", simdgroups),
            ("SCALE_BITS", struct.unpack("<i", struct.pack("<f", scale))[0]),
            ("CAUSAL", causal),
            ("WINDOW", window),
            ("SINKS", sink_dtype is not None),
            ("SINGLE", chunks == 1),
        ),
        groups=(batch * kv_heads * -(-share // queries), chunks),
        simdgroups=simdgroups,
        input_dtypes=(dtype, kv_dtype, kv_dtype, sink_dtype or dtype),
        output_shapes=((rows, chunks, value_dim), (rows, chunks), (rows, chunks)),
        output_dtypes=(dtype if chunks == 1 else mx.float32, mx.float32, mx.float32),
    )
    if chunks == 1:
        return partial, None
    combine = Launch(
        COMBINE,
        template=(
            ("T", dtype),
            ("H", heads),
            ("L", length),
            ("E", value_dim),
            ("CHUNKS", chunks),
            ("SINKS", sink_dtype is not None),
        ),
        groups=(rows, 1),
        simdgroups=1 if name == "host" else min(4, -(-value_dim // 32)),
        input_dtypes=(mx.float32, mx.float32, mx.float32, sink_dtype or dtype),
        output_shapes=((rows, value_dim),),
        output_dtypes=(dtype,),
    )
    return partial, combine


def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: mx.array | None,
    backend: Backend,
) -> mx.array:
    """The attention that `sdpa.attention` defines, for what `serves` accepts."""
    batch, heads, length, _ = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    seen = keys if window is None else min(keys, window + length - 1)
    groups = batch * kv_heads
    chunks = 1
    while (
        chunks < MAX_CHUNKS
        and seen >= 2 * chunks * CHUNK_KEYS[backend.name]
        and (backend.name != "host" or groups * chunks < 4 * thread_count())
    ):
        chunks *= 2
    partial, combine = _launches(
        backend.name,
        q.shape,
        kv_heads,
        value_dim,
        chunks,
        scale,
        causal and length > 1,
        window if window is not None and window < keys else 0,
        q.dtype,
        k.dtype,
        None if sinks is None else sinks.dtype,
    )
    logits = q if sinks is None else sinks
    out, *statistics = backend.launch(partial, (q, k, v, logits))
    if combine is not None:
        (out,) = backend.launch(combine, (out, *statistics, logits))
    return out.reshape(batch, heads, length, value_dim)
