"""Root-mean-square normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.errors import OptionError


def rms_norm_reference(x, weight, *, eps: float) -> mx.array:
    """Definition of `rms_norm`."""
    x32 = x.astype(mx.float32)
    normalized = x32 * mx.rsqrt(mx.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normalized if weight is None else normalized * weight.astype(mx.float32)).astype(x.dtype)


def rms_norm(x: mx.array, weight: mx.array | None, *, eps: float, backend: Backend) -> mx.array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    ``x [..., D]``, ``weight [D]`` or None -> the shape and dtype of ``x``. Uses `mx.fast.rms_norm`. Raises OptionError
    for a weight of another length.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise OptionError(f"rms_norm: weight is {list(weight.shape)}, but x has {x.shape[-1]} columns")
    if x.size == 0:
        return x
    backend.count("rms_norm", "mlx")
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)
