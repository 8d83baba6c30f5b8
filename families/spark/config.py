"""Spark 2.5's configuration (Spark-X2.5 4B and 1.7B).

Nothing is taken for granted that decides about the forward pass: sizes, the RMS epsilon and the rotary base of every
kind of layer in use are required. Absent ``layer_types`` are three sliding layers to a full one, an absent
``partial_rotary_factor`` is 1, absent biases are none, as in mlx-lm.

Fields of config.json fall in three groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused; and
all others (token ids, dropout, initialisation, provenance, quantization), which leave the forward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields, check_layers
from turbospark_mlx.families.rope import DEFAULT_THETA
from turbospark_mlx.families.windows import FULL, SLIDING, Windowed, check_kinds, kinds_of_mask

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "hidden_activation": ("gelu",),
    "headwise_attn_output_gate": (True,),
    "elementwise_attn_output_gate": (False,),
    "attn_output_gate": (False,),
    "gate_attn_act_mode": ("sigmoid",),
    "rope_theta": (),
    "rope_scaling": (),
    "partial_rotary_factor": (),
    "rope_traditional": (False,),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_sliding_window": (True,),
    "attention_chunk_size": (),
    "attention_sink": (False,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
}

_UNKNOWN_CONTEXT = 1048576
"""The elder engines run one model of this family, the 4B, and do not all state its trained length."""


@dataclass(frozen=True)
class SparkConfig(Windowed):
    """One model of the family.

    ``full_`` fields describe the layers with full attention, the others those with a window, which counts the query's
    own token and is None exactly when no layer slides. The partial rotary factors are the shares of a head that turn.
    ``attention_bias`` is about all matrices of attention, the gates' included.
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
    rope_theta: float
    partial_rotary_factor: float
    full_rope_theta: float
    full_partial_rotary_factor: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool | None

    model_type = "spark2_5"

    def rotary_dims(self, layer_type: str) -> int:
        """How many dimensions of a head turn, the first ones."""
        factor = self.partial_rotary_factor if layer_type == SLIDING else self.full_partial_rotary_factor
        return int(self.head_dim * factor)

    def frequencies(self, layer_type: str) -> np.ndarray:
        """Radians a position that each turning pair turns by: float64 ``[rotary_dims / 2]``, spaced for what turns."""
        width = self.rotary_dims(layer_type)
        theta = self.rope_theta if layer_type == SLIDING else self.full_rope_theta
        return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": self.model_type,
            **self.windowed_arch(),
            "fullRopeTheta": self.full_rope_theta,
            "partialRotaryFactor": self.full_partial_rotary_factor,
            **_FIXED_ARCH,
        }
        return arch, {
            "rms_norm_eps": self.rms_norm_eps,
            "sliding_partial_rotary_factor": self.partial_rotary_factor,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        }

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return dict(_ELDER_ASSUMPTION)


_FIXED_ARCH: dict[str, Any] = {
    "moeIntermediateSize": 0,
    "numExperts": 0,
    "topKExperts": 0,
    "finalLogitSoftcap": 0.0,
    "attentionKEqV": False,
    "hiddenActivation": "gelu",
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": False,
}
"""Written in full, because elder readers fall back to another family's answers for absent ones. ``attnOutputGate`` is
about gates that are packed with the queries; those of this family have a matrix of their own."""

_ELDER_ASSUMPTION: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "sliding_partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}


def config_from_hf(config: Mapping[str, Any]) -> SparkConfig:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    fields = Fields(config, "config.json", ConvertError)
    if fields.text("model_type") != SparkConfig.model_type:
        raise fields.refuse("model_type", f"this family runs {SparkConfig.model_type}.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    absent = tuple(FULL if number % 4 == 3 else SLIDING for number in range(layers))
    types = check_kinds(fields, fields.items("layer_types", absent))
    blocks = fields.object("rope_parameters")
    blocks.known({SLIDING, FULL})
    theta, factor = _rope(blocks, SLIDING, types)
    full_theta, full_factor = _rope(blocks, FULL, types)
    heads = fields.size("num_attention_heads")
    return _checked(
        fields,
        SparkConfig(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.size("num_key_value_heads"),
            head_dim=fields.size("head_dim"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            partial_rotary_factor=factor,
            full_rope_theta=full_theta,
            full_partial_rotary_factor=full_factor,
            layer_types=types,
            sliding_window=fields.size("sliding_window") if SLIDING in types else None,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", None),
        ),
    )


def _rope(blocks: Fields, kind: str, types: tuple[str, ...]) -> tuple[float, float]:
    """``(theta, the share of a head that turns)`` of layers of ``kind``; of any value where there are none."""
    block = blocks.object(kind)
    block.known({"rope_type", "rope_theta", "partial_rotary_factor"})
    block.allow_only("rope_type", ("default",), "frequencies of this family are not scaled.")
    theta = block.number("rope_theta", above=1.0) if kind in types else block.number("rope_theta", DEFAULT_THETA)
    return theta, block.number("partial_rotary_factor", 1.0)


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> SparkConfig:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is as in the 4B. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    if fields.text("family") != SparkConfig.model_type:
        raise fields.refuse("family", f"this family runs {SparkConfig.model_type}.")
    more = Fields(extension or _ELDER_ASSUMPTION, "manifest.json: extension", InstallError)
    more.exactly(set(_ELDER_ASSUMPTION))
    head_dim, kv_heads = fields.size("headDim"), fields.size("numKVHeads")
    fixed = {**_FIXED_ARCH, "numFullKVHeads": kv_heads, "fullHeadDim": head_dim, "numDenseLeadingLayers": 0}
    for key, value in fixed.items():
        fields.allow_only(key, (value,), f"in this model it is {value!r}.")
    if not math.isclose(fields.number("attentionScale", head_dim**-0.5), head_dim**-0.5, rel_tol=1e-6):
        raise fields.refuse("attentionScale", f"for heads of {head_dim} it is {head_dim**-0.5!r}.")
    types = kinds_of_mask(fields)
    return _checked(
        fields,
        SparkConfig(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=fields.size("ffnIntermediate"),
            num_hidden_layers=fields.size("numLayers", most=MOST_LAYERS),
            num_attention_heads=fields.size("numHeads"),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.size("trainedContext", _UNKNOWN_CONTEXT),
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=fields.number("ropeTheta", above=1.0),
            partial_rotary_factor=more.number("sliding_partial_rotary_factor"),
            full_rope_theta=fields.number("fullRopeTheta", above=1.0),
            full_partial_rotary_factor=fields.number("partialRotaryFactor"),
            layer_types=types,
            sliding_window=fields.size("slidingWindow") if SLIDING in types else None,
            attention_bias=more.flag("attention_bias"),
            mlp_bias=more.flag("mlp_bias"),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
        ),
    )


def _checked(fields: Fields, config: SparkConfig) -> SparkConfig:
    """The same configuration, once its numbers fit each other."""
    check_layers(fields, config)
    for kind, factor in ((SLIDING, config.partial_rotary_factor), (FULL, config.full_partial_rotary_factor)):
        if factor > 1 or not config.rotary_dims(kind) or config.rotary_dims(kind) % 2:
            raise fields.error(
                f"{fields.where}: {factor!r} of a head of {config.head_dim} turns in {kind} layers,"
                f" {config.rotary_dims(kind)} dimensions; it has to be some pairs, and no more than the head."
            )
    return config
