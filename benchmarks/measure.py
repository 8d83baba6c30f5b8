"""What several benchmarks measure with: interleaved medians, and the memory's bandwidth in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

REPEATS = 7


def interleaved(functions: dict[str, Callable[[], list[mx.array]]]) -> dict[str, float]:
    """Median seconds of each function's work, which is evaluated in one go."""
    for function in functions.values():
        for _ in range(2):
            mx.eval(function())
    times = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            mx.eval(function())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


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
