"""Muse Glimmer's configuration, text only.

An absent field means what it means to transformers, because checkpoints are published for it, unless mlx-lm takes it
for something else: then it is required. Sizes that no two models share are required as well.

``layer_rope_theta`` has an entry for each layer. Both programs read from it whether a layer has positions at all, and
take the base from ``rope_parameters``; an entry that says another base is refused.

Other fields of config.json fall in three groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused;
and all others (token ids, the tower for images and video, initialisation, quantization), which leave the forward pass
of text alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families import rope
from turbospark_mlx.families.fields import MOST_LAYERS, Fields
from turbospark_mlx.families.windows import (
    FULL,
    SLIDING,
    Windowed,
    check_attention,
    check_kinds,
    kinds_of_mask,
    read_window,
)

MODEL_TYPES = ("muse_glimmer", "muse_glimmer_text")
"""The first has the decoder's configuration in ``text_config``, or as some copies have it, beside its own fields."""

_EPS, _POST_EPS, _QUERY_FACTOR, _MULTIPLIER, _CAP, _LONGEST = 1e-5, 1e-8, 3.87, 0.19611613513818404, 20.0, 131072

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("silu", "swish"),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_traditional": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "use_qk_norm": (True,),
    "qk_norm": (True,),
    "attn_output_gate": (True,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "attn_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
}


@dataclass(frozen=True)
class MuseConfig(Windowed):
    """One model of the family.

    ``post_norm_eps`` is the epsilon of norms after a block, ``rms_norm_eps`` that of all others. Normalised queries are
    multiplied by ``qk_scale_factor``, beside the usual scale of scores. ``rotates`` says for each layer whether it has
    rotary positions; without them it has none. ``sliding_window`` counts the query's own token and is None exactly when
    no layer slides. Logits are multiplied by ``output_multiplier`` and then capped.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    post_norm_eps: float
    rope_theta: float
    rotates: tuple[bool, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    qk_scale_factor: float
    output_multiplier: float
    final_logit_softcapping: float
    tie_word_embeddings: bool | None

    model_type = "museGlimmer"

    def frequencies(self, rotates: bool) -> np.ndarray:
        """Radians a position that each pair of a head turns by, in a layer that ``rotates`` or in one that does not:
        float64 ``[head_dim / 2]``."""
        return rope.frequencies(self.head_dim, self.rope_theta, None, self.max_position_embeddings) * rotates

    def full_rope_theta(self) -> float:
        """``fullRopeTheta`` of the manifest: 0 where full layers have no positions."""
        full = [turns for turns, kind in zip(self.rotates, self.layer_types, strict=True) if kind == FULL]
        return self.rope_theta if any(full) else 0.0

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": self.model_type,
            **self.windowed_arch(),
            "moeIntermediateSize": 0,
            "finalLogitSoftcap": self.final_logit_softcapping,
            "fullRopeTheta": self.full_rope_theta(),
            **_FIXED_ARCH,
        }
        extension = {key: getattr(self, key) for key in _ELDER_ASSUMPTION}
        return arch, extension | {"rotates": list(self.rotates)}

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return _elder_extension(self.layer_types)


_FIXED_ARCH: dict[str, Any] = {
    "partialRotaryFactor": 1.0,
    "numExperts": 0,
    "topKExperts": 0,
    "attentionKEqV": False,
    "hiddenActivation": "silu",
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": True,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": False,
}
"""Written in full, because elder readers fall back to another family's answers for absent ones. ``attnOutputGate`` is
about gates that lie among the rows of queries, which are not this family's."""

_ELDER_ASSUMPTION: dict[str, Any] = {
    "rms_norm_eps": _EPS,
    "post_norm_eps": _POST_EPS,
    "qk_scale_factor": _QUERY_FACTOR,
    "output_multiplier": _MULTIPLIER,
}


def _elder_extension(layer_types: tuple[str, ...]) -> dict[str, Any]:
    """What an install of the elder engines leaves unsaid."""
    return _ELDER_ASSUMPTION | {"rotates": [kind == SLIDING for kind in layer_types]}


