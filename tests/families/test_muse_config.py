"""config.json and manifests of Muse Glimmer: spellings of one fact, defaults, and refusals by name."""

import itertools

import numpy as np
import pytest

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.muse import FAMILY
from turbospark_mlx.families.windows import FULL, SLIDING
from turbospark_mlx.testing import tiny_config, variants


def parse(variant="muse-glimmer", without=(), **fields):
    config = tiny_config("muse", variant)
    text = config["text_config"] | fields
    return FAMILY.config_from_hf(config | {"text_config": {k: v for k, v in text.items() if k not in without}})


PUBLISHED_30B = {
    "model_type": "muse_glimmer",
    "image_token_id": 200092,
    "video_token_id": 200091,
    "vision_config": {"model_type": "muse_glimmer_vision", "hidden_size": 1536},
    "text_config": {
        "model_type": "muse_glimmer_text",
        "vocab_size": 202048,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
        "hidden_activation": "silu",
        "attention_bias": False,
        "layer_types": [*[SLIDING] * 3, FULL] * 13,
        "layer_rope_theta": [*[500000.0] * 3, 0] * 13,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
    },
}
# fmt: off
ELDER_30B = {
    "family": "museGlimmer", "hiddenSize": 6656, "ffnIntermediate": 19968, "moeIntermediateSize": 0, "numHeads": 32,
    "numKVHeads": 2, "numFullKVHeads": 2, "headDim": 128, "fullHeadDim": 128, "vocabSize": 202048,
    "slidingWindow": 2048, "numLayers": 52, "numExperts": 0, "topKExperts": 0, "finalLogitSoftcap": 20,
    "ropeTheta": 500000, "fullRopeTheta": 0, "partialRotaryFactor": 1, "tieWordEmbeddings": False,
    "attentionKEqV": False, "hiddenActivation": "silu", "attentionScale": 0.08838834764831845,
    "attnOutputGate": False, "embeddingScaledBySqrtHidden": False, "routerScaled": False, "ffnSandwichNorms": True,
    "sharedExpertGated": False, "ropeNeoxSubdim": False, "trainedContext": 131072,
    "fullAttentionLayerMask": [int(n % 4 == 3) for n in range(52)],
}
# fmt: on


class TestThePublishedModel:
    def test_every_reading_is_one_configuration(self):
        """config.json, our manifest, and the elder engine's, which has no extension."""
        config = FAMILY.config_from_hf(PUBLISHED_30B)
        arch, extension = config.to_manifest()
        assert extension == config.elder_assumption()
        assert arch == ELDER_30B
        assert FAMILY.config_from_manifest(ELDER_30B, {}) == config
        sparse = {key: value for key, value in ELDER_30B.items() if key not in ("trainedContext", "attentionScale")}
        assert FAMILY.config_from_manifest(sparse, {}) == config

    def test_sizes_by_hand(self):
        """39 sliding layers, 13 full ones, 2 heads of 128; K and V, 2 bytes: 1024 bytes a token and layer."""
        config = FAMILY.config_from_hf(PUBLISHED_30B)
        assert config.kv_bytes(4096, 2) == 1024 * (39 * 2048 + 13 * 4096)
        shapes = FAMILY.expected(config)
        layer = "language_model.model.layers.51."
        assert len(shapes) == 52 * 12 + 3
        assert shapes[f"{layer}self_attn.gate_proj.weight"] == (4096, 6656)
        assert shapes[f"{layer}self_attn.k_proj.weight"] == (256, 6656)
        assert shapes[f"{layer}self_attn.o_proj.weight"] == (6656, 4096)
        assert shapes[f"{layer}mlp.down_proj.weight"] == (6656, 19968)
        assert shapes["language_model.lm_head.weight"] == (202048, 6656)

    def test_frequencies_by_hand(self):
        config = FAMILY.config_from_hf(PUBLISHED_30B)
        np.testing.assert_allclose(config.frequencies(True)[[0, 1, 63]], [1, 5e5 ** (-2 / 128), 5e5 ** (-126 / 128)])
        assert not config.frequencies(False).any()
        assert config.frequencies(False).shape == (64,)


