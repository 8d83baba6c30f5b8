"""What several benchmarks measure with: interleaved medians, the next token, the memory's bandwidth in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from turbospark_mlx import Runner
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.cuda_graph import GraphRecording

REPEATS = 7
IN_A_ROW = 3
"""Works to begin at once on a GPU."""


Begin = Callable[[], Callable[[], object]]
"""Begins some work, and returns what waits for it."""


def by_mlx(function: Callable[[], list[mx.array]], *, compiled: bool = False) -> Begin:
    """Work that MLX evaluates; ``compiled`` makes it one graph."""
    run = mx.compile(function) if compiled else function

    def begin() -> Callable[[], object]:
        outputs = run()
        mx.async_eval(outputs)
        return partial(mx.eval, outputs)

    return begin


def by_steps(function: Callable[[], list[mx.array]], known: Sequence[mx.array], backend: Backend) -> Begin:
    """Kernels as a decode step on this GPU runs them: as a CUDA graph of our own where there are such, else compiled.
    ``known`` are the arrays that they read."""
    if not backend.graphs:
        return by_mlx(function, compiled=True)
    told = [np.zeros(1, np.int32)]
    recording = GraphRecording(known, [], told)
    with recording.noting():
        recording.finish(function()[-1], [])
    return lambda: recording.begin(told).wait


def interleaved(works: dict[str, Begin], *, in_a_row: int = 1) -> dict[str, float]:
    """Median seconds of each work. ``in_a_row`` are begun before the first is waited for, so that what the host does
    for one is hidden behind the device's work on another, as far as it is less."""
    for begin in works.values():
        for _ in range(2):
            begin()()
    times = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, begin in works.items():
            start = time.perf_counter()
            for wait in [begin() for _ in range(in_a_row)]:
                wait()
            times[name].append((time.perf_counter() - start) / in_a_row)
    return {name: statistics.median(values) for name, values in times.items()}


def likeliest(runner: Runner, logits: mx.array) -> int:
    """As the generation loop does it: on the host, unless the runner knows."""
    known = runner.likeliest()
    return int(np.argmax(np.array(logits, copy=False))) if known is None else known


def memory_bandwidth(total: int, on_gpu: bool) -> tuple[str, float]:
    """What was done to measure it, and bytes a second; ``total`` bytes are touched at a time."""
    if on_gpu:
        a = mx.ones((total // 4,), mx.float32)
        mx.eval(a)
        return "a large a + 1 reads and writes", 2 * a.nbytes / interleaved({"add": by_mlx(lambda: [a + 1.0])})["add"]
    x, y = (np.ones(total // 8, np.float32) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.dot(x, y)
        times.append(time.perf_counter() - start)
    return "a large dot product of the BLAS reads", (x.nbytes + y.nbytes) / statistics.median(times)