def config_from_hf(config: Mapping[str, Any]) -> MuseConfig:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    top = Fields(config, "config.json", ConvertError)
    if top.text("model_type") not in MODEL_TYPES:
        raise top.refuse("model_type", f"this family runs {', '.join(MODEL_TYPES)}.")
    fields = top.decoder()
    if fields.text("model_type", MODEL_TYPES[1]) not in MODEL_TYPES:
        raise fields.refuse("model_type", f"this family runs {', '.join(MODEL_TYPES)}.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    longest, head_dim = fields.size("max_position_embeddings", _LONGEST), fields.size("head_dim", 128)
    theta = _theta(fields, head_dim, longest)
    default = tuple(FULL if turns == 0 else SLIDING for turns in _pattern(layers))
    types = check_kinds(fields, fields.items("layer_types", default))
    return _checked(
        fields,
        MuseConfig(
            vocab_size=(fields if fields.has("vocab_size") else top).size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("num_attention_heads"),
            num_key_value_heads=fields.size("num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=fields.number("rms_norm_eps", _EPS),
            post_norm_eps=fields.number("post_norm_eps", _POST_EPS),
            rope_theta=theta,
            rotates=_rotates(fields, types, theta),
            layer_types=types,
            sliding_window=read_window(fields, types, 2048),
            qk_scale_factor=fields.number("qk_scale_factor", _QUERY_FACTOR),
            output_multiplier=fields.number("output_multiplier", _MULTIPLIER),
            final_logit_softcapping=fields.number("final_logit_softcapping", _CAP),
            tie_word_embeddings=fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", None)),
        ),
    )


def _pattern(layers: int) -> list[int]:
    """By default every fourth layer, counted back from the last, is a full one without positions: 0 for those."""
    return [(layers - 1 - number) % 4 for number in range(layers)]


def _theta(fields: Fields, head_dim: int, longest: int) -> float:
    theta, scaling = rope.parse_rope(fields, head_dim, longest, 0.0)
    if scaling is not None:
        raise fields.error(
            f"{fields.where}: rope type {scaling.rope_type!r} is given; this family's positions are not scaled."
        )
    if not theta:
        raise fields.error(f"{fields.where}: rope_theta is missing. The model cannot be built without it.")
    return theta


def _rotates(fields: Fields, types: tuple[str, ...], theta: float) -> tuple[bool, ...]:
    """Which layers have positions. Where nothing is said, mlx-lm takes the sliding ones, and transformers those that
    slide by default, whatever they do."""
    entries = fields.items("layer_rope_theta", None)
    if entries is None:
        if [kind == SLIDING for kind in types] != [bool(turns) for turns in _pattern(len(types))]:
            raise fields.error(
                f"{fields.where}: layer_rope_theta is missing, and programs disagree about what that means beside these"
                " layer_types. Write it out: 0 for a layer without positions, rope_theta for the others."
            )
        return tuple(kind == SLIDING for kind in types)
    for number, entry in enumerate(entries):
        if isinstance(entry, bool) or entry not in (0, theta):
            raise fields.error(
                f"{fields.where}: layer_rope_theta[{number}] is {entry!r}; each is 0 or rope_theta, {theta:g},"
                " which every program takes for all layers that rotate."
            )
    return tuple(entry != 0 for entry in entries)


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> MuseConfig:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is as in the published model. Raises
    InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    if fields.text("family") != MuseConfig.model_type:
        raise fields.refuse("family", f"this family runs {MuseConfig.model_type}.")
    types = kinds_of_mask(fields)
    more = Fields(extension or _elder_extension(types), "manifest.json: extension", InstallError)
    more.exactly({*_ELDER_ASSUMPTION, "rotates"})
    rotates = more.items("rotates")
    if any(not isinstance(entry, bool) for entry in rotates):
        raise more.refuse("rotates", "expected true or false for each layer.")
    head_dim, kv_heads = fields.size("headDim"), fields.size("numKVHeads")
    others = {"numFullKVHeads": kv_heads, "fullHeadDim": head_dim, "moeIntermediateSize": 0, "numDenseLeadingLayers": 0}
    for key, value in {**_FIXED_ARCH, **others}.items():
        fields.allow_only(key, (value,), f"in this model it is {value!r}.")
    if not math.isclose(fields.number("attentionScale", head_dim**-0.5), head_dim**-0.5, rel_tol=1e-6):
        raise fields.refuse("attentionScale", f"for heads of {head_dim} it is {head_dim**-0.5!r}.")
    config = MuseConfig(
        vocab_size=fields.size("vocabSize"),
        hidden_size=fields.size("hiddenSize"),
        intermediate_size=fields.size("ffnIntermediate"),
        num_hidden_layers=fields.size("numLayers", most=MOST_LAYERS),
        num_attention_heads=fields.size("numHeads"),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("trainedContext", _LONGEST),
        rms_norm_eps=more.number("rms_norm_eps"),
        post_norm_eps=more.number("post_norm_eps"),
        rope_theta=fields.number("ropeTheta", above=1.0),
        rotates=rotates,
        layer_types=types,
        sliding_window=fields.size("slidingWindow") if SLIDING in types else None,
        qk_scale_factor=more.number("qk_scale_factor"),
        output_multiplier=more.number("output_multiplier"),
        final_logit_softcapping=fields.number("finalLogitSoftcap"),
        tie_word_embeddings=fields.flag("tieWordEmbeddings"),
    )
    _checked(fields, config)
    fields.allow_only("fullRopeTheta", (config.full_rope_theta(),), "the extension says which layers rotate.")
    return config


def _checked(fields: Fields, config: MuseConfig) -> MuseConfig:
    """The same configuration, once its numbers fit each other."""
    check_attention(fields, config)
    if len(config.rotates) != config.num_hidden_layers:
        raise fields.error(
            f"{fields.where}: {len(config.rotates)} layers are said to rotate or not, of {config.num_hidden_layers}."
        )
    return config
