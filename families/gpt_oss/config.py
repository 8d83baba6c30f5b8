"""gpt-oss's configuration.

An absent field means what it means to transformers: layers slide and see everything in turns, beginning with a sliding
one; attention has biases; rotary positions are scaled by YaRN with a factor of 32 from 4096 tokens on, and the borders
of its blend are not rounded to whole pairs. Sizes that no two models share are required.

The published config.json says some facts twice, in the names of the original release (``experts_per_token``,
``initial_context_length`` and others); what contradicts is refused. Other fields fall in three groups: read below; in
``_HARMLESS_VALUES``, where any other value is refused; and all others (token ids, dropout, router losses,
initialisation, quantization), which leave the forward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields
from turbospark_mlx.families.rope import RopeScaling, YarnScaling, parse_rope, scaling_from_dict, scaling_to_dict
from turbospark_mlx.families.windows import (
    FULL,
    SLIDING,
    Windowed,
    check_attention,
    check_kinds,
    kinds_of_mask,
    read_window,
)

_THETA, _EPS, _ALPHA, _LIMIT, _LONGEST = 150000.0, 1e-5, 1.702, 7.0, 131072
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "rope_traditional": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "use_sliding_window": (True,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "moe_intermediate_size": (),
    "norm_topk_prob": (True,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
    "topk_group": (1,),
    "packing": (),
}


@dataclass(frozen=True)
class GptOssConfig(Windowed):
    """One model of the family.

    ``intermediate_size`` is an expert's. ``sliding_window`` counts the query's own token and is None exactly when no
    layer slides. ``attention_bias`` is about q, k, v and o. ``swiglu_alpha`` and ``swiglu_limit`` are those of
    ``protocols.Activation``'s clamped SwiGLU. ``tie_word_embeddings`` is None where config.json does not say.
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
    rope_scaling: RopeScaling | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    attention_bias: bool
    num_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float
    tie_word_embeddings: bool | None

    model_type = "gptOss"

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": self.model_type,
            **self.windowed_arch(),
            "moeIntermediateSize": self.intermediate_size,
            "finalLogitSoftcap": 0.0,
            "partialRotaryFactor": 1.0,
            "numExperts": self.num_experts,
            "topKExperts": self.num_experts_per_tok,
            "attentionKEqV": False,
            "hiddenActivation": "silu",
            "swigluLimit": self.swiglu_limit,
            **_BEHAVIOUR_FLAGS,
        }
        if isinstance(self.rope_scaling, YarnScaling):
            arch |= {key: getattr(self.rope_scaling, name) for key, name in _ELDER_YARN.items()}
        extension = {
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": scaling_to_dict(self.rope_scaling),
            "attention_bias": self.attention_bias,
            "swiglu_alpha": self.swiglu_alpha,
        }
        return arch, extension

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for: they round the borders of YaRN's blend."""
        scaling = scaling_to_dict(self.rope_scaling)
        return {
            "rms_norm_eps": _EPS,
            "rope_scaling": scaling and scaling | {"truncate": True},
            "attention_bias": True,
            "swiglu_alpha": _ALPHA,
        }


_BEHAVIOUR_FLAGS = {
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": False,
}
"""Written in full, because elder readers fall back to another family's answers for absent ones."""

_ELDER_YARN = {
    "ropeScalingFactor": "factor",
    "ropeScalingOriginalContext": "original_max_position_embeddings",
    "ropeScalingBetaFast": "beta_fast",
    "ropeScalingBetaSlow": "beta_slow",
}
"""``arch`` key -> field of YarnScaling."""
_ORIGINAL_YARN = {
    "rope_scaling_factor": "factor",
    "initial_context_length": "original_max_position_embeddings",
    "rope_ntk_beta": "beta_fast",
    "rope_ntk_alpha": "beta_slow",
}
"""The original release's field -> field of YarnScaling."""


