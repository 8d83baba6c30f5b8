"""Decode attention from the joint projection on: `rotary.qkv_append`, then `sdpa.cache_attention`, or both at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import mlx.core as mx

from turbospark_mlx.custom_kernels import decode_attention, rotary, sdpa
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op

KERNEL = Kernel(
    "fused_qkv_attention",
    inputs=("qkv", "rotation", "q_norm", "k_norm", "cache", "start", "sinks"),
    outputs=("out",),
    headers=("attention", "rotated_head"),
    writes=("cache",),
)
APPEND_ATTENTION = Op(
    "append_attention",
    (KERNEL,),
    rows=1,
    only="over all keys of a short cache",
    instead=rotary.QKV_APPEND.name,
    device="gpu",
)
KEYS = 4
"""Keys that a simdgroup has on the way at a time."""


def append_attention_reference(qkv, rotation, cache, start, *, scale, mask=None, window=None, sinks=None, **sizes):
    """Definition of `append_attention`: the result, and the cache that has the rows."""
    q, cache = rotary.qkv_append_reference(qkv, rotation, cache, start, **sizes)
    y = sdpa.cache_attention_reference(q, cache, start, scale=scale, mask=mask, window=window, sinks=sinks)
    return y, cache


def fuses(qkv: mx.array, cache: mx.array, window: int | None, backend: Backend) -> bool:
    """Whether one launch does it: on a GPU, for one token, where one threadgroup a head reads all keys. On a CPU heads
    that share keys read them together, which two launches do."""
    return (
        APPEND_ATTENTION.serves(backend, qkv.dtype, rows=qkv.shape[1])
        and window is None
        and cache.shape[3] <= decode_attention.SHORT_KEYS
        and cache.shape[4] <= 512
    )


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pairs: int,
    scale: float,
    eps: float,
    dtype: mx.Dtype,
    q_norm_dtype: mx.Dtype | None,
    k_norm_dtype: mx.Dtype | None,
    sink_dtype: mx.Dtype | None,
    head_norm: bool,
) -> Launch:
    """The launch for one token of ``batch`` sequences."""
    simdgroups = 1 if backend == "host" else 16 if head_dim <= 256 else 8
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("PAIRS", pairs),
            ("SIMDGROUPS", simdgroups),
            ("KEYS", KEYS),
            ("NORM", 1 if head_norm else 0 if q_norm_dtype is None else 2),
            ("SINKS", sink_dtype is not None),
            ("EPSILON_BITS", float_bits(eps)),
            ("SCALE_BITS", float_bits(scale)),
        ),
        groups=(batch * heads, 1),
        simdgroups=simdgroups,
        input_dtypes=(dtype, mx.float32, q_norm_dtype, k_norm_dtype, dtype, mx.int32, sink_dtype),
        output_shapes=((batch, 1, heads * head_dim),),
        output_dtypes=(dtype,),
    )


def append_attention(
    qkv: mx.array,
    rotation: mx.array,
    cache: mx.array,
    start: mx.array,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    mask: Literal["causal"] | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float | None = None,
    head_norm: bool = False,
    backend: Backend,
) -> mx.array:
    """Attention of ``qkv [B, L, (H + 2 KV) * D]`` over ``cache [2, B, KV, capacity, D]``, where it writes its rows.

    Returns ``[B, L, H * D]``. `rotary.qkv_append` says what happens to the rows and to ``cache``, `rotary.appends` for
    what this is, and `sdpa.cache_attention` what the attention is. Raises OptionError as they do.
    """
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "head_norm": head_norm}
    sizes = {"heads": heads, "kv_heads": kv_heads} | norms
    attention = {"scale": scale, "mask": mask, "window": window, "sinks": sinks}
    if not fuses(qkv, cache, window, backend):
        q = rotary.qkv_append(qkv, rotation, cache, start, **sizes, backend=backend)
        return sdpa.cache_attention(q, cache, start, **attention, backend=backend)
    head_dim = rotary.check_append("append_attention", qkv, rotation, cache, **sizes)
    backend.count(APPEND_ATTENTION.name, "kernel")
    dtypes = (None if array is None else array.dtype for array in (q_norm, k_norm, sinks))
    widths = (heads, kv_heads, head_dim, rotation.shape[1])
    call = plan(backend.name, qkv.shape[0], *widths, scale, eps or 0.0, qkv.dtype, *dtypes, head_norm)
    return backend.launch(call, (qkv, rotation, q_norm, k_norm, cache, start, sinks))[0]
