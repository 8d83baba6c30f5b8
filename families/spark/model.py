"""Spark 2.5's decoder (Spark-X2.5's model card and its ``modeling_spark``).

Notable: one matrix projects queries, keys and values; each head's answer is multiplied by the sigmoid of a gate, which
is read from the layer's normalised input; layers with full attention turn a part of each head, the others all of it,
from another base; the residual stream is float32 whatever the activations are.
"""

from __future__ import annotations

from turbospark_mlx.families.attention import GroupedAttention
from turbospark_mlx.families.decoder import CausalModel, Decoder, PreNormLayer
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import Builder, RoPE
from turbospark_mlx.families.spark.config import FULL, SLIDING, SparkConfig
from turbospark_mlx.families.spark.weights import expected


class DecoderLayer(PreNormLayer):
    def __init__(self, config: SparkConfig, number: int, rope: RoPE, build: Builder):
        path = f"model.layers.{number}"
        attention = GroupedAttention(
            f"{path}.self_attn",
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.window(number),
            rope=rope,
            build=build,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            one_matrix=True,
            gates=("g_proj", config.num_attention_heads),
        )
        feed_forward = FeedForward(
            f"{path}.mlp",
            config.hidden_size,
            config.intermediate_size,
            build,
            bias=config.mlp_bias,
            activation="gelu_erf",
        )
        super().__init__(config, path, attention, feed_forward, build)


class Model(CausalModel):
    """A model of the family; see `CausalModel`. The residual stream is in float32, because the published code keeps it
    there: 36 layers add to it, and half precision would round each time."""

    expected = staticmethod(expected)
    float32_residual = True

    def decoder(self, config: SparkConfig, build: Builder, length: int) -> Decoder:
        ropes = {kind: RoPE(config.frequencies(kind)) for kind in (SLIDING, FULL)}

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(config, number, ropes[config.layer_types[number]], build)

        return Decoder(config, layer, build)
