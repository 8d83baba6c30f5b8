"""How fast a model answers on this machine, and how fast its experts come from disk."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark_mlx.admission import whole_number
from turbospark_mlx.errors import ContextError, OptionError, counted
from turbospark_mlx.experts import ExpertCounters
from turbospark_mlx.experts.blob import used_bytes
from turbospark_mlx.experts.chunks import products_bytes
from turbospark_mlx.experts.reader import ExpertReader
from turbospark_mlx.gturbo import Install
from turbospark_mlx.memory import available_bytes
from turbospark_mlx.runner import Runner

TEXT = (
    "A comet is a small body of ice and dust that warms as it comes near a star and begins to give off gas. The gas"
    " makes a bright cloud around its core, and often a tail that light and the wind of the star drive away from it."
    " Most comets spend nearly all of their lives far out in the cold, where nobody sees them, and only a few are bent"
    " into the paths that bring them back every few years. What they are made of has hardly changed since the planets"
    " were born, so that a handful of it is a letter from that time. "
)
RAW_BYTES = 512_000_000
"""What the raw bandwidth of a disk is measured on."""


@dataclass
class Phase:
    """Tokens run in a row, and what that took of the disk."""

    tokens: int
    seconds: float
    counters: ExpertCounters | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def document(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, bandwidths in bytes a second, None where nothing is streamed."""
        made: dict[str, Any] = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        if (read := self.counters) is not None:
            made |= {
                "hit_rate": read.hit_rate,
                "bytes_per_token": read.bytes_read / self.tokens,
                "read_bandwidth": read.bytes_read / read.read_seconds if read.read_seconds else None,
                "waiting": read.wait_seconds / self.seconds,
            }
        return made


def measure(
    runner: Runner,
    install: Install,
    *,
    prompt_tokens: int = 128,
    tokens: int = 32,
    repeats: int = 3,
    cold: bool = True,
    text: str = TEXT,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a prompt and an answer ``repeats`` times, and say how fast, as an object for JSON: medians of the repeats.

    ``install`` is the runner's, opened once more. The prompt is ``text``, repeated or cut to ``prompt_tokens``; the
    answer is greedy. With ``cold``, and experts that are not all in memory, what the system caches of their files is
    dropped before each repeat, where the system does that (Linux), and what a plain parallel read of them gives is
    measured in between. ``progress`` is called with the repeats done and in all. Raises OptionError and ContextError.
    """
    counts = {"prompt_tokens": prompt_tokens, "tokens": tokens, "repeats": repeats}
    prompt_tokens, tokens, repeats = (whole_number(name, value) for name, value in counts.items())
    if prompt_tokens + tokens > runner.max_context:
        raise ContextError(
            f"max_context {runner.max_context} has no room for a prompt of {prompt_tokens} and"
            f" {counted(tokens, 'more token')}."
        )
    encoded = runner.tokenizer.encode(text)
    if not encoded:
        raise OptionError("text: there are no tokens in it.")
    ids = list(islice(cycle(encoded), prompt_tokens))
    reads_files = runner.experts is not None and runner.experts.reads_files
    cold = cold and reads_files and hasattr(os, "posix_fadvise")
    free = available_bytes(runner.model.backend.device)
    mx.reset_peak_memory()
    raw, runs = [], []
    for done in range(repeats):
        if cold:
            _drop(install)
            raw.append(_raw_bandwidth(install, seed=done))
            _drop(install)
        runner.reset()
        runs.append(_run(runner, ids, tokens))
        if progress is not None:
            progress(done + 1, repeats)
    report = runner.report()
    experts, held = report.experts, 0
    if experts:
        chunk = min(report.prefill_chunk, report.max_context)
        held = experts.nbytes + products_bytes(install.arch, chunk)
    return {
        "model": report.model_type,
        "backend": report.backend,
        "dtype": report.dtype,
        "residency": experts and experts.residency,
        "expert_slots": experts and (experts.slots or None),
        "cold": cold,
        "prefill": _median([prefill for prefill, _ in runs]),
        "decode": _median([decode for _, decode in runs]),
        "raw_bandwidth": statistics.median(raw) if raw else None,
        "free_memory": free,
        "predicted_memory": report.weight_bytes + report.kv_bytes + held,
        "peak_array_memory": mx.get_peak_memory(),
    }


def _run(runner: Runner, ids: list[int], tokens: int) -> tuple[Phase, Phase]:
    logits = None

    def prefill() -> None:
        nonlocal logits
        logits = runner.prefill(ids)
        mx.eval(logits)

    def decode() -> None:
        nonlocal logits
        for _ in range(tokens):
            logits = runner.decode(int(mx.argmax(logits)))
        mx.eval(logits)

    return _phase(runner, len(ids), prefill), _phase(runner, tokens, decode)


def _phase(runner: Runner, tokens: int, work: Callable[[], None]) -> Phase:
    before, started = _counters(runner), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - started, _counters(runner)
    if after is not None:
        after = ExpertCounters(*(getattr(after, f.name) - getattr(before, f.name) for f in fields(after)))
    return Phase(tokens, seconds, after)


def _counters(runner: Runner) -> ExpertCounters | None:
    streamed = runner.experts is not None and runner.experts.resolved.slots
    return sum(runner.experts.counters, ExpertCounters()) if streamed else None


def _median(phases: list[Phase]) -> dict[str, Any]:
    """The repeat with the median time."""
    return sorted(phases, key=lambda phase: phase.seconds)[len(phases) // 2].document()


def _drop(install: Install) -> None:
    """Ask the system to forget what it caches of the experts."""
    for position in range(len(install.experts.layers)):
        os.posix_fadvise(install.expert_file(position).fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _raw_bandwidth(install: Install, seed: int) -> float:
    """Bytes a second of reading random experts as streaming does, and nothing else."""
    layers = install.experts.layers
    sample = [(position, expert) for position, layer in enumerate(layers) for expert in range(len(layer.offsets))]
    random.Random(seed).shuffle(sample)
    sizes = [used_bytes(layer) for layer in layers]
    memory = np.ones(max(sizes), np.uint8)
    reader, read = ExpertReader(install), 0
    try:
        started = time.perf_counter()
        pending = []
        for position, expert in sample:
            reads = reader.reads(position, [expert], [memory[: sizes[position]]])
            reads.start()
            pending.append(reads)
            read += reads.nbytes
            if read >= RAW_BYTES:
                break
        for reads in pending:
            reads.wait()
        return read / (time.perf_counter() - started)
    finally:
        reader.close()
