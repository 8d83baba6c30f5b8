"""Scaled dot-product attention with grouped heads (Ainslie et al., 2023)."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from turbospark_mlx.custom_kernels import decode_attention
from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.errors import OptionError

Mask = mx.array | Literal["causal"] | None


def combined_mask(mask: Mask, window: int | None, length: int, keys: int) -> mx.array | None:
    """The mask, the causal rule and the window as one boolean or additive array, or None where every key is visible."""
    position = mx.arange(keys - length, keys)[:, None]
    key = mx.arange(keys)[None]
    visible = None
    if isinstance(mask, str) and length > 1:
        visible = key <= position
    if window is not None and window < keys:
        inside = key > position - window
        visible = inside if visible is None else visible & inside
    if mask is None or isinstance(mask, str):
        return visible
    if visible is None:
        return mask
    return mask & visible if mask.dtype == mx.bool_ else mx.where(visible, mask, -mx.inf)


def attention_reference(q, k, v, *, scale: float, mask: Mask = None, window: int | None = None, sinks=None) -> mx.array:
    """Definition of `attention`."""
    batch, heads, length, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads, length)
    q32, k32, v32 = (a.astype(mx.float32) for a in (q, k, v))
    scores = (q32 * scale).reshape(*grouped, -1) @ k32[:, :, None].swapaxes(-1, -2)
    limit = combined_mask(mask, window, length, keys)
    if limit is not None:
        limit = mx.broadcast_to(limit, (batch, heads, length, keys)).reshape(*grouped, keys)
        scores = mx.where(limit, scores, -mx.inf) if limit.dtype == mx.bool_ else scores + limit.astype(mx.float32)
    peak = mx.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1)
        peak = mx.maximum(peak, sinks)
    peak = mx.where(peak == -mx.inf, 0, peak)
    weights = mx.exp(scores - peak)
    total = mx.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks - peak)
    out = (weights @ v32[:, :, None]) / mx.where(total == 0, 1, total)
    return out.reshape(batch, heads, length, -1).astype(q.dtype)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """``softmax(scale * q k^T + mask) v`` in float32.

    ``q [B, H, L, D]``, ``k [B, KV, S, D]``, ``v [B, KV, S, E]`` -> ``[B, H, L, E]`` in the dtype of ``q``; query head
    ``h`` reads KV head ``h * KV // H``. Keys are in time order and the queries are the last ``L`` of the ``S``
    positions. ``mask`` is None, ``"causal"``, or an array that broadcasts to ``[B, H, L, S]``: boolean (True is
    visible) or additive. ``window`` hides keys older than the query's own and the ``window - 1`` before it. ``sinks
    [H]`` are logits that take part in the softmax without a value. A query that sees no key gives 0. Up to 8 query rows
    without a mask array run in our kernels; others in `mx.fast.scaled_dot_product_attention` on GPUs (which gives NaN
    for a query that sees no key) and in numpy's BLAS on a CPU. Raises OptionError for shapes that do not fit.
    """
    (batch, heads, length, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if k.shape != (batch, kv_heads, keys, head_dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads or keys < length:
        raise OptionError(
            f"attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit [B, H, L, D], "
            "[B, KV, S, D], [B, KV, S, E] with H a multiple of KV and S at least L"
        )
    if isinstance(mask, str) and mask != "causal":
        raise OptionError(f"attention: mask={mask!r}; the only mask that has a name is 'causal'")
    if window is not None and window < 1:
        raise OptionError(f"attention: window={window}; a window holds at least the query's own position")
    if q.size == 0:
        return mx.zeros((batch, heads, length, v.shape[-1]), dtype=q.dtype)
    if k.dtype == v.dtype and decode_attention.serves(q, min(k.size, v.size), mask, backend):
        backend.count(decode_attention.ATTENTION.name, "kernel")
        start = mx.array([keys - length], mx.int32)
        options = {"scale": scale, "causal": mask is not None, "window": window, "sinks": sinks, "backend": backend}
        y = decode_attention.decode_attention(q, k, v, start, **options)
        return y.reshape(batch, length, heads, -1).swapaxes(1, 2)
    if backend.device == "cpu":
        backend.count(decode_attention.ATTENTION.name, "blas")
        return blas.attention(q, k, v, scale=scale, mask=mask, window=window, sinks=sinks)
    backend.count(decode_attention.ATTENTION.name, "mlx")
    if window is not None or not isinstance(mask, str):
        mask = combined_mask(mask, window, length, keys)
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        mask = mask.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def cache_attention_reference(
    q, kv, start, *, scale: float, mask: Mask = None, window=None, sinks=None, gates=None
) -> mx.array:
    """Definition of `cache_attention`."""
    keys = min(start.item() + q.shape[2], kv.shape[3])
    k, v = kv[0, :, :, :keys], kv[1, :, :, :keys]
    y = attention_reference(q.astype(mx.float32), k, v, scale=scale, mask=mask, window=window, sinks=sinks)
    batch, heads, length, head_dim = y.shape
    y = y.swapaxes(1, 2)
    if gates is not None:
        y = y * mx.sigmoid(gates.astype(mx.float32).reshape(batch, length, -1, head_dim)[:, :, 1 : 2 * heads : 2])
    return y.reshape(batch, length, -1).astype(q.dtype)


def cache_attention(
    q: mx.array,
    kv: mx.array,
    start: mx.array,
    *,
    scale: float,
    mask: Literal["causal"] | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    gates: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """`attention` over a cache's buffer in place, with the heads side by side, for what `serves_cache` accepts.

    ``q [B, H, L, D]``, ``kv [2, B, KV, capacity, D]`` with keys first -> ``[B, L, H * D]``, which is what an output
    projection takes. ``start`` is an int32 array ``[1]``, the position of the first query, read on the device; the keys
    are the first ``start + L`` rows, or all where there are no more. ``gates [B, L, S * D]`` are a joint projection, of
    whose S heads the second, fourth and so on up to the 2 H-th hold logits: the result is multiplied by their sigmoids.
    Raises OptionError for shapes that do not fit.
    """
    batch, heads, length, head_dim = q.shape
    kv_heads, capacity = kv.shape[2], kv.shape[3]
    if kv.shape != (2, batch, kv_heads, capacity, head_dim) or heads % kv_heads or length > capacity:
        raise OptionError(
            f"cache_attention: q {list(q.shape)} and kv {list(kv.shape)} do not fit [B, H, L, D] and "
            "[2, B, KV, capacity, D] with H a multiple of KV and L at most the capacity"
        )
    if gates is not None and (gates.shape[:2] != (batch, length) or gates.shape[2] < 2 * heads * head_dim):
        raise OptionError(
            f"cache_attention: gates {list(gates.shape)} are not [{batch}, {length}, at least {2 * heads} * {head_dim}]"
        )
    backend.count(decode_attention.ATTENTION.name, "kernel")
    options = {"scale": scale, "causal": mask is not None, "window": window, "sinks": sinks, "gates": gates}
    return decode_attention.decode_attention(q, kv, None, start, **options, backend=backend)