class TestSpellings:
    @pytest.mark.parametrize("variant", variants("muse"))
    def test_the_text_model_alone_and_fields_beside_the_towers(self, variant):
        text = tiny_config("muse", variant)["text_config"]
        assert FAMILY.config_from_hf(text) == parse(variant)
        flat = text | {"model_type": "muse_glimmer", "vision_config": {"hidden_size": 1536}}
        assert FAMILY.config_from_hf(flat) == parse(variant)

    def test_theta_beside_or_inside_rope_parameters(self):
        assert parse(without=["rope_parameters"], rope_theta=500000.0) == parse()
        assert parse(rope_theta=500000, rope_parameters={"rope_theta": 5e5}) == parse()

    def test_what_the_wrapper_says(self):
        config = tiny_config("muse")
        for key in ("vocab_size", "tie_word_embeddings"):
            config[key] = config["text_config"].pop(key)
        assert FAMILY.config_from_hf(config) == parse()

    def test_absent_fields_mean_what_they_mean_to_transformers(self):
        names = ("rms_norm_eps", "post_norm_eps", "qk_scale_factor", "output_multiplier", "final_logit_softcapping")
        assert parse(without=[*names, "layer_types", "layer_rope_theta"]) == parse()
        five = parse(without=["layer_types", "layer_rope_theta"], num_hidden_layers=5)
        assert five.layer_types == (FULL, SLIDING, SLIDING, SLIDING, FULL)
        assert five.rotates == (False, True, True, True, False)
        large = parse(without=["head_dim", "sliding_window", "max_position_embeddings", "tie_word_embeddings"])
        assert (large.head_dim, large.sliding_window, large.max_position_embeddings) == (128, 2048, 131072)
        assert large.tie_word_embeddings is None

    def test_layers_rotate_whatever_they_see(self):
        config = parse("muse-glimmer-tied")
        assert config.layer_types == (SLIDING, FULL, SLIDING, FULL)
        assert config.rotates == (False, True, True, False)
        arch, extension = config.to_manifest()
        assert arch["fullRopeTheta"] == 10000.0
        assert extension["rotates"] != config.elder_assumption()["rotates"]
        unseen = parse(layer_types=[FULL] * 4, layer_rope_theta=[0] * 4)
        assert (unseen.sliding_window, unseen.to_manifest()[0]["slidingWindow"]) == (None, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "muse_glimmer_vision"}, "text_config: model_type is 'muse_glimmer_vision'"),
        ({"hidden_activation": "gelu"}, "text_config: hidden_activation is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"num_experts": 4}, "num_experts is 4"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 33}, "the head size is 33"),
        ({"layer_types": [FULL] * 3}, "3 layer kinds for 4 layers"),
        ({"layer_types": [FULL, "chunked", FULL, FULL]}, "layer_types has 'chunked'"),
        ({"layer_rope_theta": [5e5] * 3}, "3 layers are said to rotate or not, of 4"),
        (
            {"layer_rope_theta": [5e5, 1e4, 5e5, 0]},
            r"layer_rope_theta\[1\] is 10000.0; each is 0 or rope_theta, 500000",
        ),
        ({"layer_rope_theta": [5e5, 5e5, 5e5, False]}, r"layer_rope_theta\[3\] is False"),
        ({"layer_rope_theta": None, "layer_types": [FULL] * 4}, "layer_rope_theta is missing, and programs disagree"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}, "rope type 'yarn' is given"),
        ({"rope_theta": 1e4}, "rope_theta is given as 10000.0 and as 500000.0"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"output_multiplier": -0.5}, "output_multiplier is -0.5"),
        ({"post_norm_eps": 0}, "post_norm_eps is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": None}, "sliding_window is None; layer_types has sliding_attention"),
    ],
)
def test_what_changes_the_model_is_refused_by_name(fields, message):
    with pytest.raises(ConvertError, match=message):
        parse(**fields)


def test_a_wrapper_that_contradicts_the_text_model():
    with pytest.raises(ConvertError, match=r"config\.json: vocab_size is 100; but in text_config it is 320"):
        FAMILY.config_from_hf(tiny_config("muse") | {"vocab_size": 100})
    with pytest.raises(ConvertError, match="model_type is 'muse'"):
        FAMILY.config_from_hf({"model_type": "muse"})


def test_gguf_is_refused_with_the_way_out():
    with pytest.raises(ConvertError, match=r"does not convert\. Take the published"):
        FAMILY.hf_config_from_gguf({"general.architecture": "muse"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "museglimmer"}, "family is 'museglimmer'"),
        ({"hiddenActivation": "gelu"}, "hiddenActivation is 'gelu'"),
        ({"attentionScale": 1.0}, "attentionScale is 1.0"),
        ({"ffnSandwichNorms": False}, "ffnSandwichNorms is False"),
        ({"attnOutputGate": True}, "attnOutputGate is True"),
        ({"embeddingScaledBySqrtHidden": True}, "embeddingScaledBySqrtHidden is True"),
        ({"numExperts": 8}, "numExperts is 8"),
        ({"fullHeadDim": 64}, "fullHeadDim is 64"),
        ({"numFullKVHeads": 1}, "numFullKVHeads is 1"),
        ({"fullRopeTheta": 500000}, "fullRopeTheta is 500000; the extension says which layers rotate"),
        ({"partialRotaryFactor": 0.5}, "partialRotaryFactor is 0.5"),
        ({"fullAttentionLayerMask": [2] * 52}, "full \\(1\\) and sliding \\(0\\)"),
        ({"finalLogitSoftcap": 0}, "finalLogitSoftcap is 0"),
        ({"slidingWindow": 0}, "slidingWindow is 0"),
        ({"numLayers": 2**31 - 1}, "numLayers is 2147483647"),
        ({"numLayers": 51}, "52 layer kinds for 51 layers"),
    ],
)
def test_an_arch_that_is_not_this_family_is_refused_by_field(fields, message):
    with pytest.raises(InstallError, match=message):
        FAMILY.config_from_manifest(ELDER_30B | fields, {})


def test_an_extension_is_complete_and_understood():
    arch, extension = parse("muse-glimmer-tied").to_manifest()
    for key in extension:
        with pytest.raises(InstallError, match=f"extension: {key} is missing"):
            FAMILY.config_from_manifest(arch, {k: v for k, v in extension.items() if k != key})
    for change, message in (
        ({"vision": 4}, "unknown field 'vision'"),
        ({"rotates": [1, 0, 0, 1]}, "rotates is .*expected true or false"),
        ({"rotates": [True]}, "1 layers are said to rotate or not, of 4"),
        ({"rotates": [True, False, True, False]}, "fullRopeTheta is 10000.0"),
    ):
        with pytest.raises(InstallError, match=message):
            FAMILY.config_from_manifest(arch, extension | change)


def test_every_variant_parses_to_another_configuration():
    for one, other in itertools.combinations(variants("muse"), 2):
        assert parse(one) != parse(other), (one, other)
