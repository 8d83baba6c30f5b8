"""Gemma 4's configuration: the Mixture-of-Experts model (26B-A4B), the dense ones (12B, 31B), and those with inputs for
every layer and shared keys and values (E2B, E4B), as one decoder with switches.

An absent field means what it means to transformers, because checkpoints are published for it: an absent
``final_logit_softcapping`` is none, absent ``layer_types`` are five sliding layers to a full one. (mlx-lm takes absent
fields from the E2B.) Sizes that no two models share are required.

config.json comes in two spellings. As published, ``global_head_dim`` and ``num_global_key_value_heads`` describe the
layers with full attention; transformers 5 saves the same as a ``per_layer_config`` with an entry for each of them.

Fields of config.json fall in three groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused; and
all others (token ids, towers for images and sound, initialisation, quantization), which leave the forward pass of text
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import MOST_LAYERS, Fields, arch_sizes, check_head_groups, check_layer_kinds
from turbospark_mlx.families.windows import FULL, SLIDING, check_kinds, kinds_of_mask, mask_of

WRAPPED_TYPES = ("gemma4", "gemma4_unified")
"""``model_type`` of configurations that keep the decoder's in ``text_config``."""
TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": ("vision",),
    "is_causal": (True,),
    "rope_scaling": (),
    "rope_traditional": (False,),
    "attn_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "attention_chunk_size": (),
    "n_shared_experts": (0,),
    "routed_scaling_factor": (1,),
}
"""``use_bidirectional_attention: "vision"`` is about images; text stays causal."""

_UNKNOWN_CONTEXT = 262144
"""The elder engines run one model of this family, the 26B-A4B, and do not all state its trained length."""


