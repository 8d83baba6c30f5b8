"""The configuration of Qwen 3.5's line: dense (``qwen3_5``) and with routed experts (``qwen3_5_moe``), one decoder.

Sizes are required: what transformers and mlx-lm assume for absent ones describes no published model. Fields of
config.json fall in three groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused; and all others
(token ids, the tower for images, prediction of several tokens, initialisation, quantization), which leave the forward
pass of text alone. Text has the same position on all axes of mRoPE, so that its sections are among the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields
from turbospark_mlx.families.hybrid import (
    MOST_TAPS,
    HybridSizes,
    check_sizes,
    layer_types,
    layer_types_of_mask,
    rope,
)

WRAPPED_TYPES = ("qwen3_5", "qwen3_5_moe")
"""``model_type`` of configurations that keep the decoder's in ``text_config``, or are the decoder's themselves."""
TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
DENSE_FAMILY, MOE_FAMILY = "qwen35", "qwen36"
"""What manifests call the two."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "rope_scaling": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "is_causal": (True,),
}


@dataclass(frozen=True)
class QwenConfig(HybridSizes):
    """One model of the family.

    ``linear_`` fields describe layers with a recurrent state: ``linear_num_value_heads`` is a multiple of
    ``linear_num_key_heads``, each of which serves that many neighbours. ``intermediate_size`` is 0 where layers have
    experts, sizes of experts are 0 where they have none. ``centered_norms`` says that norms are stored less 1, as
    published checkpoints have them.
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
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    centered_norms: bool
    tie_word_embeddings: bool | None

    @property
    def model_type(self) -> str:
        return "qwen3_5_moe" if self.num_experts else "qwen3_5"

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take with elements of ``itemsize`` bytes."""
        rows = 2 * context * self.num_key_value_heads * self.head_dim * itemsize
        recurrent = sum(map(self.recurs, range(self.num_hidden_layers)))
        return recurrent * self.state_bytes(itemsize) + (self.num_hidden_layers - recurrent) * rows

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": MOE_FAMILY if self.num_experts else DENSE_FAMILY,
            "ffnIntermediate": self.shared_expert_intermediate_size or self.intermediate_size,
            "sharedExpertGated": self.num_experts > 0,
            **self.hybrid_arch(),
            **_FIXED_ARCH,
        }
        return arch, {key: getattr(self, key) for key in _ELDER_ASSUMPTION}

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return dict(_ELDER_ASSUMPTION)


_FIXED_ARCH: dict[str, Any] = {
    "hiddenActivation": "silu",
    "attentionKEqV": False,
    "attnOutputGate": True,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "ropeNeoxSubdim": True,
    "linearOutputGateSigmoid": False,
}
"""Written in full. The elder engines take absent flags for Gemma 4's, or for the family's."""

_ELDER_ASSUMPTION: dict[str, Any] = {"rms_norm_eps": 1e-6, "centered_norms": False}

_UNKNOWN_CONTEXT = 262144
"""What every published model was trained for; the elder engines do not all state it."""


