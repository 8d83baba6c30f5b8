"""config.json and manifests of Spark 2.5: spellings of one fact, defaults, and refusals by name."""

import itertools

import numpy as np
import pytest

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families import family_for_manifest, family_for_model_type
from turbospark_mlx.families.spark import FAMILY
from turbospark_mlx.families.spark.config import FULL, SLIDING
from turbospark_mlx.testing import tiny_config, variants


def parse(variant="spark", without=(), **fields):
    config = tiny_config("spark", variant) | fields
    return FAMILY.config_from_hf({key: value for key, value in config.items() if key not in without})


PUBLISHED_4B = {
    "architectures": ["Spark2_5ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_spark.Spark2_5Config"},
    "model_type": "spark2_5",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "gate_attn_act_mode": "sigmoid",
    "head_dim": 256,
    "headwise_attn_output_gate": True,
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 9,
    "max_position_embeddings": 1048576,
    "mlp_bias": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 5000000, "rope_type": "default"},
        SLIDING: {"partial_rotary_factor": 1.0, "rope_theta": 10000, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 131072,
}
# fmt: off
RUST_4B = {
    "family": "spark2_5", "hiddenSize": 2560, "ffnIntermediate": 10240, "moeIntermediateSize": 0, "numHeads": 16,
    "numKVHeads": 4, "numFullKVHeads": 4, "headDim": 256, "fullHeadDim": 256, "vocabSize": 131072,
    "slidingWindow": 512, "finalLogitSoftcap": 0, "ropeTheta": 10000, "fullRopeTheta": 5000000,
    "partialRotaryFactor": 0.25, "numLayers": 36, "numExperts": 0, "topKExperts": 0, "tieWordEmbeddings": True,
    "attentionKEqV": False, "hiddenActivation": "gelu", "attentionScale": 0.0625, "attnOutputGate": False,
    "ropeNeoxSubdim": False, "fullAttentionLayerMask": [int(n % 4 == 3) for n in range(36)],
}
# fmt: on


class TestThePublishedModel:
    def test_every_reading_is_one_configuration(self):
        """config.json, our manifest, and that of the elder engine, which has no extension and no trained length."""
        config = FAMILY.config_from_hf(PUBLISHED_4B)
        arch, extension = config.to_manifest()
        assert extension == config.elder_assumption()
        assert FAMILY.config_from_manifest(arch, {}) == config
        assert FAMILY.config_from_manifest(RUST_4B, {}) == config
        assert {key: arch[key] for key in RUST_4B} == RUST_4B

    def test_the_registry_finds_it(self):
        assert family_for_model_type("spark2_5") is FAMILY
        assert family_for_manifest("spark2_5") is FAMILY

    def test_sizes_by_hand(self):
        """4,112,079,360 parameters are published; 27 layers keep 512 tokens, 9 keep all: 4 heads of 256, K and V."""
        config = FAMILY.config_from_hf(PUBLISHED_4B)
        shapes = FAMILY.expected(config)
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == 4_112_079_360
        at = "language_model.model.layers.35."
        assert shapes[f"{at}self_attn.q_k_v_proj.weight"] == (6144, 2560)
        assert shapes[f"{at}self_attn.g_proj.weight"] == (16, 2560)
        assert shapes[f"{at}self_attn.o_proj.weight"] == (2560, 4096)
        assert config.kv_bytes(4096, 2) == 2 * 2 * 4 * 256 * (27 * 512 + 9 * 4096)
        assert config.kv_bytes(100, 2) == 2 * 2 * 4 * 256 * 36 * 100

    def test_frequencies_by_hand(self):
        """64 of 256 dimensions turn in full layers, spaced for 64; all turn in the others."""
        config = FAMILY.config_from_hf(PUBLISHED_4B)
        full, sliding = config.frequencies(FULL), config.frequencies(SLIDING)
        assert (full.shape, sliding.shape) == ((32,), (128,))
        np.testing.assert_allclose(full[[0, 1, 31]], [1, 5e6 ** (-2 / 64), 5e6 ** (-62 / 64)])
        np.testing.assert_allclose(sliding[[0, 1, 127]], [1, 1e4 ** (-2 / 256), 1e4 ** (-254 / 256)])


