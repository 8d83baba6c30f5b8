"""config.json and manifests of the llama family: spellings of one fact, defaults, and refusals by name."""

import itertools
import json
import math

import numpy as np
import pytest

from tests.families import reference_llama
from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families import rope
from turbospark_mlx.families.llama import FAMILY
from turbospark_mlx.testing import tiny_config, variants

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}


def parse(variant="llama", without=(), **fields):
    config = tiny_config("llama", variant) | fields
    return FAMILY.config_from_hf({k: v for k, v in config.items() if k not in without})


class TestRopeSpellings:
    @pytest.mark.parametrize("variant", variants("llama"))
    def test_published_and_transformers_5_give_equal_configurations(self, variant):
        config = tiny_config("llama", variant)
        block = dict(config.get("rope_scaling") or {"rope_type": "default"})
        if "type" in block:
            block["rope_type"] = block.pop("type")
        resaved = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
        resaved["rope_parameters"] = block | {"rope_theta": config["rope_theta"]}
        assert FAMILY.config_from_hf(resaved) == FAMILY.config_from_hf(config)

    @pytest.mark.parametrize("nothing", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": None}])
    def test_no_scaling_is_spelled_in_many_ways(self, nothing):
        assert parse(rope_scaling=nothing) == parse()
        assert parse(rope_parameters=nothing) == parse()

    def test_type_and_rope_type_are_one_field(self):
        linear = parse(rope_scaling={"type": "linear", "factor": 2})
        assert linear == parse(rope_scaling={"rope_type": "linear", "factor": 2.0})
        assert linear == parse(rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2.0})
        with pytest.raises(ConvertError, match="rope_type is 'linear'; but type is 'yarn'"):
            parse(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0})

    def test_theta_alone_in_rope_parameters(self):
        assert parse(without=["rope_theta"], rope_parameters={"rope_theta": 500000}).rope_theta == 500000.0
        assert parse(without=["rope_theta"]).rope_theta == 10000.0
        with pytest.raises(ConvertError, match=r"rope_theta is given as 10000\.0 and as 500000\.0"):
            parse(rope_parameters={"rope_theta": 500000})

    def test_a_block_for_each_layer_type(self):
        block = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
        both = {"full_attention": block, "sliding_attention": block}
        linear = parse(rope_scaling={"type": "linear", "factor": 2.0})
        assert parse(rope_parameters=both) == linear
        assert parse(rope_parameters={**both, "sliding_attention": None}) == linear
        with pytest.raises(ConvertError, match="different scalings"):
            parse(rope_parameters={**both, "sliding_attention": block | {"factor": 3.0}})

    def test_the_same_scaling_twice_is_one_and_two_are_refused(self):
        assert parse(rope_scaling=LLAMA3, rope_parameters=LLAMA3) == parse(rope_scaling=LLAMA3)
        with pytest.raises(ConvertError, match="different scalings"):
            parse(rope_scaling=LLAMA3, rope_parameters=LLAMA3 | {"factor": 4.0})

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"rope_type": "somethingnew"}, "rope type 'somethingnew' is not known"),
            ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic' \(dynamic NTK\) is not supported"),
            ({"type": "mrope", "mrope_section": [1, 2, 3]}, "rope type 'mrope' is not known"),
            ({"rope_type": "default", "mrope_section": [1, 2, 3]}, r"mrope_section is \[1, 2, 3\]"),
            ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
            ({"rope_type": "linear", "factor": 0}, "factor is 0; expected a number greater than 0"),
            ({"rope_type": "linear", "factor": 10**400}, "factor is 10+; expected a number"),
            ({"rope_type": "linear", "factor": 1e-300}, "factor is 1e-300; expected a number"),
            ({"rope_type": "linear", "factor": math.nan}, "factor is nan"),
            ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}, r"beta_fast is 1e\+308"),
            ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e39}, r"attention_factor is 1e\+39"),
            ({"rope_type": "linear", "factor": "2"}, "factor is '2'; expected a number"),
            ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast is 3"),
            ({"rope_type": "yarn", "factor": math.inf}, "factor is inf"),
            ({"rope_type": "yarn"}, "neither factor nor original_max_position_embeddings"),
            ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate is 1; expected true or false"),
            ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "beta_fast is 0.5"),
            ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor is missing"),
            (LLAMA3 | {"high_freq_factor": 1.0}, "must exceed low_freq_factor"),
            (
                {"rope_type": "longrope", "factor": 2, "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
                "long_factor has 7 values; head_dim / 2 is 8",
            ),
            (
                {"rope_type": "longrope", "factor": 2, "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [0]},
                r"long_factor\[7\] is 0",
            ),
            ("linear", "rope_scaling is 'linear'; expected an object"),
        ],
    )
    def test_what_is_not_understood_is_refused_by_name(self, block, message):
        with pytest.raises(ConvertError, match=message):
            parse(rope_scaling=block)


