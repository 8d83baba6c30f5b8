"""Grouped-query attention with a gate on each of its answers, as Qwen 3.5 and its successors have it.

Queries and keys are normalised a head, the first dimensions of a head turn, and what attention answers is multiplied by
the sigmoid of a gate, which is projected with the queries.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV
from turbospark_mlx.custom_kernels import append_attention, appends, qkv_epilogue, rotate
from turbospark_mlx.families.layers import Builder, Module, Positions, RMSNorm, RoPE, project


class GatedAttention(Module):
    """Attention over everything."""

    def __init__(self, config: Any, path: str, rope: RoPE, build: Builder):
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, self.rope, self._backend, self._attention = size, rope, build.backend, build.attention
        self._heads, self._kv_heads = heads, kv_heads
        rows = {"q_proj": 2 * heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        (self.q_proj, self.k_proj, self.v_proj), self._qkv = build.projections(
            config.hidden_size, {f"{path}.{name}": n for name, n in rows.items()}
        )
        self.o_proj = build.linear(f"{path}.o_proj", heads * size, config.hidden_size)
        for name in ("q_norm", "k_norm"):
            self[name] = build.norm(f"{path}.{name}", size, config.rms_norm_eps, centered=config.centered_norms)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: LinearKV | None = None,
        *,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """``norm`` is applied to ``x [B, L, hidden]`` before, ``residual`` is added after."""
        B, L, _ = x.shape
        rotation, heads = positions.rotation(self.rope), self._heads
        qkv = self._qkv.side_by_side(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)
        norms = self.q_norm, self.k_norm
        if all(isinstance(own, RMSNorm) for own in norms):
            sizes = {"heads": heads, "kv_heads": self._kv_heads, "gated": True, "backend": self._backend}
            sizes |= {"q_norm": norms[0]["weight"], "k_norm": norms[1]["weight"], "eps": norms[0].eps}
            sizes["centered"] = norms[0].centered
            if cache is not None and cache.places(L) and appends(qkv, self._backend):
                y = self.attend_in_place(x, qkv, positions, cache, sizes)
                cache.written(y)
                return project(self.o_proj, y, residual=residual)
            q, (k, v) = qkv_epilogue(qkv, rotation, **sizes)
        else:
            own = qkv.reshape(B, L, -1, self.head_dim).transpose(0, 2, 1, 3)
            q, k, v = own[:, : 2 * heads : 2], *mx.split(own[:, 2 * heads :], 2, axis=1)
            q, k = (rotate(turn(y), rotation, backend=self._backend) for turn, y in zip(norms, (q, k), strict=True))
        gate = qkv.reshape(B, L, -1, self.head_dim)[:, :, 1 : 2 * heads : 2]
        y = self.attend(x, q, k, v, positions, cache).transpose(0, 2, 1, 3) * mx.sigmoid(gate)
        return project(self.o_proj, y.reshape(B, L, -1), residual=residual)

    def attend_in_place(
        self, x: mx.array, qkv: mx.array, positions: Positions, cache: LinearKV, sizes: dict[str, Any]
    ) -> mx.array:
        """What the queries of ``qkv [B, L, rows]`` find in ``cache``, where kernels write its keys and values, times
        their gates: ``[B, L, H * D]``. ``sizes`` are options of `rotary.qkv_append`; ``x`` is as in `attend`."""
        length = x.shape[1]
        kv = cache.place(length, (x.shape[0], self._kv_heads, self.head_dim), qkv.dtype)
        options = {"scale": self.head_dim**-0.5, "mask": "causal" if length > 1 else None}
        return append_attention(qkv, positions.rotation(self.rope), kv, positions.start, **sizes, **options)

    def attend(
        self, x: mx.array, q: mx.array, k: mx.array, v: mx.array, positions: Positions, cache: LinearKV | None
    ) -> mx.array:
        """What ``q [B, H, L, D]`` finds at ``k``, ``v [B, KV, L, D]`` and at those of ``cache``, to which they are
        added: ``[B, H, L, D]``. ``x`` is what this layer was called with, for those that choose by it."""
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        return self._attention(q, k, v, scale=self.head_dim**-0.5, mask="causal" if q.shape[2] > 1 else None)
