"""gpt-oss's decoder (OpenAI 2025, arXiv:2508.10925).

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import append_attention, appends, backends, qkv_epilogue
from turbospark_mlx.families.gpt_oss.config import GptOssConfig
from turbospark_mlx.families.gpt_oss.weights import expected, experts
from turbospark_mlx.families.layers import Builder, Format, Module, Positions, RoPE, project
from turbospark_mlx.families.moe import route, routed_experts
from turbospark_mlx.families.rope import attention_factor, frequencies, longest_context
from turbospark_mlx.protocols import ExpertFactory


class Attention(Module):
    """Grouped-query attention with rotary positions, over all tokens or over a sliding window.

    Each query head has a sink: a logit, not scaled, that takes part in the softmax without a value.
    """

    def __init__(self, config: GptOssConfig, path: str, window: int | None, rope: RoPE, build: Builder):
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, self.window, self.rope, self._attention = width, window, rope, build.attention
        self._heads, self._kv_heads, self._backend = heads, kv_heads, build.backend
        # Queries and keys are both multiplied by the attention factor, so their products are by its square.
        self.scale = width**-0.5 * attention_factor(config.rope_scaling) ** 2
        rows = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
        (self.q_proj, self.k_proj, self.v_proj), self._qkv = build.projections(
            config.hidden_size, {f"{path}.{name}": n for name, n in rows.items()}, bias=config.attention_bias
        )
        self.o_proj = build.linear(f"{path}.o_proj", heads * width, config.hidden_size, bias=config.attention_bias)
        self.sinks = build.vector(f"{path}.sinks", heads)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: LinearKV | RingKV | None = None,
        *,
        norm: nn.Module,
        residual: mx.array,
    ) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        B, L, _ = x.shape
        # A single token sees every key that its cache returns, and a ring returns them in no particular order.
        mask, window = ("causal", self.window) if L > 1 else (None, None)
        options = {"scale": self.scale, "mask": mask, "window": window, "sinks": self["sinks"]}
        parts = (self.q_proj, self.k_proj, self.v_proj)
        joint = self._qkv.joint(*parts)
        if joint is not None:
            sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "backend": self._backend}
            qkv, rotation = project(joint, x, norm=norm), positions.rotation(self.rope)
            if cache is not None and cache.places(L) and appends(qkv, self._backend):
                kv = cache.place(L, (B, self._kv_heads, self.head_dim), qkv.dtype)
                y = append_attention(qkv, rotation, kv, positions.start, **sizes, **options)
                cache.written(y)
                return project(self.o_proj, y, residual=residual)
            q, kv = qkv_epilogue(qkv, rotation, **sizes)
            kv, keys = (kv, L) if cache is None else cache.append(kv)
            k, v = kv[0, :, :, :keys], kv[1, :, :, :keys]
        else:
            products = self._qkv(norm(x), *parts)
            q, k, v = (y.reshape(B, L, -1, self.head_dim).transpose(0, 2, 1, 3) for y in products)
            q, k = self.rope(q, positions.offset), self.rope(k, positions.offset)
            if cache is not None:
                k, v = cache.update_and_fetch(k, v)
        y = self._attention(q, k, v, **options)
        return project(self.o_proj, y.transpose(0, 2, 1, 3).reshape(B, L, -1), residual=residual)


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


class DecoderLayer(Module):
    def __init__(self, config: GptOssConfig, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path = f"model.layers.{number}"
        self.window = config.sliding_window if config.slides(number) else None
        self.self_attn = Attention(config, f"{path}.self_attn", self.window, rope, build)
        self.mlp = Mixture(config, number, build)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, build.norm(f"{path}.{name}", config.hidden_size, config.rms_norm_eps))

    def __call__(
        self, x: mx.array, cache: LinearKV | RingKV | None = None, positions: Positions | None = None
    ) -> mx.array:
        """``positions`` are those after what ``cache`` holds, or from 0 on."""
        positions = positions or Positions.after(cache, x.shape[1])
        x = self.self_attn(x, positions, cache, norm=self.input_layernorm, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class Decoder(Module):
    """Embedding, layers and final norm: what the checkpoint calls ``model``."""

    def __init__(self, config: GptOssConfig, rope: RoPE, build: Builder):
        super().__init__()
        self.embed_tokens = build.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, number, rope, build) for number in range(config.num_hidden_layers)]
        self.norm = build.norm("model.norm", config.hidden_size, config.rms_norm_eps)


class Model(Module):
    """A model of the family. It follows the protocol that mlx-lm's tools call: ``model(tokens, cache=...)``,
    ``model.layers``, ``model.make_cache()``, ``model.args``."""

    def __init__(
        self,
        config: GptOssConfig,
        *,
        formats: Mapping[str, Format] | None = None,
        backend: backends.Backend | None = None,
        dtype: mx.Dtype = mx.float32,
        fused: bool = True,
        max_context: int | None = None,
        experts: ExpertFactory | None = None,
    ):
        """Zeroed parameters, to be loaded.

        ``formats`` says how each tensor is stored (see ``layers.Builder``), ``dtype`` is that of activations.
        ``fused=False`` makes plain ``mlx.nn`` modules. ``max_context`` is the longest context to expect, by which
        LongRoPE chooses its frequencies; None means the trained one. ``experts`` makes the routed experts of each
        layer; None makes them parameters.
        """
        super().__init__()
        self.args, self.model_type, self.dtype, self.fused = config, config.model_type, dtype, fused
        self.experts = experts
        self.parameter_count = sum(map(prod, expected(config).values()))
        self.backend = backend or backends.select()
        build = Builder(self.backend, dtype, formats or {}, fused, experts)
        length = max_context or config.max_position_embeddings
        self.longest_context = longest_context(config.rope_scaling, length)
        rope = RoPE(frequencies(config.head_dim, config.rope_theta, config.rope_scaling, length))
        self.model = Decoder(config, rope, build)
        if not config.tie_word_embeddings:
            self.lm_head = build.linear("lm_head", config.hidden_size, config.vocab_size)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[LinearKV | RingKV] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
    ) -> mx.array:
        """Normalised last hidden states ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead.

        ``positions`` are those after what ``cache`` holds, or from 0 on.
        """
        x = self.model.embed_tokens(tokens) if input_embeddings is None else input_embeddings
        x = x.astype(self.dtype)
        positions = positions or Positions.after(cache[0] if cache else None, x.shape[1])
        for layer, state in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, state, positions)
        return self.model.norm(x)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits ``[..., vocab]`` of hidden states ``[..., hidden]``."""
        return self.lm_head(hidden) if "lm_head" in self else self.model.embed_tokens.as_linear(hidden)

    def __call__(
        self,
        tokens: mx.array | None,
        cache: Sequence[LinearKV | RingKV] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits ``[B, L, vocab]``. Tokens go on from where ``cache`` is; without one they start at position 0."""
        return self.head(self.hidden(tokens, cache, input_embeddings))

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def make_cache(self, max_length: int | None = None) -> list[LinearKV | RingKV]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        return [LinearKV(max_length) if layer.window is None else RingKV(layer.window) for layer in self.layers]