class TestRopeFrequencies:
    @pytest.mark.parametrize("variant", variants("llama"))
    def test_equal_to_the_reference(self, variant):
        config, hf = parse(variant), tiny_config("llama", variant)
        wanted, factor = reference_llama.inverse_frequencies(hf)
        length = config.max_position_embeddings
        ours = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling, length)
        np.testing.assert_allclose(ours, wanted, rtol=1e-12)
        assert rope.attention_factor(config.rope_scaling) == pytest.approx(factor, rel=1e-12)

    @pytest.mark.parametrize(("factor", "wanted"), [(4.0, 1.1386), (32.0, 1.3466), (40.0, 1.3689)])
    def test_yarns_attention_factor_by_hand(self, factor, wanted):
        scaling = parse(rope_scaling={"rope_type": "yarn", "factor": factor}).rope_scaling
        assert scaling.attention_factor == pytest.approx(wanted, abs=5e-5)

    def test_yarns_borders_by_hand(self):
        """Heads of 64, base 150000, 4096 positions, 32 and 1 turns: pairs 8.0928 to 17.3980, or rounded 8 to 18."""
        block = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
        plain = 150000.0 ** (-np.arange(32) / 32)

        def share_interpolated(truncate):
            scaling = parse(rope_scaling=block | {"truncate": truncate}, head_dim=64).rope_scaling
            kept = rope.frequencies(64, 150000.0, scaling, 4096) / plain
            return (1 - kept) / (1 - 1 / 32)

        exact = np.clip((np.arange(32) - 8.0928) / (17.3980 - 8.0928), 0, 1)
        np.testing.assert_allclose(share_interpolated(False), exact, atol=1e-4)
        np.testing.assert_allclose(share_interpolated(True), np.clip((np.arange(32) - 8) / 10, 0, 1), atol=1e-12)

    def test_yarns_slow_border_may_lie_beyond_the_last_pair(self):
        """Heads of 16, base 100, 4096 positions: pairs 5.24 to 11.26, rounded 5 to 12, of 8 pairs."""
        block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
        scaling = parse(rope_scaling=block, head_dim=16).rope_scaling
        kept = rope.frequencies(16, 100.0, scaling, 4096) / 100.0 ** (-np.arange(8) / 8)
        np.testing.assert_allclose(kept, [1, 1, 1, 1, 1, 1, 25 / 28, 22 / 28], rtol=1e-12)

    def test_llama3_keeps_short_waves_and_stretches_long_ones(self):
        """Llama 3.1's published numbers: waves shorter than 2048 stay, longer than 8192 are divided by 8."""
        block = LLAMA3 | {"original_max_position_embeddings": 8192}
        scaling = parse(rope_scaling=block, head_dim=128).rope_scaling
        plain = 500000.0 ** (-np.arange(64) / 64)
        ratio = plain / rope.frequencies(128, 500000.0, scaling, 131072)
        waves = 2 * np.pi / plain
        np.testing.assert_allclose(ratio[waves < 2048], 1.0)
        np.testing.assert_allclose(ratio[waves > 8192], 8.0)
        between = ratio[(waves > 2048) & (waves < 8192)]
        assert len(between) == 6
        assert np.all((between > 1) & (between < 8))
        assert np.all(np.diff(between) > 0)

    def test_a_missing_original_length_is_the_models_own(self):
        """Not 4096 and not 8192, whatever other programs assume."""
        yarn = parse(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope_scaling
        assert yarn.original_max_position_embeddings == 512
        fields = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
        assert parse(rope_scaling=fields).rope_scaling.original_max_position_embeddings == 512
        outside = parse(rope_scaling=fields, original_max_position_embeddings=64)
        assert outside.rope_scaling.original_max_position_embeddings == 64
        with pytest.raises(ConvertError, match=r"original_max_position_embeddings is 16; config\.json's own is 64"):
            parse(rope_scaling=LLAMA3, original_max_position_embeddings=64)

    def test_a_yarn_without_factor_stretches_to_the_models_length(self):
        block = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
        assert parse(rope_scaling=block).rope_scaling.factor == 4.0

    def test_one_mscale_alone_does_not_count(self):
        alone = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}
        assert parse(rope_scaling=alone) == parse(rope_scaling={"rope_type": "yarn", "factor": 4.0})

    def test_longrope_chooses_by_the_length_it_is_opened_for(self):
        scaling = parse("llama-longrope").rope_scaling
        short, long = (rope.frequencies(16, 10000.0, scaling, n) for n in (16, 17))
        np.testing.assert_allclose(short / long, np.array(scaling.long_factor) / np.array(scaling.short_factor))


