"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions, as most families have it.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import append_attention, appends, gated_product, qkv_epilogue
from turbospark_mlx.families.layers import Builder, Module, Positions, RMSNorm, RoPE, project


class GroupedAttention(Module):
    """Attention over all tokens or over a sliding window."""

    def __init__(
        self,
        path: str,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        rope: RoPE,
        build: Builder,
        bias: bool = False,
        output_bias: bool = False,
        head_norm_eps: float | None = None,
        head_norm_weights: bool = True,
        gate: bool = False,
        sinks: bool = False,
    ):
        """``bias`` is about q, k and v, and comes before the rotation. With ``head_norm_eps`` every head of q and k is
        normalised before it, with or without ``head_norm_weights``. With ``gate`` answers are multiplied by the sigmoid
        of one more projection of the input. ``sinks`` are logits, one a query head and not scaled, that take part in
        the softmax without a value."""
        super().__init__()
        self.head_dim, self.scale, self.window, self.rope = head_dim, scale, window, rope
        self._heads, self._kv_heads, self._attention, self._backend = heads, kv_heads, build.attention, build.backend
        rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        (self.q_proj, self.k_proj, self.v_proj), self._qkv = build.projections(
            hidden, {f"{path}.{name}": n for name, n in rows.items()}, bias=bias
        )
        self.o_proj = build.linear(f"{path}.o_proj", heads * head_dim, hidden, bias=output_bias)
        if gate:
            self.gate_proj = build.linear(f"{path}.gate_proj", hidden, heads * head_dim)
        self._plain_norm_eps = None if head_norm_weights else head_norm_eps
        if head_norm_eps is not None and head_norm_weights:
            self.q_norm = build.norm(f"{path}.q_norm", head_dim, head_norm_eps)
            self.k_norm = build.norm(f"{path}.k_norm", head_dim, head_norm_eps)
        if sinks:
            self.sinks = build.vector(f"{path}.sinks", heads)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: LinearKV | RingKV | None = None,
        *,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        gate = None
        if "gate_proj" in self:
            x, norm = x if norm is None else norm(x), None
            gate = self.gate_proj(x)
        parts, norms = (self.q_proj, self.k_proj, self.v_proj), [self.get("q_norm"), self.get("k_norm")]
        joint = self._qkv.joint(*parts)
        if joint is not None and all(own is None or isinstance(own, RMSNorm) for own in norms):
            y = self._fused(project(joint, x, norm=norm), positions, cache)
            if gate is not None:
                y = gated_product(gate, y, activation="sigmoid", backend=self._backend)
        else:
            y = self._separate(self._qkv(x, *parts, norm=norm), positions, cache)
            if gate is not None:
                y = y * mx.sigmoid(gate)
        return project(self.o_proj, y, residual=residual)

    def _options(self, length: int) -> dict[str, Any]:
        # A single token sees every key that its cache returns, and a ring returns them in no particular order.
        mask, window = ("causal", self.window) if length > 1 else (None, None)
        return {"scale": self.scale, "mask": mask, "window": window, "sinks": self.get("sinks")}

    def _fused(self, qkv: mx.array, positions: Positions, cache: LinearKV | RingKV | None) -> mx.array:
        B, L, _ = qkv.shape
        sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "backend": self._backend}
        if "q_norm" in self:
            sizes |= {"q_norm": self.q_norm["weight"], "k_norm": self.k_norm["weight"], "eps": self.q_norm.eps}
        elif self._plain_norm_eps is not None:
            sizes |= {"head_norm": True, "eps": self._plain_norm_eps}
        rotation = positions.rotation(self.rope)
        if cache is not None and cache.places(L) and appends(qkv, self._backend):
            kv = cache.place(L, (B, self._kv_heads, self.head_dim), qkv.dtype)
            y = append_attention(qkv, rotation, kv, positions.start, **sizes, **self._options(L))
            cache.written(y)
            return y
        q, kv = qkv_epilogue(qkv, rotation, **sizes)
        kv, keys = (kv, L) if cache is None else cache.append(kv)
        y = self._attention(q, kv[0, :, :, :keys], kv[1, :, :, :keys], **self._options(L))
        return y.transpose(0, 2, 1, 3).reshape(B, L, -1)

    def _separate(
        self, products: Sequence[mx.array], positions: Positions, cache: LinearKV | RingKV | None
    ) -> mx.array:
        B, L, _ = products[0].shape
        q, k, v = (y.reshape(B, L, -1, self.head_dim).transpose(0, 2, 1, 3) for y in products)
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        elif self._plain_norm_eps is not None:
            q, k = (mx.fast.rms_norm(y, None, self._plain_norm_eps) for y in (q, k))
        q, k = self.rope(q, positions.offset), self.rope(k, positions.offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        return self._attention(q, k, v, **self._options(L)).transpose(0, 2, 1, 3).reshape(B, L, -1)
