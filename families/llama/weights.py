"""Names, shapes and roles of the llama family's tensors, each fact stated once.

Three spellings of one name, for example

    model.layers.3.self_attn.q_proj.weight                  published checkpoint, mlx checkpoint, module parameter
    language_model.model.layers.3.self_attn.q_proj.weight   install
    blk.3.attn_q.weight                                     GGUF (see gguf.py)

``post_attention_layernorm`` is the norm before the feed-forward block here. Mixtral's ``block_sparse_moe`` is ``mlp``
everywhere but in its published and mlx checkpoints. Routed experts are at ``mlp.switch_mlp`` as stacks, below
``mlp.experts`` one by one or with gate and up joined (see ``families.routed``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import routed
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.llama.config import LlamaConfig
from turbospark_mlx.families.names import PREFIX, split_layer
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROLES: dict[str, Role] = {"self_attn": "attention", "mlp": "shared_expert"}


def experts(config: LlamaConfig) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    spec = ExpertSpec(
        config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size, "silu"
    )
    return {f"model.layers.{number}.mlp.switch_mlp": spec for number in config.routed_layers()}


def _layer_shapes(config: LlamaConfig, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    matrices = (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_output_bias),
    )
    if config.num_experts and number not in config.dense_layers:
        matrices += (("mlp.gate", config.num_experts, hidden, False),)
    else:
        matrices += (
            ("mlp.gate_proj", wide, hidden, config.mlp_bias),
            ("mlp.up_proj", wide, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, wide, config.mlp_bias),
        )
    for name, rows, columns, bias in matrices:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _checkpoint_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    check_decided(config.tie_word_embeddings)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config, number)}
    shapes |= routed.shapes(experts(config))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def expected(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs, in reading order."""
    return {PREFIX + name: shape for name, shape in _checkpoint_shapes(config).items()}


def place(checkpoint_name: str, config: LlamaConfig) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    name = checkpoint_name.removeprefix(PREFIX)
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    if name in (_EMBEDDING, _HEAD, "model.norm.weight"):
        role: Role = {_EMBEDDING: "embedding", _HEAD: "head"}.get(name, "vector")
        return Placement(PREFIX + name, role, name)
    if name.endswith("rotary_emb.inv_freq"):
        return Dropped("rotary frequencies, which follow from the configuration")
    number, suffix = split_layer(name, checkpoint_name, config.model_type, config.num_hidden_layers)
    suffix = suffix.replace("block_sparse_moe.", "mlp.", 1)
    name = f"model.layers.{number}.{suffix}"
    base = f"model.layers.{number}.mlp"
    if spec := experts(config).get(f"{base}.switch_mlp"):
        position = config.routed_layers().index(number)
        if part := routed.part_of(f"{base}.switch_mlp", f"{base}.experts", name, position, spec):
            return routed.placement(PREFIX, part)
    shapes = dict(_layer_shapes(config, number))
    if suffix not in shapes:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in a {config.model_type} model with attention_bias"
            f" {config.attention_bias}, mlp_bias {config.mlp_bias}, qk_norm {config.qk_norm} and"
            f" {config.num_experts} experts a layer. Leaving it out would make another model; check config.json."
        )
    if len(shapes[suffix]) != 2:
        role = "vector"
    else:
        role = "router" if suffix == "mlp.gate.weight" else _ROLES[suffix.split(".")[0]]
    return Placement(PREFIX + name, role, name)
