"""Names, shapes and roles of Spark 2.5's tensors, each fact stated once.

Two spellings of one name, for example

    model.layers.3.self_attn.out_proj.weight                published checkpoint, mlx checkpoint
    language_model.model.layers.3.self_attn.o_proj.weight   install; without its prefix, the module parameter

The embedding is ``model.embedding`` in published checkpoints and ``embed_tokens`` in installs, in modules and in some
mlx checkpoints. ``q_k_v_proj`` has the rows of q, then those of k, then those of v, and stays one matrix.
``post_attention_layernorm`` is the norm before the feed-forward block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from turbospark_mlx.errors import ConvertError, counted
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.spark.config import SparkConfig
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

PREFIX = "language_model."
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ROLES: dict[str, Role] = {"self_attn": "attention", "mlp": "shared_expert"}


def experts(config: SparkConfig) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``: there are none."""
    return {}


def _layer_shapes(config: SparkConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer."""
    hidden, wide, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for name, rows, columns, bias in (
        ("self_attn.q_k_v_proj", queries + 2 * keys, hidden, config.attention_bias),
        ("self_attn.g_proj", heads, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    ):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def expected(config: SparkConfig) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs, in reading order."""
    check_decided(config.tie_word_embeddings)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config)}
    shapes[_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def place(checkpoint_name: str, config: SparkConfig) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    name = checkpoint_name.removeprefix(PREFIX)
    if name == "model.embedding.weight":
        name = _EMBEDDING
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    if name in (_EMBEDDING, _HEAD, _NORM):
        role: Role = {_EMBEDDING: "embedding", _HEAD: "head"}.get(name, "vector")
        return Placement(PREFIX + name, role, name)
    if name.endswith("rotary_emb.inv_freq"):
        return Dropped("rotary frequencies, which follow from the configuration")
    found = _LAYER.fullmatch(name)
    if not found:
        raise ConvertError(f"checkpoint: tensor {checkpoint_name!r} is not one of the spark family.")
    number, suffix = int(found[1]), found[2].replace("self_attn.out_proj.", "self_attn.o_proj.", 1)
    if number >= config.num_hidden_layers or str(number) != found[1]:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} is of layer {found[1]}; the configuration has"
            f" {counted(config.num_hidden_layers, 'layer')}."
        )
    shapes = dict(_layer_shapes(config))
    if suffix not in shapes:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in a spark model with attention_bias"
            f" {config.attention_bias} and mlp_bias {config.mlp_bias}. Leaving it out would make another model; check"
            " config.json."
        )
    return Placement(
        PREFIX + f"model.layers.{number}.{suffix}", _role(suffix, shapes[suffix]), f"model.layers.{number}.{suffix}"
    )


def _role(suffix: str, shape: tuple[int, ...]) -> Role:
    # A gate decides about a whole head, and has one row: it is small, and is kept as it is.
    if len(shape) == 1 or suffix == "self_attn.g_proj.weight":
        return "vector"
    return _ROLES[suffix.split(".")[0]]
