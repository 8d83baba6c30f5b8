"""The generation loop: a prompt's ids in, one response a token out.

It knows a runner that computes logits and a tokenizer that makes text, and nothing of models. Everything that can be
refused is refused before anything is computed. The runner stays usable whatever happens: after a cancellation, or when
the consumer stops early, it holds exactly the tokens it was fed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from turbospark_mlx.errors import ContextError, GenerationError, OptionError, counted
from turbospark_mlx.generation.detokenizer import Decoder, StreamingDetokenizer
from turbospark_mlx.generation.sampling import Sampler, SamplingOptions, log_softmax
from turbospark_mlx.generation.stopping import StopMatcher

FinishReason = Literal["stop", "length", "cancelled"]
Progress = Callable[[int, int], None]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Runner(Protocol):
    """What the loop needs of a runner."""

    max_context: int
    vocab_size: int

    def reuse(self, ids: Sequence[int]) -> int: ...

    def prefill(
        self, ids: Sequence[int], *, progress: Progress | None, cancelled: Callable[[], bool] | None
    ) -> Any: ...

    def decode(self, token_id: int, *, ahead: bool) -> Any: ...

    def likeliest(self) -> int | None: ...

    def reset(self) -> None: ...


@dataclass
class GenerationResponse:
    """One token of an answer, and the figures so far.

    ``text`` is what this token makes visible; the texts of all responses join to the answer. ``token`` is the id, a
    stop id included; None in the response that reports a cancellation. ``prompt_tokens`` counts the whole prompt, of
    which ``reused_tokens`` were in the runner already. ``prompt_tps`` and ``generation_tps`` are tokens a second: of
    the prompt tokens that were run, and of the tokens after the first (0 until there is one), the consumer's own time
    not counted. ``peak_memory`` is MLX's, in GB. ``finish_reason`` is None until the last response: "stop" (a stop id
    or a stop string), "length" (``max_tokens``), "cancelled". ``seed`` repeats the draws; None where nothing is drawn.
    """

    text: str
    token: int | None
    prompt_tokens: int
    reused_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    seed: int | None
    chosen_from: mx.array | np.ndarray | None = field(repr=False)
    """The logits as they were where the token was chosen; `logits` brings them to the host."""

    @cached_property
    def logits(self) -> np.ndarray | None:
        """Float32 logits ``[vocab]`` that the token was chosen from, after bias and penalties."""
        return None if self.chosen_from is None else np.array(self.chosen_from).astype(np.float32)

    @cached_property
    def logprobs(self) -> mx.array | None:
        """Float32 log-probabilities ``[vocab]`` at temperature 1, before the filters; computed when asked for."""
        if self.logits is None:
            return None
        return mx.array(log_softmax(self.logits.astype(np.float64)).astype(np.float32))


@dataclass(frozen=True)
class Request:
    """What to generate after a prompt.

    ``max_tokens`` None fills the context. ``cancelled`` is asked between chunks of the prompt and between tokens.
    """

    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    sampler: Callable[[mx.array], mx.array] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    progress: Progress | None = None
    cancelled: Callable[[], bool] | threading.Event | None = None


def admit(prompt_tokens: int, max_tokens: int | None, max_context: int) -> int:
    """How many tokens may be generated: ``max_tokens``, or for None what the context has left.

    Raises ContextError for an empty prompt and for a prompt that does not fit together with ``max_tokens``, and
    OptionError for a ``max_tokens`` below 1.
    """
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral)):
        raise OptionError(f"max_tokens is {max_tokens!r}; it must be a whole number, or None to fill the context.")
    if max_tokens is not None and max_tokens < 1:
        raise OptionError(f"max_tokens is {max_tokens}; it must be at least 1, or None to fill the context.")
    if prompt_tokens == 0:
        raise ContextError("The prompt is empty. Give at least one token.")
    needed = prompt_tokens + (1 if max_tokens is None else int(max_tokens))
    if needed > max_context:
        more = "one more token" if max_tokens is None else f"max_tokens {max_tokens}"
        raise ContextError(
            f"The prompt has {counted(prompt_tokens, 'token')}; with {more}"
            f" that is {needed}, and max_context is {max_context}."
            " Shorten the prompt, lower max_tokens (None takes what is left), or raise max_context."
        )
    return max_context - prompt_tokens if max_tokens is None else int(max_tokens)


def generate_tokens(
    runner: Runner, tokenizer: Decoder, ids: Sequence[int], request: Request
) -> Iterator[GenerationResponse]:
    """Responses to the prompt ``ids``, one a token; a cancellation adds one without a token.

    The prompt and the options are checked here, before the first response is asked for. Raises ContextError,
    OptionError, and from the iterator GenerationError and whatever the runner raises.
    """
    ids = [int(i) for i in ids]
    limit = admit(len(ids), request.max_tokens, runner.max_context)
    if request.sampler is not None and request.sampling.draws:
        raise OptionError("sampler and temperature both choose the token. Give one of them.")
    chooser = _Chooser(request, runner.vocab_size)
    return _Answer(runner, tokenizer, ids, limit, chooser, request).responses()


class _Chooser:
    """The next token under a request: processors, then our options, then the draw."""

    def __init__(self, request, vocab_size):
        self._sampler = Sampler(request.sampling, vocab_size)
        self._custom = request.sampler
        self._processors = tuple(request.logits_processors)
        self.seed = self._sampler.seed
        self.takes_the_likeliest = not (self._processors or self._custom) and request.sampling.takes_the_likeliest

    def __call__(self, logits, history):
        """``(token, logits)`` for a model's logits ``[vocab]`` behind the ids in ``history``."""
        if self._processors:
            tokens, row = mx.array(history), mx.array(logits)[None]
            for processor in self._processors:
                row = processor(tokens, row)
            logits = row[0].astype(mx.float32)
        processed = self._sampler.process(np.array(logits), history)
        if self._custom is None:
            return self._sampler.choose(processed, len(history)), processed
        token = int(self._custom(mx.array(log_softmax(processed).astype(np.float32))[None]).item())
        if not 0 <= token < processed.size:
            raise GenerationError(f"sampler chose token {token}; this model's ids are 0 to {processed.size - 1}.")
        return token, processed


