"""How well a model predicts a text.

The text's tokens are cut into windows of at most ``context`` inputs, each behind a BOS where the tokenizer adds one.
The first window predicts all that it can; every later one predicts the next ``stride`` tokens, behind the tokens before
them that fill the window. So every token is predicted exactly once (the first of the text only where there is a BOS to
predict it from), and

    nll = -mean(log p(token | tokens before it in its window)),  perplexity = exp(nll)

in float32 logits and float64 sums. A window runs through the model's own cache in chunks, and its rows are headed in
blocks, so that memory does not grow with the window or the text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark_mlx.errors import ContextError, GenerationError, OptionError, counted

DEFAULT_CONTEXT = 2048
CHUNK = 512
LOGITS_BYTES = 64 << 20


@dataclass(frozen=True)
class Window:
    """Token positions ``[begin, end)`` of which ``[scored, end)`` are predicted for the first time."""

    begin: int
    scored: int
    end: int


@dataclass(frozen=True)
class Perplexity:
    """``nll`` in nats a token over ``tokens`` predicted tokens, and ``perplexity``, its exponential."""

    nll: float
    perplexity: float
    tokens: int
    windows: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def windows(length: int, *, context: int, stride: int, has_bos: bool) -> Iterator[Window]:
    """The windows over ``length`` tokens; with a BOS, it is one of a window's ``context`` inputs."""
    # A window's last token is predicted, and is no input.
    longest = context + 1 - has_bos
    scored = 0 if has_bos else 1
    while scored < length:
        end = min(max(scored + stride, longest), length)
        yield Window(max(0, end - longest), scored, end)
        scored = end


def perplexity(
    model: Any,
    ids: Sequence[int],
    *,
    bos: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of ``model`` on the tokens ``ids`` (without BOS; ``bos`` is put before every window).

    ``context`` is at most the model's trained context, by default the smaller of that and 2048; ``stride`` is at most
    ``context``, its default. ``progress(done, total)`` counts predicted tokens. Raises OptionError, ContextError for a
    text too short to predict anything, and GenerationError, naming the token, where the loss is not finite.
    """
    trained = model.args.max_position_embeddings
    context = min(DEFAULT_CONTEXT, trained) if context is None else context
    stride = context if stride is None else stride
    if not 1 <= context <= trained:
        raise OptionError(f"context is {context}; it must be 1 to {trained}, the model's trained context.")
    if not 1 <= stride <= context:
        raise OptionError(f"stride is {stride}; it must be 1 to {context}, the context.")
    _check_ids(ids, model.args.vocab_size)
    total = len(ids) - (bos is None)
    if total < 1:
        least = 2 - (bos is not None)
        raise ContextError(f"The text has {counted(len(ids), 'token')}; it takes at least {least} to predict one.")
    began, nll, done, count = time.perf_counter(), 0.0, 0, 0
    for window in windows(len(ids), context=context, stride=stride, has_bos=bos is not None):
        for losses in _losses(model, ids, window, bos):
            if not np.isfinite(losses).all():
                bad = 1 + done + int(np.flatnonzero(~np.isfinite(losses))[0])
                raise GenerationError(
                    f"the loss of predicted token {bad} of {total} is not finite."
                    " Check the install with `turbospark-mlx verify`."
                )
            nll += float(losses.sum(dtype=np.float64))
            done += losses.size
            if progress:
                progress(done, total)
        count += 1
    mean = nll / done
    return Perplexity(mean, math.exp(mean) if mean < 700 else math.inf, done, count, time.perf_counter() - began)


def _check_ids(ids, vocab_size):
    # MLX does not check bounds: an id out of range would read other memory.
    if len(ids) and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise ContextError(f"The text has a token outside this model's ids, 0 to {vocab_size - 1}.")


def _losses(model, ids, window, bos):
    """Losses of the window's scored tokens, block by block."""
    inputs = list(ids[window.begin : window.end - 1])
    if bos is not None:
        inputs.insert(0, bos)
    targets = np.array(ids[window.scored : window.end])
    first = len(inputs) - len(targets)  # the row that predicts the first scored token
    rows = max(1, LOGITS_BYTES // (4 * model.args.vocab_size))
    cache = model.make_cache()
    for start in range(0, len(inputs), CHUNK):
        hidden = model.hidden(mx.array([inputs[start : start + CHUNK]]), cache=cache)[0]
        mx.eval(hidden, [state.state for state in cache])
        for block in range(max(start, first), start + hidden.shape[0], rows):
            end = min(block + rows, start + hidden.shape[0])
            logits = model.head(hidden[None, block - start : end - start])[0].astype(mx.float32)
            yield _negative_log_likelihood(np.array(logits), targets[block - first : end - first])


def _negative_log_likelihood(logits, targets):
    """Float64 losses of ``targets [rows]`` under float32 ``logits [rows, vocab]``.

    On the host, because MLX's logsumexp is 1e-4 too small over a vocabulary on a CPU: more than what this measures.
    """
    top = logits.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(logits - top).sum(axis=-1, dtype=np.float64))
    return totals - (logits[np.arange(len(targets)), targets] - top[:, 0])