class TestWindows:
    @pytest.mark.parametrize(
        ("model_type", "fields", "sliding"),
        [
            ("mistral", {"sliding_window": 8}, [0, 1]),
            ("mistral", {"sliding_window": None}, []),
            ("mistral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [1]),
            ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, [0, 1]),
            ("llama", {"sliding_window": 8}, []),
            ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [0]),
            ("qwen2", {"sliding_window": 8}, []),
            ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, []),
            ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [1]),
            ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [0, 1]),
            ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, []),
            ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, []),
        ],
    )
    def test_which_layers_slide(self, model_type, fields, sliding):
        config = parse(model_type=model_type, **fields)
        assert [i for i in range(2) if config.slides(i)] == sliding
        assert config.sliding_window == (8 if sliding else None)

    def test_mistral_without_the_field_has_its_published_window(self):
        assert parse("mistral", without=["sliding_window"]).sliding_window == 4096

    @pytest.mark.parametrize(
        ("types", "message"),
        [
            (["full_attention"], "layer_types has length 1; num_hidden_layers is 2"),
            (["full_attention", "linear_attention"], "layer_types has 'linear_attention'"),
            (["full_attention", "sliding_attention"], "sliding_window is None; layer_types has sliding_attention"),
        ],
    )
    def test_layer_types_that_do_not_fit(self, types, message):
        with pytest.raises(ConvertError, match=message):
            parse(layer_types=types, sliding_window=None)


