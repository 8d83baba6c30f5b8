"""The Python API: ``load``, ``generate`` and ``stream_generate``, under the names that mlx-lm's users type."""

from __future__ import annotations

import difflib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx.errors import OptionError
from turbospark_mlx.generation.loop import GenerationResponse, LogitsProcessor, Progress, Request, generate_tokens
from turbospark_mlx.generation.sampling import SAMPLING_NAMES, SamplingOptions
from turbospark_mlx.generation.stopping import stop_strings
from turbospark_mlx.runner import Runner
from turbospark_mlx.tokenizer import Tokenizer

__all__ = ["GenerationResponse", "generate", "load", "prompt_ids", "stream_generate"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | mx.array


def load(path_or_hf_repo: str | PathLike[str], **options: Any) -> tuple[nn.Module, Tokenizer]:
    """``(model, tokenizer)`` of an install directory, an alias, or a hub repository, which is pulled on first use.

    ``options`` are those of ``Runner.open``: ``kernels``, ``dtype``, ``verify``, ``fused``, ``max_context``,
    ``residency``, ``expert_slots``. Raises StoreError, InstallError and OptionError.

    >>> model, tokenizer = load("smollm2-135m")  # doctest: +SKIP
    """
    from turbospark_mlx.store import resolve

    with ExitStack() as stack:
        runner = stack.enter_context(Runner.open(resolve(path_or_hf_repo), **options))
        loaded = runner.model, runner.tokenizer
        if runner.experts is not None and runner.experts.reads_files:
            # The model needs the files for as long as it lives, and closes them when it goes.
            stack.pop_all()
    return loaded


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, template_variables: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids of a prompt.

    Text is encoded as it is, with one BOS where the tokenizer adds one; messages (dictionaries with ``role`` and
    ``content``) go through the chat template, which also sees ``template_variables``; ids are taken as they are.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence):
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise OptionError(f"prompt is a {type(prompt).__name__}; give text, token ids, or a list of messages.")
    if prompt and all(isinstance(message, Mapping) for message in prompt):
        return tokenizer.apply_chat_template(prompt, **(template_variables or {}))
    try:
        return [operator.index(i) for i in prompt]
    except TypeError:
        kinds = sorted({type(item).__name__ for item in prompt})
        raise OptionError(
            f"prompt is a list of {' and '.join(kinds)}; give text, token ids, or a list of messages."
        ) from None


def stream_generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int | None = 256,
    *,
    sampling: SamplingOptions | None = None,
    stop: str | Sequence[str] | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_progress_callback: Progress | None = None,
    cancelled: Callable[[], bool] | threading.Event | None = None,
    template_variables: Mapping[str, Any] | None = None,
    max_context: int | None = None,
    runner: Runner | None = None,
    **sampling_options: Any,
) -> Iterator[GenerationResponse]:
    """Generate after ``prompt``, one response a token. See ``GenerationResponse`` for what a response holds.

    ``prompt`` is text (as it is), token ids, or chat messages (see ``prompt_ids``). ``max_tokens`` None fills the
    context; a prompt that does not fit together with ``max_tokens`` is refused. Sampling options (``temperature``,
    ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``logit_bias``, ``seed``, ...; see ``SamplingOptions``) are
    keywords, or come in ``sampling``. ``sampler`` and ``logits_processors`` are functions as mlx-lm makes them.

    An answer ends at any of the tokenizer's ``eos_token_ids``, at a ``stop`` string (neither is shown), after
    ``max_tokens``, or when ``cancelled`` is set or returns True. ``prompt_progress_callback(done, total)`` counts
    prompt tokens. Each call is independent, with a context of ``max_context`` tokens (see ``Runner`` for the default),
    unless a ``runner`` of this model is given: then what it holds of the prompt already is not run again.

    Options are checked at the call. Raises OptionError, ContextError, and while iterating GenerationError, or
    ContextError where ``runner`` has run something else since the last response.
    """
    ids = prompt_ids(tokenizer, prompt, template_variables)
    request = Request(
        max_tokens=max_tokens,
        sampling=_sampling(sampling, sampling_options),
        stop_ids=tokenizer.eos_token_ids,
        stop_strings=stop_strings(stop),
        sampler=sampler,
        logits_processors=logits_processors,
        progress=prompt_progress_callback,
        cancelled=cancelled,
    )
    if runner is None:
        runner = Runner(model, max_context=max_context)
    elif runner.model is not model:
        raise OptionError("runner belongs to another model. Make one with Runner(model).")
    elif max_context is not None:
        raise OptionError(
            "max_context is a property of the runner that is given. Make one with Runner(model, max_context=...)."
        )
    return generate_tokens(runner, tokenizer, ids, request)


def generate(model: nn.Module, tokenizer: Tokenizer, prompt: Prompt, verbose: bool = False, **options: Any) -> str:
    """The whole answer to ``prompt`` as text. ``options`` are those of ``stream_generate``.

    ``verbose`` prints the answer as it comes, and its figures behind it.

    >>> generate(model, tokenizer, "The capital of France is", max_tokens=8)  # doctest: +SKIP
    """
    pieces, last = [], None
    for last in stream_generate(model, tokenizer, prompt, **options):
        pieces.append(last.text)
        if verbose:
            print(last.text, end="", flush=True)
    if verbose:
        print(f"\n{figures(last)}")
    return "".join(pieces)


def figures(last: GenerationResponse) -> str:
    """The figures of an answer, as lines of text, from its last response."""
    reused = f" ({last.reused_tokens} reused)" if last.reused_tokens else ""
    seed = "" if last.seed is None else f"\nseed: {last.seed}"
    return (
        f"prompt: {last.prompt_tokens} tokens{reused}, {last.prompt_tps:.1f} tokens/s\n"
        f"generated: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s\n"
        f"peak memory: {last.peak_memory:.2f} GB\n"
        f"finish reason: {last.finish_reason}{seed}"
    )


def _sampling(sampling: SamplingOptions | None, options: dict[str, Any]) -> SamplingOptions:
    for name in options:
        if name not in SAMPLING_NAMES:
            near = difflib.get_close_matches(name, SAMPLING_NAMES, n=1, cutoff=0.5)
            hint = (
                f" Did you mean {near[0]}?" if near else f" Sampling options are {', '.join(sorted(SAMPLING_NAMES))}."
            )
            raise OptionError(f"{name} is not an option.{hint}")
    return replace(sampling or SamplingOptions(), **options)
