"""The configuration of Qwen4-Exp's text model (``qwen4_exp``): recurrent and sparse attention layers around widened,
"hyper-connected" residual streams, routed experts everywhere, and a table of n-grams.

Sizes are required, but for those of n-grams, which are transformers' where absent. Fields of config.json fall in three
groups: read below; in ``_HARMLESS_VALUES``, where any other value is refused; and all others (token ids, the tower for
images, prediction of several tokens, initialisation, quantization), which leave the forward pass of text alone. Text
has the same position on all axes of mRoPE, so that its sections are among the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.fields import LARGEST_SIZE, MOST_LAYERS, Fields
from turbospark_mlx.families.hybrid import (
    FULL,
    LINEAR,
    MOST_TAPS,
    STATES_KEPT,
    HybridSizes,
    check_sizes,
    layer_types,
    layer_types_of_mask,
    rope,
)
from turbospark_mlx.families.qwen4.ngrams import Hash, hash_of

WRAPPED_TYPE, TEXT_TYPE = "qwen4_exp", "qwen4_exp_text"
MANIFEST_FAMILY = "qwen4exp"

_MOST_STREAMS, _MOST_ORDERS, _MOST_TABLE_HEADS, _MOST_BASE = 64, 8, 64, 1 << 28
"""Far above any model: counts in a file must not decide how long a loop runs."""
_INDEXED = "indexed_attention"
"""What transformers calls sparse attention layers when it saves a configuration."""

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "indexer_kv_heads": (1,),
    "rope_scaling": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "is_causal": (True,),
}


@dataclass(frozen=True)
class Qwen4Config(HybridSizes):
    """One model of the family.

    ``linear_`` fields are those of ``QwenConfig``; ``linear_gate`` is ``"sigmoid"`` or ``"silu"``. The residual has
    ``hc_count`` streams. Attention sees at most ``indexer_budget`` tokens of whole blocks, each of
    ``indexer_compress_ratio`` tokens. ``ple_layer`` is the layer that is told about n-grams, counted from 0, or None;
    without it all that is about them is 0. ``centered_norms`` says that norms are stored less 1, as the published
    checkpoint has them.
    """

    vocab_size: int
    hidden_size: int
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
    linear_gate: str
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    ple_layer: int | None
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    ple_eos_token_id: int
    centered_norms: bool
    tie_word_embeddings: bool | None

    model_type = WRAPPED_TYPE

    @property
    def wide(self) -> int:
        """The width of all streams of the residual together."""
        return self.hc_count * self.hidden_size

    @property
    def block_top_k(self) -> int:
        """The blocks of keys that a query sees of those before it; with no more, it sees all."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def ngram_tail(self) -> int:
        """The rows that the convolution over n-grams needs again: its taps are ``ngram_size`` tokens apart."""
        return (self.ple_conv_kernel_size - 1) * self.ngram_size

    @property
    def ngram_hash(self) -> Hash:
        """Only for models with a ``ple_layer``."""
        return hash_of(
            self.vocab_size,
            self.ngram_size,
            self.heads_per_ngram,
            self.ngram_vocab_size_base,
            self.make_ngram_vocab_size_divisible_by,
            self.seed,
        )

    @property
    def ngram_width(self) -> int:
        """The columns of the n-gram table."""
        return self.ple_embed_dim // ((self.ngram_size - 1) * self.heads_per_ngram)

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """Bytes that the caches of one sequence of ``context`` tokens take with elements of ``itemsize`` bytes."""
        blocks = max(1, context // self.indexer_compress_ratio)
        rows = 2 * context * self.num_key_value_heads * self.head_dim + (context + blocks) * self.indexer_head_dim
        recurrent = sum(map(self.recurs, range(self.num_hidden_layers)))
        total = recurrent * self.state_bytes(itemsize) + (self.num_hidden_layers - recurrent) * rows * itemsize
        if self.ple_layer is not None:
            total += STATES_KEPT * self.ngram_tail * self.wide * itemsize + 4 * context
        return total

    def to_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The manifest's ``arch`` and the extension, both complete."""
        arch = {
            "family": MANIFEST_FAMILY,
            "ffnIntermediate": self.shared_expert_intermediate_size,
            "linearOutputGateSigmoid": self.linear_gate == "sigmoid",
            "hcMult": self.hc_count,
            "hcLowrank": self.hc_lowrank,
            "caIndexNHeads": self.indexer_n_heads,
            "caIndexHeadDim": self.indexer_head_dim,
            "caIndexTopK": self.block_top_k,
            "caIndexBudget": self.indexer_budget,
            "caCSACompressRate": self.indexer_compress_ratio,
            "pleLayerIds": [] if self.ple_layer is None else [self.ple_layer + 1],
            **{key: getattr(self, name) for key, name in _PLE_FIELDS.items()},
            **self.hybrid_arch(),
            **_FIXED_ARCH,
        }
        return arch, {key: getattr(self, key) for key in _ELDER_ASSUMPTION}

    def elder_assumption(self) -> dict[str, Any]:
        """What the elder engines take each extension key for."""
        return dict(_ELDER_ASSUMPTION)


_PLE_FIELDS = {
    "pleEmbedDim": "ple_embed_dim",
    "pleConvKernelSize": "ple_conv_kernel_size",
    "pleNgramSize": "ngram_size",
    "pleHeadsPerNgram": "heads_per_ngram",
    "pleNgramVocabSizeBase": "ngram_vocab_size_base",
    "pleMakeDivisibleBy": "make_ngram_vocab_size_divisible_by",
    "pleSplitNgramParts": "split_ngram_parts",
    "pleSeed": "seed",
    "pleEosTokenId": "ple_eos_token_id",
}
"""Manifest key -> field, of what is about n-grams."""

_FIXED_ARCH: dict[str, Any] = {
    "hiddenActivation": "silu",
    "attentionKEqV": False,
    "attnOutputGate": True,
    "embeddingScaledBySqrtHidden": False,
    "routerScaled": False,
    "ffnSandwichNorms": False,
    "ropeNeoxSubdim": True,
    "sharedExpertGated": True,
    "caIndexKvHeads": 1,
}
"""Written in full. The elder engines take absent flags for Gemma 4's, or for the family's."""

_ELDER_ASSUMPTION: dict[str, Any] = {"rms_norm_eps": 1e-6, "centered_norms": False}

_UNKNOWN_CONTEXT = 262144
"""What every published model was trained for; the elder engines do not all state it."""


def config_from_hf(config: Mapping[str, Any]) -> Qwen4Config:
    """Parse config.json, which describes the checkpoint as it was published; ``weights.settle`` finds out whether its
    norms were changed since. Raises ConvertError on every field that changes the model and is not understood."""
    top = Fields(config, "config.json", ConvertError)
    top.allow_only("model_type", (WRAPPED_TYPE, TEXT_TYPE), f"this family runs {WRAPPED_TYPE} and {TEXT_TYPE}.")
    fields = top.object("text_config") if top.has("text_config") else top
    fields.allow_only("model_type", (WRAPPED_TYPE, TEXT_TYPE), f"beside {top.text('model_type')!r} outside.")
    for key in ("vocab_size", "tie_word_embeddings"):
        if top.has(key) and fields.has(key) and top.values[key] != fields.values[key]:
            raise top.refuse(key, f"but in text_config it is {fields.values[key]!r}.")
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(
            key, harmless, "this family does not implement it, and without it the model would be another."
        )
    gate = fields.text("output_gate_type", "silu")
    fields.allow_only("output_gate_type", ("sigmoid", "silu"), "this family knows sigmoid and silu.")
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    theta, share = rope(fields)
    budget, ratio = fields.size("indexer_budget"), fields.size("indexer_compress_ratio")
    if budget % ratio:
        raise fields.refuse("indexer_budget", f"it has to be a multiple of indexer_compress_ratio, {ratio}.")
    return _checked(
        fields,
        Qwen4Config(
            vocab_size=(fields if fields.has("vocab_size") else top).size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.size("num_attention_heads"),
            num_key_value_heads=fields.size("num_key_value_heads"),
            head_dim=fields.size("head_dim"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            partial_rotary_factor=share,
            layer_types=layer_types(fields, layers, (FULL, _INDEXED)),
            linear_num_key_heads=fields.size("linear_num_key_heads"),
            linear_num_value_heads=fields.size("linear_num_value_heads"),
            linear_key_head_dim=fields.size("linear_key_head_dim"),
            linear_value_head_dim=fields.size("linear_value_head_dim"),
            linear_conv_kernel_dim=fields.size("linear_conv_kernel_dim", least=2, most=MOST_TAPS),
            linear_gate=gate,
            num_experts=fields.size("num_experts"),
            num_experts_per_tok=fields.size("num_experts_per_tok"),
            moe_intermediate_size=fields.size("moe_intermediate_size"),
            shared_expert_intermediate_size=fields.size("shared_expert_intermediate_size"),
            hc_count=fields.size("hc_count", least=2, most=_MOST_STREAMS),
            hc_lowrank=fields.size("hc_lowrank"),
            indexer_n_heads=fields.size("indexer_n_heads"),
            indexer_head_dim=fields.size("indexer_head_dim"),
            indexer_budget=budget,
            indexer_compress_ratio=ratio,
            **_ngrams_from_hf(fields, layers),
            centered_norms=True,
            tie_word_embeddings=fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", None)),
        ),
    )


def _ngrams_from_hf(fields: Fields, layers: int) -> dict[str, Any]:
    ids = fields.items("ple_layer_ids", ())
    if any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= layers for n in ids) or len(set(ids)) > 1:
        raise fields.refuse(
            "ple_layer_ids", f"this family runs models with at most one such layer, from 1 to {layers}."
        )
    if not ids:
        return {"ple_layer": None, **dict.fromkeys(_PLE_FIELDS.values(), 0)}
    eos = fields.values.get("eos_token_id")
    return {
        "ple_layer": ids[0] - 1,
        "ple_embed_dim": fields.size("ple_embed_dim", fields.size("hidden_size")),
        "ple_conv_kernel_size": fields.size("ple_conv_kernel_size", 4, least=2, most=MOST_TAPS),
        "ngram_size": fields.size("ngram_size", 3, least=2, most=_MOST_ORDERS),
        "heads_per_ngram": fields.size("heads_per_ngram", 8, most=_MOST_TABLE_HEADS),
        "ngram_vocab_size_base": fields.size("ngram_vocab_size_base", 20_000_000, least=2, most=_MOST_BASE),
        "make_ngram_vocab_size_divisible_by": fields.size("make_ngram_vocab_size_divisible_by", 128),
        "split_ngram_parts": fields.size("split_ngram_parts", 512),
        "seed": fields.size("seed", 1234, least=0),
        # A list's first id is the one that is hashed for.
        "ple_eos_token_id": Fields(
            {"eos_token_id": eos[0] if isinstance(eos, list | tuple) and eos else eos}, fields.where, fields.error
        ).size("eos_token_id", least=0),
    }


def config_from_manifest(arch: Mapping[str, Any], extension: Mapping[str, Any]) -> Qwen4Config:
    """Parse a manifest. Without an extension, norms are as they are multiplied. Raises InstallError."""
    fields = Fields(arch, "manifest.json: arch", InstallError)
    fields.allow_only("family", (MANIFEST_FAMILY,), f"this family runs {MANIFEST_FAMILY}.")
    more = Fields(extension or _ELDER_ASSUMPTION, "manifest.json: extension", InstallError)
    more.exactly(set(_ELDER_ASSUMPTION))
    head_dim, theta, kv_heads = fields.size("headDim"), fields.number("ropeTheta", above=1.0), fields.size("numKVHeads")
    budget, ratio = fields.size("caIndexBudget"), fields.size("caCSACompressRate")
    fixed = {
        **_FIXED_ARCH,
        "fullHeadDim": head_dim,
        "fullRopeTheta": theta,
        "numFullKVHeads": kv_heads,
        "attentionScale": head_dim**-0.5,
        "slidingWindow": 0,
        "finalLogitSoftcap": 0,
        "routerScoringFunc": "softmax",
        "routedScalingFactor": 1,
        "numDenseLeadingLayers": 0,
        "caIndexTopK": budget // ratio,
    }
    for key, value in fixed.items():
        fields.allow_only(key, (value,), f"this {MANIFEST_FAMILY} model has {value!r}.")
    if budget % ratio:
        raise fields.refuse("caIndexBudget", f"it has to be a multiple of caCSACompressRate, {ratio}.")
    layers = fields.size("numLayers", most=MOST_LAYERS)
    return _checked(
        fields,
        Qwen4Config(
            vocab_size=fields.size("vocabSize"),
            hidden_size=fields.size("hiddenSize"),
            num_hidden_layers=layers,
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
            linear_gate="sigmoid" if fields.flag("linearOutputGateSigmoid") else "silu",
            num_experts=fields.size("numExperts"),
            num_experts_per_tok=fields.size("topKExperts"),
            moe_intermediate_size=fields.size("moeIntermediateSize"),
            shared_expert_intermediate_size=fields.size("ffnIntermediate"),
            hc_count=fields.size("hcMult", least=2, most=_MOST_STREAMS),
            hc_lowrank=fields.size("hcLowrank"),
            indexer_n_heads=fields.size("caIndexNHeads"),
            indexer_head_dim=fields.size("caIndexHeadDim"),
            indexer_budget=budget,
            indexer_compress_ratio=ratio,
            **_ngrams_from_manifest(fields, layers),
            centered_norms=more.flag("centered_norms"),
            tie_word_embeddings=fields.flag("tieWordEmbeddings"),
        ),
    )


def _ngrams_from_manifest(fields: Fields, layers: int) -> dict[str, Any]:
    ids = fields.items("pleLayerIds", ())
    if len(ids) > 1 or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= layers for n in ids):
        raise fields.refuse("pleLayerIds", f"this family runs models with at most one such layer, from 1 to {layers}.")
    if not ids:
        return {"ple_layer": None, **dict.fromkeys(_PLE_FIELDS.values(), 0)}
    bounds = {
        "pleConvKernelSize": (2, MOST_TAPS),
        "pleNgramSize": (2, _MOST_ORDERS),
        "pleHeadsPerNgram": (1, _MOST_TABLE_HEADS),
        "pleNgramVocabSizeBase": (2, _MOST_BASE),
        "pleSeed": (0, LARGEST_SIZE),
        "pleEosTokenId": (0, LARGEST_SIZE),
    }
    found = {}
    for key, name in _PLE_FIELDS.items():
        least, most = bounds.get(key, (1, LARGEST_SIZE))
        found[name] = fields.size(key, least=least, most=most)
    return {"ple_layer": ids[0] - 1, **found}


