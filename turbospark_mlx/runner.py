"""The runner: one sequence of tokens through one model, with its caches.

It knows token ids and logits; text, sampling and stopping are others' business. What cannot work is refused before
anything is computed, and nothing leaves the caches of different layers at different positions: an error on the way puts
them back to the last pass that was completed, or empties them where that cannot be had again.
"""

from __future__ import annotations

import gc
import math
import operator
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from turbospark_mlx import loader
from turbospark_mlx.admission import ContextLimit, resolve_context, whole_number
from turbospark_mlx.cache import RingKV, mark_all, reusable_prefix, rollback_all, trim_all
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import BackendError, ContextError, OptionError, TurbosparkError, counted
from turbospark_mlx.experts import ExpertCounters, ExpertStore, Routed, least_bytes, open_experts
from turbospark_mlx.gturbo import Install
from turbospark_mlx.memory import available_bytes, give_back, map_large_blocks, uncached
from turbospark_mlx.readers import read_ahead
from turbospark_mlx.report import Report
from turbospark_mlx.step import Begun, DecodeStep
from turbospark_mlx.tokenizer import Tokenizer

PREFILL_CHUNK = {"cpu": 512, "gpu": 2048}
"""Prompt tokens run at once, by device."""
WARM_UP_ROWS = (9, 4, 1)
"""Products take one path for a single row, one for up to 8, and one for more."""
STEPS_TO_SETTLE = 2
"""A decode step runs once to learn its operations, then as what it stays."""


@dataclass(frozen=True)
class Mark:
    """A point in a runner's sequence, for ``Runner.rollback``."""

    position: int
    layers: tuple[Any, ...]


