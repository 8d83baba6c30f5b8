"""Names, shapes and roles of Gemma 4's tensors, each fact stated once.

Spellings of one name, for example

    model.language_model.layers.3.mlp.up_proj.weight    published checkpoint
    language_model.model.layers.3.mlp.up_proj.weight    mlx checkpoint and install
    model.layers.3.mlp.up_proj.weight                   module parameter, and checkpoints of the text model alone

``post_`` norms come after a block, before its result is added; with experts there is one for each branch (``_1`` dense,
``_2`` routed) and one for their sum. Routed experts are at ``experts.switch_glu`` as stacks, at ``experts`` with gate
and up joined (see ``families.routed``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import routed
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.gemma4.config import Gemma4Config
from turbospark_mlx.families.names import PREFIX, canonical, split_layer
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOWERS = (
    *("vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio."),
    "vision_embedder.",
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_ROUTED_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def experts(config: Gemma4Config) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    if not config.num_experts:
        return {}
    spec = ExpertSpec(
        config.num_experts, config.top_k_experts, config.hidden_size, config.moe_intermediate_size, "gelu_tanh"
    )
    return {f"model.layers.{number}.experts.switch_glu": spec for number in range(config.num_hidden_layers)}


def _top_shapes(config: Gemma4Config) -> dict[str, tuple[int, ...]]:
    hidden, each = config.hidden_size, config.hidden_size_per_layer_input
    shapes = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if each:
        every = config.num_hidden_layers * each
        shapes |= {
            "model.embed_tokens_per_layer.weight": (config.vocab_size_per_layer_input, every),
            "model.per_layer_model_projection.weight": (every, hidden),
            "model.per_layer_projection_norm.weight": (each,),
        }
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: Gemma4Config, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """``(name, shape)`` of every tensor of one layer but those of routed experts."""
    hidden, size, wide = config.hidden_size, config.head_size(number), config.feed_forward_size(number)
    queries, keys = config.num_attention_heads * size, config.kv_heads(number) * size
    yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.q_norm.weight", (size,)
    if number < config.first_shared_layer:
        yield "self_attn.k_proj.weight", (keys, hidden)
        yield "self_attn.k_norm.weight", (size,)
        if not config.k_is_v(number):
            yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "mlp.gate_proj.weight", (wide, hidden)
    yield "mlp.up_proj.weight", (wide, hidden)
    yield "mlp.down_proj.weight", (hidden, wide)
    if config.num_experts:
        yield "router.proj.weight", (config.num_experts, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (config.num_experts,)
    for norm in (*_NORMS, *(_ROUTED_NORMS if config.num_experts else ())):
        yield f"{norm}.weight", (hidden,)
    if each := config.hidden_size_per_layer_input:
        yield "per_layer_input_gate.weight", (each, hidden)
        yield "per_layer_projection.weight", (hidden, each)
        yield "post_per_layer_input_norm.weight", (hidden,)
    yield "layer_scalar", (1,)


def expected(config: Gemma4Config) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs."""
    check_decided(config.tie_word_embeddings)
    shapes = _top_shapes(config)
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config, number)}
    shapes |= routed.shapes(experts(config))
    return {PREFIX + name: shape for name, shape in shapes.items()}


def unused(config: Gemma4Config) -> Mapping[str, str]:
    """See ``protocols.Family.unused``."""
    last = f"{PREFIX}model.layers.{config.num_hidden_layers - 1}.layer_scalar"
    return {last: "the final norm divides by what the last layer is multiplied with"}


def _role(name: str, shape: tuple[int, ...]) -> Role:
    if len(shape) < 2:
        return "vector"
    if "embed_tokens" in name:
        return "embedding"
    if name == _HEAD:
        return "head"
    if ".router." in name:
        return "router"
    return "attention" if ".self_attn." in name else "shared_expert"


def place(checkpoint_name: str, config: Gemma4Config) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    if checkpoint_name.removeprefix("model.").startswith(_TOWERS):
        return Dropped("of a tower for images or sound; text alone is run")
    name = canonical(checkpoint_name)
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    shape = _top_shapes(config).get(name)
    if shape is None:
        number, suffix = split_layer(name, checkpoint_name, "gemma4", config.num_hidden_layers)
        base = f"model.layers.{number}.experts"
        spec = experts(config).get(f"{base}.switch_glu")
        if spec and (part := routed.part_of(f"{base}.switch_glu", base, name, number, spec)):
            return routed.placement(PREFIX, part)
        if suffix.startswith("self_attn.rotary_emb."):
            return Dropped("rotary frequencies, which follow from the configuration")
        unused = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        if number >= config.first_shared_layer and suffix.removeprefix("self_attn.") in unused:
            return Dropped(f"layer {number} reads the keys and values of layer {config.kv_source(number)}")
        shape = dict(_layer_shapes(config, number)).get(suffix)
        if shape is None:
            raise ConvertError(
                f"checkpoint: tensor {checkpoint_name!r} has no place in a gemma4 model with {config.num_experts}"
                f" experts a layer, attention_k_eq_v {config.attention_k_eq_v} and hidden_size_per_layer_input"
                f" {config.hidden_size_per_layer_input}. Leaving it out would make another model; check config.json."
            )
    return Placement(PREFIX + name, _role(name, shape), name)
