"""config.json and manifests of Gemma 4: spellings of one fact, defaults, and refusals by name."""

import itertools
import json

import numpy as np
import pytest

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.gemma4 import FAMILY
from turbospark_mlx.families.gemma4.config import FULL, SLIDING
from turbospark_mlx.testing import tiny_config, variants


def parse(variant="gemma4-moe", without=(), **fields):
    config = tiny_config("gemma4", variant)
    text = config["text_config"] | fields
    return FAMILY.config_from_hf(config | {"text_config": {k: v for k, v in text.items() if k not in without}})


PUBLISHED_26B = {
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "eos_token_id": [1, 106],
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
        "num_experts": 128,
        "top_k_experts": 8,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}
# fmt: off
SWIFT_26B = {
    "hiddenSize": 2816, "ffnIntermediate": 2112, "moeIntermediateSize": 704, "numHeads": 16, "numKVHeads": 8,
    "numFullKVHeads": 2, "headDim": 256, "fullHeadDim": 512, "vocabSize": 262144, "slidingWindow": 1024,
    "numLayers": 30, "numExperts": 128, "topKExperts": 8, "finalLogitSoftcap": 30, "ropeTheta": 10000,
    "fullRopeTheta": 1000000, "partialRotaryFactor": 0.25, "tieWordEmbeddings": True, "attentionKEqV": True,
    "hiddenActivation": "gelu_pytorch_tanh", "fullAttentionLayerMask": [int(n % 6 == 5) for n in range(30)],
}
# fmt: on


class TestThePublishedModel:
    def test_every_reading_is_one_configuration(self):
        """config.json, our manifest, and the manifests of both elder engines, which have no extension."""
        config = FAMILY.config_from_hf(PUBLISHED_26B)
        arch, extension = config.to_manifest()
        assert extension == config.elder_assumption()
        assert FAMILY.config_from_manifest(arch, {}) == config
        assert FAMILY.config_from_manifest(SWIFT_26B, {}) == config
        assert {key: arch[key] for key in SWIFT_26B} == SWIFT_26B

    def test_sizes_by_hand(self):
        """25 sliding layers of 8 heads of 256, 5 full ones of 2 heads of 512; K and V, 2 bytes."""
        config = FAMILY.config_from_hf(PUBLISHED_26B)
        assert config.kv_bytes(4096, 2) == 2 * 2 * (25 * 1024 * 8 * 256 + 5 * 4096 * 2 * 512)
        shapes = FAMILY.expected(config)
        at = "language_model.model.layers."
        assert shapes[f"{at}4.self_attn.v_proj.weight"] == (2048, 2816)
        assert shapes[f"{at}5.self_attn.q_proj.weight"] == (8192, 2816)
        assert shapes[f"{at}5.self_attn.k_proj.weight"] == (1024, 2816)
        assert f"{at}5.self_attn.v_proj.weight" not in shapes
        assert shapes[f"{at}5.mlp.up_proj.weight"] == (2112, 2816)
        assert shapes[f"{at}29.experts.switch_glu.down_proj.weight"] == (128, 2816, 704)
        assert shapes[f"{at}0.router.proj.weight"] == (128, 2816)

    def test_frequencies_by_hand(self):
        """64 pairs of a full head turn, spaced for all 256; all 128 of a sliding one."""
        config = FAMILY.config_from_hf(PUBLISHED_26B)
        full, sliding = config.frequencies(FULL), config.frequencies(SLIDING)
        assert (full.shape, sliding.shape) == ((256,), (128,))
        np.testing.assert_allclose(full[[0, 1, 63]], [1, 1e6 ** (-2 / 512), 1e6 ** (-126 / 512)])
        assert not full[64:].any()
        np.testing.assert_allclose(sliding[[0, 127]], [1, 1e4 ** (-254 / 256)])


