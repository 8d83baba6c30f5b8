"""Single experts' matrices and biases out of checkpoint tensors that hold several of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from turbospark_mlx.convert.source import Rows, SourceTensor
from turbospark_mlx.protocols import RoutedPart


def stacked_shape(part: RoutedPart, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """The shape of a checkpoint tensor, where each of ``part.tensors`` has ``shape``."""
    joined = (len(part.tensors) * shape[0], *shape[1:])
    if part.transposed:
        joined = joined[::-1]
    return joined if part.expert is not None else (num_experts, *joined)


def cut(tensor: SourceTensor, part: RoutedPart, shape: tuple[int, ...], at: int, share: int, what: str) -> SourceTensor:
    """Tensor ``share`` of ``part.tensors``, of ``shape``, of the ``at``-th expert in ``tensor``; messages call it
    ``what``."""
    count, rows = len(part.tensors), shape[0]
    joined = _expert(tensor, part, count * rows, at, stacked_vector=len(shape) == 1 and part.expert is None)

    def read(start: int, stop: int) -> Rows:
        if not part.interleaved:
            return joined(share * rows + start, share * rows + stop)
        taken = joined(count * start, count * stop)
        if isinstance(taken, tuple):
            return type(taken)(*(np.ascontiguousarray(array[share::count]) for array in taken))
        return np.ascontiguousarray(taken[share::count])

    return SourceTensor(shape, tensor.format, f"{tensor.where}, {what}", read)


def _expert(
    tensor: SourceTensor, part: RoutedPart, joined: int, at: int, *, stacked_vector: bool
) -> Callable[[int, int], Rows]:
    """What reads rows of one expert's share of ``tensor``, which has ``joined`` of them."""
    if stacked_vector:
        return lambda start, stop: tensor.read(at, at + 1).reshape(-1, 1)[start:stop]
    if not part.transposed:
        return lambda start, stop: tensor.read(at * joined + start, at * joined + stop)
    inputs = tensor.shape[-2]
    # Rows are columns of the file, so that all of an expert is read for each tile. Keeping it would take its memory.
    return lambda start, stop: np.ascontiguousarray(tensor.read(at * inputs, (at + 1) * inputs)[:, start:stop].T)
