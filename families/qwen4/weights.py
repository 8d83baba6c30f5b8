"""Names, shapes and roles of Qwen4-Exp's tensors, each fact stated once.

Spellings of one name, for example

    model.language_model.layers.3.mlp.up_proj.weight    published checkpoint
    language_model.model.layers.3.mlp.up_proj.weight    mlx checkpoint and install
    model.layers.3.mlp.up_proj.weight                   module parameter, and checkpoints of the text model alone

Published norms are stored less 1; most copies for MLX have them as they are multiplied, and some do not: only their
values tell (`settle`). (The norm inside recurrent layers is plain everywhere.) Convolutions are ``[channels, 1, taps]``
or ``[channels, taps, 1]``, the same bytes, and ``[channels, taps]`` in an install.

The table of n-grams is one tensor, or shards of as many rows each. Routed experts are at ``mlp.switch_mlp`` as stacks,
at ``mlp.experts`` one by one or with gate and up joined (see ``families.routed``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import routed
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.hybrid import attention_shapes, recurrent_shapes
from turbospark_mlx.families.names import PREFIX, canonical, split_layer
from turbospark_mlx.families.qwen4.config import Qwen4Config
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role, TablePart

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOWERS = ("visual.", "vision_tower.")
_SENSITIVE = ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "block_inject_weight.weight", "index_qk_proj.weight")
"""What decides between experts, streams and blocks by small differences, and is small itself."""

TABLE = "ple.ple_embedding.ngram_embedding.weight"
_SHARD = re.compile(r"ple\.ple_embedding\.ngram_embedding\.shard_(\d+)\.weight")
_HASH = {
    "ple.ple_embedding.layer_multipliers": "multipliers",
    "ple.ple_embedding.ngram_heads_vocab_sizes": "sizes",
    "ple.ple_embedding.ngram_heads_offsets": "offsets",
}
"""Constants of the hash that checkpoints may have -> field of ``Hash``."""

TELLING = "attn_hyper_connection.hc_norm.weight"
"""The norms whose values are far enough from each other."""
_PLAIN_FROM, _MOST_PLAIN, _LEAST_CENTERED, _MOST_CENTERED, _SHARE = 0.75, 1.5, -0.5, 0.5, 0.9
"""Between which medians of the norms' means lie which convention, and the share of them that has to agree. Published
norms that are stored less 1 have means of about 0.2."""


def settle(
    config: Qwen4Config, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], np.ndarray]
) -> Qwen4Config:
    """The configuration with ``centered_norms`` as the values of the checkpoint's norms say.

    Raises ConvertError where they say neither, and where the checkpoint's constants of the n-gram hash are not those of
    its configuration.
    """
    for name in shapes:
        field = next((field for constant, field in _HASH.items() if name.endswith(f".{constant}")), None)
        if field and config.ple_layer is not None:
            ours, theirs = getattr(config.ngram_hash, field), values(name).reshape(-1).tolist()
            if list(ours) != theirs:
                raise ConvertError(
                    f"checkpoint: {name} is {theirs!r:.200}; config.json's n-gram fields give {list(ours)!r:.200}."
                    " Take both from the same checkpoint."
                )
    # One of another shape is refused by its name, once the configuration is settled.
    telling = [name for name, shape in shapes.items() if name.endswith(TELLING) and shape == (config.wide,)]
    means = [float(values(name).mean()) for name in telling]
    if not means:
        return config
    centered, found = norms_centered(means)
    if centered is None:
        raise ConvertError(
            f"checkpoint: {found}, so that nobody knows whether norms are stored less 1. Take another copy of the"
            " checkpoint."
        )
    return replace(config, centered_norms=centered)


def norms_centered(means: Sequence[float]) -> tuple[bool | None, str]:
    """Whether norms are stored less 1, by the means of those that tell, or None; and what was found, in words."""
    middle, high = np.median(means), np.mean(np.array(means) > _MOST_CENTERED)
    found = (
        f"the means of {len(means)} tensors {TELLING} have the median {middle:.3g}, and {high:.0%} exceed"
        f" {_MOST_CENTERED}"
    )
    if high >= _SHARE and _PLAIN_FROM <= middle <= _MOST_PLAIN:
        return False, found
    return (True if high <= 1 - _SHARE and _LEAST_CENTERED <= middle <= _MOST_CENTERED else None), found


def experts(config: Qwen4Config) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    spec = ExpertSpec(config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)
    return {f"model.layers.{number}.mlp.switch_mlp": spec for number in range(config.num_hidden_layers)}


def table_facts(config: Qwen4Config) -> Mapping[str, Any] | None:
    """See ``protocols.Family.table_facts``."""
    if config.ple_layer is None:
        return None
    hashed = config.ngram_hash
    return {
        "layerIndex": config.ple_layer,
        "shards": config.split_ngram_parts,
        "multipliers": list(hashed.multipliers),
        "headVocabSizes": list(hashed.sizes),
        "headOffsets": list(hashed.offsets),
    }


def _connection_shapes(config: Qwen4Config, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.hc_norm.weight", (config.wide,)
    yield f"{path}.input_mix_weight_down.weight", (config.hc_lowrank, config.wide)
    yield f"{path}.input_mix_weight_up.weight", (config.wide, config.hc_lowrank)


def _top_shapes(config: Qwen4Config) -> dict[str, tuple[int, ...]]:
    shapes = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    shapes |= _connection_shapes(config, "model.hyper_connection_mixer")
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: Qwen4Config, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden, wide = config.hidden_size, config.wide
    if number == config.ple_layer:
        yield TABLE, (config.ngram_hash.rows, config.ngram_width)
        yield "ple.key_proj.weight", (wide, config.ple_embed_dim)
        yield "ple.value_proj.weight", (hidden, config.ple_embed_dim)
        for norm in ("norm_key", "norm_query", "norm_conv"):
            yield f"ple.{norm}.weight", (wide,)
        yield "ple.conv1d.weight", (wide, config.ple_conv_kernel_size)
    for path in ("attn_hyper_connection", "mlp_hyper_connection"):
        yield from _connection_shapes(config, path)
        yield f"{path}.block_inject_weight.weight", (config.hc_count, wide)
    if config.recurs(number):
        yield from recurrent_shapes(config, (config.convolved_width, config.linear_conv_kernel_dim))
    else:
        yield from attention_shapes(config)
        width = config.indexer_head_dim
        yield "self_attn.indexer.index_qk_proj.weight", ((config.indexer_n_heads + 1) * width, hidden)
        yield "self_attn.indexer.q_layernorm.weight", (width,)
        yield "self_attn.indexer.k_layernorm.weight", (width,)
    yield "mlp.gate.weight", (config.num_experts, hidden)
    yield "mlp.shared_expert_gate.weight", (1, hidden)
    shared = config.shared_expert_intermediate_size
    yield "mlp.shared_expert.gate_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.up_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.down_proj.weight", (hidden, shared)


def expected(config: Qwen4Config) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs."""
    check_decided(config.tie_word_embeddings)
    shapes = _top_shapes(config)
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config, number)}
    shapes |= routed.shapes(experts(config))
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _role(name: str, suffix: str, shape: tuple[int, ...]) -> Role:
    if len(shape) < 2 or suffix.endswith(".conv1d.weight"):
        return "vector"
    if name == _EMBEDDING or suffix == TABLE:
        return "embedding"
    if name == _HEAD:
        return "head"
    if suffix.endswith(_SENSITIVE):
        return "router"
    return "shared_expert" if suffix.startswith("mlp.") else "attention"


