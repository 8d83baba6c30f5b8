"""Qwen4-Exp's decoder: recurrent layers (`families.delta`) and sparse attention layers around widened residual streams.

Notable: a layer reads a mix of the streams and adds its answer to each of them with a share of its own
(`HyperConnection`); attention sees the blocks that an indexer chooses (`SparseAttention`); one layer is told about the
n-grams that end in each token (`NgramLayer`), whose table is far larger than memory and is read by the row.

Shapes: B sequences, L tokens, C streams, H their width. Does not know images: ids of their placeholders are embedded
like any token's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark_mlx.cache import BlockKeys, JointState, LinearKV, RecurrentState
from turbospark_mlx.custom_kernels import (
    choose_positions,
    indexed_attention,
    ngram_gate,
    pool_blocks,
    rms_norm,
    rotate,
    score_blocks,
    sparse_mask,
    stream_inject,
    stream_mix,
)
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.families.decoder import CausalModel
from turbospark_mlx.families.delta import GatedDeltaNet
from turbospark_mlx.families.gated_attention import GatedAttention
from turbospark_mlx.families.layers import Builder, Module, Positions, RoPE
from turbospark_mlx.families.moe import SharedExpertMoe
from turbospark_mlx.families.qwen4.config import Qwen4Config
from turbospark_mlx.families.qwen4.ngrams import row_ids
from turbospark_mlx.families.qwen4.weights import expected, experts, norms_centered

State = RecurrentState | JointState


class StreamNorm(Module):
    """A root mean square for each stream, and a weight for each of their dimensions."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self._shape, self._backend = (config.hc_count, config.hidden_size), build.backend
        self._eps, self._centered = config.rms_norm_eps, config.centered_norms
        self.weight = build.vector(f"{path}.weight", config.wide)

    def __call__(self, x: mx.array) -> mx.array:
        """``x [..., C * H]``."""
        weight, options = self["weight"].reshape(self._shape), {"eps": self._eps, "centered": self._centered}
        y = rms_norm(x.reshape(*x.shape[:-1], *self._shape), weight, **options, backend=self._backend)
        return y.reshape(x.shape)