class _Answer:
    """One run of the loop."""

    def __init__(self, runner, tokenizer, ids, limit, chooser, request):
        self._runner, self._ids, self._limit, self._chooser, self._request = runner, ids, limit, chooser, request
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._matcher = StopMatcher(request.stop_strings)
        cancelled = request.cancelled
        self._cancelled = cancelled.is_set if isinstance(cancelled, threading.Event) else cancelled or (lambda: False)
        self._reused = self._prompt_run = self._generated = 0
        self._prompt_seconds = self._decode_seconds = 0.0

    def responses(self):
        try:
            yield from self._run()
        except GenerationError:
            # Caches that led to logits such as NaN must not be reused.
            self._runner.reset()
            raise

    def _run(self):
        logits = self._prefill()
        history = list(self._ids)
        while logits is not None:
            began = time.perf_counter()
            likeliest = self._runner.likeliest() if self._chooser.takes_the_likeliest else None
            token, chosen_from = self._chooser(logits, history) if likeliest is None else (likeliest, logits)
            self._generated += 1
            history.append(token)
            text, finish_reason = self._add(token)
            self._decode_seconds += time.perf_counter() - began
            yield self._response(text, token, finish_reason, chosen_from)
            if finish_reason:
                return
            logits = None if self._cancelled() else self._decode(history)
        yield self._response(self._flush(), None, "cancelled", None)

    def _prefill(self):
        """Logits behind the prompt, or None when cancelled."""
        began = time.perf_counter()
        self._reused = self._runner.reuse(self._ids)

        def progress(done, total):
            self._prompt_run = done
            if self._request.progress is not None:
                self._request.progress(self._reused + done, self._reused + total)

        logits = self._runner.prefill(self._ids[self._reused :], progress=progress, cancelled=self._cancelled)
        self._prompt_seconds = time.perf_counter() - began
        return logits

    def _decode(self, history):
        """Logits behind ``history``, of which the runner has all but the last token."""
        began = time.perf_counter()
        if self._runner.history != history[:-1]:
            raise ContextError(
                "This answer cannot go on, because its runner has run something else since. Finish one answer before"
                " the next, or give each its own runner."
            )
        logits = self._runner.decode(history[-1], ahead=self._chooser.takes_the_likeliest)
        self._decode_seconds += time.perf_counter() - began
        return logits

    def _add(self, token):
        """``(visible text, finish reason)`` of a token."""
        is_stop = token in self._request.stop_ids
        text = "" if is_stop else self._matcher.push(self._detokenizer.push(token))
        last = is_stop or self._matcher.matched or self._generated == self._limit
        if last:
            text += self._flush()
        if is_stop or self._matcher.matched:
            return text, "stop"
        return text, "length" if last else None

    def _flush(self):
        return self._matcher.push(self._detokenizer.finish()) + self._matcher.finish()

    def _response(self, text, token, finish_reason, chosen_from):
        after_first = max(self._generated - 1, 0)
        return GenerationResponse(
            text=text,
            token=token,
            prompt_tokens=len(self._ids),
            reused_tokens=self._reused,
            prompt_tps=self._prompt_run / self._prompt_seconds if self._prompt_seconds else 0.0,
            generation_tokens=self._generated,
            generation_tps=after_first / self._decode_seconds if after_first else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            seed=self._chooser.seed,
            chosen_from=chosen_from,
        )
