"""The deepseek2 family's decoder: DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).

Shapes: B sequences, L tokens, S visible ones, H heads; a head has n dimensions without a position, r that turn, v
values; R is the width of the latent that keys and values come from. What is cached of a token is its normalised latent
and one turned key part for all heads.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark_mlx.cache import LatentKV
from turbospark_mlx.custom_kernels import HeadRows, backends, latent_attends, latent_attention, rotate, rotations
from turbospark_mlx.families.decoder import CausalModel, Decoder, PreNormLayer
from turbospark_mlx.families.deepseek2.config import BIASED, Deepseek2Config
from turbospark_mlx.families.deepseek2.weights import expected, experts
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.layers import AffineLinear, Builder, Module, Positions, RMSNorm, RoPE, project
from turbospark_mlx.families.moe import route, routed_experts
from turbospark_mlx.families.rope import attention_factor, frequencies

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the configuration's ``rms_norm_eps`` is."""


class PartialRoPE(RoPE):
    """`RoPE` of pairs of neighbours or of halves, with a magnitude: only a part of a head turns, so that it cannot go
    into the scale of scores."""

    def __init__(self, frequencies: np.ndarray, *, interleaved: bool, magnitude: float):
        super().__init__(frequencies)
        self.interleaved, self._magnitude = interleaved, magnitude

    def table(self, offset: int, length: int) -> np.ndarray:
        return rotations(self._frequencies, np.arange(offset, offset + length), magnitude=self._magnitude)

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        y = mx.fast.rope(
            x, x.shape[-1], traditional=self.interleaved, base=None, scale=1.0, offset=offset, freqs=self._periods
        )
        return y if self._magnitude == 1.0 else y * self._magnitude


def per_head(
    linear: nn.Module, heads: int, rows: slice, x: mx.array, *, transpose: bool, backend: backends.Backend
) -> mx.array:
    """Products with the ``rows`` that each head has in a matrix, as it is stored: ``x [B, H, L, K]`` times their
    transpose where ``transpose``, otherwise times themselves; in the dtype of ``x``."""
    names = [name for name in ("weight", "scales", "biases") if name in linear]
    weight, *companions = (linear[name].reshape(heads, -1, linear[name].shape[-1]) for name in names)
    if companions:
        form = {"group_size": linear.group_size, "bits": linear.bits}
        if backend.device == "cpu":
            weight, *companions = (part[:, rows] for part in (weight, *companions))
            return mx.quantized_matmul(x, weight, *companions, transpose=transpose, **form).astype(x.dtype)
        # MLX's CUDA products take packed matrices neither in part nor, of this shape, at all.
        weight = mx.dequantize(weight, *(companion.astype(x.dtype) for companion in companions), **form)
    weight = weight[:, rows].astype(x.dtype)
    return x @ (weight.swapaxes(-1, -2) if transpose else weight)


