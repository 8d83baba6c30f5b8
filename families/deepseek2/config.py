"""The deepseek2 family's configuration: DeepSeek-V2, V2-Lite and V2.5, and V3 and R1, as one decoder with switches.

What transformers' reading of a field leaves open, or what mlx-lm reads differently, is required or refused:

- ``q_lora_rank`` has to be there, null where queries are not compressed; both take an absent one for 1536.
- V2: weights of chosen experts are never normalised; transformers and mlx-lm ignore ``norm_topk_prob``, so true is
  refused. ``n_group`` and ``topk_group`` count only with ``group_limited_greedy``.
- V3: routing is always ``noaux_tc`` over sigmoids. Its sizes have other defaults in every program and are required.
- YaRN's ``mscale`` and ``mscale_all_dim`` come together: programs disagree about one alone.

Fields of config.json fall in three groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused; and
all others (token ids, ``head_dim``, training and parallelism, quantization), which leave the forward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields, check_decided
from turbospark_mlx.families.rope import RopeScaling, YarnScaling, parse_rope, scaling_from_dict, scaling_to_dict

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")

GREEDY, GROUPS, BIASED = "greedy", "group_limited_greedy", "noaux_tc"
"""Ways to choose experts: the best, the best within the best groups, and the same by scores with a learned bias."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "index_topk": (),
    "index_n_heads": (),
    "qk_layernorm": (False,),
    "scale_emb": (1,),
    "residual_multiplier": (1,),
}
"""``index_`` fields are the sparse attention of V3.2, which is another model."""

_UNKNOWN_CONTEXT = 163840
"""The elder engines run one model of this family, the V2-Lite, and do not all state its trained length."""


@dataclass(frozen=True)
class Deepseek2Config:
    """One model of the family.

    A head's query and key have ``qk_nope_head_dim`` dimensions without a position and ``qk_rope_head_dim`` that turn;
    keys without a position and values come from a latent of ``kv_lora_rank``, queries from one of ``q_lora_rank`` or,
    where that is None, from the hidden state. ``rope_interleave`` pairs neighbours, otherwise halves.
    ``mscale_all_dim`` is YaRN's, 0 for none: it sharpens scores. The first ``first_k_dense_replace`` layers, and those
    whose number is no multiple of ``moe_layer_freq``, have a dense block of ``intermediate_size``.
    ``num_nextn_predict_layers`` layers behind the last one predict further tokens and are left out. ``split_kv_b`` says
    that the matrix which makes keys and values of a latent is stored in two parts, as mlx-lm stores V3's: of this
    config.json says nothing (see ``weights.settle``).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleave: bool
    mscale_all_dim: float
    first_k_dense_replace: int
    moe_layer_freq: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    tie_word_embeddings: bool | None
    split_kv_b: bool = False

    model_type = "deepseek2"

    def slides(self, layer: int) -> bool:
        """Every layer sees everything."""
        return False

    @property
    def latent_size(self) -> int:
        """Values that a layer's cache keeps of a token: the latent, and the one key part that turns."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by: YaRN's part goes by the square, because its paper scales q and k alike."""
        magnitude = 1.0
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_scaling.factor > 1:
            magnitude = 0.1 * self.mscale_all_dim * math.log(self.rope_scaling.factor) + 1.0
        return magnitude * magnitude / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    def routed_layers(self) -> list[int]:
        """The layers that have routed experts, in order."""
        return [n for n in range(self.first_k_dense_replace, self.num_hidden_layers) if n % self.moe_layer_freq == 0]

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take with elements of ``itemsize`` bytes."""
        return self.num_hidden_layers * context * self.latent_size * itemsize

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        check_decided(self.tie_word_embeddings)
        arch = {
            "family": self.model_type,
            "hiddenSize": self.hidden_size,
            "ffnIntermediate": self.shared_expert_intermediate_size,
            "moeIntermediateSize": self.moe_intermediate_size,
            "numHeads": self.num_attention_heads,
            "headDim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "fullHeadDim": self.v_head_dim,
            "vocabSize": self.vocab_size,
            "ropeTheta": self.rope_theta,
            "fullRopeTheta": self.rope_theta,
            "numLayers": self.num_hidden_layers,
            "numExperts": self.n_routed_experts,
            "topKExperts": self.num_experts_per_tok,
            "tieWordEmbeddings": self.tie_word_embeddings,
            "fullAttentionLayerMask": [_MLA] * self.num_hidden_layers,
            "attentionScale": self.attention_scale,
            "trainedContext": self.max_position_embeddings,
            "mlaKvLoraRank": self.kv_lora_rank,
            "mlaQLoraRank": self.q_lora_rank or 0,
            "mlaNopeHeadDim": self.qk_nope_head_dim,
            "mlaRopeHeadDim": self.qk_rope_head_dim,
            "mlaVHeadDim": self.v_head_dim,
            "numDenseLeadingLayers": self.first_k_dense_replace,
            "denseLeadIntermediateSize": self.intermediate_size,
            "routerScoringFunc": "sigmoid" if self.topk_method == BIASED else "softmax",
            "routedScalingFactor": self.routed_scaling_factor,
            **_FIXED_ARCH,
        }
        if isinstance(self.rope_scaling, YarnScaling):
            arch |= {
                "ropeScalingFactor": self.rope_scaling.factor,
                "ropeScalingOriginalContext": self.rope_scaling.original_max_position_embeddings,
                "ropeScalingBetaFast": self.rope_scaling.beta_fast,
                "ropeScalingBetaSlow": self.rope_scaling.beta_slow,
                "ropeScalingMscale": self.mscale_all_dim,
            }
        extension = {key: getattr(self, key) for key in _ELDER_ASSUMPTION}
        return arch, {**extension, "rope_scaling": scaling_to_dict(self.rope_scaling)}

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return _elder_assumption(Fields(self.to_manifest()[0], "manifest.json: arch", InstallError))


