"""Rotary position embedding: how a configuration spells it, and which frequency each pair of dimensions turns at.

Pure arithmetic in float64; ``layers.RoPE`` applies the result. Pair ``i`` of a head of ``D`` dimensions is
``(x[i], x[i + D/2])`` and turns by ``position * f_i``, where ``f_i = theta ** (-2 i / D)`` before scaling.

Does not know dynamic NTK scaling, whose frequencies depend on the length so far: keys that are already in the cache
would have been turned at other frequencies than the query, so the answer would depend on how the prompt was cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from turbospark_mlx.families.fields import Fields

DEFAULT_THETA = 10000.0
"""What a configuration without ``rope_theta`` means; Llama 2's has none."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency divided by ``factor``."""

    rope_type: ClassVar[str] = "linear"
    attention_factor: ClassVar[float] = 1.0
    factor: float

    @classmethod
    def parse(cls, fields: Fields, context: RopeContext) -> LinearScaling:
        return cls(factor=fields.number("factor"))

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by ``factor``, short ones kept, a linear blend between."""

    rope_type: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def parse(cls, fields: Fields, context: RopeContext) -> Llama3Scaling:
        scaling = cls(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=fields.size("original_max_position_embeddings", context.original_length),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise fields.refuse("high_freq_factor", f"it must exceed low_freq_factor, {scaling.low_freq_factor:g}.")
        return scaling

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow pairs, keep fast ones, and sharpen attention.

    ``attention_factor`` multiplies queries and keys alike. ``truncate`` rounds the borders of the blend to whole pairs.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    @classmethod
    def parse(cls, fields: Fields, context: RopeContext) -> YarnScaling:
        original = fields.size("original_max_position_embeddings", context.original_length)
        factor = fields.number("factor", None)
        if factor is None:
            if not (fields.has("original_max_position_embeddings") or context.original_length_stated):
                raise fields.error(f"{fields.where}: neither factor nor original_max_position_embeddings is there.")
            factor = context.max_position_embeddings / original
        mscale, mscale_all_dim = (
            fields.number("mscale", None, above=-1.0),
            fields.number("mscale_all_dim", None, above=-1.0),
        )

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        inferred = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
        scaling = cls(
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=fields.number("attention_factor", inferred),
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            truncate=fields.flag("truncate", True),
        )
        if scaling.beta_fast < scaling.beta_slow:
            raise fields.refuse("beta_fast", f"it must not be less than beta_slow, {scaling.beta_slow:g}.")
        return scaling

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        pairs = frequencies.size

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001
        interpolate = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1.0 - interpolate + interpolate / self.factor)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one divisor a pair, from ``short_factor`` or ``long_factor``.

    Which of the two is decided once, by the longest context that the model is opened for, so that a cached key and a
    query always agree and cutting a prompt changes nothing.
    """

    rope_type: ClassVar[str] = "longrope"
    original_max_position_embeddings: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]

    @classmethod
    def parse(cls, fields: Fields, context: RopeContext) -> LongRopeScaling:
        original = fields.size("original_max_position_embeddings", context.original_length)
        factor = fields.number("factor", context.max_position_embeddings / original)
        inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return cls(
            original_max_position_embeddings=original,
            attention_factor=fields.number("attention_factor", inferred),
            short_factor=_divisors(fields, "short_factor", context.head_dim // 2),
            long_factor=_divisors(fields, "long_factor", context.head_dim // 2),
        )

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        return frequencies / (self.long_factor if length > self.original_max_position_embeddings else self.short_factor)


def _divisors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    values = fields.items(key)
    if len(values) != count:
        raise fields.error(f"{fields.where}: {key} has {len(values)} values; head_dim / 2 is {count}.")
    each = Fields({f"{key}[{i}]": value for i, value in enumerate(values)}, fields.where, fields.error)
    return tuple(each.number(name) for name in each.values)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling

_SCALINGS: dict[str, type] = {s.rope_type: s for s in (LinearScaling, Llama3Scaling, YarnScaling, LongRopeScaling)}
_UNDERSTOOD = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "truncate"),
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "default": set(),
}
_SAID_ELSEWHERE = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}
"""``finetuned`` is a remark of some YaRN checkpoints; the others are read by name below."""


@dataclass(frozen=True)
class RopeContext:
    """What a scaling needs to know of the model around it."""

    head_dim: int
    max_position_embeddings: int
    original_length: int
    """Length before scaling, for scalings that do not state it: config.json's own field, else the model's length."""
    original_length_stated: bool


