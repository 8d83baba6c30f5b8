"""Names, shapes and roles of Muse Glimmer's tensors, each fact stated once.

Spellings of one name, for example

    model.language_model.layers.3.self_attn.gate_proj.weight    published checkpoint
    language_model.model.layers.3.self_attn.gate_proj.weight    mlx checkpoint and install
    model.layers.3.self_attn.gate_proj.weight                   module parameter, and checkpoints of text alone

``post_`` norms come after a block, before its result is added. The norms of layers are stored less 1, the final one is
not; embeddings, queries and keys are normalised without weights, so that there are none.
"""

from __future__ import annotations

from collections.abc import Mapping

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families.fields import check_decided
from turbospark_mlx.families.muse.config import MuseConfig
from turbospark_mlx.families.names import PREFIX, canonical, split_layer
from turbospark_mlx.protocols import Dropped, ExpertSpec, Placement, Role

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_TOWERS = ("vision_tower.", "vision_adapter.", "vision_projection.")


def experts(config: MuseConfig) -> Mapping[str, ExpertSpec]:
    """See ``protocols.Family.experts``."""
    return {}


def _layer_shapes(config: MuseConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of one layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.gate_proj.weight": (queries, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
    }


def expected(config: MuseConfig) -> Mapping[str, tuple[int, ...]]:
    """Install name -> logical shape of every tensor that the model needs, in reading order."""
    check_decided(config.tie_word_embeddings)
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes[_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def place(checkpoint_name: str, config: MuseConfig) -> Placement | Dropped:
    """Where a checkpoint tensor goes; an install name maps to itself.

    A head beside a tied embedding is dropped as its copy; whether it is one is for the caller to check. Raises
    ConvertError for a name that no model of this configuration has.
    """
    if checkpoint_name.removeprefix("model.").startswith(_TOWERS):
        return Dropped("of the tower for images and video; text alone is run")
    name = canonical(checkpoint_name)
    if name == _HEAD and config.tie_word_embeddings:
        return Dropped("a copy of the tied embedding")
    if name in (_EMBEDDING, _HEAD, _NORM):
        role: Role = {_EMBEDDING: "embedding", _HEAD: "head"}.get(name, "vector")
        return Placement(PREFIX + name, role, name)
    number, suffix = split_layer(name, checkpoint_name, "muse", config.num_hidden_layers)
    if suffix.startswith("self_attn.rotary_emb."):
        return Dropped("rotary frequencies, which follow from the configuration")
    shape = _layer_shapes(config).get(suffix)
    if shape is None:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} has no place in layer {number} of a muse model, which has no"
            " biases and normalises queries and keys without weights. Leaving it out would make another model."
        )
    if len(shape) == 1:
        role = "vector"
    else:
        role = "attention" if suffix.startswith("self_attn.") else "shared_expert"
    return Placement(PREFIX + name, role, name)