class Attention(Module):
    """Multi-head latent attention in its absorbed form: queries are brought to the latents, not latents to every
    head's keys and values.

    ``kv_b_proj``'s matrix is used as it is stored. Where something else stands in for that module (an adapter), the
    expanded form applies it to every visible latent.
    """

    def __init__(self, config: Deepseek2Config, path: str, rope: PartialRoPE, build: Builder):
        super().__init__()
        self._rope, self._attention, self._backend, self._fused = rope, build.attention, build.backend, build.fused
        self._scale, self._heads, self._latent = config.attention_scale, config.num_attention_heads, config.kv_lora_rank
        self._nope, self._values = config.qk_nope_head_dim, config.v_head_dim
        hidden, rows = config.hidden_size, config.num_attention_heads * (self._nope + config.qk_rope_head_dim)
        self._first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        (self[self._first], self.kv_a_proj_with_mqa), self._joint = build.projections(
            hidden,
            {
                f"{path}.{self._first}": config.q_lora_rank or rows,
                f"{path}.kv_a_proj_with_mqa": config.latent_size,
            },
        )
        if config.q_lora_rank is not None:
            self.q_a_layernorm = build.norm(f"{path}.q_a_layernorm", config.q_lora_rank, _LATENT_EPS)
            self.q_b_proj = build.linear(f"{path}.q_b_proj", config.q_lora_rank, rows)
        self.kv_a_layernorm = build.norm(f"{path}.kv_a_layernorm", self._latent, _LATENT_EPS)
        if config.split_kv_b:
            self.embed_q = build.linear(f"{path}.embed_q", self._nope, self._heads * self._latent)
            self.unembed_out = build.linear(f"{path}.unembed_out", self._latent, self._heads * self._values)
        else:
            self.kv_b_proj = build.linear(f"{path}.kv_b_proj", self._latent, self._heads * (self._nope + self._values))
        self.o_proj = build.linear(f"{path}.o_proj", self._heads * self._values, hidden)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: LatentKV | None = None,
        *,
        norm: nn.Module,
        residual: mx.array,
    ) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        B, L, _ = x.shape
        parts = self[self._first], self.kv_a_proj_with_mqa
        joint = self._joint.joint(*parts)
        if joint is not None:
            width = parts[1]["weight"].shape[0]
            q, latent = mx.split(project(joint, x, norm=norm), [-width], axis=-1)
        else:
            q, latent = self._joint(norm(x), *parts)
        if "q_b_proj" in self:
            q = project(self.q_b_proj, q, norm=self.q_a_layernorm)
        options = {"scale": self._scale, "mask": "causal" if L > 1 else None}
        if cache is not None and cache.places(L) and (matrices := self._matrices()) is not None:
            rotation = positions.rotation(self._rope)
            if latent_attends(q, rotation, self._backend):
                rows = cache.place(L, (B, 1, latent.shape[-1]), latent.dtype)
                around = {"transposed": "embed_q" in self, "interleaved": self._rope.interleaved}
                learned = self.kv_a_layernorm["weight"], rotation, rows, positions.start, *matrices
                y = latent_attention(q, latent, *learned, **options, **around, eps=_LATENT_EPS, backend=self._backend)
                cache.written(y)
                return project(self.o_proj, y, residual=residual)
        q = q.reshape(B, L, self._heads, -1).transpose(0, 2, 1, 3)
        rows = mx.concatenate(
            [
                self.kv_a_layernorm(latent[..., : self._latent])[:, None],
                self._turn(latent[:, None, :, self._latent :], positions),
            ],
            axis=-1,
        )
        if cache is not None:
            buffer, count = cache.append(rows[None])
            rows = buffer[0, :, :, :count]
        y = self._attend(q[..., : self._nope], self._turn(q[..., self._nope :], positions), rows, options)
        return project(self.o_proj, y.transpose(0, 2, 1, 3).reshape(B, L, -1), residual=residual)

    def _turn(self, x: mx.array, positions: Positions) -> mx.array:
        if not self._fused:
            return self._rope(x, positions.offset)
        rotation = positions.rotation(self._rope)
        return rotate(x, rotation, interleaved=self._rope.interleaved, backend=self._backend)

    def _matrices(self) -> tuple[HeadRows, HeadRows] | None:
        """Where keys and values come from, if both are packed and the norm of latents is this package's."""
        names = ("embed_q", "unembed_out") if "embed_q" in self else ("kv_b_proj",)
        if not isinstance(self.kv_a_layernorm, RMSNorm) or not all(isinstance(self[n], AffineLinear) for n in names):
            return None

        def rows(linear: AffineLinear, first: int, count: int, stride: int) -> HeadRows:
            parts = (linear["weight"], linear["scales"], linear["biases"])
            return HeadRows(*parts, linear.bits, linear.group_size, first, count, stride)

        nope, values = self._nope, self._values
        if "embed_q" in self:
            return rows(self.embed_q, 0, self._latent, self._latent), rows(self.unembed_out, 0, values, values)
        return rows(self.kv_b_proj, 0, nope, nope + values), rows(self.kv_b_proj, nope, values, nope + values)

    def _attend(self, q: mx.array, turned: mx.array, rows: mx.array, options: dict[str, object]) -> mx.array:
        """``q [B, H, L, n]``, ``turned [B, H, L, r]`` over ``rows [B, 1, S, R + r]`` -> ``[B, H, L, v]``."""
        latents, heads, nope = rows[..., : self._latent], self._heads, self._nope
        if "embed_q" in self:
            q = per_head(self.embed_q, heads, slice(None), q, transpose=True, backend=self._backend)
            y = self._attention(mx.concatenate([q, turned], axis=-1), rows, latents, **options)
            return per_head(self.unembed_out, heads, slice(None), y, transpose=True, backend=self._backend)
        linear = self.kv_b_proj
        if "weight" in linear:
            q = per_head(linear, heads, slice(None, nope), q, transpose=False, backend=self._backend)
            y = self._attention(mx.concatenate([q, turned], axis=-1), rows, latents, **options)
            return per_head(linear, heads, slice(nope, None), y, transpose=True, backend=self._backend)
        B, _, S, _ = rows.shape
        each = linear(latents[:, 0]).reshape(B, S, heads, -1).transpose(0, 2, 1, 3)
        keys = mx.broadcast_to(rows[..., self._latent :], (B, heads, S, turned.shape[-1]))
        keys = mx.concatenate([each[..., :nope], keys], axis=-1)
        return self._attention(mx.concatenate([q, turned], axis=-1), keys, each[..., nope:], **options)