def parse_rope(
    config: Fields, head_dim: int, max_position_embeddings: int, default_theta: float = DEFAULT_THETA
) -> tuple[float, RopeScaling | None]:
    """``(theta, scaling)`` from config.json, in the published spelling (``rope_theta`` and ``rope_scaling``) or in that
    of transformers 5 (``rope_parameters``).

    One fact may be spelled twice if the spellings agree. Raises ``config.error`` for contradictions, for unknown types
    and unknown fields, by name.
    """
    blocks = [block for key in ("rope_scaling", "rope_parameters") for block in _blocks(config.object(key))]
    original = config.size("original_max_position_embeddings", None)
    context = RopeContext(head_dim, max_position_embeddings, original or max_position_embeddings, original is not None)

    thetas = {fields.number("rope_theta", above=1.0) for fields in (config, *blocks) if fields.has("rope_theta")}
    if len(thetas) > 1:
        raise config.error(f"{config.where}: rope_theta is given as {' and as '.join(map(str, sorted(thetas)))}.")
    scalings = {_parse_block(block, context) for block in blocks}
    if len(scalings) > 1:
        raise config.error(f"{config.where}: rope_scaling and rope_parameters describe different scalings.")
    config.allow_only("partial_rotary_factor", (1,), "this family rotates whole heads.")
    return (thetas or {default_theta}).pop(), (scalings or {None}).pop()


def _blocks(fields: Fields) -> list[Fields]:
    """The block itself, the blocks of each layer type where they are nested, or nothing where it is empty."""
    if not fields.values:
        return []
    if any(isinstance(value, Mapping) for value in fields.values.values()):
        return [fields.object(key) for key in fields.values if fields.has(key)]
    return [fields]


def _parse_block(fields: Fields, context: RopeContext) -> RopeScaling | None:
    spellings = {fields.text(key) for key in ("rope_type", "type") if fields.has(key)}
    if len(spellings) > 1:
        raise fields.refuse("rope_type", f"but type is {fields.values['type']!r}.")
    rope_type = (spellings or {"default"}).pop()
    if rope_type == "dynamic":
        raise fields.error(
            f"{fields.where}: rope type 'dynamic' (dynamic NTK) is not supported: its frequencies change with the"
            " length, so cached keys would not match. Use the checkpoint without rope scaling, or with yarn."
        )
    if rope_type not in _UNDERSTOOD:
        raise fields.error(
            f"{fields.where}: rope type {rope_type!r} is not known. Supported: {', '.join(sorted(_UNDERSTOOD))}."
        )
    for key, value in fields.values.items():
        if key not in _UNDERSTOOD[rope_type] | _SAID_ELSEWHERE and value is not None:
            raise fields.refuse(key, f"rope type {rope_type!r} has no such field that this version understands.")
    fields.allow_only("partial_rotary_factor", (1,), "this family rotates whole heads.")
    if rope_type == "default":
        return None
    stated = fields.values.get("original_max_position_embeddings")
    if context.original_length_stated and stated not in (None, context.original_length):
        raise fields.refuse("original_max_position_embeddings", f"config.json's own is {context.original_length}.")
    return _SCALINGS[rope_type].parse(fields, context)


def scaling_to_dict(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """A JSON object from which ``scaling_from_dict`` rebuilds an equal scaling."""
    if scaling is None:
        return None
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(scaling).items()}
    return {"rope_type": scaling.rope_type, **values}


def scaling_from_dict(fields: Fields, key: str, head_dim: int, max_position_embeddings: int) -> RopeScaling | None:
    """The scaling in ``fields[key]``, which ``scaling_to_dict`` wrote. Raises ``fields.error``."""
    block = fields.object(key)
    if not block.values:
        return None
    return _parse_block(block, RopeContext(head_dim, max_position_embeddings, max_position_embeddings, False))


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, length: int) -> np.ndarray:
    """Radians a position that each pair turns by: float64 ``[head_dim / 2]``.

    ``length`` is the longest context that the model is opened for.
    """
    base = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return base if scaling is None else scaling.scale(base, theta, length)


def longest_context(scaling: RopeScaling | None, length: int) -> int | None:
    """The longest context that ``frequencies`` for ``length`` are right for; None where they do not depend on it."""
    if isinstance(scaling, LongRopeScaling) and length <= scaling.original_max_position_embeddings:
        return scaling.original_max_position_embeddings
    return None


def attention_factor(scaling: RopeScaling | None) -> float:
    """What queries and keys are both multiplied by."""
    return 1.0 if scaling is None else scaling.attention_factor