def config_from_hf(config: Mapping[str, Any]) -> GptOssConfig:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    fields = Fields(config, "config.json", ConvertError)
    if fields.text("model_type") != "gpt_oss":
        raise fields.refuse("model_type", "this family runs gpt_oss.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    head_dim = fields.size("head_dim", 64)
    longest = fields.size("max_position_embeddings", _LONGEST)
    theta, scaling = _rope(fields, head_dim, longest)
    types, window = _windows(fields, layers)
    return _checked(
        fields,
        GptOssConfig(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("num_attention_heads"),
            num_key_value_heads=fields.size("num_key_value_heads"),
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=fields.number("rms_norm_eps", _EPS),
            rope_theta=theta,
            rope_scaling=scaling,
            layer_types=types,
            sliding_window=window,
            attention_bias=fields.flag("attention_bias", True),
            num_experts=_said_twice(fields, "num_local_experts", "num_experts"),
            num_experts_per_tok=_said_twice(fields, "num_experts_per_tok", "experts_per_token"),
            swiglu_alpha=fields.number("swiglu_alpha", _ALPHA),
            swiglu_limit=fields.number("swiglu_limit", _LIMIT),
            tie_word_embeddings=fields.flag("tie_word_embeddings", None),
        ),
    )


def _said_twice(fields: Fields, key: str, original: str) -> int:
    """A count that the original release calls ``original``."""
    value = fields.size(key if fields.has(key) or not fields.has(original) else original)
    fields.allow_only(original, (value,), f"{key} is {value}.")
    return value


def _rope(fields: Fields, head_dim: int, longest: int) -> tuple[float, RopeScaling | None]:
    if not any(fields.object(key).values for key in ("rope_scaling", "rope_parameters")):
        fields = Fields({**fields.values, "rope_scaling": _YARN}, fields.where, fields.error)
    theta, scaling = parse_rope(fields, head_dim, longest, _THETA)
    for key, name in _ORIGINAL_YARN.items():
        known = (getattr(scaling, name),) if isinstance(scaling, YarnScaling) else ()
        fields.allow_only(
            key, known, f"by rope_scaling or rope_parameters it is {known[0] if known else 'not scaled'}."
        )
    return theta, scaling


def _windows(fields: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
    """``(layer_types, sliding_window)``."""
    types = fields.items("layer_types", tuple(FULL if number % 2 else SLIDING for number in range(layers)))
    return types, read_window(fields, check_kinds(fields, types), 128)


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> GptOssConfig:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is what the published models have, which do not
    round the borders of YaRN's blend. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    if fields.text("family") != "gptOss":
        raise fields.refuse("family", "this family runs gptOss.")
    head_dim, kv_heads, wide = fields.size("headDim"), fields.size("numKVHeads"), fields.size("moeIntermediateSize")
    theta = fields.number("ropeTheta", above=1.0)
    longest = fields.size("trainedContext", _LONGEST)
    types = kinds_of_mask(fields)
    more = Fields(extension or _elder_extension(fields), "manifest.json: extension", InstallError)
    more.exactly({"rms_norm_eps", "rope_scaling", "attention_bias", "swiglu_alpha"})
    scaling = scaling_from_dict(more, "rope_scaling", head_dim, longest)
    fixed = {
        **dict.fromkeys(_BEHAVIOUR_FLAGS, (False,)),
        "attentionKEqV": (False,),
        "hiddenActivation": ("silu",),
        "finalLogitSoftcap": (0,),
        "partialRotaryFactor": (1,),
        "numFullKVHeads": (kv_heads,),
        "fullHeadDim": (head_dim,),
        "fullRopeTheta": (theta,),
        "ffnIntermediate": (wide,),
        "numDenseLeadingLayers": (0,),
        "routerScoringFunc": ("softmax",),
        "routedScalingFactor": (1,),
        **{
            key: (getattr(scaling, name),) if isinstance(scaling, YarnScaling) else (0,)
            for key, name in _ELDER_YARN.items()
        },
    }
    for key, harmless in fixed.items():
        fields.allow_only(key, harmless, f"in this model it is {harmless[0]!r}.")
    if not math.isclose(fields.number("attentionScale", head_dim**-0.5), head_dim**-0.5, rel_tol=1e-6):
        raise fields.refuse("attentionScale", f"for heads of {head_dim} it is {head_dim**-0.5!r}.")
    return _checked(
        fields,
        GptOssConfig(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=wide,
            num_hidden_layers=fields.size("numLayers", most=MOST_LAYERS),
            num_attention_heads=fields.size("numHeads"),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            layer_types=types,
            sliding_window=fields.size("slidingWindow") if SLIDING in types else None,
            attention_bias=more.flag("attention_bias"),
            num_experts=fields.size("numExperts"),
            num_experts_per_tok=fields.size("topKExperts"),
            swiglu_alpha=more.number("swiglu_alpha"),
            swiglu_limit=fields.number("swigluLimit", _LIMIT),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
        ),
    )


def _elder_extension(fields: Fields) -> dict[str, Any]:
    """What an install of the elder engines leaves unsaid."""
    yarn = {name: fields.number(key) for key, name in _ELDER_YARN.items()}
    scaling = {"rope_type": "yarn", **yarn, "truncate": False}
    return {"rms_norm_eps": _EPS, "rope_scaling": scaling, "attention_bias": True, "swiglu_alpha": _ALPHA}


def _checked(fields: Fields, config: GptOssConfig) -> GptOssConfig:
    """The same configuration, once its numbers fit each other."""
    check_attention(fields, config)
    if config.num_experts_per_tok > config.num_experts:
        raise fields.error(
            f"{fields.where}: {config.num_experts_per_tok} experts a token are asked for, and a layer has"
            f" {config.num_experts}."
        )
    return config