def _checked(fields: Fields, config: Qwen4Config) -> Qwen4Config:
    """The same configuration, once its numbers fit each other."""

    def fail(why: str) -> Exception:
        return fields.error(f"{fields.where}: {why}")

    check_sizes(fields, config)
    if config.num_experts_per_tok > config.num_experts:
        raise fail(f"{config.num_experts_per_tok} experts a token are asked for; a layer has {config.num_experts}.")
    if config.rotary_width > config.indexer_head_dim:
        raise fail(
            f"{config.rotary_width} dimensions of a head turn; those of the indexer have {config.indexer_head_dim}."
        )
    if config.ple_layer is None:
        return config
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    if config.ple_embed_dim % heads:
        raise fail(
            f"{config.ple_embed_dim} dimensions of an n-gram embedding cannot be shared by {heads} heads evenly."
        )
    if not config.recurs(config.ple_layer):
        raise fail(f"layer {config.ple_layer} is told about n-grams, but is no {LINEAR} layer.")
    if config.ple_eos_token_id >= config.vocab_size:
        raise fail(f"token {config.ple_eos_token_id} ends texts; the vocabulary has {config.vocab_size}.")
    if config.ngram_hash.rows > LARGEST_SIZE or config.ngram_hash.rows % config.split_ngram_parts:
        raise fail(
            f"an n-gram table of {config.ngram_hash.rows} rows cannot be cut into {config.split_ngram_parts} parts."
        )
    return config
