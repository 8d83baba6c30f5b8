"""What the decoders of all families share: embedding, layers and norm, and the model around them.

A family's ``model.py`` has its layers, and says here what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import InstallError
from turbospark_mlx.families.layers import AffineEmbedding, AffineLinear, Builder, Format, Module, Positions
from turbospark_mlx.protocols import ExpertFactory, LayerCache, ModelConfig, RowTable


class PreNormLayer(Module):
    """Attention, then feed-forward: each reads what a norm makes of the stream, and adds to it."""

    def __init__(self, config: Any, path: str, attention: nn.Module, feed_forward: nn.Module, build: Builder):
        super().__init__()
        self.self_attn, self.mlp = attention, feed_forward
        for name in ("input_layernorm", "post_attention_layernorm"):
            self[name] = build.norm(f"{path}.{name}", config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, cache: LayerCache | None = None, positions: Positions | None = None) -> mx.array:
        """``positions`` are those after what ``cache`` holds, or from 0 on."""
        positions = positions or Positions.after(cache, x.shape[1])
        x = self.self_attn(x, positions, cache, norm=self.input_layernorm, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class Decoder(Module):
    """Embedding, layers and final norm: what the checkpoint calls ``model``."""

    def __init__(self, config: Any, layer: Callable[[int], nn.Module], build: Builder, *, centered: bool = False):
        """``layer`` makes the layer of a number; ``centered`` says that the final norm is stored less 1."""
        super().__init__()
        self.embed_tokens = build.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [layer(number) for number in range(config.num_hidden_layers)]
        self.norm = build.norm("model.norm", config.hidden_size, config.rms_norm_eps, centered=centered)


class CausalModel(Module):
    """A model of a family. It follows the protocol that mlx-lm's tools call: ``model(tokens, cache=...)``,
    ``model.layers``, ``model.make_cache()``, ``model.args``."""

    float32_residual = False
    """Whether what layers add up stays in float32 whatever the dtype of activations is."""

    longest_context: int | None = None
    """Up to how many tokens the frequencies that were chosen are right; None where every length has the same."""

    logit_scale: float = 1.0
    """What logits are multiplied by, before they are capped."""
    logit_cap: float | None = None
    """c where logits y are capped as c tanh(y / c)."""

    choosers: tuple[str, ...] = (".mlp.gate.", ".router.")
    """What the names of parameters have in them that choose, so that NaN there may be a choice and not a number."""

    expected: Callable[[Any], Mapping[str, tuple[int, ...]]]
    """The family's ``Family.expected``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        formats: Mapping[str, Format] | None = None,
        backend: backends.Backend | None = None,
        dtype: mx.Dtype = mx.float32,
        fused: bool = True,
        max_context: int | None = None,
        experts: ExpertFactory | None = None,
        table: RowTable | None = None,
    ):
        """Zeroed parameters, to be loaded.

        ``formats`` says how each tensor is stored (see ``layers.Builder``), ``dtype`` is that of activations.
        ``fused=False`` makes plain ``mlx.nn`` modules. ``max_context`` is the longest context to expect, by which
        LongRoPE chooses its frequencies; None means the trained one. ``experts`` makes the routed experts of each
        layer; None makes them parameters. ``table`` is the model's table on disk, in families that have one; None
        makes it a parameter too.
        """
        super().__init__()
        self.args, self.model_type, self.dtype, self.fused = config, config.model_type, dtype, fused
        self.experts = experts
        self.parameter_count = sum(map(prod, self.expected(config).values()))
        self.backend = backend or backends.select()
        residual = mx.float32 if self.float32_residual else None
        build = Builder(self.backend, dtype, formats or {}, fused, experts, residual, table)
        self.model = self.decoder(config, build, max_context or config.max_position_embeddings)
        if not config.tie_word_embeddings:
            self.lm_head = build.linear("lm_head", config.hidden_size, config.vocab_size)

    def decoder(self, config: Any, build: Builder, length: int) -> Decoder:
        """The family's decoder, for contexts of up to ``length`` tokens."""
        raise NotImplementedError

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[LayerCache] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
    ) -> mx.array:
        """Normalised last hidden states ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead.

        ``positions`` are those after what ``cache`` holds, or from 0 on.
        """
        x = self.model.embed_tokens(tokens) if input_embeddings is None else input_embeddings
        x = x.astype(mx.float32 if self.float32_residual else self.dtype)
        positions = positions or Positions.after(cache[0] if cache else None, x.shape[1])
        for layer, state in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, state, positions)
        return self.model.norm(x)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits ``[..., vocab]`` of hidden states ``[..., hidden]``, capped in float32 where they are capped."""
        table = self.get("lm_head", self.model.embed_tokens)
        product = table if "lm_head" in self else table.as_linear
        if isinstance(table, AffineLinear | AffineEmbedding):
            return product(hidden, scale=self.logit_scale, softcap=self.logit_cap)
        logits = product(hidden)
        if self.logit_cap is None:
            return logits if self.logit_scale == 1.0 else logits * self.logit_scale
        wide = logits.astype(mx.float32) * (self.logit_scale / self.logit_cap)
        return (mx.tanh(wide) * self.logit_cap).astype(logits.dtype)

    def __call__(
        self,
        tokens: mx.array | None,
        cache: Sequence[LayerCache] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits ``[B, L, vocab]``. Tokens go on from where ``cache`` is; without one they start at position 0."""
        return self.head(self.hidden(tokens, cache, input_embeddings))

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def check(self) -> None:
        """Raise InstallError where the values that were loaded contradict the configuration, or cannot choose.

        Whatever else is not finite makes logits that are not finite, by which it is found."""
        for name, array in tree_flatten(self.parameters()):
            is_chooser = any(part in name for part in self.choosers) and mx.issubdtype(array.dtype, mx.floating)
            if is_chooser and not mx.isfinite(array).all().item():
                raise InstallError(f"model_weights.bin: {name} holds NaN or infinite values. Convert the model again.")

    @property
    def looks_up(self) -> bool:
        """Whether a pass needs its token ids on the host, so that it cannot begin before they are known there."""
        return False

    def look_up(self, tokens: int | mx.array, cache: Sequence[LayerCache] | None) -> dict[str, np.ndarray]:
        """What `hidden` is given beside ``tokens``, an id or ``[B, L]``, which follow what ``cache`` holds: what is
        found by them on the host, as keyword arguments whose shapes do not depend on the position."""
        return {}

    def make_cache(self, max_length: int | None = None) -> list[LayerCache]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        windows = [layer.self_attn.window for layer in self.layers]
        return [LinearKV(max_length) if window is None else RingKV(window) for window in windows]