_MLA = 5
"""What the manifest's layer mask calls latent attention."""

_FIXED_ARCH: dict[str, Any] = {
    "numKVHeads": 1,
    "numFullKVHeads": 1,
    "slidingWindow": 0,
    "finalLogitSoftcap": 0.0,
    "partialRotaryFactor": 0.0,
    "attentionKEqV": False,
    "hiddenActivation": "silu",
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": True,
}
"""As the elder engines write them for this family; none of them changes it."""

_ELDER_ASSUMPTION: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "topk_method": GREEDY,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
    "split_kv_b": False,
}


def _elder_assumption(arch: Fields) -> dict[str, Any]:
    """YaRN is what ``arch`` says of it, never magnified and with whole borders."""
    if not arch.values.get("ropeScalingFactor"):
        return dict(_ELDER_ASSUMPTION)
    scaling = YarnScaling(
        factor=arch.number("ropeScalingFactor"),
        original_max_position_embeddings=arch.size("ropeScalingOriginalContext"),
        attention_factor=1.0,
        beta_fast=arch.number("ropeScalingBetaFast"),
        beta_slow=arch.number("ropeScalingBetaSlow"),
        truncate=True,
    )
    return {**_ELDER_ASSUMPTION, "rope_scaling": scaling_to_dict(scaling)}


