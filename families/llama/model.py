"""The llama family's decoder: Llama 2/3.x, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE in one, by switches.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head. Qwen2 adds biases to q, k and v
before the rotation; Qwen3 normalises every head of q and k before it.
"""

from __future__ import annotations

from turbospark_mlx.families.attention import GroupedAttention
from turbospark_mlx.families.decoder import CausalModel, Decoder, PreNormLayer
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import Builder, RoPE
from turbospark_mlx.families.llama.config import LlamaConfig
from turbospark_mlx.families.llama.weights import expected, experts
from turbospark_mlx.families.moe import SparseMoe
from turbospark_mlx.families.rope import attention_factor, frequencies, longest_context


def feed_forward(config: LlamaConfig, number: int, build: Builder) -> FeedForward | SparseMoe:
    """The block of layer ``number``: routed experts where it has any."""
    path = f"model.layers.{number}.mlp"
    spec = experts(config).get(f"{path}.switch_mlp")
    if spec is None:
        return FeedForward(path, config.hidden_size, config.intermediate_size, build, bias=config.mlp_bias)
    position = config.routed_layers().index(number)
    return SparseMoe(path, position, spec, normalize=config.norm_topk_prob, build=build)


class DecoderLayer(PreNormLayer):
    def __init__(self, config: LlamaConfig, number: int, rope: RoPE, build: Builder):
        path = f"model.layers.{number}"
        attention = GroupedAttention(
            f"{path}.self_attn",
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            # Queries and keys are both multiplied by the attention factor, so their products are by its square.
            scale=config.head_dim**-0.5 * attention_factor(config.rope_scaling) ** 2,
            window=config.window(number),
            rope=rope,
            build=build,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            head_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
        super().__init__(config, path, attention, feed_forward(config, number, build), build)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: LlamaConfig, build: Builder, length: int) -> Decoder:
        self.longest_context = longest_context(config.rope_scaling, length)
        rope = RoPE(frequencies(config.head_dim, config.rope_theta, config.rope_scaling, length))
        return Decoder(config, lambda number: DecoderLayer(config, number, rope, build), build)
