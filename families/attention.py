"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions, as most families have it.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import append_attention, appends, qkv_epilogue
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
        sinks: bool = False,
        gates: tuple[str, int] | None = None,
        one_matrix: bool = False,
    ):
        """``bias`` is about q, k, v and gates, and comes before the rotation. With ``head_norm_eps`` every head of q
        and k is normalised before it, with or without ``head_norm_weights``. ``sinks`` are logits, one a query head and
        not scaled, that take part in the softmax without a value. With ``gates``, name and width of one more projection
        of the input, what the heads answer is multiplied by the sigmoids of its results, each for as many neighbours as
        there are to one. With ``one_matrix`` the rows of q, k and v are those of ``q_k_v_proj``."""
        super().__init__()
        self.head_dim, self.scale, self.window, self.rope = head_dim, scale, window, rope
        self._heads, self._kv_heads, self._attention, self._backend = heads, kv_heads, build.attention, build.backend
        rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self._borders = [rows["q_proj"], rows["q_proj"] + rows["k_proj"]]
        if one_matrix:
            rows = {"q_k_v_proj": sum(rows.values())}
        self._names = tuple(rows)
        parts, self._qkv = build.projections(hidden, {f"{path}.{name}": n for name, n in rows.items()}, bias=bias)
        for name, part in zip(rows, parts, strict=True):
            self[name] = part
        self._gate, self._gated = gates and gates[0], build.gated_product
        if gates:
            self[gates[0]] = build.linear(f"{path}.{gates[0]}", hidden, gates[1], bias=bias)
        self.o_proj = build.linear(f"{path}.o_proj", heads * head_dim, hidden, bias=output_bias)
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
        if self._gate:
            x, norm = x if norm is None else norm(x), None
            gate = self[self._gate](x)
        y = self._answer(x, positions, cache, norm=norm)
        y = y if gate is None else self._gated(gate, y, activation="sigmoid")
        return project(self.o_proj, y, residual=residual)

    def _answer(
        self, x: mx.array, positions: Positions, cache: LinearKV | RingKV | None, *, norm: nn.Module | None
    ) -> mx.array:
        """``x [B, L, hidden]`` -> what all heads answer, ``[B, L, H * D]``."""
        B, L, _ = x.shape
        # A single token sees every key that its cache returns, and a ring returns them in no particular order.
        mask, window = ("causal", self.window) if L > 1 else (None, None)
        options = {"scale": self.scale, "mask": mask, "window": window, "sinks": self.get("sinks")}
        parts, norms = [self[name] for name in self._names], [self.get("q_norm"), self.get("k_norm")]
        joint = self._qkv.joint(*parts)
        if joint is not None and all(own is None or isinstance(own, RMSNorm) for own in norms):
            sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "backend": self._backend}
            if norms[0] is not None:
                sizes |= {"q_norm": norms[0]["weight"], "k_norm": norms[1]["weight"], "eps": norms[0].eps}
            elif self._plain_norm_eps is not None:
                sizes |= {"head_norm": True, "eps": self._plain_norm_eps}
            qkv, rotation = project(joint, x, norm=norm), positions.rotation(self.rope)
            if cache is not None and cache.places(L) and appends(qkv, self._backend):
                kv = cache.place(L, (B, self._kv_heads, self.head_dim), qkv.dtype)
                y = append_attention(qkv, rotation, kv, positions.start, **sizes, **options)
                cache.written(y)
                return y
            q, kv = qkv_epilogue(qkv, rotation, **sizes)
            kv, keys = (kv, L) if cache is None else cache.append(kv)
            k, v = kv[0, :, :, :keys], kv[1, :, :, :keys]
        else:
            x = x if norm is None else norm(x)
            products = self._qkv(x, *parts)
            if len(parts) == 1:
                products = mx.split(products[0], self._borders, axis=-1)
            q, k, v = (y.reshape(B, L, -1, self.head_dim).transpose(0, 2, 1, 3) for y in products)
            if "q_norm" in self:
                q, k = self.q_norm(q), self.k_norm(k)
            elif self._plain_norm_eps is not None:
                q, k = (mx.fast.rms_norm(y, None, self._plain_norm_eps) for y in (q, k))
            q, k = self.rope(q, positions.offset), self.rope(k, positions.offset)
            if cache is not None:
                k, v = cache.update_and_fetch(k, v)
        y = self._attention(q, k, v, **options)
        return y.transpose(0, 2, 1, 3).reshape(B, L, -1)
