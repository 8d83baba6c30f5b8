"""Attention masks as arrays, for callers that build their own attention."""

from __future__ import annotations

import mlx.core as mx


def causal_mask(queries: int, keys: int, window: int | None = None) -> mx.array:
    """Which keys each query sees: boolean ``[queries, keys]``.

    The queries are the last of the ``keys`` positions. A window counts the query's own position.
    """
    query = mx.arange(keys - queries, keys)[:, None]
    key = mx.arange(keys)[None]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
