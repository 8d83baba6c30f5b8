"""What configurations share whose layers see a window or everything, in groups of query heads. Pure facts."""

from __future__ import annotations

from typing import Any

from turbospark_mlx.families.fields import Fields, arch_sizes, check_layers

FULL, SLIDING = "full_attention", "sliding_attention"


class Windowed:
    """A configuration with ``layer_types``, a ``sliding_window``, and one size of heads."""

    layer_types: tuple[str, ...]
    sliding_window: int | None
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int

    def slides(self, layer: int) -> bool:
        """Whether this layer sees only the last ``sliding_window`` tokens."""
        return self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        """How many tokens this layer sees, the query's own counted; None where it sees all."""
        return self.sliding_window if self.slides(layer) else None

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take with elements of ``itemsize`` bytes."""
        sliding = self.layer_types.count(SLIDING)
        rows = (len(self.layer_types) - sliding) * context + sliding * min(context, self.sliding_window or 0)
        return 2 * rows * self.num_key_value_heads * self.head_dim * itemsize

    def windowed_arch(self) -> dict[str, Any]:
        """The part of the manifest's ``arch`` that all of them have."""
        return {
            **arch_sizes(self),
            "ffnIntermediate": self.intermediate_size,
            "slidingWindow": self.sliding_window or 0,
            "fullAttentionLayerMask": mask_of(self.layer_types),
            "attentionScale": self.head_dim**-0.5,
        }


def check_kinds(fields: Fields, types: tuple[Any, ...]) -> tuple[str, ...]:
    """``types``, once each of them is a kind of layer that there is."""
    for entry in types:
        if entry not in (FULL, SLIDING):
            raise fields.error(f"{fields.where}: layer_types has {entry!r}; this family has {FULL} and {SLIDING}.")
    return types


def read_window(fields: Fields, types: tuple[str, ...], default: int) -> int | None:
    """``sliding_window`` of a config.json: None where no layer slides; null beside one that does is refused."""
    if SLIDING not in types:
        return None
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        raise fields.refuse("sliding_window", f"layer_types has {SLIDING}, which needs a window.")
    return fields.size("sliding_window", default)


def mask_of(types: tuple[str, ...]) -> list[int]:
    """A manifest's ``fullAttentionLayerMask`` of the layers' kinds."""
    return [int(kind == FULL) for kind in types]


def kinds_of_mask(fields: Fields) -> tuple[str, ...]:
    """The layers' kinds by a manifest's ``fullAttentionLayerMask``."""
    mask = fields.items("fullAttentionLayerMask")
    if any(isinstance(entry, bool) or entry not in (0, 1) for entry in mask):
        raise fields.refuse("fullAttentionLayerMask", "this family has full (1) and sliding (0) layers.")
    return tuple(FULL if entry else SLIDING for entry in mask)


def check_attention(fields: Fields, config: Any) -> None:
    """`check_layers`, for heads that turn as a whole."""
    check_layers(fields, config)
    if config.head_dim % 2:
        raise fields.error(
            f"{fields.where}: the head size is {config.head_dim}; rotary position embedding needs pairs."
        )
