"""What configurations of models share in which recurrent layers stand between attention layers. Needs no mlx.

Recurrent layers are those of ``families.delta``, attention layers those of ``families.gated_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from turbospark_mlx.families.fields import Fields, arch_sizes, check_layers

FULL, LINEAR = "full_attention", "linear_attention"

STATES_KEPT = 3
"""The states that a recurrent layer holds: the last one, and those that the last two tokens came from."""
MOST_TAPS = 64
"""Far above any model's convolution."""
_STATE_ITEMSIZE = 4

_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
}


class HybridSizes:
    """What follows from the sizes of a configuration, a dataclass that has them under the names of ``QwenConfig``."""

    def recurs(self, layer: int) -> bool:
        """Whether this layer has a recurrent state instead of keys and values."""
        return self.layer_types[layer] == LINEAR

    @property
    def key_width(self) -> int:
        """The width of all keys of a recurrent layer, and of all its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved_width(self) -> int:
        """Queries, keys and values of a recurrent layer, which go through its convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def rotary_width(self) -> int:
        """The leading dimensions of a head that turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def frequencies(self) -> np.ndarray:
        """Radians a position that each pair turns by: float64 ``[rotary width / 2]``."""
        return self.rope_theta ** (-np.arange(0, self.rotary_width, 2) / self.rotary_width)

    def hybrid_arch(self) -> dict[str, Any]:
        """The part of the manifest's ``arch`` that all of them have."""
        return {
            **arch_sizes(self),
            "moeIntermediateSize": self.moe_intermediate_size,
            "slidingWindow": 0,
            "finalLogitSoftcap": 0.0,
            "partialRotaryFactor": self.partial_rotary_factor,
            "numExperts": self.num_experts,
            "topKExperts": self.num_experts_per_tok,
            "fullAttentionLayerMask": self.layer_mask,
            "attentionScale": self.head_dim**-0.5,
            "linearNumKHeads": self.linear_num_key_heads,
            "linearNumVHeads": self.linear_num_value_heads,
            "linearKeyHeadDim": self.linear_key_head_dim,
            "linearValueHeadDim": self.linear_value_head_dim,
            "linearConvKernelSize": self.linear_conv_kernel_dim,
        }

    @property
    def layer_mask(self) -> list[int]:
        """The manifest's number for each kind of layer."""
        return [2 if self.recurs(number) else 1 for number in range(self.num_hidden_layers)]

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that the states of one recurrent layer take, with elements of ``itemsize`` bytes."""
        tail = (self.linear_conv_kernel_dim - 1) * self.convolved_width * itemsize
        return STATES_KEPT * (tail + self.value_width * self.linear_key_head_dim * _STATE_ITEMSIZE)


def layer_types(fields: Fields, layers: int, full: tuple[str, ...] = (FULL,)) -> tuple[str, ...]:
    """``layer_types``; where they are absent every ``full_attention_interval``-th layer is a full one. ``full`` are
    spellings of `FULL`."""
    types = fields.items("layer_types", None)
    if types is None:
        interval = fields.size("full_attention_interval")
        return tuple(LINEAR if (n + 1) % interval else FULL for n in range(layers))
    for entry in types:
        if entry not in (*full, LINEAR):
            raise fields.error(f"{fields.where}: layer_types has {entry!r}; this family has {FULL} and {LINEAR}.")
    types = tuple(LINEAR if entry == LINEAR else FULL for entry in types)
    interval = fields.size("full_attention_interval", None)
    if interval and types != tuple(LINEAR if (n + 1) % interval else FULL for n in range(len(types))):
        raise fields.refuse("full_attention_interval", "layer_types says otherwise. Remove the one that is wrong.")
    return types


def rope(fields: Fields, *default_share: float) -> tuple[float, float]:
    """``(theta, share of a head that turns)``, which stand in ``rope_parameters``, or beside them. Without a
    ``default_share`` both are required."""
    block = fields.object("rope_parameters")
    block.known(_ROPE_FIELDS)
    for key in ("rope_type", "type"):
        block.allow_only(key, ("default", "mrope"), "this family knows unscaled positions.")
    for key in ("rope_theta", "partial_rotary_factor"):
        if block.has(key) and fields.has(key) and block.values[key] != fields.values[key]:
            raise fields.refuse(key, f"but in rope_parameters it is {block.values[key]!r}.")
    source = block if block.has("rope_theta") else fields
    share = (block if block.has("partial_rotary_factor") else fields).number("partial_rotary_factor", *default_share)
    return source.number("rope_theta", above=1.0), share


def layer_types_of_mask(fields: Fields) -> tuple[str, ...]:
    """The kinds of a manifest's layers."""
    mask = fields.items("fullAttentionLayerMask")
    if any(isinstance(entry, bool) or entry not in (1, 2) for entry in mask):
        raise fields.refuse("fullAttentionLayerMask", "this family has full (1) and recurrent (2) layers.")
    return tuple(FULL if entry == 1 else LINEAR for entry in mask)


def check_sizes(fields: Fields, config: Any) -> None:
    """Raise the error of ``fields`` unless the sizes of a configuration fit each other."""

    def fail(why: str) -> Exception:
        return fields.error(f"{fields.where}: {why}")

    check_layers(fields, config)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise fail(f"{values} value heads of recurrent layers cannot share {keys} key heads evenly.")
    if config.partial_rotary_factor > 1:
        raise fail(f"partial_rotary_factor is {config.partial_rotary_factor}; no more than a whole head can turn.")
    if config.rotary_width % 2 or not config.rotary_width:
        raise fail(f"{config.rotary_width} dimensions of a head turn; rotary position embedding needs pairs.")


def attention_shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of the tensors of an attention layer. ``q_proj`` has the rows of each head's query and then
    those of its gate, head after head."""
    hidden, size = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    yield "self_attn.q_proj.weight", (2 * queries, hidden)
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (size,)
    yield "self_attn.k_norm.weight", (size,)


def recurrent_shapes(config: Any, convolution: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of the tensors of a recurrent layer, whose convolution's weights are ``convolution``."""
    hidden, heads, values = config.hidden_size, config.linear_num_value_heads, config.value_width
    yield "linear_attn.in_proj_qkv.weight", (config.convolved_width, hidden)
    yield "linear_attn.in_proj_z.weight", (values, hidden)
    yield "linear_attn.in_proj_b.weight", (heads, hidden)
    yield "linear_attn.in_proj_a.weight", (heads, hidden)
    yield "linear_attn.conv1d.weight", convolution
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (config.linear_value_head_dim,)
    yield "linear_attn.out_proj.weight", (hidden, values)