class TestSpellings:
    def test_absent_layer_types_are_three_sliding_to_a_full_one(self):
        assert parse(without=["layer_types"]) == parse()
        seven = parse(without=["layer_types"], num_hidden_layers=7)
        assert [seven.slides(n) for n in range(7)] == [True, True, True, False, True, True, True]

    @pytest.mark.parametrize(
        "key",
        [
            *("hidden_act", "headwise_attn_output_gate", "gate_attn_act_mode", "attention_bias", "mlp_bias"),
            "rope_type",
        ],
    )
    def test_what_may_be_absent(self, key):
        blocks = tiny_config("spark")["rope_parameters"]
        blocks = {kind: {k: v for k, v in block.items() if k != key} for kind, block in blocks.items()}
        assert parse(without=[key], rope_parameters=blocks) == parse()

    def test_an_absent_share_is_the_whole_head(self):
        blocks = {SLIDING: {"rope_theta": 100}, FULL: {"rope_theta": 1000, "partial_rotary_factor": 0.5}}
        config = parse(rope_parameters=blocks)
        assert (config.rotary_dims(SLIDING), config.rotary_dims(FULL)) == (32, 16)

    def test_a_kind_that_no_layer_has_needs_no_base(self):
        config = parse("spark-full")
        assert (config.sliding_window, config.rope_theta, config.partial_rotary_factor) == (None, 10000.0, 1.0)

    def test_an_open_head(self):
        assert parse(without=["tie_word_embeddings"]).tie_word_embeddings is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
            ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
            ({"gate_attn_act_mode": "silu"}, "gate_attn_act_mode is 'silu'"),
            ({"headwise_attn_output_gate": False}, "headwise_attn_output_gate is False"),
            ({"rope_theta": 500000.0}, "rope_theta is 500000.0"),
            ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ({"use_qk_norm": True}, "use_qk_norm is True"),
            ({"num_experts": 8}, "num_experts is 8"),
            ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
            ({"model_type": "spark3"}, "model_type is 'spark3'; this family runs spark2_5"),
            ({"layer_types": [SLIDING, "linear_attention", SLIDING, FULL]}, "layer_types has 'linear_attention'"),
            ({"layer_types": [SLIDING] * 3}, "3 layer kinds for 4 layers"),
            ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
            ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
            ({"sliding_window": 0}, "sliding_window is 0"),
            ({"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ],
    )
    def test_what_is_not_understood(self, fields, message):
        with pytest.raises(ConvertError, match=message):
            parse(**fields)

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"rope_type": "yarn", "rope_theta": 1e4}, "full_attention: rope_type is 'yarn'"),
            ({"rope_theta": 1e4, "factor": 2.0}, "factor is 2.0"),
            ({}, "full_attention: rope_theta is missing"),
            ({"rope_theta": 1.0}, "rope_theta is 1.0"),
            ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "1.5 of a head of 32 turns in full_attention layers"),
            (
                {"rope_theta": 1e4, "partial_rotary_factor": 0.01},
                "turns in full_attention layers, 0 dim",
            ),
            ({"rope_theta": 1e4, "partial_rotary_factor": 0.1}, "turns in full_attention layers, 3 dim"),
        ],
    )
    def test_rotations(self, block, message):
        blocks = tiny_config("spark")["rope_parameters"]
        with pytest.raises(ConvertError, match=message):
            parse(rope_parameters=blocks | {FULL: block})
        with pytest.raises(ConvertError, match="chunked_attention is"):
            parse(rope_parameters=blocks | {"chunked_attention": {"rope_theta": 1e4}})

    @pytest.mark.parametrize(
        "key",
        [
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window"),
            *("rope_parameters", "model_type"),
        ],
    )
    def test_what_is_required(self, key):
        missing = "rope_theta" if key == "rope_parameters" else key
        with pytest.raises(ConvertError, match=f"{missing} is missing"):
            parse(without=[key])


class TestManifests:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"family": "llama"}, "family is 'llama'"),
            ({"hiddenActivation": "gelu_pytorch_tanh"}, "hiddenActivation is 'gelu_pytorch_tanh'"),
            ({"attnOutputGate": True}, "attnOutputGate is True"),
            ({"numExperts": 8}, "numExperts is 8"),
            ({"finalLogitSoftcap": 30.0}, "finalLogitSoftcap is 30.0"),
            ({"numFullKVHeads": 1}, "numFullKVHeads is 1"),
            ({"fullHeadDim": 64}, "fullHeadDim is 64"),
            ({"attentionScale": 1.0}, "attentionScale is 1.0"),
            ({"fullAttentionLayerMask": [0, 0, 0, 2]}, "fullAttentionLayerMask is"),
            ({"fullAttentionLayerMask": [0, 0, 1]}, "3 layer kinds for 4 layers"),
            ({"ropeTheta": 0}, "ropeTheta is 0"),
            ({"fullRopeTheta": 0}, "fullRopeTheta is 0"),
            ({"partialRotaryFactor": 2.0}, "2.0 of a head of 32 turns"),
        ],
    )
    def test_what_is_refused(self, fields, message):
        arch, extension = parse().to_manifest()
        with pytest.raises(InstallError, match=message):
            FAMILY.config_from_manifest(arch | fields, extension)

    def test_the_extension_is_complete(self):
        arch, extension = parse().to_manifest()
        for key in extension:
            with pytest.raises(InstallError, match=f"{key} is missing"):
                FAMILY.config_from_manifest(arch, {k: v for k, v in extension.items() if k != key})
        with pytest.raises(InstallError, match="unknown field 'newer'"):
            FAMILY.config_from_manifest(arch, extension | {"newer": 1})

    def test_no_two_variants_are_one_configuration(self):
        for one, other in itertools.combinations(variants("spark"), 2):
            assert parse(one) != parse(other)