def config_from_hf(config: Mapping[str, Any]) -> QwenConfig:
    """Parse config.json, which describes the checkpoint as it was published; ``weights.settle`` finds out whether its
    norms were changed since. Raises ConvertError on every field that changes the model and is not understood."""
    top = Fields(config, "config.json", ConvertError)
    spelling = top.text("model_type")
    if spelling not in (*WRAPPED_TYPES, *TEXT_TYPES):
        raise top.refuse("model_type", f"this family runs {', '.join((*WRAPPED_TYPES, *TEXT_TYPES))}.")
    fields = top.decoder()
    routed = spelling in (WRAPPED_TYPES[1], TEXT_TYPES[1])
    inner = fields.text("model_type", spelling)
    if (inner in (WRAPPED_TYPES[1], TEXT_TYPES[1])) != routed or inner not in (*WRAPPED_TYPES, *TEXT_TYPES):
        raise fields.refuse("model_type", f"beside {spelling!r} outside.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    if not routed:
        for key in ("num_experts", "num_experts_per_tok"):
            fields.allow_only(key, (0,), f"a {spelling} model has no experts.")
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    theta, share = rope(fields, 0.25)
    return _checked(
        fields,
        QwenConfig(
            vocab_size=(fields if fields.has("vocab_size") else top).size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=0 if routed else fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("num_attention_heads"),
            num_key_value_heads=fields.size("num_key_value_heads"),
            head_dim=fields.size("head_dim"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            partial_rotary_factor=share,
            layer_types=layer_types(fields, layers),
            linear_num_key_heads=fields.size("linear_num_key_heads"),
            linear_num_value_heads=fields.size("linear_num_value_heads"),
            linear_key_head_dim=fields.size("linear_key_head_dim"),
            linear_value_head_dim=fields.size("linear_value_head_dim"),
            linear_conv_kernel_dim=fields.size("linear_conv_kernel_dim", least=2, most=MOST_TAPS),
            num_experts=fields.size("num_experts") if routed else 0,
            num_experts_per_tok=fields.size("num_experts_per_tok") if routed else 0,
            moe_intermediate_size=fields.size("moe_intermediate_size") if routed else 0,
            shared_expert_intermediate_size=fields.size("shared_expert_intermediate_size") if routed else 0,
            centered_norms=True,
            tie_word_embeddings=fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", None)),
        ),
    )


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> QwenConfig:
    """Parse a manifest. Without an extension, norms are as MLX checkpoints have them. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    fields.allow_only("family", (DENSE_FAMILY, MOE_FAMILY), f"this family runs {DENSE_FAMILY} and {MOE_FAMILY}.")
    routed = fields.text("family") == MOE_FAMILY
    more = Fields(extension or _ELDER_ASSUMPTION, "manifest.json: extension", InstallError)
    more.exactly(set(_ELDER_ASSUMPTION))
    head_dim, theta, kv_heads = fields.size("headDim"), fields.number("ropeTheta", above=1.0), fields.size("numKVHeads")
    fixed = {
        **_FIXED_ARCH,
        "sharedExpertGated": routed,
        "fullHeadDim": head_dim,
        "fullRopeTheta": theta,
        "numFullKVHeads": kv_heads,
        "attentionScale": head_dim**-0.5,
        "slidingWindow": 0,
        "finalLogitSoftcap": 0,
        "routerScoringFunc": "softmax",
        "routedScalingFactor": 1,
        "numDenseLeadingLayers": 0,
    }
    if not routed:
        fixed |= {"numExperts": 0, "topKExperts": 0, "moeIntermediateSize": 0}
    for key, value in fixed.items():
        fields.allow_only(key, (value,), f"this {fields.text('family')} model has {value!r}.")
    wide = fields.size("ffnIntermediate")
    return _checked(
        fields,
        QwenConfig(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=0 if routed else wide,
            num_hidden_layers=fields.size("numLayers", most=MOST_LAYERS),
            num_attention_heads=fields.size("numHeads"),
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.size("trainedContext", _UNKNOWN_CONTEXT),
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=theta,
            partial_rotary_factor=fields.number("partialRotaryFactor"),
            layer_types=layer_types_of_mask(fields),
            linear_num_key_heads=fields.size("linearNumKHeads"),
            linear_num_value_heads=fields.size("linearNumVHeads"),
            linear_key_head_dim=fields.size("linearKeyHeadDim"),
            linear_value_head_dim=fields.size("linearValueHeadDim"),
            linear_conv_kernel_dim=fields.size("linearConvKernelSize", least=2, most=MOST_TAPS),
            num_experts=fields.size("numExperts") if routed else 0,
            num_experts_per_tok=fields.size("topKExperts") if routed else 0,
            moe_intermediate_size=fields.size("moeIntermediateSize") if routed else 0,
            shared_expert_intermediate_size=wide if routed else 0,
            centered_norms=more.flag("centered_norms"),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
        ),
    )


def _checked(fields: Fields, config: QwenConfig) -> QwenConfig:
    """The same configuration, once its numbers fit each other."""
    check_sizes(fields, config)
    if config.num_experts_per_tok > config.num_experts:
        raise fields.error(
            f"{fields.where}: {config.num_experts_per_tok} experts a token are asked for; a layer has"
            f" {config.num_experts}."
        )
    return config
