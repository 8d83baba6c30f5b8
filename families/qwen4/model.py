"""Qwen4-Exp's decoder: recurrent layers (`families.delta`) and sparse attention layers around widened residual streams.

Notable: a layer reads a mix of the streams and adds its answer to each of them with a share of its own (`hyper`);
attention sees the blocks that an indexer chooses (`attention`); one layer is told about the n-grams that end in each
token (`ngram_layer`), whose table is far larger than memory and is read by the row.

Shapes: B sequences, L tokens, C streams, H their width. Does not know images: ids of their placeholders are embedded
like any token's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark_mlx.cache import BlockKeys, JointState, LinearKV, RecurrentState
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.families.decoder import CausalModel
from turbospark_mlx.families.delta import GatedDeltaNet
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE, repeated_rows
from turbospark_mlx.families.moe import SharedExpertMoe
from turbospark_mlx.families.qwen4.attention import BlockRoPE, SparseAttention
from turbospark_mlx.families.qwen4.config import Qwen4Config
from turbospark_mlx.families.qwen4.hyper import HyperConnection
from turbospark_mlx.families.qwen4.ngram_layer import NgramLayer, NgramState
from turbospark_mlx.families.qwen4.weights import expected, experts, norms_centered

State = RecurrentState | JointState


class DecoderLayer(Module):
    def __init__(
        self, config: Qwen4Config, number: int, rope: RoPE, block_rope: BlockRoPE, length: int, build: Builder
    ):
        super().__init__()
        path = f"model.layers.{number}"
        if number == config.ple_layer:
            self.ple = NgramLayer(config, f"{path}.ple", build)
        for name in ("attn_hyper_connection", "mlp_hyper_connection"):
            self[name] = HyperConnection(config, f"{path}.{name}", build)
        if config.recurs(number):
            shape = (config.convolved_width, config.linear_conv_kernel_dim)
            self.linear_attn = GatedDeltaNet(
                config, f"{path}.linear_attn", build, convolution=shape, gate=config.linear_gate
            )
        else:
            self.self_attn = SparseAttention(config, f"{path}.self_attn", rope, block_rope, length, build)
        spec = experts(config)[f"{path}.mlp.switch_mlp"]
        self.mlp = SharedExpertMoe(f"{path}.mlp", number, spec, config.shared_expert_intermediate_size, build)

    def __call__(
        self,
        x: mx.array,
        cache: State | None = None,
        positions: Positions | None = None,
        ngrams: mx.array | None = None,
    ) -> mx.array:
        """``x [B, L, C * H]``. ``positions`` are those after what ``cache`` holds, or from 0 on; ``ngrams`` are for the
        layer that is told about them, from its ``look_up``."""
        positions = positions or Positions.after(cache, x.shape[1])
        if "ple" in self:
            told, cache = (None, None) if cache is None else cache.parts
            x = self.ple(x, ngrams, positions, told)
        read, normed = self.attn_hyper_connection.mix(x)
        y = (self.linear_attn if "linear_attn" in self else self.self_attn)(read, positions, cache)
        x = self.attn_hyper_connection.inject(x, y, normed)
        read, normed = self.mlp_hyper_connection.mix(x)
        return self.mlp_hyper_connection.inject(x, self.mlp(read), normed)


class Qwen4Decoder(Module):
    """Embedding, layers and what the head reads: what the checkpoint calls ``model``."""

    def __init__(self, config: Qwen4Config, build: Builder, length: int):
        super().__init__()
        rope, block_rope = RoPE(config.frequencies()), BlockRoPE(config.frequencies(), config.indexer_compress_ratio)
        self.embed_tokens = build.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(config, number, rope, block_rope, length, build) for number in range(config.num_hidden_layers)
        ]
        self.hyper_connection_mixer = HyperConnection(config, "model.hyper_connection_mixer", build, inject=False)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    choosers = (*CausalModel.choosers, ".indexer.")
    expected = staticmethod(expected)

    def decoder(self, config: Qwen4Config, build: Builder, length: int) -> Qwen4Decoder:
        return Qwen4Decoder(config, build, length)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[State] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
        ngrams: mx.array | None = None,
    ) -> mx.array:
        """What the head reads ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead.

        ``positions`` are those after what ``cache`` holds, or from 0 on; ``ngrams`` come from `look_up`, which is asked
        where they are not given. Raises OptionError where ids are needed beside embeddings.
        """
        if self.looks_up and ngrams is None:
            if tokens is None:
                raise OptionError("input_embeddings: this model looks up n-grams by token id. Give tokens beside them.")
            ngrams = mx.array(self.look_up(tokens, cache)["ngrams"])
        copies = self.args.hc_count
        if input_embeddings is None:
            x = repeated_rows(self.model.embed_tokens, tokens, copies).astype(self.dtype)
        else:
            x = mx.tile(input_embeddings.astype(self.dtype), (1, 1, copies))
        positions = positions or Positions.after(cache[0] if cache else None, x.shape[1])
        for layer, state in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, state, positions, ngrams)
        return self.model.hyper_connection_mixer.mix(x)[0]

    @property
    def looks_up(self) -> bool:
        """See `CausalModel`: rows of the table of n-grams."""
        return self.args.ple_layer is not None

    def look_up(self, tokens: int | mx.array, cache: Sequence[State] | None) -> dict[str, np.ndarray]:
        """See `CausalModel`."""
        if not self.looks_up:
            return {}
        number = self.args.ple_layer
        ids = np.array(tokens, np.int32).reshape(1 if isinstance(tokens, int) else tokens.shape[0], -1)
        return {"ngrams": self.layers[number].ple.look_up(ids, None if cache is None else cache[number].parts[0])}

    def check(self) -> None:
        """See `CausalModel`: an install may not say how its norms are stored, or say it wrongly."""
        super().check()
        means = [
            layer.attn_hyper_connection.hc_norm["weight"].astype(mx.float32).mean().item() for layer in self.layers
        ]
        centered, found = norms_centered(means)
        if centered != self.args.centered_norms:
            said = "less 1" if self.args.centered_norms else "as they are multiplied"
            raise InstallError(
                f"model_weights.bin: {found}; manifest.json takes norms to be stored {said}. Convert the model again."
            )

    def attend_sparsely(self, sparse: bool) -> None:
        """Whether attention layers choose blocks, as they were trained to, or see everything, for comparison."""
        for layer in self.layers:
            if "self_attn" in layer:
                layer.self_attn.sparse = sparse

    def make_cache(self, max_length: int | None = None) -> list[State]:
        """An empty state for each layer, for sequences of up to ``max_length`` tokens."""
        config, block = self.args, self.args.indexer_compress_ratio

        def state(number: int) -> State:
            if not config.recurs(number):
                return JointState(LinearKV(max_length), BlockKeys(block, max_length))
            return JointState(NgramState(), RecurrentState()) if number == config.ple_layer else RecurrentState()

        return [state(number) for number in range(config.num_hidden_layers)]
