"""The llama family's configuration: Llama 2/3.x, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE as one decoder with
switches.

Where published code disagrees about a field, transformers' reading is taken, because checkpoints are published for it:

- Mistral: ``sliding_window`` without ``layer_types`` windows every layer, and an absent ``sliding_window`` means 4096.
  (With ``layer_types``, which transformers' Mistral disregards, those decide, as in every other model that has them.)
- Qwen: windows only with ``use_sliding_window``, and only from layer ``max_window_layers`` on.
- Mixtral and Qwen3-MoE: a window holds for every layer; Qwen3-MoE has one only with ``use_sliding_window``.
- Qwen3-MoE: an absent ``norm_topk_prob`` is false, though every published model says true.
- An absent ``head_dim`` is ``hidden_size / num_attention_heads``; an absent ``rope_theta`` is 10000, or Mixtral's 1e6.

Fields of config.json fall in three groups. Those read below are understood. Those of ``_HARMLESS_VALUES`` change the
model unless they hold one of the listed values, and are refused otherwise. All others (token ids, dropout,
initialisation, provenance, quantization, which belongs to the converter) leave the forward pass alone and are not
looked at; a change that no field tells of still shows in the tensors, whose names and shapes are checked one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields
from turbospark_mlx.families.rope import DEFAULT_THETA, RopeScaling, parse_rope, scaling_from_dict, scaling_to_dict
from turbospark_mlx.families.windows import FULL, SLIDING, Windowed, check_attention, check_kinds, kinds_of_mask

MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""config.json's ``model_type`` -> the manifest's ``arch.family``."""
_ROUTED = ("mixtral", "qwen3_moe")
"""Those of ``MODEL_TYPES`` that have routed experts."""
_DEFAULT_THETAS = {"mixtral": 1e6}

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "rope_traditional": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "position_embedding_type": ("rope", "absolute"),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attn_output_gate": (False,),
    "attention_chunk_size": (),
    "attention_sink": (False,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_temperature_tuning": (False,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "embedding_multiplier": (1,),
    "scale_emb": (1,),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "post_norm": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "n_routed_experts": (0,),
    "moe_num_experts": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "n_group": (1,),
}
_DENSE_ONLY = ("num_experts", "num_local_experts")

_EXTENSION_KEYS = {"rms_norm_eps", "rope_scaling", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"}
_ROUTED_EXTENSION_KEYS = {"norm_topk_prob", "dense_layers"}

_UNKNOWN_CONTEXT = 4096
"""What the elder engines take for an install that does not state its trained length."""


@dataclass(frozen=True)
class LlamaConfig(Windowed):
    """One model of the family.

    ``model_type`` is the manifest's family string. ``attention_bias`` is about q, k and v; ``attention_output_bias``
    about o. ``sliding_window`` counts the query's own token and is None exactly when no layer slides.
    ``num_experts`` is 0 in dense models; otherwise every layer but ``dense_layers`` has experts of
    ``moe_intermediate_size`` instead of one block of ``intermediate_size``. ``norm_topk_prob`` says whether the weights
    of the chosen experts are made to add up to 1.
    ``tie_word_embeddings`` is None where config.json does not say: then the tensors decide, and whoever sees them
    replaces it (``dataclasses.replace``) before asking for a manifest or for the expected tensors.
    """

    model_type: str
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
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool | None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()

    def routed_layers(self) -> list[int]:
        """The layers that have routed experts, in order."""
        return [n for n in range(self.num_hidden_layers) if n not in self.dense_layers] if self.num_experts else []

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": self.model_type,
            **self.windowed_arch(),
            "moeIntermediateSize": self.moe_intermediate_size,
            "finalLogitSoftcap": 0.0,
            "partialRotaryFactor": 1.0,
            "numExperts": self.num_experts,
            "topKExperts": self.num_experts_per_tok,
            "attentionKEqV": False,
            "hiddenActivation": "silu",
            **_BEHAVIOUR_FLAGS,
        }
        extension = {
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": scaling_to_dict(self.rope_scaling),
            "attention_bias": self.attention_bias,
            "attention_output_bias": self.attention_output_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
        }
        if self.num_experts:
            extension |= {"norm_topk_prob": self.norm_topk_prob, "dense_layers": list(self.dense_layers)}
        return arch, extension

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for: they decide by family."""
        return elder_assumption(self.model_type, routed=self.num_experts > 0)


_BEHAVIOUR_FLAGS = {
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": False,
}
"""Written in full, because elder readers fall back to another family's answers for absent ones."""