class HyperConnection(Module):
    """What a sublayer reads of the streams, and what each of them is given of its answer."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder, *, inject: bool = True):
        super().__init__()
        self._streams, self._backend = config.hc_count, build.backend
        self.hc_norm = StreamNorm(config, f"{path}.hc_norm", build)
        self.input_mix_weight_down = build.linear(f"{path}.input_mix_weight_down", config.wide, config.hc_lowrank)
        self.input_mix_weight_up = build.linear(f"{path}.input_mix_weight_up", config.hc_lowrank, config.wide)
        if inject:
            self.block_inject_weight = build.linear(f"{path}.block_inject_weight", config.wide, config.hc_count)

    def mix(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """``x [B, L, C * H]`` -> what is read ``[B, L, H]``, and the streams as they were normalised for it."""
        normed = self.hc_norm(x)
        low = self.input_mix_weight_down(normed) / self._streams
        gate = self.input_mix_weight_up(low * mx.sigmoid(low))
        return stream_mix(gate, normed, streams=self._streams, backend=self._backend), normed

    def inject(self, x: mx.array, y: mx.array, normed: mx.array) -> mx.array:
        """The streams ``x`` with an answer ``y [B, L, H]``; ``normed`` comes from `mix`."""
        return stream_inject(x, y, self.block_inject_weight(normed), backend=self._backend)


class Indexer(Module):
    """Scores blocks of tokens for each query, by keys and queries of its own."""

    def __init__(self, config: Qwen4Config, path: str, rope: RoPE, build: Builder):
        super().__init__()
        width, eps, centered = config.indexer_head_dim, config.rms_norm_eps, config.centered_norms
        self._width, self._block, self._backend = width, config.indexer_compress_ratio, build.backend
        # A block turns as its first token does: by whole blocks a position.
        self._rope, self._block_rope = rope, RoPE(config.frequencies() * self._block)
        self._options = {"eps": eps, "centered": centered}
        self.index_qk_proj = build.linear(
            f"{path}.index_qk_proj", config.hidden_size, (config.indexer_n_heads + 1) * width
        )
        self.q_layernorm = build.norm(f"{path}.q_layernorm", width, eps, centered=centered)
        self.k_layernorm = build.norm(f"{path}.k_layernorm", width, eps, centered=centered)

    def __call__(self, x: mx.array, cache: BlockKeys | None) -> tuple[mx.array, mx.array]:
        """``x [B, L, H]``, whose keys are added to ``cache`` -> queries ``[B, heads, L, D]``, not normalised yet, and
        the keys of all whole blocks ``[B, N, D]``."""
        batch, length, _ = x.shape
        rows = self.index_qk_proj(x).reshape(batch, length, -1, self._width)
        queries, keys = rows[:, :, :-1].transpose(0, 2, 1, 3), rows[:, :, -1]
        if cache is not None:
            return queries, cache.append(keys, self._pool)
        count = length // self._block
        blocks = keys[:, : count * self._block].reshape(batch, count, self._block, self._width)
        return queries, self._pool(blocks, 0) if count else keys[:, :0]

    def _pool(self, keys: mx.array, first: int) -> mx.array:
        rotation = mx.array(self._block_rope.table(first, keys.shape[1]))
        return pool_blocks(keys, self.k_layernorm["weight"], rotation, **self._options, backend=self._backend)

    def scores(self, queries: mx.array, blocks: mx.array, positions: Positions) -> mx.array:
        """Float32 ``[B, L, N]`` of what a call gave."""
        queries = rotate(self.q_layernorm(queries), positions.rotation(self._rope), backend=self._backend)
        return score_blocks(queries, blocks, positions.start, block=self._block, backend=self._backend)


class SparseAttention(GatedAttention):
    """Gated attention to the blocks that an indexer chooses and to the tokens behind the last whole one.

    Where there are no more blocks than may be chosen, and where ``sparse`` is set to False, it sees everything.
    """

    sparse = True

    def __init__(self, config: Qwen4Config, path: str, rope: RoPE, build: Builder):
        super().__init__(config, path, rope, build)
        self._block, self._top_k = config.indexer_compress_ratio, config.block_top_k
        self.indexer = Indexer(config, f"{path}.indexer", rope, build)

    def attend(
        self, x: mx.array, q: mx.array, k: mx.array, v: mx.array, positions: Positions, cache: JointState | None
    ) -> mx.array:
        """See `GatedAttention`; ``cache`` has keys and values, and the indexer's keys."""
        own, index = (None, None) if cache is None else cache.parts
        if own is not None:
            k, v = own.update_and_fetch(k, v)
        queries, blocks = self.indexer(x, index)
        length, keys, scale = q.shape[2], k.shape[2], self.head_dim**-0.5
        if not self.sparse or blocks.shape[1] <= self._top_k:
            return self._attention(q, k, v, scale=scale, mask="causal" if length > 1 else None)
        scores = self.indexer.scores(queries, blocks, positions)
        if length == 1:
            return self._attend_to_chosen(q, k, v, scores, positions)
        mask = sparse_mask(scores, positions.offset, keys, block=self._block, top_k=self._top_k)
        return self._attention(q, k, v, scale=scale, mask=mask)

    def _attend_to_chosen(
        self, q: mx.array, k: mx.array, v: mx.array, scores: mx.array, positions: Positions
    ) -> mx.array:
        sizes = {"keys": k.shape[2], "block": self._block, "top_k": self._top_k}
        chosen = choose_positions(scores[:, 0], positions.start, **sizes, backend=self._backend)
        return indexed_attention(q, k, v, chosen, scale=self.head_dim**-0.5, backend=self._backend)

    def warm_up(self, config: Qwen4Config, dtype: mx.Dtype) -> mx.array:
        """A token behind as many as are needed for a choice, all of them zeros."""
        blocks, size = self._top_k + 1, config.head_dim
        q = mx.zeros((1, config.num_attention_heads, 1, size), dtype)
        k = mx.zeros((1, config.num_key_value_heads, blocks * self._block, size), dtype)
        keys = mx.zeros((1, blocks, config.indexer_head_dim), dtype)
        queries = mx.zeros((1, config.indexer_n_heads, 1, config.indexer_head_dim), dtype)
        positions = Positions(k.shape[2] - 1, 1)
        return self._attend_to_chosen(q, k, k, self.indexer.scores(queries, keys, positions), positions)


