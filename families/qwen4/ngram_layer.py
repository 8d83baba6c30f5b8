"""The layer that tells residual streams about the n-grams that end in each token.

Their table is far larger than memory and is read by the row, by what `ngrams` makes of token ids. So a pass begins on
the host (`NgramLayer.look_up`), which keeps every id; what it finds is an input of what follows.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.custom_kernels import convolves, dilated_convolution, dilated_convolution_step, ngram_gate
from turbospark_mlx.families.layers import Builder, Module, Positions, product_in
from turbospark_mlx.families.qwen4.config import Qwen4Config
from turbospark_mlx.families.qwen4.hyper import StreamNorm
from turbospark_mlx.families.qwen4.ngrams import row_ids


class NgramState(RecurrentState):
    """What is known of n-grams: the tail of a convolution, and every id so far.

    Ids stay on the host, those of all tokens, so that a state that goes back has nothing to do about them.
    """

    _BUCKET = 256

    def __init__(self) -> None:
        super().__init__(1)
        self._ids = np.zeros((1, 0), np.int32)

    def follow(self, tokens: np.ndarray, count: int, first: int) -> np.ndarray:
        """The ``count`` ids before ``tokens [B, L]``, which come after ``offset`` others: int32 ``[B, count]``, with
        ``first`` before the first of all. They count once the state has advanced."""
        offset, end = self.offset, self.offset + tokens.shape[1]
        if offset == 0 or end > self._ids.shape[1]:
            room = np.zeros((len(tokens), -(-end // self._BUCKET) * self._BUCKET), np.int32)
            room[:, :offset] = self._ids[:, :offset]
            self._ids = room
        self._ids[:, offset:end] = tokens
        before = self._ids[:, max(0, offset - count) : offset]
        return np.pad(before, ((0, 0), (count - before.shape[1], 0)), constant_values=first)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._ids[:, : self.offset].nbytes

    @property
    def state(self) -> tuple[mx.array | None, mx.array, int]:
        tail, offset = super().state
        return tail, mx.array(self._ids[:, :offset]), offset

    @state.setter
    def state(self, state: tuple[mx.array | None, mx.array, int]) -> None:
        tail, ids, offset = state
        RecurrentState.state.fset(self, (tail, offset))
        self._ids = np.array(ids)

    def __deepcopy__(self, memo: dict) -> NgramState:
        twin = super().__deepcopy__(memo)
        twin._ids = self._ids.copy()
        return twin


class NgramTable(Module):
    """Rows of the n-gram table: as a parameter, or read from where it lives."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self.table = build.table
        if build.table is None:
            rows = config.ngram_hash.rows
            self.ngram_embedding = build.embedding(f"{path}.ngram_embedding", rows, config.ngram_width)

    def look_up(self, ids: np.ndarray) -> np.ndarray:
        """What a call takes for rows ``ids [B, L, heads]``: those rows, or the ids where the table is a parameter."""
        return ids.astype(np.int32) if self.table is None else self.table.rows(ids)

    def __call__(self, found: mx.array) -> mx.array:
        """The rows side by side ``[B, L, heads * columns]``."""
        rows = self.ngram_embedding(found) if self.table is None else found
        return rows.reshape(*found.shape[:2], -1)


class NgramLayer(Module):
    """Tells the streams about the n-grams that end in each token."""

    def __init__(self, config: Qwen4Config, path: str, build: Builder):
        super().__init__()
        self._config, self._backend, self._dtype = config, build.backend, build.dtype
        self.ple_embedding = NgramTable(config, f"{path}.ple_embedding", build)
        self.key_proj = build.linear(f"{path}.key_proj", config.ple_embed_dim, config.wide)
        self.value_proj = build.linear(f"{path}.value_proj", config.ple_embed_dim, config.hidden_size)
        for name in ("norm_key", "norm_query", "norm_conv"):
            self[name] = StreamNorm(config, f"{path}.{name}", build)
        self.conv1d = Module()
        self.conv1d.weight = build.vector(f"{path}.conv1d.weight", config.wide, config.ple_conv_kernel_size)

    def look_up(self, tokens: np.ndarray, cache: NgramState | None) -> np.ndarray:
        """What a call takes beside the streams of ``tokens [B, L]``, which follow what ``cache`` holds."""
        config, state = self._config, NgramState() if cache is None else cache
        before = state.follow(tokens, config.ngram_size - 1, config.ple_eos_token_id)
        return self.ple_embedding.look_up(row_ids(tokens, before, config.ngram_hash, config.ple_eos_token_id))

    def __call__(self, x: mx.array, found: mx.array, positions: Positions, cache: NgramState | None = None) -> mx.array:
        """The streams ``x [B, L, C * H]``, and what is added to them; ``found`` comes from `look_up`."""
        rows, (batch, length, _) = self.ple_embedding(found), x.shape
        key, value = (product_in(self._dtype, matrix, rows) for matrix in (self.key_proj, self.value_proj))
        told = ngram_gate(self.norm_key(key), self.norm_query(x), value, backend=self._backend)
        newest, weight, apart = self.norm_conv(told), self.conv1d["weight"], self._config.ngram_size
        shape = (batch, self._config.ngram_tail, self._config.wide)
        if cache is not None and cache.places(length) and convolves(newest, self._backend):
            (tail,) = cache.place(length, (shape,), (newest.dtype,))
            given = newest, told, x, tail, positions.start, weight
            y = dilated_convolution_step(*given, apart=apart, backend=self._backend)
            cache.written(y)
            return y
        tail = None if cache is None else cache[0]
        history = mx.concatenate([mx.zeros(shape, newest.dtype) if tail is None else tail, newest], axis=1)
        if cache is not None:
            # The last token by itself, so that its step can be taken back.
            for start, end in [(0, length)] if length == 1 else [(0, length - 1), (length - 1, length)]:
                cache[0] = mx.take(history, mx.arange(end, end + shape[1]), axis=1)
                cache.advance(end - start)
        return x + (told + dilated_convolution(history, weight, apart=apart).astype(told.dtype))