def elder_assumption(model_type: str, *, routed: bool) -> dict[str, Any]:
    assumed: dict[str, Any] = {
        "rms_norm_eps": 1e-5 if model_type == "llama" else 1e-6,
        "rope_scaling": None,
        "attention_bias": model_type == "qwen2",
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": model_type in ("qwen3", "qwen3moe"),
    }
    return assumed | {"norm_topk_prob": True, "dense_layers": []} if routed else assumed


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    fields = Fields(config, "config.json", ConvertError)
    spelling = fields.text("model_type")
    if spelling not in MODEL_TYPES:
        raise fields.refuse("model_type", f"this family runs {', '.join(MODEL_TYPES)}.")
    model_type = MODEL_TYPES[spelling]
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    if spelling not in _ROUTED:
        for key in _DENSE_ONLY:
            fields.allow_only(key, (0,), f"a {spelling} model has no experts.")
    if model_type == "qwen2":
        fields.allow_only("attention_bias", (True,), "Qwen2 has biases on q, k and v.")

    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse(
            "hidden_size", f"it is not a multiple of num_attention_heads, {heads}, and head_dim is absent."
        )
    head_dim = fields.size("head_dim", hidden // heads)
    longest = fields.size("max_position_embeddings")
    theta, scaling = parse_rope(fields, head_dim, longest, _DEFAULT_THETAS.get(spelling, DEFAULT_THETA))
    layer_types, window = _windows(fields, spelling, layers)
    attention_bias = fields.flag("attention_bias", False)
    return _checked(
        fields,
        LlamaConfig(
            model_type=model_type,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.size("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            layer_types=layer_types,
            sliding_window=window,
            attention_bias=attention_bias or model_type == "qwen2",
            attention_output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=fields.flag("mlp_bias", False),
            qk_norm=model_type in ("qwen3", "qwen3moe"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", None),
            **(_experts(fields, spelling, layers) if spelling in _ROUTED else {}),
        ),
    )


def _experts(fields: Fields, spelling: str, layers: int) -> dict[str, Any]:
    """What config.json says of routed experts, in the published spelling and in that of transformers 5."""
    counts = {fields.size(key) for key in _DENSE_ONLY if fields.has(key)}
    if len(counts) != 1:
        found = f"given as {' and as '.join(map(str, sorted(counts)))}" if counts else "missing"
        raise fields.error(f"{fields.where}: the number of experts is {found} ({' or '.join(_DENSE_ONLY)}).")
    made = {"num_experts": counts.pop(), "num_experts_per_tok": fields.size("num_experts_per_tok")}
    if spelling == "mixtral":
        return {**made, "moe_intermediate_size": fields.size("intermediate_size")}
    named = Fields(
        {str(i): n for i, n in enumerate(fields.items("mlp_only_layers", ()))}, "mlp_only_layers", fields.error
    )
    dense = {named.size(key, least=0, most=layers - 1) for key in named.values}
    step = fields.size("decoder_sparse_step", 1)
    return {
        **made,
        "moe_intermediate_size": fields.size("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "dense_layers": tuple(n for n in range(layers) if n in dense or (n + 1) % step),
    }


def _windows(fields: Fields, spelling: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """``(layer_types, sliding_window)`` as the family of ``spelling`` means them."""
    window = fields.size("sliding_window", None)
    if spelling == "mistral" and "sliding_window" not in fields.values:
        window = 4096
    types = fields.items("layer_types", None)
    if types is None:
        first = layers
        if spelling in ("mistral", "mixtral") or (spelling == "qwen3_moe" and fields.flag("use_sliding_window", False)):
            first = 0
        elif spelling in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
            first = fields.size("max_window_layers", 28, least=0)
        types = tuple(SLIDING if window is not None and i >= first else FULL for i in range(layers))
    if len(types) != layers:
        raise fields.error(f"{fields.where}: layer_types has length {len(types)}; num_hidden_layers is {layers}.")
    if SLIDING not in check_kinds(fields, types):
        return types, None
    if window is None:
        raise fields.refuse("sliding_window", f"layer_types has {SLIDING}, which needs a window.")
    return types, window


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> LlamaConfig:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is decided by family, as elder engines do.
    Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    model_type = fields.text("family")
    if model_type not in MODEL_TYPES.values():
        raise fields.refuse("family", f"this family runs {', '.join(sorted(set(MODEL_TYPES.values())))}.")
    experts = fields.size("numExperts", least=0)
    if bool(experts) != (model_type == "qwen3moe") and model_type != "llama":
        raise fields.refuse("numExperts", f"a {model_type} model has {'some' if model_type == 'qwen3moe' else 'none'}.")
    assumed = elder_assumption(model_type, routed=experts > 0)
    more = Fields(extension or assumed, "manifest.json: extension", InstallError)
    more.exactly(_EXTENSION_KEYS | _ROUTED_EXTENSION_KEYS if experts else _EXTENSION_KEYS)

    head_dim = fields.size("headDim")
    kv_heads = fields.size("numKVHeads")
    theta = fields.number("ropeTheta", above=1.0)
    types = kinds_of_mask(fields)
    longest = fields.size("trainedContext", _UNKNOWN_CONTEXT)
    fixed = {
        **dict.fromkeys(_BEHAVIOUR_FLAGS, (False,)),
        "attentionKEqV": (False,),
        "hiddenActivation": ("silu",),
        "finalLogitSoftcap": (0,),
        "partialRotaryFactor": (1,),
        "numFullKVHeads": (kv_heads,),
        "fullHeadDim": (head_dim,),
        "fullRopeTheta": (theta,),
        "numDenseLeadingLayers": (0,),
        "routerScoringFunc": ("softmax",),
        "routedScalingFactor": (1,),
        **({} if experts else {"topKExperts": (0,), "moeIntermediateSize": (0,)}),
    }
    for key, harmless in fixed.items():
        fields.allow_only(key, harmless, f"a {model_type} model has {harmless[0]!r}.")
    if not math.isclose(fields.number("attentionScale", head_dim**-0.5), head_dim**-0.5, rel_tol=1e-6):
        raise fields.refuse("attentionScale", f"for heads of {head_dim} it is {head_dim**-0.5!r}.")
    return _checked(
        fields,
        LlamaConfig(
            model_type=model_type,
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=fields.size("ffnIntermediate"),
            num_hidden_layers=fields.size("numLayers", most=MOST_LAYERS),
            num_attention_heads=fields.size("numHeads"),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling_from_dict(more, "rope_scaling", head_dim, longest),
            layer_types=types,
            sliding_window=fields.size("slidingWindow") if SLIDING in types else None,
            attention_bias=more.flag("attention_bias"),
            attention_output_bias=more.flag("attention_output_bias"),
            mlp_bias=more.flag("mlp_bias"),
            qk_norm=more.flag("qk_norm"),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
            **(_experts_of_manifest(fields, more, experts) if experts else {}),
        ),
    )


def _experts_of_manifest(fields: Fields, more: Fields, experts: int) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": fields.size("topKExperts"),
        "moe_intermediate_size": fields.size("moeIntermediateSize"),
        "norm_topk_prob": more.flag("norm_topk_prob"),
        "dense_layers": more.items("dense_layers"),
    }


def _checked(fields: Fields, config: LlamaConfig) -> LlamaConfig:
    """The same configuration, once its numbers fit each other."""
    check_attention(fields, config)
    if config.num_experts_per_tok > config.num_experts:
        raise fields.error(
            f"{fields.where}: {config.num_experts_per_tok} experts a token are asked for, and a layer has"
            f" {config.num_experts}."
        )
    if any(type(n) is not int or not 0 <= n < config.num_hidden_layers for n in config.dense_layers):
        raise fields.error(f"{fields.where}: dense_layers is {list(config.dense_layers)}; layer numbers are needed.")
    if config.num_experts and not config.routed_layers():
        raise fields.error(f"{fields.where}: {config.num_experts} experts are declared, and no layer has any.")
    return config