class NgramTable(Module):
    """Rows of the n-gram table: as a parameter, or read from where it lives."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self.table, self._dtype = build.table, build.dtype
        if build.table is None:
            rows = config.ngram_hash.rows
            self.ngram_embedding = build.embedding(f"{path}.ngram_embedding", rows, config.ngram_width)

    def __call__(self, ids: np.ndarray) -> mx.array:
        """``ids [B, L, heads]`` -> their rows side by side ``[B, L, heads * columns]``."""
        if self.table is None:
            rows = self.ngram_embedding(mx.array(ids.astype(np.int32)))
        else:
            rows = mx.array(self.table.rows(ids))
        return rows.astype(self._dtype).reshape(*ids.shape[:2], -1)


class NgramState(RecurrentState):
    """What is known of n-grams: the tail of a convolution, and the last ids."""

    def places(self, length: int) -> bool:
        """Never: a token's rows are read on the host, so that its step is no list of kernels."""
        return False


class NgramLayer(Module):
    """Tells the streams about the n-grams that end in each token."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self._config, self._backend = config, build.backend
        self.ple_embedding = NgramTable(config, f"{path}.ple_embedding", build)
        self.key_proj = build.linear(f"{path}.key_proj", config.ple_embed_dim, config.wide)
        self.value_proj = build.linear(f"{path}.value_proj", config.ple_embed_dim, config.hidden_size)
        for name in ("norm_key", "norm_query", "norm_conv"):
            self[name] = StreamNorm(config, f"{path}.{name}", build)
        self.conv1d = DilatedConvolution(config, f"{path}.conv1d", build)

    def __call__(self, x: mx.array, tokens: np.ndarray, cache: NgramState | None = None) -> mx.array:
        """What is added to the streams ``x [B, L, C * H]`` of ``tokens [B, L]``."""
        (batch, length), config = tokens.shape, self._config
        tail, before = (None, None) if cache is None else (cache[0], cache[1])
        if tail is None:
            tail = mx.zeros((batch, config.ngram_tail, config.wide), x.dtype)
            before = np.full((batch, config.ngram_size - 1), config.ple_eos_token_id, np.int32)
        seen = np.concatenate([np.array(before), tokens], axis=1)
        rows = self.ple_embedding(row_ids(tokens, np.array(before), config.ngram_hash, config.ple_eos_token_id))
        key, query = self.norm_key(self.key_proj(rows)), self.norm_query(x)
        told = ngram_gate(key, query, self.value_proj(rows), backend=self._backend)
        history = mx.concatenate([tail, self.norm_conv(told)], axis=1)
        if cache is not None:
            # The last token by itself, so that its step can be taken back.
            for start, end in [(0, length)] if length == 1 else [(0, length - 1), (length - 1, length)]:
                cache[0] = mx.take(history, mx.arange(end, end + config.ngram_tail), axis=1)
                cache[1] = mx.array(seen[:, end : end + config.ngram_size - 1].astype(np.int32))
                cache.advance(end - start)
        return told + self.conv1d(history).astype(told.dtype)


class DilatedConvolution(Module):
    """A causal convolution of each channel by itself, whose taps are ``ngram_size`` tokens apart, then SiLU."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self._taps, self._apart = config.ple_conv_kernel_size, config.ngram_size
        self.weight = build.vector(f"{path}.weight", config.wide, self._taps)

    def __call__(self, rows: mx.array) -> mx.array:
        """``rows [B, (taps - 1) * apart + L, C * H]``, oldest first -> float32 ``[B, L, C * H]``."""
        weight, apart = self["weight"].astype(mx.float32), self._apart
        length = rows.shape[1] - (self._taps - 1) * apart
        y = sum(
            rows[:, tap * apart : tap * apart + length].astype(mx.float32) * weight[:, tap] for tap in range(self._taps)
        )
        return y * mx.sigmoid(y)


