"""Float dtypes as they are stored, in numpy: bfloat16 is carried as uint16, because numpy has no bfloat16."""

from __future__ import annotations

import numpy as np

STORAGE = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
"""Dtype name, as in ``AffineFormat.companion_dtype``, to the numpy dtype that holds its bytes."""


def to_float32(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The values of a stored array as float32; exact for all three dtypes."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite float32 values in their stored form, rounded to nearest even. Values too large become infinite."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype])


def all_finite(stored: np.ndarray, dtype: str) -> bool:
    """Whether a stored array holds neither NaN nor infinity."""
    if dtype == "bfloat16":
        return not np.any((stored & np.uint16(0x7F80)) == 0x7F80)
    return bool(np.isfinite(stored).all())
