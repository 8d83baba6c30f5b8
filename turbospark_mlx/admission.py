"""How long a context may be: what was asked for, what the model was trained for, and what memory holds."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from turbospark_mlx.errors import OptionError
from turbospark_mlx.gturbo.files import spell_bytes
from turbospark_mlx.protocols import ModelConfig

DEFAULT_CONTEXT = 4096
"""Longest context that is chosen without being asked for."""
CACHE_SHARE = 0.5
"""Of the memory that the weights leave, what the caches of a context chosen by default may take."""
GRANULARITY = 256
"""Contexts that memory decides are multiples of this."""


@dataclass(frozen=True)
class ContextLimit:
    """The longest context in tokens, prompt and answer together, and in a few words why."""

    tokens: int
    reason: str


def resolve_context(
    config: ModelConfig, asked: int | None, itemsize: int, room: int, longest: int | None = None
) -> ContextLimit:
    """The context limit for caches with elements of ``itemsize`` bytes, with ``room`` bytes free beside the weights.

    By default the least of 4096, the trained length, and what half of ``room`` holds. A context that is asked for may
    exceed the trained length but not ``room``. ``longest`` is what a model that is already loaded was loaded for, where
    that matters. Raises OptionError.
    """
    if asked is not None:
        tokens = whole_number("max_context", asked)
        if longest is not None and tokens > longest:
            raise OptionError(
                f"max_context={tokens}: the model was loaded for contexts of up to {longest} tokens, and its rotary"
                f" frequencies differ beyond. Load it with max_context={tokens}."
            )
        if (needed := config.kv_bytes(tokens, itemsize)) > room:
            raise OptionError(
                f"max_context={tokens}: its caches take {spell_bytes(needed)}, and {spell_bytes(room)} of memory are"
                f" free beside the weights. Up to {_largest(config, tokens, itemsize, room)} tokens fit."
            )
        beyond = tokens > config.max_position_embeddings
        return ContextLimit(tokens, "as asked, beyond the trained length" if beyond else "as asked")
    ceiling = min(DEFAULT_CONTEXT, config.max_position_embeddings, longest or DEFAULT_CONTEXT)
    fitting = _largest(config, ceiling, itemsize, int(room * CACHE_SHARE))
    if fitting == 0:
        least = min(GRANULARITY, ceiling)
        raise OptionError(
            f"max_context: caches of {least} tokens take {spell_bytes(config.kv_bytes(least, itemsize))}, and"
            f" {spell_bytes(room)} of memory are free beside the weights. Free memory, or name a max_context."
        )
    if fitting < ceiling:
        return ContextLimit(fitting, "as memory allows")
    return ContextLimit(ceiling, "the trained length" if ceiling < DEFAULT_CONTEXT else "the default")


def _largest(config: ModelConfig, ceiling: int, itemsize: int, room: int) -> int:
    """The longest context whose caches fit in ``room``: ``ceiling``, a smaller multiple of GRANULARITY, or 0."""
    if config.kv_bytes(ceiling, itemsize) <= room:
        return ceiling
    low, high = 0, ceiling // GRANULARITY + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if config.kv_bytes(middle * GRANULARITY, itemsize) <= room else (low, middle)
    return low * GRANULARITY


def whole_number(option: str, value: int) -> int:
    """``value`` as an int of at least 1. Raises OptionError naming ``option``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{option}={value!r}: a whole number of at least 1 is needed.")
    return number
