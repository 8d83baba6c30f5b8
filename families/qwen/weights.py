"""Names, shapes and roles of Qwen 3.5's tensors, each fact stated once.

Spellings of one name, for example

    model.language_model.layers.3.mlp.up_proj.weight    published checkpoint
    language_model.model.layers.3.mlp.up_proj.weight    mlx checkpoint and install
    model.layers.3.mlp.up_proj.weight                   module parameter, and checkpoints of the text model alone

Two layouts go together: published checkpoints have convolutions ``[channels, 1, taps]`` and norms less 1, those that
mlx-lm saved have ``[channels, taps, 1]`` and norms as they are multiplied. (The norm inside recurrent layers is plain
in both.) Convolutions are the same bytes either way, and an install keeps the shape, so that its tensors contradict a
configuration with the wrong ``centered_norms``.

``q_proj`` has the rows of each head's query and then those of its gate, head after head. Routed experts are at
``mlp.switch_mlp`` as stacks, at ``mlp.experts`` one by one or with gate and up joined (see ``families.routed``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import routed
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.names import PREFIX, canonical, split_layer
from turbospark_mlx.families.qwen.config import QwenConfig
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONVOLUTION = "linear_attn.conv1d.weight"
_TOWERS = ("visual.", "vision_tower.")
_ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def settle(config: QwenConfig, shapes: Mapping[str, tuple[int, ...]]) -> QwenConfig:
    """The configuration with ``centered_norms`` as the checkpoint has its convolutions: checkpoint name -> shape.

    Raises ConvertError where some are in one layout and some in the other.
    """
    found = {name: shape for name, shape in shapes.items() if name.endswith(f".{_CONVOLUTION}") and len(shape) == 3}
    plain = {name for name, shape in found.items() if shape[2] == 1}
    if plain and len(plain) < len(found):
        other = next(name for name in found if name not in plain)
        raise ConvertError(
            f"checkpoint: {min(plain)} is laid out as MLX has it and {other} as it was published, so that nobody knows"
            " which norms are stored less 1. Take another copy of the checkpoint."
        )
    return replace(config, centered_norms=not plain)


def experts(config: QwenConfig) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    if not config.num_experts:
        return {}
    spec = ExpertSpec(config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)
    return {f"model.layers.{number}.mlp.switch_mlp": spec for number in range(config.num_hidden_layers)}


def _top_shapes(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def convolution_shape(config: QwenConfig) -> tuple[int, int, int]:
    """The shape of a convolution's weights in the layout that goes with the norms'."""
    channels, taps = config.convolved_width, config.linear_conv_kernel_dim
    return (channels, 1, taps) if config.centered_norms else (channels, taps, 1)


def _layer_shapes(config: QwenConfig, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden, size = config.hidden_size, config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.recurs(number):
        heads, values = config.linear_num_value_heads, config.value_width
        yield "linear_attn.in_proj_qkv.weight", (config.convolved_width, hidden)
        yield "linear_attn.in_proj_z.weight", (values, hidden)
        yield "linear_attn.in_proj_b.weight", (heads, hidden)
        yield "linear_attn.in_proj_a.weight", (heads, hidden)
        yield _CONVOLUTION, convolution_shape(config)
        yield "linear_attn.A_log", (heads,)
        yield "linear_attn.dt_bias", (heads,)
        yield "linear_attn.norm.weight", (config.linear_value_head_dim,)
        yield "linear_attn.out_proj.weight", (hidden, values)
    else:
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        yield "self_attn.q_proj.weight", (2 * queries, hidden)
        yield "self_attn.k_proj.weight", (keys, hidden)
        yield "self_attn.v_proj.weight", (keys, hidden)
        yield "self_attn.o_proj.weight", (hidden, queries)
        yield "self_attn.q_norm.weight", (size,)
        yield "self_attn.k_norm.weight", (size,)
    path, wide = "mlp", config.intermediate_size
    if config.num_experts:
        path, wide = "mlp.shared_expert", config.shared_expert_intermediate_size
        yield "mlp.gate.weight", (config.num_experts, hidden)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
    yield f"{path}.gate_proj.weight", (wide, hidden)
    yield f"{path}.up_proj.weight", (wide, hidden)
    yield f"{path}.down_proj.weight", (hidden, wide)


def expected(config: QwenConfig) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs."""
    check_decided(config.tie_word_embeddings)
    shapes = _top_shapes(config)
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config, number)}
    shapes |= routed.shapes(experts(config))
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _role(name: str, suffix: str, shape: tuple[int, ...]) -> Role:
    if len(shape) < 2 or suffix == _CONVOLUTION:
        return "vector"
    if name == _EMBEDDING:
        return "embedding"
    if name == _HEAD:
        return "head"
    if suffix in _ROUTERS:
        return "router"
    return "shared_expert" if suffix.startswith("mlp.") else "attention"


def place(checkpoint_name: str, config: QwenConfig) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    if checkpoint_name.removeprefix("model.").startswith(_TOWERS):
        return Dropped("of the tower for images; text alone is run")
    name = canonical(checkpoint_name)
    if name.startswith(("mtp.", "model.mtp.")):
        return Dropped("of the head that predicts several tokens, which is not run")
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    shape, suffix = _top_shapes(config).get(name), ""
    if shape is None:
        number, suffix = split_layer(name, checkpoint_name, "qwen", config.num_hidden_layers)
        path = f"model.layers.{number}.mlp"
        spec = experts(config).get(f"{path}.switch_mlp")
        if spec and (part := routed.part_of(f"{path}.switch_mlp", f"{path}.experts", name, number, spec)):
            return routed.placement(PREFIX, part)
        if suffix.startswith("self_attn.rotary_emb."):
            return Dropped("rotary frequencies, which follow from the configuration")
        shape = dict(_layer_shapes(config, number)).get(suffix)
        if shape is None:
            raise ConvertError(
                f"checkpoint: tensor {checkpoint_name!r} has no place in a layer of {config.layer_types[number]} with"
                f" {config.num_experts} experts. Leaving it out would make another model; check config.json."
            )
    return Placement(PREFIX + name, _role(name, suffix, shape), name)