class TestFields:
    def test_head_size_follows_from_the_width_where_it_is_absent(self):
        config = parse("qwen3", without=["head_dim"], hidden_size=2048, num_attention_heads=32, num_key_value_heads=8)
        assert config.head_dim == 64
        assert parse("qwen3").head_dim == 32
        assert parse(head_dim=None).head_dim == 16
        assert parse(without=["num_key_value_heads"]).num_key_value_heads == 4

    @pytest.mark.parametrize("said", [True, False, None])
    def test_a_tied_head_is_said_or_left_open(self, said):
        assert parse(tie_word_embeddings=said).tie_word_embeddings is said
        assert parse(without=["tie_word_embeddings"]).tie_word_embeddings is None

    @pytest.mark.parametrize(
        ("model_type", "said", "qkv", "out"),
        [
            ("llama", None, False, False),
            ("llama", True, True, True),
            ("qwen2", None, True, False),
            ("qwen2", True, True, False),
            ("qwen3", None, False, False),
            ("qwen3", True, True, True),
        ],
    )
    def test_where_attention_has_biases(self, model_type, said, qkv, out):
        config = parse(model_type=model_type, attention_bias=said)
        assert (config.attention_bias, config.attention_output_bias) == (qkv, out)
        assert config.qk_norm == (model_type == "qwen3")

    def test_what_does_not_touch_the_forward_pass_is_not_looked_at(self):
        harmless = {
            "architectures": ["LlamaForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "quantization": {"group_size": 64, "bits": 4},
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0",
            "use_cache": True,
            "partial_rotary_factor": 1.0,
            "final_logit_softcapping": None,
            "some_new_remark": {"nested": True},
        }
        assert parse(**harmless) == parse()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "mamba"}, "model_type is 'mamba'; this family runs llama, mistral, mixtral, qwen2, qwen3"),
            ({"model_type": None}, "model_type is missing"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"num_local_experts": 8}, "num_local_experts is 8; a llama model has no experts"),
            ({"num_experts": 4}, "num_experts is 4; a llama model has no experts"),
            ({"n_shared_experts": 1}, "n_shared_experts is 1"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
            ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
            ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
            ({"use_qk_norm": True}, "use_qk_norm is True"),
            ({"no_rope_layers": [1, 1]}, r"no_rope_layers is \[1, 1\]"),
            ({"hidden_size": None}, "hidden_size is missing"),
            ({"hidden_size": 66}, "hidden_size is 66; it is not a multiple of num_attention_heads, 4"),
            ({"hidden_size": -64}, "hidden_size is -64"),
            ({"vocab_size": 320.5}, r"vocab_size is 320\.5"),
            ({"vocab_size": True}, "vocab_size is True"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected a whole number from 1 to 4096"),
            ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
            ({"head_dim": 15}, "head size is 15"),
            ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
            ({"rope_theta": 1.0}, "rope_theta is 1.0"),
            ({"attention_bias": "yes"}, "attention_bias is 'yes'; expected true or false"),
            ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list"),
            ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; expected true or false"),
        ],
    )
    def test_what_changes_the_model_is_refused_by_name(self, fields, message):
        with pytest.raises(ConvertError, match=message):
            parse(**fields)

    def test_qwen2_without_its_biases_is_refused(self):
        with pytest.raises(ConvertError, match="attention_bias is False; Qwen2 has biases"):
            parse("qwen2", attention_bias=False)


