"""Names, shapes and roles of gpt-oss's tensors, each fact stated once.

Two spellings of one name, for example

    model.layers.3.mlp.router.weight                 published checkpoint, mlx checkpoint, module parameter
    language_model.model.layers.3.mlp.gate.weight    install

Routed experts are stacks at ``mlp.experts`` in mlx's checkpoints and in modules. In published ones, gate and up are one
tensor whose rows (and biases) take turns: row 2r is the gate's row r, row 2r + 1 the up matrix's. With ``_blocks`` and
``_scales`` it is MXFP4 ``[experts, rows, columns]``; without a suffix it is plain and transposed, ``[experts, columns,
rows]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import routed
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.gpt_oss.config import GptOssConfig
from turbospark_mlx.families.names import PREFIX, split_layer
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role, RoutedPart

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_INSTALLED = {
    "self_attn.sinks": "self_attn.sinks.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
}
"""What installs call a tensor of a layer, where that is not the checkpoint's name."""
_PUBLISHED = {installed: name for name, installed in _INSTALLED.items()}
_JOINED = re.compile(r"(gate_up|down)_proj(_blocks|_bias)?")


def experts(config: GptOssConfig) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    spec = ExpertSpec(
        config.num_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        config.intermediate_size,
        "clamped_swiglu",
        config.swiglu_alpha,
        config.swiglu_limit,
        biases=True,
    )
    return {f"model.layers.{number}.mlp.experts": spec for number in range(config.num_hidden_layers)}


def _layer_shapes(config: GptOssConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden = config.hidden_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    for name, rows, columns, bias in (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_bias),
        ("mlp.router", config.num_experts, hidden, True),
    ):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    yield "self_attn.sinks", (config.num_attention_heads,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def expected(config: GptOssConfig) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs, in reading order."""
    check_decided(config.tie_word_embeddings)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for number in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config):
            shapes[f"model.layers.{number}.{_INSTALLED.get(name, name)}"] = shape
    shapes |= routed.shapes(experts(config))
    shapes[_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def place(checkpoint_name: str, config: GptOssConfig) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    name = checkpoint_name.removeprefix(PREFIX)
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    if name in (_EMBEDDING, _HEAD, _NORM):
        role: Role = {_EMBEDDING: "embedding", _HEAD: "head"}.get(name, "vector")
        return Placement(PREFIX + name, role, name)
    number, suffix = split_layer(name, checkpoint_name, "gpt-oss", config.num_hidden_layers)
    suffix = _PUBLISHED.get(suffix, suffix)
    path = f"model.layers.{number}.mlp.experts"
    if part := _routed(path, name, number, experts(config)[path]):
        return routed.placement(PREFIX, part)
    shapes = dict(_layer_shapes(config))
    if suffix not in shapes:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in a gpt-oss model with attention_bias"
            f" {config.attention_bias}. Leaving it out would make another model; check config.json."
        )
    if len(shapes[suffix]) == 1:
        role = "vector"
    else:
        role = "router" if suffix.startswith("mlp.") else "attention"
    layer = f"model.layers.{number}."
    return Placement(PREFIX + layer + _INSTALLED.get(suffix, suffix), role, layer + suffix)


def _routed(path: str, name: str, position: int, spec: ExpertSpec) -> tuple[str, RoutedPart] | None:
    """``(parameter name, part)`` of a tensor of routed experts; None where ``name`` is not one of these."""
    if not name.startswith(f"{path}."):
        return None
    found = _JOINED.fullmatch(name.removeprefix(f"{path}."))
    if not found:
        return routed.stack_of(path, name, position, spec)
    bias = "_bias" if found[2] == "_bias" else ""
    tensors = tuple(matrix + bias for matrix in found[1].split("_"))
    part = RoutedPart(position, tensors, interleaved=len(tensors) > 1, transposed=found[2] is None)
    return routed.parameter(path, tensors[0]), part