class TestSmallModels:
    def test_which_layer_reads_whose_keys(self):
        config = parse("gemma4-small")
        assert config.layer_types == (SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL)
        assert [config.kv_source(n) for n in range(7)] == [0, 1, 2, 1, 2, 2, 1]
        assert [config.feed_forward_size(n) for n in range(7)] == [128] * 3 + [256] * 4
        assert config.kv_bytes(100, 4) == 4 * 2 * (8 * 16 + 100 * 32 + 8 * 16)

    def test_a_double_width_without_shared_layers_is_none(self):
        assert parse("gemma4-dense", use_double_wide_mlp=True) == parse("gemma4-dense")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7; expected a whole number from 0 to 6"),
            ({"num_kv_shared_layers": 6}, "6 layers share keys and values, and none before them is of kind full_att"),
            ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is 300; each of 320 tokens"),
        ],
    )
    def test_what_cannot_be(self, fields, message):
        with pytest.raises(ConvertError, match=message):
            parse("gemma4-small", **fields)


class TestSpellings:
    @pytest.mark.parametrize("variant", variants("gemma4"))
    def test_the_text_model_alone(self, variant):
        config = tiny_config("gemma4", variant)
        assert FAMILY.config_from_hf(config["text_config"]) == FAMILY.config_from_hf(config)
        assert FAMILY.config_from_hf(config | {"model_type": "gemma4_unified"}) == FAMILY.config_from_hf(config)

    @pytest.mark.parametrize("variant", variants("gemma4"))
    def test_as_transformers_5_saves_it(self, variant):
        """By transformers itself, from the published spelling."""
        transformers = pytest.importorskip("transformers")
        config = tiny_config("gemma4", variant)
        saved = transformers.Gemma4TextConfig(**config["text_config"]).to_dict()
        assert "global_head_dim" not in saved
        resaved = config | {"text_config": json.loads(json.dumps(saved))}
        assert FAMILY.config_from_hf(resaved) == FAMILY.config_from_hf(config)

    def test_per_layer_config_has_to_be_about_the_full_layers(self):
        full = {"head_dim": 32, "num_key_value_heads": 1}
        gone = ("global_head_dim", "num_global_key_value_heads")
        assert parse(without=gone, per_layer_config={"1": full, "3": full}) == parse()
        assert parse(per_layer_config={"1": full, "3": full}) == parse()
        for block, message in (
            ({"1": full}, r"per_layer_config is about layers 1; those with full attention are 1, 3"),
            ({"1": full, "3": full | {"head_dim": 64}}, r"per_layer_config: 3: is .*64.*layer 1 is"),
            ({"1": full | {"sliding_window": 4}, "3": full}, "sliding_window is 4"),
            ({"1": full | {"head_dim": 64}, "3": full | {"head_dim": 64}}, "global_head_dim is 32; per_layer_config"),
        ):
            with pytest.raises(ConvertError, match=message):
                parse(per_layer_config=block)

    def test_absent_fields_mean_what_they_mean_to_transformers(self):
        names = (
            "layer_types",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "final_logit_softcapping",
            "rope_parameters",
        )
        config = parse("gemma4-dense", without=(*names, "sliding_window", "global_head_dim"), num_hidden_layers=8)
        assert config.layer_types == (SLIDING,) * 5 + (FULL, SLIDING, FULL)
        assert (config.num_kv_shared_layers, config.use_double_wide_mlp) == (0, False)
        assert (config.final_logit_softcapping, config.sliding_window, config.global_head_dim) == (None, 512, 512)
        assert (config.rope_theta, config.global_rope_theta, config.partial_rotary_factor) == (1e4, 1e6, 0.25)
        assert parse("gemma4-dense", without=["attention_k_eq_v"]).num_global_key_value_heads == 2
        assert parse("gemma4-dense", without=["enable_moe_block"], num_experts=8).num_experts == 0
        assert parse(without=["tie_word_embeddings"]).tie_word_embeddings is None
        per_layer = parse(without=["hidden_size_per_layer_input", "vocab_size_per_layer_input"])
        assert (per_layer.hidden_size_per_layer_input, per_layer.vocab_size_per_layer_input) == (256, 262144)

    def test_rope_of_full_layers(self):
        def full(**block):
            return parse(rope_parameters={FULL: block, SLIDING: {"rope_theta": 5000.0}})

        assert full(rope_type="default", rope_theta=2e4, partial_rotary_factor=0.5).partial_rotary_factor == 1.0
        assert full(rope_type="proportional", rope_theta=2e4).partial_rotary_factor == 1.0
        assert full(rope_type="proportional", partial_rotary_factor=0.5).global_rope_theta == 1e6
        scaled = full(rope_type="proportional", partial_rotary_factor=0.5, factor=8.0)
        np.testing.assert_allclose(scaled.frequencies(FULL)[:2], [1 / 8, 1e6 ** (-2 / 32) / 8])
        assert scaled.rope_theta == 5000.0
        assert scaled.to_manifest()[1]["global_rope_factor"] == 8.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "silu"}, "text_config: hidden_activation is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling is"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"num_global_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"global_head_dim": 33}, "the head size is 33"),
        ({"layer_types": [FULL, SLIDING] * 2}, "the last layer slides"),
        ({"layer_types": [FULL] * 3}, "3 layer kinds for 4 layers"),
        ({"layer_types": [FULL, "chunked", FULL, FULL]}, "layer_types has 'chunked'"),
        ({"layer_types": None, "sliding_window_pattern": 5}, "sliding_window_pattern is 5"),
        ({"top_k_experts": 9}, "9 experts a token are asked for, and a layer has 8"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"vocab_size": 300}, "config.json: vocab_size is 320; but in text_config it is 300"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "beta_fast": 3}}}, "beta_fast is 3"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "no more than a whole",
        ),
        ({"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 5.0}}}, "chunked_attention is"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 10000.0; this version does not understand"),
    ],
)
def test_what_changes_the_model_is_refused_by_name(fields, message):
    with pytest.raises(ConvertError, match=message):
        parse(**fields)


