"""Gemma 4's decoder (model card: ai.google.dev/gemma/docs/core/model_card_4).

Shapes: B sequences, L tokens, H query heads, KV key/value heads, D dimensions a head, which differ between layers with
a window and layers with full attention. Notable: every block's input and output are normalised; queries and keys are
normalised a head, values too but without a weight, and scores are not scaled; where keys are values, values are the
keys before norm and rotation; the last layers of some sizes read the keys and values of an earlier layer; every layer
ends with a scalar for the whole residual stream.

Does not know images or sound: ids of their placeholders are embedded like any token's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import (
    JoinedNorms,
    add_rms_norm,
    appends,
    cache_attention,
    gated_product,
    qkv_append,
    qkv_epilogue,
    rms_norm,
    rms_norm_add,
)
from turbospark_mlx.errors import OptionError
from turbospark_mlx.families.decoder import CausalModel, Decoder
from turbospark_mlx.families.feed_forward import FeedForward
from turbospark_mlx.families.gemma4.config import FULL, SLIDING, Gemma4Config
from turbospark_mlx.families.gemma4.weights import expected, experts
from turbospark_mlx.families.layers import (
    Builder,
    Module,
    Positions,
    RMSNorm,
    RoPE,
    add_normed,
    project,
    scaled_rows,
)
from turbospark_mlx.families.moe import route, routed_experts

Visible = tuple[mx.array, mx.array | None]
"""Keys and values ``[B, KV, S, D]`` in time order, or a cache's buffer ``[2, B, KV, capacity, D]`` and None."""


