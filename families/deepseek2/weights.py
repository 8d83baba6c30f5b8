"""Names, shapes and roles of the deepseek2 family's tensors, each fact stated once.

Spellings of one name, for example

    model.layers.3.self_attn.kv_a_proj_with_mqa.weight          published checkpoint, mlx checkpoint, module parameter
    language_model.model.layers.3.self_attn.kv_a_proj.weight    install

``kv_b_proj`` has, for each head, the rows of its keys without a position and then those of its values. mlx-lm splits
V3's: ``embed_q [heads, latent, nope]`` is the first part, transposed, ``unembed_out [heads, values, latent]`` the
second. Packed groups of the two run along different axes, so that one form cannot become the other without rounding
again: an install has the checkpoint's, as matrices of all heads' rows. The shared
experts are one block of their joint width. Routed experts are at ``mlp.switch_mlp`` as stacks, below ``mlp.experts``
one by one or with gate and up joined (see ``families.routed``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from turbospark_mlx.errors import ConvertError, counted
from turbospark_mlx.families import routed
from turbospark_mlx.families.deepseek2.config import BIASED, Deepseek2Config
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

PREFIX = "language_model."
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_INSTALLED = {
    "self_attn.kv_a_proj_with_mqa.": "self_attn.kv_a_proj.",
    "self_attn.kv_a_layernorm.": "self_attn.kv_a_norm.",
    "mlp.shared_experts.": "mlp.shared_expert.",
}
"""What an install calls modules that checkpoints call otherwise."""


def experts(config: Deepseek2Config) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    spec = ExpertSpec(
        config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
    )
    return {f"model.layers.{number}.mlp.switch_mlp": spec for number in config.routed_layers()}


def _block(path: str, hidden: int, wide: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.gate_proj.weight", (wide, hidden)
    yield f"{path}.up_proj.weight", (wide, hidden)
    yield f"{path}.down_proj.weight", (hidden, wide)


def _layer_shapes(config: Deepseek2Config, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(checkpoint name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    latent, queries = config.kv_lora_rank, config.q_lora_rank
    rows = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if queries is None:
        yield "self_attn.q_proj.weight", (rows, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (queries, hidden)
        yield "self_attn.q_a_layernorm.weight", (queries,)
        yield "self_attn.q_b_proj.weight", (rows, queries)
    yield "self_attn.kv_a_proj_with_mqa.weight", (config.latent_size, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    nope, values = config.qk_nope_head_dim, config.v_head_dim
    if config.split_kv_b:
        yield "self_attn.embed_q.weight", (heads * latent, nope)
        yield "self_attn.unembed_out.weight", (heads * values, latent)
    else:
        yield "self_attn.kv_b_proj.weight", (heads * (nope + values), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * values)
    if number in config.routed_layers():
        yield "mlp.gate.weight", (config.n_routed_experts, hidden)
        if config.topk_method == BIASED:
            yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
        yield from _block("mlp.shared_experts", hidden, config.shared_expert_intermediate_size)
    else:
        yield from _block("mlp", hidden, config.intermediate_size)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _checkpoint_shapes(config: Deepseek2Config) -> dict[str, tuple[int, ...]]:
    check_decided(config.tie_word_embeddings)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config, number)}
    shapes |= routed.shapes(experts(config))
    shapes[_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for before, after in names.items():
        name = name.replace(f".{before}", f".{after}", 1)
    return name


def _installed(name: str) -> str:
    return PREFIX + _renamed(name, _INSTALLED)


def expected(config: Deepseek2Config) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs, in reading order."""
    return {_installed(name): shape for name, shape in _checkpoint_shapes(config).items()}


def settle(
    config: Deepseek2Config, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Any]
) -> Deepseek2Config:
    """See ``protocols.Family``: whether ``kv_b_proj`` is split. Raises ConvertError for parts of other sizes."""
    split = False
    for name, shape in shapes.items():
        found = re.fullmatch(r".*\.self_attn\.(embed_q|unembed_out)\.weight", name)
        if found:
            rows = config.kv_lora_rank if found[1] == "embed_q" else config.v_head_dim
            if shape[:-1] != (config.num_attention_heads, rows) and len(shape) == 3:
                raise ConvertError(
                    f"checkpoint: tensor {name!r} is {list(shape)}; config.json calls for"
                    f" {config.num_attention_heads} heads of {rows} rows."
                )
            split = True
    return replace(config, split_kv_b=split)


def place(checkpoint_name: str, config: Deepseek2Config) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    name = _renamed(checkpoint_name.removeprefix(PREFIX), {after: before for before, after in _INSTALLED.items()})
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    if name in (_EMBEDDING, _HEAD, _NORM):
        role: Role = {_EMBEDDING: "embedding", _HEAD: "head"}.get(name, "vector")
        return Placement(PREFIX + name, role, name)
    if name.endswith("rotary_emb.inv_freq"):
        return Dropped("rotary frequencies, which follow from the configuration")
    found = _LAYER.fullmatch(name)
    if not found:
        raise ConvertError(f"checkpoint: tensor {checkpoint_name!r} is not one of the deepseek2 family.")
    number, suffix, layers = int(found[1]), found[2], config.num_hidden_layers
    if layers <= number < layers + config.num_nextn_predict_layers:
        return Dropped("of a layer that predicts further tokens, which is not run")
    if number >= layers or str(number) != found[1]:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} is of layer {found[1]}; the configuration has"
            f" {counted(layers, 'layer')}."
        )
    base = f"model.layers.{number}.mlp"
    if spec := experts(config).get(f"{base}.switch_mlp"):
        position = config.routed_layers().index(number)
        if part := routed.part_of(f"{base}.switch_mlp", f"{base}.experts", name, position, spec):
            return routed.placement(PREFIX, part)
    # Both forms of kv_b_proj have a place; which of them the model expects is settled by all names together.
    shapes = {
        name: shape
        for split in (False, True)
        for name, shape in _layer_shapes(replace(config, split_kv_b=split), number)
    }
    if suffix not in shapes:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in a deepseek2 model with q_lora_rank"
            f" {config.q_lora_rank}, topk_method {config.topk_method} and experts in layers {config.routed_layers()}."
            " Leaving it out would make another model; check config.json."
        )
    if len(shapes[suffix]) != 2:
        role = "vector"
    elif suffix == "mlp.gate.weight":
        role = "router"
    else:
        role = "attention" if suffix.startswith("self_attn.") else "shared_expert"
    return Placement(_installed(name), role, name)
