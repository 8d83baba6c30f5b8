"""What several benchmarks measure with: interleaved medians, the next token, the memory's bandwidth in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from turbospark_mlx import Runner

REPEATS = 7


def interleaved(functions: dict[str, Callable[[], list[mx.array]]], *, compiled: bool = False) -> dict[str, float]:
    """Median seconds of each function's work, which is evaluated in one go.

    ``compiled`` makes it one graph, as a decode step is, and evaluates that three times in a row: what the host does
    for one is hidden behind the device's work on another, as far as it is less.
    """
    runs = 3 if compiled else 1
    if compiled:
        functions = {name: mx.compile(function) for name, function in functions.items()}
    for function in functions.values():
        for _ in range(2):
            mx.eval(function())
    times = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(runs - 1):
                mx.async_eval(function())
            mx.eval(function())
            times[name].append((time.perf_counter() - start) / runs)
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
        return "a large a + 1 reads and writes", 2 * a.nbytes / interleaved({"add": lambda: [a + 1.0]})["add"]
    x, y = (np.ones(total // 8, np.float32) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.dot(x, y)
        times.append(time.perf_counter() - start)
    return "a large dot product of the BLAS reads", (x.nbytes + y.nbytes) / statistics.median(times)