def routing(config: Deepseek2Config) -> dict[str, object]:
    """How tokens choose their experts (arXiv:2405.04434, 2.1.3; arXiv:2412.19437, 2.1.2), as options of
    `custom_kernels.router_topk_select`."""
    return {
        "top_k": config.num_experts_per_tok,
        "normalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "sigmoid": config.topk_method == BIASED,
        "groups": config.n_group,
        "kept_groups": config.topk_group,
    }


class Mixture(Module):
    """Routed experts, and the shared ones, which every token meets, unweighted."""

    def __init__(self, config: Deepseek2Config, path: str, position: int, build: Builder):
        super().__init__()
        self._routing, self._backend = routing(config), build.backend
        self.gate = build.linear(f"{path}.gate", config.hidden_size, config.n_routed_experts)
        if config.topk_method == BIASED:
            name = "e_score_correction_bias"
            self.gate[name] = build.vector(f"{path}.gate.{name}", config.n_routed_experts)
        spec = experts(config)[f"{path}.switch_mlp"]
        self.switch_mlp = routed_experts(f"{path}.switch_mlp", position, spec, build)
        self.shared_experts = FeedForward(
            f"{path}.shared_experts", config.hidden_size, config.shared_expert_intermediate_size, build
        )

    def __call__(self, x: mx.array, *, norm: nn.Module, residual: mx.array) -> mx.array:
        """``norm`` is applied to ``x`` before, ``residual`` is added after."""
        rows = norm(x).reshape(-1, x.shape[-1])
        choice_bias = self.gate.get("e_score_correction_bias")
        indices, weights = route(self.gate, rows, **self._routing, choice_bias=choice_bias, backend=self._backend)
        pending = self.switch_mlp.begin(indices)
        shared = self.shared_experts(x, norm=norm, residual=residual)
        added = shared.reshape(rows.shape)
        return self.switch_mlp.finish(pending, rows, weights, meanwhile=(shared,), residual=added).reshape(x.shape)


class DecoderLayer(PreNormLayer):
    def __init__(self, config: Deepseek2Config, number: int, rope: PartialRoPE, build: Builder):
        path, routed = f"model.layers.{number}", config.routed_layers()
        if number in routed:
            feed_forward = Mixture(config, f"{path}.mlp", routed.index(number), build)
        else:
            feed_forward = FeedForward(f"{path}.mlp", config.hidden_size, config.intermediate_size, build)
        attention = Attention(config, f"{path}.self_attn", rope, build)
        super().__init__(config, path, attention, feed_forward, build)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: Deepseek2Config, build: Builder, length: int) -> Decoder:
        turns = frequencies(
            config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        rope = PartialRoPE(turns, interleaved=config.rope_interleave, magnitude=attention_factor(config.rope_scaling))
        return Decoder(config, lambda number: DecoderLayer(config, number, rope, build), build)

    def make_cache(self, max_length: int | None = None) -> list[LatentKV]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        return [LatentKV(max_length) for _ in self.layers]