def test_a_wrapper_without_a_text_model():
    with pytest.raises(ConvertError, match="text_config is missing"):
        FAMILY.config_from_hf({"model_type": "gemma4"})
    with pytest.raises(ConvertError, match="model_type is 'gemma3'"):
        FAMILY.config_from_hf({"model_type": "gemma3"})


def test_gguf_is_refused_with_the_way_out():
    with pytest.raises(ConvertError, match=r"does not convert\. Take the published"):
        FAMILY.hf_config_from_gguf({"general.architecture": "gemma4"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "gemma3"}, "family is 'gemma3'"),
        ({"hiddenActivation": "silu"}, "hiddenActivation is 'silu'"),
        ({"attentionScale": 0.0625}, "attentionScale is 0.0625"),
        ({"ffnSandwichNorms": False}, "ffnSandwichNorms is False"),
        ({"routerScaled": False}, "routerScaled is False"),
        ({"sharedExpertGated": True}, "sharedExpertGated is True"),
        ({"numDenseLeadingLayers": 1}, "numDenseLeadingLayers is 1"),
        ({"fullAttentionLayerMask": [2] * 30}, "full \\(1\\) and sliding \\(0\\)"),
        ({"numExperts": 0}, "topKExperts is 8; a model without experts has 0"),
        ({"finalLogitSoftcap": -3}, "finalLogitSoftcap is -3"),
        ({"slidingWindow": 0}, "slidingWindow is 0"),
        ({"numLayers": 2**31 - 1}, "numLayers is 2147483647"),
    ],
)
def test_an_arch_that_is_not_this_family_is_refused_by_field(fields, message):
    with pytest.raises(InstallError, match=message):
        FAMILY.config_from_manifest(SWIFT_26B | fields, {})


def test_an_extension_is_complete_and_understood():
    arch, extension = parse("gemma4-small").to_manifest()
    for key in extension:
        with pytest.raises(InstallError, match=f"extension: {key} is missing"):
            FAMILY.config_from_manifest(arch, {k: v for k, v in extension.items() if k != key})
    with pytest.raises(InstallError, match="unknown field 'altup'"):
        FAMILY.config_from_manifest(arch, extension | {"altup": 4})


def test_every_variant_parses_to_another_configuration():
    for one, other in itertools.combinations(variants("gemma4"), 2):
        assert parse(one) != parse(other), (one, other)
