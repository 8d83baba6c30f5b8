"""config.json and manifests of DeepSeek models: spellings of one fact, numbers by hand, and refusals by name."""

import json

import numpy as np
import pytest

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.deepseek2 import FAMILY
from turbospark_mlx.families.rope import attention_factor, frequencies
from turbospark_mlx.testing import tiny_config

# fmt: off
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V2_LITE = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": False, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True, "hidden_act": "silu",
    "max_position_embeddings": 163840, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "pretraining_tp": 1,
    "rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "bos_token_id": 100000, "eos_token_id": 100001,
}
V3 = V2_LITE | {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "ep_size": 1,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
RUST_V2_LITE = {
    "family": "deepseek2", "hiddenSize": 2048, "ffnIntermediate": 2816, "moeIntermediateSize": 1408, "numHeads": 16,
    "numKVHeads": 1, "numFullKVHeads": 1, "headDim": 192, "fullHeadDim": 128, "vocabSize": 102400, "slidingWindow": 0,
    "numLayers": 27, "numExperts": 64, "topKExperts": 6, "finalLogitSoftcap": 0, "ropeTheta": 1e4, "fullRopeTheta": 1e4,
    "partialRotaryFactor": 0.0, "tieWordEmbeddings": False, "attentionKEqV": False, "hiddenActivation": "silu",
    "fullAttentionLayerMask": [5] * 27, "attentionScale": 0.11472138679292612, "ropeNeoxSubdim": True,
    "attnOutputGate": False, "embeddingScaledBySqrtHidden": False, "routerScaled": False, "ffnSandwichNorms": False,
    "sharedExpertGated": False, "mlaKvLoraRank": 512, "mlaQLoraRank": 0, "mlaNopeHeadDim": 128, "mlaRopeHeadDim": 64,
    "mlaVHeadDim": 128, "denseLeadIntermediateSize": 10944, "numDenseLeadingLayers": 1, "ropeScalingFactor": 40,
    "ropeScalingOriginalContext": 4096, "ropeScalingBetaFast": 32, "ropeScalingBetaSlow": 1,
    "ropeScalingMscale": 0.707, "routerScoringFunc": "softmax",
}
# fmt: on


def v2(**fields):
    return FAMILY.config_from_hf(V2_LITE | fields)


def v3(**fields):
    return FAMILY.config_from_hf(V3 | fields)


class TestPublishedModels:
    def test_every_reading_of_v2_lite_is_one_configuration(self):
        """config.json, as transformers 5 saves it, our manifest, and the Rust engine's, which has no extension."""
        config = v2()
        arch, extension = config.to_manifest()
        assert extension == config.elder_assumption()
        assert FAMILY.config_from_manifest(json.loads(json.dumps(arch)), {}) == config
        assert FAMILY.config_from_manifest(RUST_V2_LITE, {}) == config
        assert {key: arch[key] for key in RUST_V2_LITE} == RUST_V2_LITE
        saved = {**V2_LITE["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
        assert v2(rope_scaling=None, rope_theta=None, rope_parameters=saved, head_dim=64) == config
        assert v2(rope_parameters=saved) == config

    def test_v3_is_flagged_for_the_elder_engines(self):
        arch, extension = v3().to_manifest()
        assert (arch["mlaQLoraRank"], arch["numDenseLeadingLayers"], arch["routerScoringFunc"]) == (1536, 3, "sigmoid")
        assert extension != v3().elder_assumption()
        assert FAMILY.config_from_manifest(arch, extension) == v3()

    def test_numbers_by_hand(self):
        """Scores by m squared, m = 0.1 mscale_all_dim ln 40 + 1; rotations not at all."""
        assert v2().attention_scale == pytest.approx(0.11472138679292612, rel=1e-14)
        assert v3().attention_scale == pytest.approx(0.1352337788608801, rel=1e-14)
        assert v2(rope_scaling=None).attention_scale == pytest.approx(192**-0.5, rel=1e-14)
        assert attention_factor(v2().rope_scaling) == attention_factor(v3().rope_scaling) == 1.0
        assert (v2().kv_bytes(1, 2), v3().kv_bytes(1, 2)) == (31104, 70272)
        assert v2().shared_expert_intermediate_size == 2816
        assert v3().routed_layers() == list(range(3, 61))
        assert v2(moe_layer_freq=10).routed_layers() == [10, 20]

    def test_frequencies_by_hand(self):
        f = frequencies(64, 10000.0, v2().rope_scaling, 163840)
        ext = 10000.0 ** (-np.arange(32) / 32)
        np.testing.assert_allclose(f[:11], ext[:11])
        np.testing.assert_allclose(
            f[[11, 12, 16, 20, 22]], [0.039006927, 0.02687936, 0.0055, 7.9056942e-4, 1.7782794e-4]
        )
        np.testing.assert_allclose(f[23:], ext[23:] / 40)

    def test_shapes_by_hand(self):
        shapes, at = FAMILY.expected(v2()), "language_model.model.layers."
        assert shapes[f"{at}0.mlp.up_proj.weight"] == (10944, 2048)
        assert shapes[f"{at}1.mlp.shared_expert.up_proj.weight"] == (2816, 2048)
        assert shapes[f"{at}1.mlp.switch_mlp.down_proj.weight"] == (64, 2048, 1408)
        assert shapes[f"{at}1.self_attn.kv_a_proj.weight"] == (576, 2048)
        assert shapes[f"{at}1.self_attn.kv_b_proj.weight"] == (4096, 512)
        assert shapes[f"{at}1.self_attn.q_proj.weight"] == (3072, 2048)
        shapes = FAMILY.expected(v3())
        assert shapes[f"{at}3.self_attn.q_b_proj.weight"] == (24576, 1536)
        assert shapes[f"{at}3.mlp.gate.e_score_correction_bias"] == (256,)
        assert f"{at}2.mlp.gate.weight" not in shapes


class TestSpellings:
    def test_what_leaves_the_model_as_it_is(self):
        assert v2(n_group=8, topk_group=3) == v2()
        assert v2(topk_method=None, scoring_func=None, norm_topk_prob=None, routed_scaling_factor=None) == v2()
        assert v3(rope_interleave=True, topk_method=None, scoring_func=None) == v3()
        assert v3(num_nextn_predict_layers=None, num_mtp_layers=1) == v3()
        assert v2(tie_word_embeddings=None).tie_word_embeddings is None

    def test_one_magnitude_for_scores_and_another_for_rotations(self):
        scaling = v2(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}).rope_scaling
        m = [0.1 * weight * np.log(40) + 1 for weight in (1.0, 0.5)]
        assert attention_factor(scaling) == pytest.approx(m[0] / m[1])
        for alone in ({}, {"mscale": 1.0}, {"mscale": 1.0, "mscale_all_dim": 0}):
            config = v2(rope_scaling={**YARN, **alone})
            assert attention_factor(config.rope_scaling) == pytest.approx(m[0])
            assert config.attention_scale == pytest.approx(192**-0.5, rel=1e-14)

    @pytest.mark.parametrize(
        ("base", "fields", "message"),
        [
            (V2_LITE, {"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'; this family runs deepseek_v2"),
            (V2_LITE, {"num_key_value_heads": 1}, "num_key_value_heads is 1; every head"),
            (V2_LITE, {"attention_bias": True}, "attention_bias is True"),
            (V2_LITE, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            (V2_LITE, {"index_topk": 2048}, "index_topk is 2048"),
            (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True; programs"),
            (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; a deepseek_v2 model has greedy"),
            (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
            (
                V2_LITE,
                {"first_k_dense_replace": 27},
                "first_k_dense_replace is 27; expected a whole number from 0 to 26",
            ),
            (V2_LITE, {"moe_layer_freq": 30}, "no layer has routed experts"),
            (V2_LITE, {"num_experts_per_tok": 65}, "65 experts a token are asked for"),
            (V2_LITE, {"qk_rope_head_dim": 63}, "needs pairs"),
            (V2_LITE, {"n_shared_experts": None}, "n_shared_experts is missing"),
            (
                V2_LITE,
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                "rope type 'linear' is not one of this family",
            ),
            (V2_LITE, {"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale is 0.7; mscale_all_dim is 0"),
            (V2_LITE, {"rope_scaling": {**YARN, "mscale_all_dim": 0.7}}, "both or none of them"),
            (V2_LITE, {"rope_scaling": {"a": dict(YARN)}}, "one kind of layers"),
            (
                V2_LITE,
                {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
                "rope_scaling and rope_parameters give different mscale_all_dim",
            ),
            (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; a deepseek_v3 model has noaux_tc"),
            (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
            (V3, {"n_group": None}, "n_group is missing"),
            (V3, {"norm_topk_prob": None}, "norm_topk_prob is missing"),
            (V3, {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
            (V3, {"n_group": 7}, "256 experts in 7 groups"),
            (V3, {"n_group": 256, "topk_group": 8}, "scored by its two best"),
            (V3, {"topk_group": 9}, "256 experts in 8 groups, of which 9"),
            (V3, {"n_group": 64, "topk_group": 1}, "1 of 64 groups have 4"),
        ],
    )
    def test_refusals_name_the_field(self, base, fields, message):
        with pytest.raises(ConvertError, match=message):
            FAMILY.config_from_hf(base | fields)

    def test_an_absent_rank_of_queries_is_refused_where_null_is_none(self):
        """mlx-lm and transformers take 1536 for it."""
        with pytest.raises(ConvertError, match="q_lora_rank is missing"):
            FAMILY.config_from_hf({key: value for key, value in V2_LITE.items() if key != "q_lora_rank"})
        assert v2().q_lora_rank is None


@pytest.mark.parametrize(
    ("arch", "extension", "message"),
    [
        ({"attentionScale": 192**-0.5}, {}, "attentionScale is .*make it 0.1147"),
        ({"headDim": 128}, {}, "headDim is 128"),
        ({"fullAttentionLayerMask": [1] * 27}, {}, "fullAttentionLayerMask"),
        ({"routerScoringFunc": "sigmoid"}, {}, "routerScoringFunc is 'sigmoid'"),
        ({"sharedExpertGated": True}, {}, "sharedExpertGated is True"),
        ({"numDenseLeadingLayers": 27}, {}, "numDenseLeadingLayers is 27"),
        ({}, {"topk_method": "best"}, "topk_method is 'best'"),
        ({}, {"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({}, {"windows": 8}, "unknown field 'windows'"),
        ({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not one of this family"),
    ],
)
def test_manifests_are_refused_by_field(arch, extension, message):
    if extension:
        extension = v2().to_manifest()[1] | extension
    with pytest.raises(InstallError, match=message):
        FAMILY.config_from_manifest(RUST_V2_LITE | arch, extension)


def test_gguf_files_are_refused():
    with pytest.raises(ConvertError, match="GGUF files this version does not convert"):
        FAMILY.hf_config_from_gguf({"general.architecture": "deepseek2"})


def test_variants_reach_every_switch():
    configs = [FAMILY.config_from_hf(tiny_config("deepseek2", v)) for v in ("deepseek-v2", "deepseek-v3-halves")]
    assert [c.rope_interleave for c in configs] == [True, False]
    assert [attention_factor(c.rope_scaling) == 1.0 for c in configs] == [False, False]
