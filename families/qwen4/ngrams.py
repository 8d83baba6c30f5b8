"""Which rows of the n-gram table belong to a token: hashes of it and of the tokens before it. Needs no mlx.

An n-gram of each order from 2 to ``ngram_size`` is hashed once and looked up by several heads, each in a part of the
table of its own, whose number of rows is a prime (as in transformers' ``Qwen4ExpTextNGramEmbedding``). Everything is
int64: products of ids and multipliers stay below 2^63 by the choice of the multipliers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Hash:
    """``multipliers[s]`` is for the token ``s`` before; head ``j`` has ``sizes[j]`` rows from ``offsets[j]`` on, the
    heads of the shortest n-grams first. ``rows`` are those of all heads, filled up to what the table has."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


@lru_cache(maxsize=16)
def hash_of(vocab_size: int, ngram_size: int, heads_per_ngram: int, base: int, divisor: int, seed: int) -> Hash:
    """The hash of a model's only table."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    multipliers = tuple(2 * (_splitmix(seed + _GAMMA * (s + 1)) % half) + 1 for s in range(ngram_size))
    sizes: list[int] = []
    prime = base - 1
    for _ in range((ngram_size - 1) * heads_per_ngram):
        prime += 1
        while not _is_prime(prime):
            prime += 1
        sizes.append(prime)
    ends = np.cumsum(sizes).tolist()
    return Hash(multipliers, tuple(sizes), (0, *ends[:-1]), -(-ends[-1] // divisor) * divisor)


def _splitmix(value: int) -> int:
    """Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    if value < 2 or (value % 2 == 0 and value != 2):
        return False
    return all(value % divisor for divisor in range(3, isqrt(value) + 1, 2))


def row_ids(tokens: np.ndarray, before: np.ndarray, hashed: Hash, eos: int) -> np.ndarray:
    """The rows of ``tokens [B, L]`` behind ``before [B, ngram_size - 1]``: int64 ``[B, L, heads]``.

    Nothing before an ``eos`` counts for what comes after it: it reads as ``eos`` instead.
    """
    seen = np.concatenate([before, tokens], axis=1).astype(np.int64)
    length, order = tokens.shape[1], len(hashed.multipliers)
    per_order = len(hashed.sizes) // (order - 1)
    sizes, offsets = np.array(hashed.sizes), np.array(hashed.offsets)
    mixed = seen[:, order - 1 :] * hashed.multipliers[0]
    ended, rows = np.zeros(tokens.shape, bool), []
    for back in range(1, order):
        start = order - 1 - back
        earlier = seen[:, start : start + length]
        ended |= earlier == eos
        mixed = mixed ^ (np.where(ended, eos, earlier) * hashed.multipliers[back])
        heads = slice((back - 1) * per_order, back * per_order)
        rows.append(mixed[..., None] % sizes[heads] + offsets[heads])
    return np.concatenate(rows, axis=-1)
