"""How far a kernel's outputs are from those of its reference in float32, and how far they may be."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
"""Of the largest value: float32 sums in another order, and the steps of the other types."""


def outputs(found) -> list[mx.array]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def reference(function: Callable, arrays: list[mx.array]) -> list[np.ndarray]:
    """What ``function`` gives in float32 on a CPU."""
    with mx.stream(mx.cpu):
        return [np.array(float32(a)).astype(np.float64) for a in outputs(function(*map(float32, arrays)))]


def errors(found: list[mx.array], expected: list[np.ndarray], arrays: list[mx.array]) -> Iterator[tuple[float, float]]:
    """(error, allowed) of each output; integers have to be the same."""
    for one, value in zip(found, expected, strict=True):
        types = [a.dtype for a in (*arrays, one) if mx.issubdtype(a.dtype, mx.floating)]
        error = np.abs(np.array(float32(one)).astype(np.float64) - value).max() / max(np.abs(value).max(), 1e-30)
        allowed = max(TOLERANCE[t] for t in types) if mx.issubdtype(one.dtype, mx.floating) else 0.0
        yield float(error), allowed
