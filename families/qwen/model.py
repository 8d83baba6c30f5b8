"""Qwen 3.5's decoder: three recurrent layers (`delta`) for each one with full attention, dense or with experts.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head. Notable: what attention answers
is multiplied by the sigmoid of a gate, which is projected with the queries; queries and keys are normalised a head, and
a quarter of each head turns; beside its routed experts a layer has a shared one with a gate of its own.

Does not know images: ids of their placeholders are embedded like any token's.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RecurrentState
from turbospark_mlx.custom_kernels import rotate
from turbospark_mlx.families.decoder import CausalModel, Decoder
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE, project
from turbospark_mlx.families.moe import route, routed_experts
from turbospark_mlx.families.qwen.config import QwenConfig
from turbospark_mlx.families.qwen.delta import GatedDeltaNet
from turbospark_mlx.families.qwen.weights import expected, experts

State = LinearKV | RecurrentState


class Attention(Module):
    """Grouped-query attention over everything, with a gate on each of its answers."""

    def __init__(self, config: QwenConfig, path: str, rope: RoPE, build: Builder):
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, self.rope, self._backend, self._attention = size, rope, build.backend, build.attention
        rows = {"q_proj": 2 * heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        (self.q_proj, self.k_proj, self.v_proj), self._qkv = build.projections(
            config.hidden_size, {f"{path}.{name}": n for name, n in rows.items()}
        )
        self.o_proj = build.linear(f"{path}.o_proj", heads * size, config.hidden_size)
        for name in ("q_norm", "k_norm"):
            self[name] = build.norm(f"{path}.{name}", size, config.rms_norm_eps, centered=config.centered_norms)

    def __call__(
        self, x: mx.array, positions: Positions, cache: LinearKV | None = None, *, norm: nn.Module, residual: mx.array
    ) -> mx.array:
        """``norm`` is applied to ``x [B, L, hidden]`` before, ``residual`` is added after."""
        B, L, _ = x.shape
        products = self._qkv(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)
        q, k, v = (y.reshape(B, L, -1, self.head_dim) for y in products)
        q, gate = q[:, :, ::2], q[:, :, 1::2]
        q, k, v = (y.transpose(0, 2, 1, 3) for y in (self.q_norm(q), self.k_norm(k), v))
        rotation = positions.rotation(self.rope)
        q, k = (rotate(y, rotation, backend=self._backend) for y in (q, k))
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = self._attention(q, k, v, scale=self.head_dim**-0.5, mask="causal" if L > 1 else None)
        y = y.transpose(0, 2, 1, 3) * mx.sigmoid(gate)
        return project(self.o_proj, y.reshape(B, L, -1), residual=residual)


class Mixture(Module):
    """Routed experts, whose weights add up to 1, and a shared one with a gate."""

    def __init__(self, config: QwenConfig, number: int, build: Builder):
        super().__init__()
        path, hidden = f"model.layers.{number}.mlp", config.hidden_size
        spec = experts(config)[f"{path}.switch_mlp"]
        self._top_k, self._backend = spec.top_k, build.backend
        self.gate = build.linear(f"{path}.gate", hidden, spec.num_experts)
        self.switch_mlp = routed_experts(f"{path}.switch_mlp", number, spec, build)
        wide = config.shared_expert_intermediate_size
        self.shared_expert = FeedForward(f"{path}.shared_expert", hidden, wide, build)
        self.shared_expert_gate = build.linear(f"{path}.shared_expert_gate", hidden, 1)

    def __call__(self, x: mx.array, *, norm: nn.Module, residual: mx.array) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = norm(x).reshape(-1, x.shape[-1])
        indices, weights = route(self.gate, rows, self._top_k, normalize=True, backend=self._backend)
        pending = self.switch_mlp.begin(indices)
        shared = self.shared_expert(rows) * mx.sigmoid(self.shared_expert_gate(rows))
        routed = self.switch_mlp.finish(pending, rows, weights, meanwhile=(shared,))
        return residual + (routed + shared).reshape(x.shape)


class DecoderLayer(Module):
    def __init__(self, config: QwenConfig, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path = f"model.layers.{number}"
        if config.recurs(number):
            self.linear_attn = GatedDeltaNet(config, f"{path}.linear_attn", build)
        else:
            self.self_attn = Attention(config, f"{path}.self_attn", rope, build)
        if config.num_experts:
            self.mlp = Mixture(config, number, build)
        else:
            self.mlp = FeedForward(f"{path}.mlp", config.hidden_size, config.intermediate_size, build)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self[name] = build.norm(
                f"{path}.{name}", config.hidden_size, config.rms_norm_eps, centered=config.centered_norms
            )

    def __call__(self, x: mx.array, cache: State | None = None, positions: Positions | None = None) -> mx.array:
        """``positions`` are those after what ``cache`` holds, or from 0 on."""
        positions = positions or Positions.after(cache, x.shape[1])
        norm = self.input_layernorm
        if "linear_attn" in self:
            x = self.linear_attn(x, cache, norm=norm, residual=x)
        else:
            x = self.self_attn(x, positions, cache, norm=norm, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: QwenConfig, build: Builder, length: int) -> Decoder:
        rope = RoPE(config.frequencies())

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(config, number, rope, build)

        return Decoder(config, layer, build, centered=config.centered_norms)

    def make_cache(self, max_length: int | None = None) -> list[State]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        recurs = map(self.args.recurs, range(self.args.num_hidden_layers))
        return [RecurrentState() if each else LinearKV(max_length) for each in recurs]
