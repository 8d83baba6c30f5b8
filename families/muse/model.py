"""Muse Glimmer's decoder (model card: huggingface.co/meta-models/Muse-Glimmer-30B).

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head. Notable: embeddings, queries and
keys are normalised without weights, and queries then multiplied by a number; what attention answers is multiplied by
the sigmoid of a gate, which is a projection of its own; every block's input and output are normalised, with weights
stored less 1 and a much smaller epsilon after a block; three layers of four have a window and rotary positions, the
fourth sees everything and knows no positions; logits are multiplied by a number before they are capped.

Does not know images or video: ids of their placeholders are embedded like any token's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import rms_norm
from turbospark_mlx.families.attention import GroupedAttention
from turbospark_mlx.families.decoder import CausalModel, Decoder
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE, add_normed
from turbospark_mlx.families.muse.config import MuseConfig
from turbospark_mlx.families.muse.weights import expected
from turbospark_mlx.protocols import LayerCache


class DecoderLayer(Module):
    def __init__(self, config: MuseConfig, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path, hidden = f"model.layers.{number}", config.hidden_size
        self.self_attn = GroupedAttention(
            f"{path}.self_attn",
            hidden,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            # Queries are multiplied by the factor after their norm, so scores are.
            scale=config.head_dim**-0.5 * config.qk_scale_factor,
            window=config.window(number),
            rope=rope,
            build=build,
            head_norm_eps=config.rms_norm_eps,
            head_norm_weights=False,
            gates=("gate_proj", config.num_attention_heads * config.head_dim),
        )
        self.mlp = FeedForward(f"{path}.mlp", hidden, config.intermediate_size, build)
        for name, eps in (
            ("input_layernorm", config.rms_norm_eps),
            ("post_attention_layernorm", config.post_norm_eps),
            ("pre_feedforward_layernorm", config.rms_norm_eps),
            ("post_feedforward_layernorm", config.post_norm_eps),
        ):
            self[name] = build.norm(f"{path}.{name}", hidden, eps, centered=True)

    def __call__(
        self, x: mx.array, cache: LinearKV | RingKV | None = None, positions: Positions | None = None
    ) -> mx.array:
        """``positions`` are those after what ``cache`` holds, or from 0 on."""
        positions = positions or Positions.after(cache, x.shape[1])
        y = self.self_attn(x, positions, cache, norm=self.input_layernorm)
        x = add_normed(x, self.post_attention_layernorm, y)
        y = self.mlp(x, norm=self.pre_feedforward_layernorm)
        return add_normed(x, self.post_feedforward_layernorm, y)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: MuseConfig, build: Builder, length: int) -> Decoder:
        self.logit_scale, self.logit_cap = config.output_multiplier, config.final_logit_softcapping
        # Without a position, nothing turns.
        ropes = {rotates: RoPE(config.frequencies(rotates)) for rotates in (False, True)}

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(config, number, ropes[config.rotates[number]], build)

        return Decoder(config, layer, build)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[LayerCache] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
    ) -> mx.array:
        """Normalised last hidden states ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead,
        as the embedding gives them, before they are normalised. ``positions`` are those after what ``cache`` holds, or
        from 0 on."""
        x = self.model.embed_tokens(tokens) if input_embeddings is None else input_embeddings
        x = rms_norm(x.astype(self.dtype), None, eps=self.args.rms_norm_eps, backend=self.backend)
        return super().hidden(None, cache, x, positions=positions)