def place(checkpoint_name: str, config: Qwen4Config) -> Placement | Dropped:
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
    if shape := _top_shapes(config).get(name):
        return Placement(PREFIX + name, _role(name, name, shape), name)
    number, suffix = split_layer(name, checkpoint_name, "qwen4", config.num_hidden_layers)
    path = f"model.layers.{number}"
    stack = f"{path}.mlp.switch_mlp"
    if part := routed.part_of(stack, f"{path}.mlp.experts", name, number, experts(config)[stack]):
        return routed.placement(PREFIX, part)
    if number == config.ple_layer and (place := _place_of_table(path, suffix, config)):
        return place
    if suffix.startswith("self_attn.rotary_emb."):
        return Dropped("rotary frequencies, which follow from the configuration")
    shape = dict(_layer_shapes(config, number)).get(suffix)
    if shape is None:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in layer {number}, of {config.layer_types[number]}."
            " Leaving it out would make another model; check config.json."
        )
    return Placement(PREFIX + name, _role(name, suffix, shape), name)


def _place_of_table(path: str, suffix: str, config: Qwen4Config) -> Placement | Dropped | None:
    """The place of a tensor that is, or is about, the table of n-grams; None for any other."""
    if suffix in _HASH:
        return Dropped("constants of the n-gram hash, which follow from the configuration")
    shard, parts = _SHARD.fullmatch(suffix), config.split_ngram_parts
    if suffix != TABLE and not (shard and str(int(shard[1])) == shard[1] and int(shard[1]) < parts):
        return None
    part = TablePart(int(shard[1]), parts) if shard else TablePart(0, 1)
    return Placement(f"{PREFIX}{path}.{TABLE}", "embedding", f"{path}.{TABLE}", table=part)