class Runner:
    """Drives a model over one sequence of token ids. A context manager.

    It belongs to the thread that made it, as MLX's streams do: any other thread is refused in one sentence. So is a
    process that was forked since, where MLX's own threads are missing and a computation would wait for ever.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context: int | ContextLimit | None = None,
        prefill_chunk: int | None = None,
        install: Install | None = None,
    ):
        """A runner over ``model``.

        ``max_context`` counts prompt and generated tokens together (``admission.resolve_context`` has the default);
        ``prefill_chunk`` is the number of prompt tokens run at once. ``tokenizer`` comes from ``install``, which the
        runner closes. Raises OptionError.
        """
        self._thread = threading.current_thread()
        self._process = os.getpid()
        self._closed = False
        self._install = install
        self.model = model
        if not isinstance(max_context, ContextLimit):
            room = available_bytes(model.backend.device)
            max_context = resolve_context(model.args, max_context, model.dtype.size, room, model.longest_context)
        self._limit = max_context
        self.vocab_size: int = model.args.vocab_size
        """The length of a row of logits. A tokenizer may have fewer ids."""
        self._chunk = PREFILL_CHUNK[model.backend.device]
        if prefill_chunk is not None:
            self._chunk = whole_number("prefill_chunk", prefill_chunk)
        self._ids: list[int] = []
        self._cache = model.make_cache(self.max_context)
        self.experts: ExpertStore | None = model.experts
        """Where the routed experts live, with what was read of them; None where they are parameters."""
        if self.experts and prefill_chunk is None:
            self._chunk = min(self._chunk, self.experts.most_rows)
        # Who has experts read from disk wants little memory, and waits longer for them than for memory.
        self._streams_on_cpu = model.backend.device == "cpu" and self.experts is not None and self.experts.reads_files
        if self._streams_on_cpu:
            map_large_blocks()
        chosen_on_host = self.experts is not None and self.experts.on_host
        arrays = self.experts.arrays if self.experts else ()
        self._slots = self.experts.slot_maps if self.experts else None
        self._step = DecodeStep(model, self._cache, fixed=not chosen_on_host, arrays=arrays, slots=self._slots)
        can_be_laid_out = self._slots is not None or not chosen_on_host
        self._looks_ahead = model.backend.device == "gpu" and can_be_laid_out and not model.looks_up
        # The second of two steps has overwritten what the first needs to be run again.
        self._takes_back_one = any(isinstance(layer, RingKV) for layer in self._cache)
        self._ahead: Begun | None = None
        self._last: Begun | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        max_context: int | None = None,
        kernels: str = "auto",
        dtype: str | mx.Dtype | None = None,
        verify: str = "auto",
        prefill_chunk: int | None = None,
        fused: bool = True,
        residency: str = "auto",
        expert_slots: int | str = "auto",
        progress: loader.Progress | None = None,
    ) -> Runner:
        """Open an install and load its model.

        ``kernels`` chooses the back end (``custom_kernels.backends.select``), ``dtype`` that of activations
        (``loader.resolve_dtype``), ``verify`` how much is hashed (``Install.open``). ``fused=False`` makes plain
        ``mlx.nn`` modules on the reference back end, which have gradients. ``residency`` and ``expert_slots`` say where
        routed experts live (``experts.open_experts``). ``progress`` is called with the bytes of
        weights read so far and in all. Raises InstallError, OptionError, BackendError.
        """
        backend = backends.select(kernels if fused else "reference")
        activations = loader.resolve_dtype(dtype, backend)
        with ExitStack() as stack:
            install = stack.enter_context(Install.open(path, verify=verify))
            read_ahead(install.resident_file)
            _, config = loader.read_config(install)
            weights = sum(entry.nbytes for entry in install.tensors.values())
            room = max(0, available_bytes(backend.device) - weights)
            asked = {"residency": residency, "slots": expert_slots}
            least = least_bytes(install, **asked, fused=fused)
            limit = resolve_context(config, max_context, activations.size, max(0, room - least))
            store = None
            if fused and install.experts:
                room -= config.kv_bytes(limit.tokens, activations.size)
                store = stack.enter_context(open_experts(install, backend=backend, room=room, **asked))
            model = loader.load_model(
                install,
                backend=backend,
                dtype=activations,
                fused=fused,
                max_context=limit.tokens,
                experts=store,
                progress=progress,
            )
            runner = cls(model, max_context=limit, prefill_chunk=prefill_chunk, install=install)
            runner._compile_kernels()
            stack.pop_all()
        give_back()
        return runner

    def _compile_kernels(self) -> None:
        """Run one token and a few together, so that no kernel is compiled in the middle of an answer."""
        if self.model.backend.launch is None:
            return

        def run(length: int) -> list[Any]:
            caches = self.model.make_cache(self.max_context)
            mx.eval(self.model(mx.zeros((1, length), mx.int32), cache=caches))
            return caches

        # A step with its own way of running kernels compiles them itself, unless a miss makes it run layer by layer.
        alone = 1 if self._step.is_apart and self._slots is None else 0
        lengths = [length for length in WARM_UP_ROWS if alone < length <= self.max_context] or [1]
        with self.experts.idle() if self.experts and self.experts.on_host else nullcontext():
            if self.model.backend.rehearse is not None:
                self.model.backend.rehearse(partial(run, length) for length in lengths)
            else:
                for length in lengths:
                    caches = run(length)
                for _ in range(min(STEPS_TO_SETTLE, self.max_context - caches[0].offset)):
                    mx.eval(self._step(0, caches)[0])
        if self.experts:
            self.experts.compile_kernels(self.model.dtype)
        self.model.backend.counters.clear()

    @property
    def max_context(self) -> int:
        """The most tokens that the sequence may have."""
        return self._limit.tokens

    @property
    def position(self) -> int:
        """The number of tokens run so far."""
        return len(self._ids)

    @property
    def history(self) -> list[int]:
        """The token ids run so far."""
        return list(self._ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The install's tokenizer. Raises InstallError where it has none."""
        self._check_usable()
        if self._install is None:
            raise TurbosparkError("This runner was made from a model, not from an install, so it has no tokenizer.")
        return Tokenizer.from_install(self._install)

    def prefill(
        self,
        ids: Sequence[int],
        *,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> mx.array | None:
        """Run ``ids`` after what was run so far; returns float32 logits ``[vocab]`` behind the last of them.

        ``progress`` is called with the tokens done and in all after every chunk. ``cancelled`` is asked before every
        chunk; once it says yes, the chunks that were run stay and None is returned. Raises ContextError, before
        anything is computed, for no ids, ids that the model does not have, and more than the context has room for, and
        OptionError for what are no ids.
        After any other error, too, the chunks that were run stay. Where the evaluation itself failed, or the chunk that
        failed has overwritten what a sliding window would need again, nothing stays: to hold that as well would take
        the memory of those caches twice. Ctrl-C lets an evaluation under way end, and what it ran stays, too.
        ``history`` and ``reuse`` say what is left to run.
        """
        self._check_usable()
        self._forget_ahead()
        ids = self._admit(ids)
        logits = None
        for first in range(0, len(ids), self._chunk):
            if cancelled is not None and cancelled():
                return None
            chunk = ids[first : first + self._chunk]
            done = first + len(chunk)
            with uncached() if self._streams_on_cpu else nullcontext():
                logits = self._forward(chunk, head=done == len(ids))
            if progress is not None:
                progress(done, len(ids))
        return logits

    def decode(self, token_id: int, *, ahead: bool = False) -> mx.array:
        """Run one token; returns float32 logits ``[vocab]`` behind it. Raises as ``prefill`` does.

        ``ahead`` lets a GPU begin with the most probable next token meanwhile, whose logits are then there sooner. It
        changes no result; a step that was begun in vain costs its time.
        """
        self._check_usable()
        return self._forward(self._admit([token_id]), head=True, ahead=ahead)

    def likeliest(self) -> int | None:
        """The most probable token behind the last ``decode`` that looked ahead; None where that is not known, or where
        the logits are not all numbers.

        It is known without bringing the logits to the host, which costs a GPU's user a good part of a token's time.
        """
        self._check_usable()
        if self._last is None or not math.isfinite(self._last.peak):
            return None
        return self._last.likeliest

    def mark(self) -> Mark:
        """A point to come back to with ``rollback``. It holds the caches' buffers, not a copy."""
        self._check_usable()
        self._forget_ahead()
        return Mark(self.position, tuple(mark_all(self._cache)))

    def rollback(self, mark: Mark) -> None:
        """Go back to ``mark``, as if nothing had been run since.

        Raises ContextError, and changes nothing, for a mark of another runner, one from before ``reset``, and one that
        was passed on the way back to an earlier point.
        """
        self._check_usable()
        self._forget_ahead()
        rollback_all(self._cache, mark.layers)
        del self._ids[mark.position :]

    def reuse(self, ids: Sequence[int]) -> int:
        """Go back to the longest prefix of ``ids`` that the caches hold, and return its length.

        At least one of ``ids`` is left to run, because logits come only from running a token. Where a sliding window
        has overwritten what the common prefix needs, the runner is reset and 0 is returned.
        """
        self._check_usable()
        self._forget_ahead()
        common = 0
        for mine, theirs in zip(self._ids, list(ids)[:-1], strict=False):
            if mine != theirs:
                break
            common += 1
        common = reusable_prefix(self._cache, common)
        if common == 0:
            self.reset()
        elif common < self.position:
            trim_all(self._cache, common)
            del self._ids[common:]
        return common

    def reset(self) -> None:
        """Forget everything that was run, and give its memory back."""
        self._check_usable()
        self._empty()

    def close(self) -> None:
        """Let go of the model and of the install's files; a second call does nothing."""
        if self._closed:
            return
        self._check_usable()
        self._closed = True
        # Who gets its memory next does not wait for them.
        with suppress(BackendError):
            self._end_steps()
        self._ids, self._cache, self._ahead, self._last = [], [], None, None
        self._step = self._slots = self.model = None
        if self.experts is not None:
            self.experts.close()
            self.experts = None
        if self._install is not None:
            self._install.close()
            gc.collect()  # the model's modules hold each other
            give_back()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self) -> Report:
        """What was resolved, and what is in use."""
        self._check_usable()
        config, backend = self.model.args, self.model.backend
        arrays = [array for _, array in tree_flatten(self.model.parameters())]
        return Report(
            model_type=self.model.model_type,
            parameters=self.model.parameter_count,
            backend=backend.name,
            backend_reason=backend.reason,
            device=backend.device,
            dtype=str(self.model.dtype).removeprefix("mlx.core."),
            fused=self.model.fused,
            max_context=self._limit.tokens,
            context_reason=self._limit.reason,
            trained_context=config.max_position_embeddings,
            prefill_chunk=self._chunk,
            weight_bytes=sum(array.nbytes for array in arrays),
            kv_bytes=config.kv_bytes(self.max_context, self.model.dtype.size),
            kv_bytes_now=sum(layer.nbytes for layer in self._cache),
            experts=self.experts and self.experts.resolved,
            expert_counters=self.experts and sum(self.experts.counters, ExpertCounters()),
            operations=dict(backend.counters),
            decode_step=self._step.how,
        )

    def _check_usable(self) -> None:
        if threading.current_thread() is not self._thread:
            raise BackendError(
                f"This runner belongs to thread {self._thread.name!r}, which made it, and was called from"
                f" {threading.current_thread().name!r}: make a runner in the thread that uses it."
            )
        if os.getpid() != self._process:
            raise BackendError(
                f"This runner belongs to process {self._process}, of which this one, {os.getpid()}, is a fork, and MLX"
                ' computes nothing in a fork: start processes by "spawn", and make a runner in each.'
            )
        if self._closed:
            raise TurbosparkError("This runner is closed. Open it again.")

    def _admit(self, ids: Sequence[int]) -> list[int]:
        """The ids as ints, once they are known to be tokens of this model that fit behind the others."""
        try:
            ids = [operator.index(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]
        except TypeError as error:
            raise OptionError(f"Token ids are whole numbers in one list or array: {error}.") from None
        if not ids:
            raise ContextError("There are no tokens to run: the prompt is empty.")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ContextError(
                f"Token id {wrong} is not one of this model's, which go from 0 to {self.vocab_size - 1}."
            )
        if self.position + len(ids) > self.max_context:
            raise ContextError(
                f"max_context {self.max_context} has no room for {counted(len(ids), 'token')} after {self.position}."
                " Shorten the prompt, reset, or open with a larger max_context."
            )
        return ids

    def _forward(self, ids: list[int], *, head: bool, ahead: bool = False) -> mx.array | None:
        """Run ``ids`` as one pass. Only its last row goes through the head, and only where ``head``."""
        after, is_laid_out, routed = self.position + len(ids), False, None
        try:
            if head and len(ids) == 1:
                logits, routed = self._decode_step(ids[0], ahead)
            else:
                hidden = self.model.hidden(mx.array([ids]), self._cache)
                logits = self.model.head(hidden[:, -1:])[0, 0].astype(mx.float32) if head else None
            is_laid_out = True
            self._evaluate(logits, routed)
            if not self._is_right(routed):
                is_laid_out, routed = False, None
                logits = self._run_again(ids[0])
                is_laid_out = True
                self._evaluate(logits)
            self._ids += ids
            if self._last is not None:
                self._begin_next(self._last)
        except BaseException as error:
            if not is_laid_out or self.position == after:
                self._go_back()
            # Python hears of Ctrl-C when the evaluation has ended: another has nothing left to do then.
            elif isinstance(error, Exception) or not self._can_evaluate(logits, routed):
                # The buffers are results of the evaluation that failed.
                self._empty()
            elif self._is_right(routed):
                self._ids += ids
            else:
                self._go_back()
            raise
        return logits

    def _evaluate(self, logits: mx.array | None, routed: Routed | None = None) -> None:
        states = [] if self._ahead else [layer.arrays for layer in self._cache]
        mx.eval(logits, routed and routed.array, states)

    def _can_evaluate(self, logits: mx.array | None, routed: Routed | None) -> bool:
        try:
            self._evaluate(logits, routed)
        except BaseException:
            return False
        return True

    def _is_right(self, routed: Routed | None) -> bool:
        """Whether a step that was evaluated had every expert that it chose."""
        return routed is None or self._slots.settle(routed)

    def _run_again(self, token: int) -> mx.array:
        """Take back a step that lacked experts, and run its token as they are read."""
        self._forget_ahead()
        trim_all(self._cache, self.position)
        return self._step(token, self._cache, by_layer=True)[0]

    def _go_back(self) -> None:
        """After an error in the middle of a pass: to the end of the last one, or to nothing."""
        if self.experts is not None:
            self.experts.settle()
        try:
            self._end_steps()
        except TurbosparkError:
            # What a step that failed has written is not known.
            self._empty()
            return
        if reusable_prefix(self._cache, self.position) == self.position:
            trim_all(self._cache, self.position)
        else:
            self._empty()

    def _decode_step(self, token: int, ahead: bool) -> tuple[mx.array, Routed | None]:
        """Logits behind ``token``, which may have been begun before, and what has to be right for them to count.
        ``ahead`` begins with the next, or has `_forward` begin with it once they do."""
        begun, self._last = self._ahead, None
        if begun is not None and begun.fed == token:
            self._ahead = None
        else:
            self._forget_ahead()
            begun = None
        by_layer = self._slots is not None and not (self._slots.expect_hits() and self._step.is_whole)
        if by_layer or not (ahead and self._looks_ahead):
            if begun is None:
                return self._step(token, self._cache, by_layer=by_layer)
            return begun.logits, begun.routed
        if begun is None:
            begun = self._step.begin(token, self._cache)
        if begun.routed is None or not self._takes_back_one:
            self._begin_next(begun)
        self._last = begun
        return begun.logits, begun.routed

    def _begin_next(self, begun: Begun) -> None:
        """Begin with the likeliest token behind ``begun``, once, where there is room for it."""
        is_laid_out = self._slots is None or self._step.is_whole
        if self._ahead is None and is_laid_out and self._cache[0].offset < self.max_context:
            self._ahead = self._step.begin(begun, self._cache)

    def _forget_ahead(self) -> None:
        """Bring the caches back from a step that was begun and is not wanted, once it has written its last: MLX does
        not know that what comes next writes the same rows."""
        ahead, self._ahead, self._last = self._ahead, None, None
        if ahead is not None:
            try:
                ahead.wait()
            finally:
                trim_all(self._cache, self.position)

    def _end_steps(self) -> None:
        """Let all steps on their way come to their end, wanted or not. Raises BackendError."""
        self._ahead = self._last = None
        self._step.wait()

    def _empty(self) -> None:
        # Who gets the caches' memory next does not wait for them.
        with suppress(BackendError):
            self._end_steps()
        self._ids, self._cache = [], self.model.make_cache(self.max_context)
