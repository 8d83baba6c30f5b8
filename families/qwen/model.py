"""Qwen 3.5's decoder: three recurrent layers (`families.delta`) for each one with full, gated attention
(`families.gated_attention`), dense or with routed experts beside a shared one that has a gate of its own.

Does not know images: ids of their placeholders are embedded like any token's.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.cache import LinearKV, RecurrentState
from turbospark_mlx.families.decoder import CausalModel, Decoder
from turbospark_mlx.families.delta import GatedDeltaNet
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.gated_attention import GatedAttention
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE
from turbospark_mlx.families.moe import SharedExpertMoe
from turbospark_mlx.families.qwen.config import QwenConfig
from turbospark_mlx.families.qwen.weights import convolution_shape, expected, experts

State = LinearKV | RecurrentState


class DecoderLayer(Module):
    def __init__(self, config: QwenConfig, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path = f"model.layers.{number}"
        if config.recurs(number):
            shape = convolution_shape(config)
            self.linear_attn = GatedDeltaNet(config, f"{path}.linear_attn", build, convolution=shape)
        else:
            self.self_attn = GatedAttention(config, f"{path}.self_attn", rope, build)
        if config.num_experts:
            spec, wide = experts(config)[f"{path}.mlp.switch_mlp"], config.shared_expert_intermediate_size
            self.mlp = SharedExpertMoe(f"{path}.mlp", number, spec, wide, build)
        else:
            self.mlp = FeedForward(f"{path}.mlp", config.hidden_size, config.intermediate_size, build)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self[name] = build.norm(
                f"{path}.{name}", config.hidden_size, config.rms_norm_eps, centered=config.centered_norms
            )

    def __call__(self, x: mx.array, cache: State | None = None, positions: Positions | None = None) -> mx.array:
        """``positions`` are those after what ``cache`` holds, or from 0 on."""
        positions = positions or Positions.after(cache, x.shape[1])
        attend = self.linear_attn if "linear_attn" in self else self.self_attn
        x = attend(x, positions, cache, norm=self.input_layernorm, residual=x)
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