def config_from_hf(config: Mapping[str, Any]) -> Deepseek2Config:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    fields = Fields(config, "config.json", ConvertError)
    spelling = fields.text("model_type")
    if spelling not in MODEL_TYPES:
        raise fields.refuse("model_type", f"this family runs {', '.join(MODEL_TYPES)}.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    if "q_lora_rank" not in fields.values:
        raise fields.error("config.json: q_lora_rank is missing. Write null where queries are not compressed.")
    heads, rotary = fields.size("num_attention_heads"), fields.size("qk_rope_head_dim")
    fields.allow_only("num_key_value_heads", (heads,), "every head has keys and values of its own in this family.")
    longest, width = fields.size("max_position_embeddings"), fields.size("moe_intermediate_size")
    theta, scaling = parse_rope(fields, rotary, longest)
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    return _checked(
        fields,
        Deepseek2Config(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            q_lora_rank=fields.size("q_lora_rank", None),
            kv_lora_rank=fields.size("kv_lora_rank"),
            qk_nope_head_dim=fields.size("qk_nope_head_dim"),
            qk_rope_head_dim=rotary,
            v_head_dim=fields.size("v_head_dim"),
            max_position_embeddings=longest,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_interleave=fields.flag("rope_interleave", True),
            mscale_all_dim=_mscale(fields),
            first_k_dense_replace=fields.size("first_k_dense_replace", least=0, most=layers - 1),
            moe_layer_freq=fields.size("moe_layer_freq", 1),
            n_routed_experts=fields.size("n_routed_experts"),
            num_experts_per_tok=fields.size("num_experts_per_tok"),
            moe_intermediate_size=width,
            shared_expert_intermediate_size=fields.size("n_shared_experts") * width,
            **(_routing_v2(fields) if spelling == "deepseek_v2" else _routing_v3(fields)),
            num_nextn_predict_layers=fields.size(
                "num_nextn_predict_layers", fields.size("num_mtp_layers", 0, least=0), least=0, most=MOST_LAYERS
            ),
            tie_word_embeddings=fields.flag("tie_word_embeddings", None),
        ),
    )


def _mscale(fields: Fields) -> float:
    """YaRN's ``mscale_all_dim``, 0 for none, in whichever block scaling is described."""
    found = set()
    for block in (fields.object(key) for key in ("rope_scaling", "rope_parameters")):
        for key, value in block.values.items():
            if isinstance(value, Mapping):
                raise block.refuse(key, "this family has one kind of layers.")
        if block.values:
            pair = tuple(block.number(key, 0.0, above=-1.0) for key in ("mscale", "mscale_all_dim"))
            if min(pair) < 0 or (bool(pair[0]) != bool(pair[1]) and pair != (1.0, 0.0)):
                raise block.refuse("mscale", f"mscale_all_dim is {pair[1]:g}; both or none of them are to be positive.")
            found.add(pair[1])
    if len(found) > 1:
        raise fields.error(f"{fields.where}: rope_scaling and rope_parameters give different mscale_all_dim.")
    return (found or {0.0}).pop()


def _routing_v2(fields: Fields) -> dict[str, Any]:
    method = fields.text("topk_method", GREEDY)
    if method not in (GREEDY, GROUPS):
        raise fields.refuse("topk_method", f"a deepseek_v2 model has {GREEDY} or {GROUPS}.")
    fields.allow_only("scoring_func", ("softmax",), "a deepseek_v2 model has softmax.")
    fields.allow_only("norm_topk_prob", (False,), "programs that run deepseek_v2 models disregard it.")
    limited = method == GROUPS
    return {
        "topk_method": method,
        "n_group": fields.size("n_group") if limited else 1,
        "topk_group": fields.size("topk_group") if limited else 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
    }


def _routing_v3(fields: Fields) -> dict[str, Any]:
    fields.allow_only("topk_method", (BIASED,), f"a deepseek_v3 model has {BIASED}.")
    fields.allow_only("scoring_func", ("sigmoid",), "a deepseek_v3 model has sigmoid.")
    return {
        "topk_method": BIASED,
        "n_group": fields.size("n_group"),
        "topk_group": fields.size("topk_group"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
    }


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> Deepseek2Config:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is as in the V2-Lite. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    fields.allow_only("family", ("deepseek2",), "this family runs deepseek2.")
    more = Fields(extension or _elder_assumption(fields), "manifest.json: extension", InstallError)
    more.exactly(set(_ELDER_ASSUMPTION))
    rotary, longest = fields.size("mlaRopeHeadDim"), fields.size("trainedContext", _UNKNOWN_CONTEXT)
    values, theta = fields.size("mlaVHeadDim"), fields.number("ropeTheta", above=1.0)
    method = more.text("topk_method")
    if method not in (GREEDY, GROUPS, BIASED):
        raise more.refuse("topk_method", f"this family has {GREEDY}, {GROUPS} and {BIASED}.")
    nope, layers = fields.size("mlaNopeHeadDim"), fields.size("numLayers", most=MOST_LAYERS)
    for key, value in {
        **_FIXED_ARCH,
        "headDim": nope + rotary,
        "fullHeadDim": values,
        "fullRopeTheta": theta,
        "routerScoringFunc": "sigmoid" if method == BIASED else "softmax",
    }.items():
        fields.allow_only(key, (value,), f"this deepseek2 model has {value!r}.")
    if set(fields.items("fullAttentionLayerMask")) != {_MLA}:
        raise fields.refuse("fullAttentionLayerMask", f"a deepseek2 model has latent attention ({_MLA}) in each layer.")
    config = _checked(
        fields,
        Deepseek2Config(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=fields.size("denseLeadIntermediateSize"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("numHeads"),
            q_lora_rank=fields.size("mlaQLoraRank", 0, least=0) or None,
            kv_lora_rank=fields.size("mlaKvLoraRank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rotary,
            v_head_dim=values,
            max_position_embeddings=longest,
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling_from_dict(more, "rope_scaling", rotary, longest),
            rope_interleave=more.flag("rope_interleave"),
            mscale_all_dim=fields.number("ropeScalingMscale", 0.0, above=-1.0),
            first_k_dense_replace=fields.size("numDenseLeadingLayers", 0, least=0, most=layers - 1),
            moe_layer_freq=more.size("moe_layer_freq"),
            n_routed_experts=fields.size("numExperts"),
            num_experts_per_tok=fields.size("topKExperts"),
            moe_intermediate_size=fields.size("moeIntermediateSize"),
            shared_expert_intermediate_size=fields.size("ffnIntermediate"),
            topk_method=method,
            n_group=more.size("n_group"),
            topk_group=more.size("topk_group"),
            norm_topk_prob=more.flag("norm_topk_prob"),
            routed_scaling_factor=fields.number("routedScalingFactor", 1.0),
            num_nextn_predict_layers=more.size("num_nextn_predict_layers", least=0, most=MOST_LAYERS),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
            split_kv_b=more.flag("split_kv_b"),
        ),
    )
    if not math.isclose(fields.number("attentionScale"), config.attention_scale, rel_tol=1e-6):
        raise fields.refuse("attentionScale", f"its head sizes and rope scaling make it {config.attention_scale!r}.")
    return config


def _checked(fields: Fields, config: Deepseek2Config) -> Deepseek2Config:
    """The same configuration, once its numbers fit each other."""

    def fail(why: str) -> Exception:
        return fields.error(f"{fields.where}: {why}")

    if config.qk_rope_head_dim % 2:
        raise fail(f"the turning part of a head is {config.qk_rope_head_dim}; rotary position embedding needs pairs.")
    if config.rope_scaling is not None and not isinstance(config.rope_scaling, YarnScaling):
        raise fail(f"rope type {config.rope_scaling.rope_type!r} is not one of this family, which has yarn or none.")
    if config.mscale_all_dim < 0:
        raise fail(f"mscale_all_dim is {config.mscale_all_dim:g}; it is 0 or more.")
    if not config.routed_layers():
        raise fail("no layer has routed experts; first_k_dense_replace and moe_layer_freq leave none.")
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups or config.topk_group > groups:
        raise fail(f"{experts} experts in {groups} groups, of which {config.topk_group} are chosen, do not go evenly.")
    if config.topk_method == BIASED and groups > 1 and experts // groups < 2:
        raise fail(f"{experts} experts in {groups} groups: a group is scored by its two best.")
    if config.num_experts_per_tok > config.topk_group * (experts // groups):
        raise fail(
            f"{config.num_experts_per_tok} experts a token are asked for, and {config.topk_group} of {groups} groups"
            f" have {config.topk_group * (experts // groups)}."
        )
    return config