class DecoderLayer(Module):
    def __init__(self, config: Qwen4Config, number: int, rope: RoPE, build: Builder):
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
            self.self_attn = SparseAttention(config, f"{path}.self_attn", rope, build)
        spec = experts(config)[f"{path}.mlp.switch_mlp"]
        self.mlp = SharedExpertMoe(f"{path}.mlp", number, spec, config.shared_expert_intermediate_size, build)

    def __call__(
        self,
        x: mx.array,
        cache: State | None = None,
        positions: Positions | None = None,
        tokens: np.ndarray | None = None,
    ) -> mx.array:
        """``x [B, L, C * H]``. ``positions`` are those after what ``cache`` holds, or from 0 on; ``tokens [B, L]`` are
        for the layer that is told about n-grams."""
        positions = positions or Positions.after(cache, x.shape[1])
        if "ple" in self:
            told, cache = (None, None) if cache is None else cache.parts
            x = x + self.ple(x, tokens, told)
        read, normed = self.attn_hyper_connection.mix(x)
        y = (self.linear_attn if "linear_attn" in self else self.self_attn)(read, positions, cache)
        x = self.attn_hyper_connection.inject(x, y, normed)
        read, normed = self.mlp_hyper_connection.mix(x)
        return self.mlp_hyper_connection.inject(x, self.mlp(read), normed)


class Qwen4Decoder(Module):
    """Embedding, layers and what the head reads: what the checkpoint calls ``model``."""

    def __init__(self, config: Qwen4Config, build: Builder):
        super().__init__()
        rope = RoPE(config.frequencies())
        self.embed_tokens = build.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, number, rope, build) for number in range(config.num_hidden_layers)]
        self.hyper_connection_mixer = HyperConnection(config, "model.hyper_connection_mixer", build, inject=False)


class Model(CausalModel):
    """A model of the family; see `CausalModel`."""

    choosers = (*CausalModel.choosers, ".indexer.")
    expected = staticmethod(expected)

    def decoder(self, config: Qwen4Config, build: Builder, length: int) -> Qwen4Decoder:
        return Qwen4Decoder(config, build)

    def hidden(
        self,
        tokens: mx.array | None,
        cache: Sequence[State] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        positions: Positions | None = None,
    ) -> mx.array:
        """What the head reads ``[B, L, hidden]`` of ``tokens [B, L]``, or of ``input_embeddings`` instead.

        ``positions`` are those after what ``cache`` holds, or from 0 on. Raises OptionError where ids are needed beside
        embeddings.
        """
        x = self.model.embed_tokens(tokens) if input_embeddings is None else input_embeddings
        x = mx.tile(x.astype(self.dtype), (1, 1, self.args.hc_count))
        positions = positions or Positions.after(cache[0] if cache else None, x.shape[1])
        ids = None
        if self.args.ple_layer is not None:
            if tokens is None:
                raise OptionError("input_embeddings: this model looks up n-grams by token id. Give tokens beside them.")
            ids = np.array(tokens)
        for layer, state in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, state, positions, ids)
        return self.model.hyper_connection_mixer.mix(x)[0]

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

    def warm_up(self, length: int) -> list[mx.array]:
        """See `CausalModel`: short passes choose no blocks."""
        attention = next((layer.self_attn for layer in self.layers if "self_attn" in layer), None)
        chooses = length >= (self.args.block_top_k + 1) * self.args.indexer_compress_ratio
        return [attention.warm_up(self.args, self.dtype)] if attention is not None and chooses else []

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