class TestManifest:
    def manifest(self, variant="llama"):
        return json.loads(json.dumps(parse(variant).to_manifest()))

    def test_arch_is_what_the_elder_engines_require(self):
        arch, extension = self.manifest("mistral-mixed")
        # fmt: off
        required = {
            "hiddenSize", "ffnIntermediate", "moeIntermediateSize", "numHeads", "numKVHeads", "numFullKVHeads",
            "headDim", "fullHeadDim", "vocabSize", "slidingWindow", "numLayers", "numExperts", "topKExperts",
            "finalLogitSoftcap", "ropeTheta", "fullRopeTheta", "partialRotaryFactor", "tieWordEmbeddings",
            "attentionKEqV", "hiddenActivation", "fullAttentionLayerMask",
        }
        behaviour = {
            "attnOutputGate", "attentionScale", "embeddingScaledBySqrtHidden", "routerScaled", "ffnSandwichNorms",
            "sharedExpertGated", "ropeNeoxSubdim",
        }
        # fmt: on
        assert arch.keys() >= required | behaviour
        assert arch["fullAttentionLayerMask"] == [0, 1]
        assert (arch["slidingWindow"], arch["attentionScale"], arch["trainedContext"]) == (8, 32**-0.5, 512)
        assert extension["rope_scaling"] is None

    @pytest.mark.parametrize("variant", variants("llama"))
    def test_elder_engines_are_right_only_where_the_extension_says_what_they_assume(self, variant):
        config = parse(variant)
        arch, extension = config.to_manifest()
        assumed = config.elder_assumption() == extension
        assert assumed == (FAMILY.config_from_manifest(arch, {}) == config)
        assert assumed == (
            variant
            in {"llama", "llama-tied", "llama-one-head", "llama-three-heads"}
            | {"mistral", "mistral-mixed", "qwen2", "qwen2-windows", "qwen3", "mixtral", "mixtral-windows"}
        )

    @pytest.mark.parametrize(
        ("family", "eps", "bias", "norm"),
        [("llama", 1e-5, False, False), ("qwen2", 1e-6, True, False), ("qwen3", 1e-6, False, True)],
    )
    def test_an_elder_install_is_read_by_its_familys_habits(self, family, eps, bias, norm):
        arch, _ = self.manifest()
        for key in ("trainedContext", "attnOutputGate", "attentionScale"):
            del arch[key]
        config = FAMILY.config_from_manifest(arch | {"family": family}, {})
        assert (config.rms_norm_eps, config.attention_bias, config.qk_norm) == (eps, bias, norm)
        assert (config.rope_scaling, config.mlp_bias, config.attention_output_bias) == (None, False, False)
        assert config.max_position_embeddings == 4096

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"family": "gptOss"}, "family is 'gptOss'"),
            ({"family": "qwen3moe"}, "numExperts is 0; a qwen3moe model has some"),
            ({"family": "qwen3", "numExperts": 8}, "numExperts is 8; a qwen3 model has none"),
            ({"topKExperts": 2}, "topKExperts is 2; a llama model has 0"),
            ({"attnOutputGate": True}, "attnOutputGate is True"),
            ({"ropeNeoxSubdim": True}, "ropeNeoxSubdim is True"),
            ({"attentionScale": 1.0}, r"attentionScale is 1\.0; for heads of 16 it is 0\.25"),
            ({"finalLogitSoftcap": 30.0}, r"finalLogitSoftcap is 30\.0"),
            ({"partialRotaryFactor": 0.25}, r"partialRotaryFactor is 0\.25"),
            ({"numFullKVHeads": 1}, "numFullKVHeads is 1"),
            ({"fullHeadDim": 32}, "fullHeadDim is 32"),
            ({"fullRopeTheta": 1e6}, r"fullRopeTheta is 1000000\.0"),
            ({"hiddenActivation": "gelu"}, "hiddenActivation is 'gelu'"),
            ({"fullAttentionLayerMask": [1, 2]}, r"fullAttentionLayerMask is \[1, 2\]"),
            ({"fullAttentionLayerMask": [1, True]}, "fullAttentionLayerMask"),
            ({"fullAttentionLayerMask": [1]}, "1 layer kind for 2 layers"),
            ({"fullAttentionLayerMask": [1, 0]}, "slidingWindow is 0"),
            ({"numLayers": 2**31 - 1}, "numLayers is 2147483647"),
            ({"numHeads": 0}, "numHeads is 0"),
            ({"vocabSize": "320"}, "vocabSize is '320'"),
        ],
    )
    def test_an_arch_that_is_not_this_family_is_refused_by_field(self, fields, message):
        arch, extension = self.manifest()
        with pytest.raises(
            InstallError, match=f"manifest.json: arch: {message}" if "layer kind" not in message else message
        ):
            FAMILY.config_from_manifest(arch | fields, extension)

    def test_an_extension_is_complete_and_understood(self):
        arch, extension = self.manifest("llama-yarn")
        for key in extension:
            with pytest.raises(InstallError, match=f"extension: {key} is missing"):
                FAMILY.config_from_manifest(arch, {k: v for k, v in extension.items() if k != key})
        with pytest.raises(InstallError, match="unknown field 'attention_sinks'"):
            FAMILY.config_from_manifest(arch, extension | {"attention_sinks": True})
        with pytest.raises(InstallError, match="rms_norm_eps is '1e-5'"):
            FAMILY.config_from_manifest(arch, extension | {"rms_norm_eps": "1e-5"})
        with pytest.raises(InstallError, match="rope type 'dynamic'"):
            FAMILY.config_from_manifest(arch, extension | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})


