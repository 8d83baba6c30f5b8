"""Qwen 3.5's decoder: three recurrent layers (`delta`) for each one with full attention, dense or with experts.

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head. Notable: what attention answers
is multiplied by the sigmoid of a gate, which is projected with the queries; queries and keys are normalised a head, and
a quarter of each head turns; beside its routed experts a layer has a shared one with a gate of its own.

Does not know images: ids of their placeholders are embedded like any token's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RecurrentState
from turbospark_mlx.custom_kernels import backends, rotate
from turbospark_mlx.families.layers import Builder, Format, Module, Positions, RMSNorm, RoPE, project
from turbospark_mlx.families.moe import route, routed_experts
from turbospark_mlx.families.qwen.config import QwenConfig
from turbospark_mlx.families.qwen.delta import GatedDeltaNet
from turbospark_mlx.families.qwen.weights import expected, experts
from turbospark_mlx.protocols import ExpertFactory

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


class FeedForward(Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, wide: int, path: str, build: Builder):
        super().__init__()
        (self.gate_proj, self.up_proj), self._gate_up = build.projections(
            hidden, {f"{path}.gate_proj": wide, f"{path}.up_proj": wide}
        )
        self.down_proj = build.linear(f"{path}.down_proj", wide, hidden)

    def __call__(self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        joint = self._gate_up.joint(self.gate_proj, self.up_proj)
        if joint is not None:
            if norm is not None and (not isinstance(norm, RMSNorm) or norm.centered):
                x, norm = norm(x), None
            return project(self.down_proj, joint.gated(x, norm=norm), residual=residual)
        gate, up = self._gate_up(x, self.gate_proj, self.up_proj, norm=norm)
        return project(self.down_proj, gate * mx.sigmoid(gate) * up, residual=residual)


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
        self.shared_expert = FeedForward(hidden, wide, f"{path}.shared_expert", build)
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
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size, f"{path}.mlp", build)
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


class Decoder(Module):
    """Embedding, layers and final norm: what the checkpoint calls ``model``."""

    def __init__(self, config: QwenConfig, build: Builder):
        super().__init__()
        rope = RoPE(config.frequencies())
        self.embed_tokens = build.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, number, rope, build) for number in range(config.num_hidden_layers)]
        self.norm = build.norm("model.norm", config.hidden_size, config.rms_norm_eps, centered=config.centered_norms)


class Model(Module):
    """A model of the family. It follows the protocol that mlx-lm's tools call: ``model(tokens, cache=...)``,
    ``model.layers``, ``model.make_cache()``, ``model.args``."""

    longest_context = None

    def __init__(
        self,
        config: QwenConfig,
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
        ``fused=False`` makes plain ``mlx.nn`` modules. ``experts`` makes the routed experts of each layer; None makes
        them parameters. ``max_context`` changes nothing here: frequencies are the same for every length.
        """
        super().__init__()
        self.args, self.model_type, self.dtype, self.fused = config, config.model_type, dtype, fused
        self.experts = experts
        self.parameter_count = sum(map(prod, expected(config).values()))
        self.backend = backend or backends.select()
        build = Builder(self.backend, dtype, formats or {}, fused, experts)
        self.model = Decoder(config, build)
        if not config.tie_word_embeddings:
            self.lm_head = build.linear("lm_head", config.hidden_size, config.vocab_size)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[State] | None = None,
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
        cache: Sequence[State] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits ``[B, L, vocab]``. Tokens go on from where ``cache`` is; without one they start at position 0."""
        return self.head(self.hidden(tokens, cache, input_embeddings))

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def make_cache(self, max_length: int | None = None) -> list[State]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        recurs = map(self.args.recurs, range(self.args.num_hidden_layers))
        return [RecurrentState() if each else LinearKV(max_length) for each in recurs]