@dataclass(frozen=True)
class Gemma4Config:
    """One model of the family.

    ``global_`` fields describe the layers with full attention, the others those with a window, which counts the
    query's own token and is None exactly when no layer slides. ``partial_rotary_factor`` is the share of a full layer's
    head that turns. The last ``num_kv_shared_layers`` have no keys and values of their own. Sizes of parts that a model
    does not have are 0.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    global_rope_theta: float
    partial_rotary_factor: float
    global_rope_factor: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    attention_k_eq_v: bool
    final_logit_softcapping: float | None
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    tie_word_embeddings: bool | None

    model_type = "gemma4"

    def slides(self, layer: int) -> bool:
        """Whether this layer sees only the last ``sliding_window`` tokens."""
        return self.layer_types[layer] == SLIDING

    def head_size(self, layer: int) -> int:
        return self.head_dim if self.slides(layer) else self.global_head_dim

    def kv_heads(self, layer: int) -> int:
        return self.num_key_value_heads if self.slides(layer) else self.num_global_key_value_heads

    def k_is_v(self, layer: int) -> bool:
        """Whether this layer's values are its keys before their norm and rotation."""
        return self.attention_k_eq_v and not self.slides(layer)

    @property
    def first_shared_layer(self) -> int:
        """Layers from this one on read the keys and values of an earlier one."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this one reads: itself, or the last one of its kind that has any."""
        if layer < self.first_shared_layer:
            return layer
        kind = self.layer_types[layer]
        return max(n for n in range(self.first_shared_layer) if self.layer_types[n] == kind)

    def feed_forward_size(self, layer: int) -> int:
        wide = self.use_double_wide_mlp and layer >= self.first_shared_layer
        return self.intermediate_size * (2 if wide else 1)

    def frequencies(self, layer_type: str) -> np.ndarray:
        """Radians a position that each pair of a head turns by: float64 ``[head size / 2]``.

        Full layers have proportional RoPE: frequencies are spaced for the whole head, and the last ones are 0.
        """
        if layer_type == SLIDING:
            return self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        turning = self.global_rope_theta ** (-np.arange(0, self.global_head_dim, 2) / self.global_head_dim)
        turning[int(self.partial_rotary_factor * self.global_head_dim // 2) :] = 0.0
        return turning / self.global_rope_factor

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take with elements of ``itemsize`` bytes."""
        total = 0
        for layer in range(self.first_shared_layer):
            rows = min(context, self.sliding_window or 0) if self.slides(layer) else context
            total += 2 * rows * self.kv_heads(layer) * self.head_size(layer) * itemsize
        return total

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": self.model_type,
            **arch_sizes(self),
            "ffnIntermediate": self.intermediate_size,
            "moeIntermediateSize": self.moe_intermediate_size,
            "numFullKVHeads": self.num_global_key_value_heads,
            "fullHeadDim": self.global_head_dim,
            "slidingWindow": self.sliding_window or 0,
            "finalLogitSoftcap": self.final_logit_softcapping or 0.0,
            "fullRopeTheta": self.global_rope_theta,
            "partialRotaryFactor": self.partial_rotary_factor,
            "numExperts": self.num_experts,
            "topKExperts": self.top_k_experts,
            "attentionKEqV": self.attention_k_eq_v,
            "fullAttentionLayerMask": mask_of(self.layer_types),
            **_FIXED_ARCH,
        }
        extension = {key: getattr(self, key) for key in _ELDER_ASSUMPTION}
        return arch, extension

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return dict(_ELDER_ASSUMPTION)


_FIXED_ARCH: dict[str, Any] = {
    "hiddenActivation": "gelu_pytorch_tanh",
    "attentionScale": 1.0,
    "attnOutputGate": False,
    "embeddingScaledBySqrtHidden": True,
    "routerScaled": True,
    "ffnSandwichNorms": True,
    "sharedExpertGated": False,
    "ropeNeoxSubdim": False,
}
"""Written in full; absent ones mean the same to every reader of this family."""

_ELDER_ASSUMPTION: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "global_rope_factor": 1.0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


def config_from_hf(config: Mapping[str, Any]) -> Gemma4Config:
    """Parse config.json. Raises ConvertError on every field that changes the model and is not understood."""
    top = Fields(config, "config.json", ConvertError)
    spelling = top.text("model_type")
    if spelling not in (*WRAPPED_TYPES, *TEXT_TYPES):
        raise top.refuse("model_type", f"this family runs {', '.join((*WRAPPED_TYPES, *TEXT_TYPES))}.")
    fields = top
    if spelling in WRAPPED_TYPES:
        if not top.has("text_config"):
            raise top.error("config.json: text_config is missing. The model cannot be built without it.")
        fields = top.decoder()
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    types = _layer_types(fields, layers)
    k_is_v = fields.flag("attention_k_eq_v", False)
    head_dim, kv_heads = fields.size("head_dim", 256), fields.size("num_key_value_heads")
    global_head_dim, global_kv_heads = _full_layers(fields, types, kv_heads, k_is_v)
    theta, global_theta, share, factor = _rope(fields)
    vocab = fields.size("vocab_size", top.size("vocab_size", 262144))
    shared = fields.size("num_kv_shared_layers", 0, least=0, most=layers - 1)
    per_layer = fields.size("hidden_size_per_layer_input", 256, least=0)
    moe = fields.flag("enable_moe_block", False)
    return _checked(
        fields,
        Gemma4Config(
            vocab_size=vocab,
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("num_attention_heads"),
            num_key_value_heads=kv_heads,
            num_global_key_value_heads=global_kv_heads,
            head_dim=head_dim,
            global_head_dim=global_head_dim,
            max_position_embeddings=fields.size("max_position_embeddings", 131072),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            global_rope_theta=global_theta,
            partial_rotary_factor=share,
            global_rope_factor=factor,
            layer_types=types,
            sliding_window=fields.size("sliding_window", 512) if SLIDING in types else None,
            attention_k_eq_v=k_is_v,
            final_logit_softcapping=_softcap(fields, "final_logit_softcapping", None),
            num_kv_shared_layers=shared,
            use_double_wide_mlp=fields.flag("use_double_wide_mlp", False) and shared > 0,
            hidden_size_per_layer_input=per_layer,
            vocab_size_per_layer_input=fields.size("vocab_size_per_layer_input", 262144) if per_layer else 0,
            num_experts=fields.size("num_experts") if moe else 0,
            top_k_experts=fields.size("top_k_experts") if moe else 0,
            moe_intermediate_size=fields.size("moe_intermediate_size") if moe else 0,
            tie_word_embeddings=fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", None)),
        ),
    )


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    types = fields.items("layer_types", None)
    if types is None:
        fields.allow_only("sliding_window_pattern", (6,), "without layer_types every sixth layer is a full one.")
        types = tuple(FULL if n % 6 == 5 or n == layers - 1 else SLIDING for n in range(layers))
    return check_kinds(fields, types)


def _full_layers(fields: Fields, types: tuple[str, ...], kv_heads: int, k_is_v: bool) -> tuple[int, int]:
    """``(head size, key/value heads)`` of full layers, in either spelling."""
    saved = fields.object("per_layer_config")
    if not saved.values:
        heads = fields.size("num_global_key_value_heads", kv_heads)
        return fields.size("global_head_dim", 512), heads if k_is_v else kv_heads
    full = [str(number) for number, kind in enumerate(types) if kind == FULL]
    if sorted(saved.values) != sorted(full):
        raise fields.error(
            f"{fields.where}: per_layer_config is about layers {', '.join(sorted(saved.values))}; those with full"
            f" attention are {', '.join(sorted(full))}."
        )
    blocks = [saved.object(number) for number in full]
    for block in blocks:
        block.known({"head_dim", "num_key_value_heads"})
        if block.values != blocks[0].values:
            raise fields.error(f"{block.where}: is {dict(block.values)}, layer {full[0]} is {dict(blocks[0].values)}.")
    pair = blocks[0].size("head_dim"), blocks[0].size("num_key_value_heads", kv_heads)
    for key, value in zip(("global_head_dim", "num_global_key_value_heads"), pair, strict=True):
        fields.allow_only(key, (value,), "per_layer_config says otherwise.")
    return pair


def _rope(fields: Fields) -> tuple[float, float, float, float]:
    """``(theta of sliding layers, theta of full ones, the share of a full head that turns, divisor there)``."""
    blocks = fields.object("rope_parameters")
    blocks.known({SLIDING, FULL})
    sliding, full = (blocks.object(kind) for kind in (SLIDING, FULL))
    sliding.known({"rope_type", "rope_theta", "partial_rotary_factor"})
    sliding.allow_only("rope_type", ("default",), "sliding layers turn whole heads at plain frequencies.")
    sliding.allow_only("partial_rotary_factor", (1,), "sliding layers turn whole heads.")
    theta = sliding.number("rope_theta", 10000.0, above=1.0)
    full.known({"rope_type", "rope_theta", "partial_rotary_factor", "factor"})
    kind = full.text("rope_type", "default" if full.values else "proportional")
    full.allow_only("rope_type", ("default", "proportional"), "full layers have default or proportional.")
    global_theta = full.number("rope_theta", 1000000.0, above=1.0)
    if kind == "default":
        return theta, global_theta, 1.0, 1.0
    share = full.number("partial_rotary_factor", 1.0 if full.values else 0.25)
    return theta, global_theta, share, full.number("factor", 1.0)


def _softcap(fields: Fields, key: str, default: Any) -> float | None:
    """A positive number; None for 0, null or an absent field."""
    if fields.values.get(key, default) == 0 and not isinstance(fields.values.get(key), bool):
        return None
    return fields.number(key, None)


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> Gemma4Config:
    """Parse a manifest. Without an extension, what ``arch`` cannot say is as in the 26B-A4B. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    fields.allow_only("family", ("gemma4",), "this family runs gemma4.")
    more = Fields(extension or _ELDER_ASSUMPTION, "manifest.json: extension", InstallError)
    more.exactly(set(_ELDER_ASSUMPTION))
    for key, value in {**_FIXED_ARCH, "routerScoringFunc": "softmax", "routedScalingFactor": 1}.items():
        fields.allow_only(key, (value,), f"a gemma4 model has {value!r}.")
    fields.allow_only("numDenseLeadingLayers", (0,), "a gemma4 model has experts in every layer or in none.")
    types = kinds_of_mask(fields)
    experts = fields.size("numExperts", least=0)
    if not experts:
        for key in ("topKExperts", "moeIntermediateSize"):
            fields.allow_only(key, (0,), "a model without experts has 0.")
    layers = fields.size("numLayers", most=MOST_LAYERS)
    return _checked(
        fields,
        Gemma4Config(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            intermediate_size=fields.size("ffnIntermediate"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("numHeads"),
            num_key_value_heads=fields.size("numKVHeads"),
            num_global_key_value_heads=fields.size("numFullKVHeads"),
            head_dim=fields.size("headDim"),
            global_head_dim=fields.size("fullHeadDim"),
            max_position_embeddings=fields.size("trainedContext", _UNKNOWN_CONTEXT),
            rms_norm_eps=more.number("rms_norm_eps"),
            rope_theta=fields.number("ropeTheta", above=1.0),
            global_rope_theta=fields.number("fullRopeTheta", above=1.0),
            partial_rotary_factor=fields.number("partialRotaryFactor"),
            global_rope_factor=more.number("global_rope_factor"),
            layer_types=types,
            sliding_window=fields.size("slidingWindow") if SLIDING in types else None,
            attention_k_eq_v=fields.flag("attentionKEqV"),
            final_logit_softcapping=_softcap(fields, "finalLogitSoftcap", None),
            num_kv_shared_layers=more.size("num_kv_shared_layers", least=0, most=layers - 1),
            use_double_wide_mlp=more.flag("use_double_wide_mlp"),
            hidden_size_per_layer_input=more.size("hidden_size_per_layer_input", least=0),
            vocab_size_per_layer_input=more.size("vocab_size_per_layer_input", least=0),
            num_experts=experts,
            top_k_experts=fields.size("topKExperts") if experts else 0,
            moe_intermediate_size=fields.size("moeIntermediateSize") if experts else 0,
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
        ),
    )


def _checked(fields: Fields, config: Gemma4Config) -> Gemma4Config:
    """The same configuration, once its numbers fit each other."""

    def fail(why: str) -> Exception:
        return fields.error(f"{fields.where}: {why}")

    types, shared = config.layer_types, config.num_kv_shared_layers
    check_layer_kinds(fields, config)
    if types[-1] != FULL:
        raise fail("the last layer slides. transformers makes it a full one; say so in layer_types.")
    for layer in (types.index(kind) for kind in dict.fromkeys(types)):
        heads, size = config.kv_heads(layer), config.head_size(layer)
        check_head_groups(fields, config.num_attention_heads, heads)
        if size % 2:
            raise fail(f"the head size is {size}; rotary position embedding needs pairs.")
    if config.partial_rotary_factor > 1:
        raise fail(f"partial_rotary_factor is {config.partial_rotary_factor}; no more than a whole head can turn.")
    if missing := set(types) - set(types[: config.first_shared_layer]):
        raise fail(f"{shared} layers share keys and values, and none before them is of kind {missing.pop()}.")
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input < config.vocab_size:
        raise fail(
            f"vocab_size_per_layer_input is {config.vocab_size_per_layer_input}; each of {config.vocab_size} tokens"
            " needs an input for every layer."
        )
    if config.top_k_experts > config.num_experts:
        raise fail(f"{config.top_k_experts} experts a token are asked for, and a layer has {config.num_experts}.")
    return config
