"""gpt-oss's decoder (OpenAI 2025, arXiv:2508.10925).

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.families.attention import GroupedAttention
from turbospark_mlx.families.decoder import CausalModel, Decoder, PreNormLayer
from turbospark_mlx.families.gpt_oss.config import GptOssConfig
from turbospark_mlx.families.gpt_oss.weights import expected, experts
from turbospark_mlx.families.layers import Builder, Module, RoPE
from turbospark_mlx.families.moe import route, routed_experts
from turbospark_mlx.families.rope import attention_factor, frequencies, longest_context


class Mixture(Module):
    """What the checkpoint calls ``mlp``: a router with a bias, and routed experts alone."""

    def __init__(self, config: GptOssConfig, number: int, build: Builder):
        super().__init__()
        path = f"model.layers.{number}.mlp"
        spec = experts(config)[f"{path}.experts"]
        self._top_k, self._backend = spec.top_k, build.backend
        self.router = build.linear(f"{path}.router", spec.hidden, spec.num_experts, bias=True)
        self.experts = routed_experts(f"{path}.experts", number, spec, build)

    def __call__(self, x: mx.array, *, norm: nn.Module, residual: mx.array) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = norm(x).reshape(-1, x.shape[-1])
        indices, weights = route(self.router, rows, self._top_k, normalize=True, backend=self._backend)
        pending = self.experts.begin(indices)
        return self.experts.finish(pending, rows, weights, residual=residual.reshape(rows.shape)).reshape(x.shape)


class DecoderLayer(PreNormLayer):
    def __init__(self, config: GptOssConfig, number: int, rope: RoPE, build: Builder):
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
            output_bias=config.attention_bias,
            sinks=True,
        )
        super().__init__(config, path, attention, Mixture(config, number, build), build)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: GptOssConfig, build: Builder, length: int) -> Decoder:
        self.longest_context = longest_context(config.rope_scaling, length)
        rope = RoPE(frequencies(config.head_dim, config.rope_theta, config.rope_scaling, length))
        return Decoder(config, lambda number: DecoderLayer(config, number, rope, build), build)