class Attention(Module):
    """Grouped-query attention over a window or over everything, with keys and values of its own or of another layer."""

    def __init__(self, config: Gemma4Config, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path = f"model.layers.{number}.self_attn"
        size, heads, kv_heads = config.head_size(number), config.num_attention_heads, config.kv_heads(number)
        self.window, self.head_dim, self.rope = config.sliding_window if config.slides(number) else None, size, rope
        self._eps, self._backend, self._attention = config.rms_norm_eps, build.backend, build.attention
        self._heads, self._kv_heads, self._k_is_v = heads, 0, False
        self._number, self._source = number, config.kv_source(number)
        self._is_read = any(config.kv_source(n) == number for n in range(number + 1, config.num_hidden_layers))
        rows = {"q_proj": heads * size}
        if number < config.first_shared_layer:
            self._kv_heads, self._k_is_v = kv_heads, config.k_is_v(number)
            rows["k_proj"] = kv_heads * size
            if not self._k_is_v:
                rows["v_proj"] = kv_heads * size
        self._names = tuple(rows)
        parts, self._qkv = build.projections(config.hidden_size, {f"{path}.{name}": n for name, n in rows.items()})
        for name, part in zip(rows, parts, strict=True):
            self[name] = part
        self.o_proj = build.linear(f"{path}.o_proj", heads * size, config.hidden_size)
        self.q_norm = build.norm(f"{path}.q_norm", size, config.rms_norm_eps)
        if self._kv_heads:
            self.k_norm = build.norm(f"{path}.k_norm", size, config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        positions: Positions,
        cache: LinearKV | RingKV | None,
        visible: dict[int, Visible],
        *,
        norm: nn.Module,
    ) -> mx.array:
        """``x [B, L, hidden]`` -> the same shape. ``visible`` is what earlier layers saw that later ones read too, by
        their numbers; a layer that is read adds itself. ``norm`` is applied to ``x`` before."""
        parts = [self[name] for name in self._names]
        joint, norms = self._qkv.joint(*parts), [self.q_norm, self.get("k_norm")]
        if joint is not None and all(own is None or isinstance(own, RMSNorm) for own in norms):
            q, own = self._fused(project(joint, x, norm=norm), positions, cache)
        else:
            q, own = self._separate(self._qkv(norm(x), *parts), positions, cache)
        if own is None:
            own = visible[self._source]
        elif self._is_read:
            visible[self._number] = own
        return self.o_proj(self._attend(q, own, positions))

    def _fused(
        self, qkv: mx.array, positions: Positions, cache: LinearKV | RingKV | None
    ) -> tuple[mx.array, Visible | None]:
        B, L, _ = qkv.shape
        options = {
            "heads": self._heads,
            "kv_heads": self._kv_heads,
            "q_norm": self.q_norm["weight"],
            "k_norm": self.k_norm["weight"] if self._kv_heads else None,
            "eps": self._eps,
            "value_norm": True,
            "shared_values": self._k_is_v,
            "backend": self._backend,
        }
        rotation = positions.rotation(self.rope)
        if cache is not None and cache.places(L) and appends(qkv, self._backend):
            kv = cache.place(L, (B, self._kv_heads, self.head_dim), qkv.dtype)
            q = qkv_append(qkv, rotation, kv, positions.start, **options)
            cache.written(q)
            return q, (kv, None)
        q, kv = qkv_epilogue(qkv, rotation, **options)
        if kv is None:
            return q, None
        kv, keys = (kv, L) if cache is None else cache.append(kv)
        return q, (kv[0, :, :, :keys], kv[1, :, :, :keys])

    def _separate(
        self, products: Sequence[mx.array], positions: Positions, cache: LinearKV | RingKV | None
    ) -> tuple[mx.array, Visible | None]:
        q, *own = (y.reshape(*y.shape[:2], -1, self.head_dim).transpose(0, 2, 1, 3) for y in products)
        q = self.rope(self.q_norm(q), positions.offset)
        if not own:
            return q, None
        k = self.rope(self.k_norm(own[0]), positions.offset)
        v = rms_norm(own[-1], None, eps=self._eps, backend=self._backend)
        return q, (k, v) if cache is None else cache.update_and_fetch(k, v)

    def _attend(self, q: mx.array, visible: Visible, positions: Positions) -> mx.array:
        B, _, L, _ = q.shape
        # A single token sees every key that its cache returns, and a ring returns them in no particular order.
        mask, window = ("causal", self.window) if L > 1 else (None, None)
        options = {"scale": 1.0, "mask": mask, "window": window}
        keys, values = visible
        if values is None:
            return cache_attention(q, keys, positions.start, **options, backend=self._backend)
        y = self._attention(q, keys, values, **options)
        return y.transpose(0, 2, 1, 3).reshape(B, L, -1)


class Router(Module):
    """Chooses experts from the residual stream itself, normalised and scaled; weights need not add up to 1."""

    def __init__(self, config: Gemma4Config, number: int, build: Builder):
        super().__init__()
        path = f"model.layers.{number}.router"
        self.eps, self._root, self._top_k = config.rms_norm_eps, config.hidden_size**-0.5, config.top_k_experts
        self._backend = build.backend
        self.proj = build.linear(f"{path}.proj", config.hidden_size, config.num_experts)
        self.scale = build.vector(f"{path}.scale", config.hidden_size)
        self.per_expert_scale = build.vector(f"{path}.per_expert_scale", config.num_experts)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """``x [rows, hidden]`` -> indices and float32 weights ``[rows, top_k]``."""
        return self.choose(rms_norm(x, self["scale"], eps=self.eps, dtype=mx.float32, backend=self._backend))

    def choose(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """The same of ``x`` that was normalised with ``scale``, in float32."""
        around = {"logit_scale": self._root, "expert_scale": self["per_expert_scale"]}
        return route(self.proj, normed, self._top_k, normalize=True, **around, backend=self._backend)


class Experts(Module):
    """What the checkpoint calls ``experts``: the routed ones, wherever they live."""

    def __init__(self, config: Gemma4Config, number: int, build: Builder):
        super().__init__()
        path = f"model.layers.{number}.experts.switch_glu"
        self.switch_glu = routed_experts(path, number, experts(config)[path], build)


_AROUND_BRANCHES = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
"""Norms before, between and behind the branches of a layer with experts."""


class DecoderLayer(Module):
    def __init__(self, config: Gemma4Config, number: int, rope: RoPE, build: Builder):
        super().__init__()
        path, hidden = f"model.layers.{number}", config.hidden_size
        self._backend = build.backend
        self.self_attn = Attention(config, number, rope, build)
        wide = config.feed_forward_size(number)
        self.mlp = FeedForward(f"{path}.mlp", hidden, wide, build, activation="gelu_tanh")
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        if config.num_experts:
            self.router, self.experts = Router(config, number, build), Experts(config, number, build)
            norms += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"]
        if each := config.hidden_size_per_layer_input:
            self.per_layer_input_gate = build.linear(f"{path}.per_layer_input_gate", hidden, each)
            self.per_layer_projection = build.linear(f"{path}.per_layer_projection", each, hidden)
            norms.append("post_per_layer_input_norm")
        for name in norms:
            self[name] = build.norm(f"{path}.{name}", hidden, config.rms_norm_eps)
        self.layer_scalar = build.vector(f"{path}.layer_scalar", 1)

    def __call__(
        self,
        x: mx.array,
        cache: LinearKV | RingKV | None = None,
        positions: Positions | None = None,
        *,
        visible: dict[int, Visible] | None = None,
        layer_input: mx.array | None = None,
    ) -> mx.array:
        """See ``Attention``. ``positions`` are those after what ``cache`` holds, or from 0 on; ``layer_input [B, L,
        d]`` is what this layer is told about each token, in models that have it."""
        positions = positions or Positions.after(cache, x.shape[1])
        visible = {} if visible is None else visible
        around = positions, cache, visible
        scale = self["layer_scalar"] if layer_input is None else None
        if "router" in self:
            x = self.mixture(x, self.self_attn(x, *around, norm=self.input_layernorm), scale)
        else:
            attended = self.self_attn(x, *around, norm=self.input_layernorm)
            x = add_normed(x, self.post_attention_layernorm, attended)
            y = self.mlp(x, norm=self.pre_feedforward_layernorm)
            x = add_normed(x, self.post_feedforward_layernorm, y, scale=scale)
        if layer_input is None:
            return x
        gate = self.per_layer_input_gate(x)
        y = self.per_layer_projection(gated_product(gate, layer_input, activation="gelu_tanh", backend=self._backend))
        return add_normed(x, self.post_per_layer_input_norm, y, scale=self["layer_scalar"])

    def mixture(self, x: mx.array, attended: mx.array, scale: mx.array | None) -> mx.array:
        """What follows attention: the dense branch and the routed one, each normalised, added, and normalised again.

        Norms that meet are one operation as long as they and the router are this package's, and have one eps.
        """
        norms = [self[name] for name in _AROUND_BRANCHES]
        alike = all(type(norm) is RMSNorm and norm.eps == norms[0].eps for norm in norms)
        fused = alike and type(self.router) is Router and self.router.eps == norms[0].eps
        flat = (-1, x.shape[-1])
        if fused:
            options = {"eps": norms[0].eps, "backend": self._backend}
            before, second = self.post_attention_layernorm["weight"], self.pre_feedforward_layernorm_2["weight"]
            around = {"before": before, "second": second, "dtype": mx.float32}
            x, normed, given = add_rms_norm(attended, x, self.router["scale"], **around, **options)
            indices, weights = self.router.choose(normed.reshape(flat))
            del normed
        else:
            x = add_normed(x, self.post_attention_layernorm, attended)
            indices, weights = self.router(x.reshape(flat))
            given = self.pre_feedforward_layernorm_2(x)
        del attended  # a chunk's, which are many bytes beside those of its experts' products
        pending = self.experts.switch_glu.begin(indices)
        dense = self.mlp(x, norm=self.pre_feedforward_layernorm)
        routed = self.experts.switch_glu.finish(pending, given.reshape(flat), weights, meanwhile=(dense,))
        routed = routed.reshape(x.shape)
        after = self.post_feedforward_layernorm
        if fused:
            weights = [self[f"post_feedforward_layernorm_{branch}"]["weight"] for branch in (1, 2)]
            joined = JoinedNorms(weights[0], routed, weights[1])
            return rms_norm_add(dense, after["weight"], x, joined=joined, scale=scale, **options)
        y = add_normed(self.post_feedforward_layernorm_1(dense), self.post_feedforward_layernorm_2, routed)
        return add_normed(x, after, y, scale=scale)


class Gemma4Decoder(Decoder):
    """`Decoder`, and in some sizes a table of inputs for every layer."""

    def __init__(self, config: Gemma4Config, build: Builder):
        rope = {kind: RoPE(config.frequencies(kind)) for kind in (SLIDING, FULL)}

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(config, number, rope[config.layer_types[number]], build)

        super().__init__(config, layer, build)
        self._config = config
        if each := config.hidden_size_per_layer_input:
            every = config.num_hidden_layers * each
            self.embed_tokens_per_layer = build.embedding(
                "model.embed_tokens_per_layer", config.vocab_size_per_layer_input, every
            )
            self.per_layer_model_projection = build.linear(
                "model.per_layer_model_projection", config.hidden_size, every
            )
            # The published model divides the projection by sqrt(hidden) before this norm, which is to multiply eps.
            eps = config.rms_norm_eps * config.hidden_size
            self.per_layer_projection_norm = build.norm("model.per_layer_projection_norm", each, eps)

    def layer_inputs(self, tokens: mx.array | None, x: mx.array) -> mx.array | None:
        """What each layer is told about each token, from its id and its embedding: ``[B, L, layers, d]``, or None in
        models without it."""
        each = self._config.hidden_size_per_layer_input
        if not each:
            return None
        if tokens is None:
            raise OptionError(
                "input_embeddings: this model looks up an input for every layer by token id. Give tokens beside them."
            )
        shape = (*x.shape[:2], -1, each)
        known = scaled_rows(self.embed_tokens_per_layer, tokens, each**0.5).reshape(shape)
        projected = self.per_layer_model_projection(x).reshape(shape)
        return add_normed(known, self.per_layer_projection_norm, projected, scale=2**-0.5)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    expected = staticmethod(expected)

    def decoder(self, config: Gemma4Config, build: Builder, length: int) -> Gemma4Decoder:
        self.logit_cap = config.final_logit_softcapping
        return Gemma4Decoder(config, build)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[LinearKV | RingKV] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
    ) -> mx.array:
        """Normalised last hidden states ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead,
        as the embedding gives them, before they are scaled. ``positions`` are those after what ``cache`` holds, or from
        0 on. Raises OptionError where ids are needed beside embeddings."""
        root = self.args.hidden_size**0.5
        if input_embeddings is None:
            x = scaled_rows(self.model.embed_tokens, tokens, root).astype(self.dtype)
        else:
            x = input_embeddings.astype(self.dtype) * root
        inputs = self.model.layer_inputs(tokens, x)
        positions = positions or Positions.after(cache[0] if cache else None, x.shape[1])
        visible: dict[int, Visible] = {}
        for number, layer in enumerate(self.layers):
            x = layer(
                x,
                cache[number] if cache and number < len(cache) else None,
                positions,
                visible=visible,
                layer_input=None if inputs is None else inputs[:, :, number],
            )
        return self.model.norm(x)

    def make_cache(self, max_length: int | None = None) -> list[LinearKV | RingKV]:
        """An empty state for each layer with keys and values of its own, for sequences of up to ``max_length``
        tokens."""
        own = self.layers[: self.args.first_shared_layer]
        return [
            LinearKV(max_length) if layer.self_attn.window is None else RingKV(layer.self_attn.window) for layer in own
        ]
