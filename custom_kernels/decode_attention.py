"""The kernels ``attention_decode_partial`` and ``_combine``: few query rows over all keys of a cache."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op

PARTIAL = Kernel(
    "attention_decode_partial",
    inputs=("q", "k", "v", "start", "sinks", "gates", "positions"),
    outputs=("out", "peaks", "totals"),
    headers=("attention", "sigmoid_gate"),
)
COMBINE = Kernel(
    "attention_decode_combine",
    inputs=("parts", "peaks", "totals", "sinks", "gates"),
    outputs=("y",),
    headers=("attention", "sigmoid_gate"),
)
ROWS = 8
"""Query rows up to which the kernels are used: more belong to a matrix product."""
ATTENTION = Op("attention", (PARTIAL, COMBINE), rows=ROWS, only="without a mask array", cpu="blas")
CHUNK_KEYS = {"metal": 256, "cuda": 128, "host": 64}
"""Keys that are worth a threadgroup of their own."""
MAX_CHUNKS = 32
SHARED_QUERIES = 16
"""Query rows that a CPU's core takes at a time where all heads read the same rows, which are wide."""
SHORT_KEYS = 1024
"""Keys up to which a GPU gives each query head of a single token one threadgroup, and nothing is left to combine."""


def serves(q: mx.array, kv_size: int, mask, backend: Backend) -> bool:
    """Whether the kernels take this attention: few rows, no mask array, no tiny arrays (see `gemv`)."""
    return (
        ATTENTION.serves(backend, q.dtype, rows=q.shape[2])
        and (mask is None or isinstance(mask, str))
        and min(q.size, kv_size) >= 8
    )


def chunk_count(backend: str, length: int, groups: int, seen: int) -> int:
    """Into how many chunks ``seen`` keys are cut for ``length`` tokens; ``groups`` threadgroups share one chunk."""
    chunks = 1
    if backend != "host" and length == 1 and seen <= SHORT_KEYS:
        return chunks
    while (
        chunks < MAX_CHUNKS
        and seen >= 2 * chunks * CHUNK_KEYS[backend]
        and (backend != "host" or groups * chunks < 4 * thread_count())
    ):
        chunks *= 2
    return chunks


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    kv_heads: int,
    value_dim: int,
    chunks: int,
    scale: float,
    causal: bool,
    window: int,
    cache: bool,
    shared: bool,
    dtype: mx.Dtype,
    kv_dtype: mx.Dtype,
    sink_dtype: mx.Dtype | None,
    gates: int,
    indexed: bool,
) -> tuple[Launch, Launch]:
    """The two launches for ``q`` of ``shape`` and keys in ``chunks``; ``window`` 0 is none.

    ``cache`` says that keys and values are one buffer, ``shared`` that values are the first elements of keys, ``gates``
    how many heads the projection with the gates has, ``indexed`` that keys are listed.
    """
    gate_dtype = dtype if gates else None
    batch, heads, length, head_dim = shape
    share, rows = heads // kv_heads * length, batch * heads * length
    host, single, merged = backend == "host", chunks == 1, (batch, length, heads * value_dim)
    if host:
        queries, keys, simdgroups = share if length == 1 else 8, 16, 1
        if shared:
            # Keys are kept until they are values, in a core's first cache, and queries are many.
            queries, keys = min(queries, SHARED_QUERIES), 8
    elif length == 1 and single:
        queries, keys, simdgroups = 1, 4, 16 if value_dim <= 256 else 8
    else:
        queries, keys, simdgroups = max(1, min(share, 4, 512 // max(head_dim, value_dim))), 4, 8
    partial = Launch(
        PARTIAL,
        template=(
            ("T", dtype),
            ("KV_T", kv_dtype),
            ("O", dtype if single else mx.float32),
            ("CACHE", cache),
            ("SHARED_VALUES", shared),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("E", value_dim),
            ("QUERIES", queries),
            ("KEYS", keys),
            ("SIMDGROUPS", simdgroups),
            ("SCALE_BITS", float_bits(scale)),
            ("CAUSAL", causal),
            ("WINDOW", window),
            ("SINKS", sink_dtype is not None),
            ("GATES", gates if single else 0),
            ("INDEXED", indexed),
        ),
        groups=(batch * kv_heads * -(-share // queries), chunks),
        simdgroups=simdgroups,
        input_dtypes=(
            *(dtype, kv_dtype, None if cache else kv_dtype, mx.int32, sink_dtype),
            gate_dtype if single else None,
            mx.int32 if indexed else None,
        ),
        output_shapes=(merged, None, None) if single else ((rows, chunks, value_dim), *[(rows, chunks)] * 2),
        output_dtypes=(dtype if single else mx.float32, mx.float32, mx.float32),
    )
    combine = Launch(
        COMBINE,
        template=(
            ("T", dtype),
            ("H", heads),
            ("E", value_dim),
            ("SINKS", sink_dtype is not None),
            ("GATES", gates),
        ),
        groups=(rows, 1),
        simdgroups=1 if host else min(4, -(-value_dim // 32)),
        input_dtypes=(mx.float32, mx.float32, mx.float32, sink_dtype, gate_dtype),
        output_shapes=(merged,),
        output_dtypes=(dtype,),
    )
    return partial, combine


def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array | None,
    start: mx.array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    sinks: mx.array | None = None,
    shared_dim: int | None = None,
    gates: mx.array | None = None,
    positions: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """The attention that `sdpa` defines, with merged heads ``[B, L, H * E]``, for what `serves` accepts.

    ``k [B, KV, S, D]``, ``v [B, KV, S, E]``, or one buffer of both in ``k [2, B, KV, S, D]``, or one of keys ``[1, B,
    KV, S, D]`` whose first ``shared_dim`` elements are the values. ``start`` is an int32 array ``[1]``, the position of
    the first query; keys after the last query's are not read. ``S`` decides how the keys are cut, because the number of
    keys is known on the device only. ``gates`` are `sdpa.cache_attention`'s. ``positions [B, P]``, int32, list the keys
    of a single query instead, as many as ``start`` and one more.
    """
    batch, _, length, _ = q.shape
    kv_heads, capacity, head_dim = k.shape[-3:]
    if positions is not None:
        capacity = positions.shape[1]
    seen = capacity if window is None else min(capacity, window + length - 1)
    chunks = chunk_count(backend.name, length, batch * kv_heads, seen)
    partial, combine = plan(
        backend.name,
        q.shape,
        kv_heads,
        shared_dim or (head_dim if v is None else v.shape[3]),
        chunks,
        scale,
        causal and length > 1,
        window or 0,
        v is None,
        shared_dim is not None,
        q.dtype,
        k.dtype,
        None if sinks is None else sinks.dtype,
        0 if gates is None else gates.shape[2] // head_dim,
        positions is not None,
    )
    out, *statistics = backend.launch(partial, (q, k, v, start, sinks, gates if chunks == 1 else None, positions))
    if chunks > 1:
        (out,) = backend.launch(combine, (out, *statistics, sinks, gates))
    else:
        backend.prepare(combine)
    return out