class TestExperts:
    def test_mixtral(self):
        config = parse("mixtral")
        assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (4, 2, 128)
        assert (config.routed_layers(), config.norm_topk_prob) == ([0, 1], True)
        assert parse("mixtral", without=["num_local_experts"], num_experts=4) == config
        assert parse("mixtral", without=["rope_theta"]).rope_theta == 1e6
        assert parse("mixtral").sliding_window is None

    def test_qwen3_moe(self):
        config = parse("qwen3-moe")
        assert (config.moe_intermediate_size, config.intermediate_size) == (64, 128)
        assert (config.dense_layers, config.routed_layers()) == ((1,), [0, 2])
        assert parse("qwen3-moe", without=["num_experts"], num_local_experts=8) == config
        assert parse("qwen3-moe", num_local_experts=8) == config
        assert parse("qwen3-moe", without=["norm_topk_prob"]).norm_topk_prob is False
        assert parse("qwen3-moe", mlp_only_layers=None, decoder_sparse_step=None).dense_layers == ()
        assert parse("qwen3-moe", mlp_only_layers=[0], decoder_sparse_step=2).dense_layers == (0, 2)
        assert parse("qwen3-moe", sliding_window=8, max_window_layers=2).sliding_window is None
        windows = parse("qwen3-moe", sliding_window=8, max_window_layers=2, use_sliding_window=True)
        assert [windows.slides(layer) for layer in range(3)] == [True] * 3

    @pytest.mark.parametrize(
        ("variant", "fields", "message"),
        [
            ("mixtral", {"num_local_experts": None}, r"the number of experts is missing \(num_experts or"),
            ("mixtral", {"num_experts": 8}, "the number of experts is given as 4 and as 8"),
            ("mixtral", {"num_experts_per_tok": 5}, "5 experts a token are asked for, and a layer has 4"),
            ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
            ("qwen3-moe", {"mlp_only_layers": [3]}, "mlp_only_layers: 0 is 3; expected a whole number from 0 to 2"),
            ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, "8 experts are declared, and no layer has any"),
            ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
            ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
            ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ],
    )
    def test_what_is_not_understood_is_refused(self, variant, fields, message):
        with pytest.raises(ConvertError, match=message):
            parse(variant, **fields)

    def test_an_elder_install(self):
        """Weights add up to 1 and every layer has experts; nothing says otherwise there."""
        arch, _ = parse("qwen3-moe", mlp_only_layers=[]).to_manifest()
        assert arch["family"] == "qwen3moe"
        assert FAMILY.config_from_manifest(arch, {}) == parse("qwen3-moe", mlp_only_layers=[])
        with pytest.raises(InstallError, match="routerScoringFunc is 'sigmoid'"):
            FAMILY.config_from_manifest(arch | {"routerScoringFunc": "sigmoid"}, {})
        arch, extension = parse("qwen3-moe").to_manifest()
        for wrong in (["1"], [True], [3], 1):
            with pytest.raises(InstallError, match="dense_layers"):
                FAMILY.config_from_manifest(arch, extension | {"dense_layers": wrong})


def test_sizes_of_caches_by_hand():
    """2 layers, K and V, 2 KV heads of 32, 4 bytes: 1024 bytes a token; a window of 8 stops growing at 8."""
    full, mixed = parse("qwen3"), parse("mistral-mixed")
    assert [full.kv_bytes(n, 4) for n in (1, 100)] == [1024, 102400]
    assert [mixed.kv_bytes(n, 4) for n in (5, 8, 100)] == [5 * 1024, 8 * 1024, 512 * 100 + 512 * 8]


def test_every_variant_parses_to_another_configuration():
    for one, other in itertools.combinations(variants("llama"), 2):
        assert parse(one) != parse(other), (one, other)
