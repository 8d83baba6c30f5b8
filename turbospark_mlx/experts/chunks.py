"""How many rows are mixed at once. Everybody cuts alike, so that where experts live changes no bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

SCRATCH_BYTES = 64_000_000
"""What the products of a chunk may take before they are summed."""


def most_rows(top_k: int, hidden: int) -> int:
    """Rows whose products, ``top_k`` float32 rows of ``hidden`` each, stay within the scratch memory."""
    return max(1, SCRATCH_BYTES // (4 * top_k * hidden))


def products_bytes(arch: Mapping[str, Any], rows: int) -> int:
    """What the products of a chunk of ``rows`` rows take in a model of this ``arch`` of a manifest."""
    top_k, hidden = arch["topKExperts"], arch["hiddenSize"]
    return 4 * min(rows, most_rows(top_k, hidden)) * top_k * hidden


def mix_in_parts(
    mix: Callable[..., mx.array], indices, x: mx.array, weights: mx.array, residual: mx.array | None
) -> mx.array:
    """``mix(indices, x, weights, residual)`` over at most ``most_rows`` rows at a time."""
    rows, step = x.shape[0], most_rows(weights.shape[1], x.shape[1])
    if rows <= step:
        return mix(indices, x, weights, residual)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    added = [None if residual is None else residual[part] for part in parts]
    return mx.concatenate(
        [mix(indices[part], x[part], weights[part], more) for part, more in zip(parts, added, strict=True)]
    )
