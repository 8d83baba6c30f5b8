"""The ops in numpy float64, from their equations and from the packed bytes, sharing nothing with the package."""

import math

import mlx.core as mx
import numpy as np


def normal(rng, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Random numbers, rounded to ``dtype``."""
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def unpack(weight: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> np.ndarray:
    """The matrix that packed little-endian bits stand for."""
    rows = weight.shape[0]
    stream = np.unpackbits(np.array(weight).view(np.uint8), axis=1, bitorder="little")
    q = stream.reshape(rows, -1, bits) @ (1 << np.arange(bits))
    grouped = q.reshape(rows, -1, group_size)
    return (float64(scales)[..., None] * grouped + float64(biases)[..., None]).reshape(rows, -1)


def random_affine(rng, rows: int, columns: int, bits: int, group_size: int, dtype: mx.Dtype):
    """A random packed matrix; every bit pattern occurs."""
    weight = mx.array(rng.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32))
    scales = mx.array(rng.normal(size=(rows, columns // group_size)).astype(np.float32) / 2**bits).astype(dtype)
    biases = mx.array(rng.normal(size=(rows, columns // group_size)).astype(np.float32)).astype(dtype)
    return weight, scales, biases


def attention(q, k, v, scale, visible=None, additive=None, sinks=None) -> np.ndarray:
    """One query and one head at a time. ``visible`` and ``additive`` are ``[B, H, L, S]``."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        g = h * k.shape[1] // q.shape[1]
        logits = scale * (k[b, g] @ q[b, h, i])
        if additive is not None:
            logits = logits + additive[b, h, i]
        shown = np.ones(len(logits), bool) if visible is None else visible[b, h, i]
        logits, values = logits[shown], v[b, g][shown]
        if sinks is not None:
            logits, values = np.append(logits, sinks[h]), np.append(values, np.zeros((1, v.shape[-1])), axis=0)
        if len(logits):
            weights = np.exp(logits - logits.max())
            out[b, h, i] = weights @ values / weights.sum()
    return out


def gated(gate: np.ndarray, up: np.ndarray, activation: str, limit: float | None) -> np.ndarray:
    """Gated units, with the error function of Python's library."""
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "gelu_erf":
        return gate * 0.5 * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) * up
    if activation == "clamped_swiglu":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return (1 if activation == "sigmoid" else gate) / (1 + np.exp(-gate)) * up


def relative_error(found: mx.array, expected: np.ndarray) -> float:
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(float64(found) - expected).max() / np.abs(expected).max())
