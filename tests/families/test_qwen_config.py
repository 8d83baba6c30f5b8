"""Qwen 3.5's config.json, in every spelling; what is not understood is refused by name."""

import copy
import json

import pytest

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.hybrid import FULL, LINEAR
from turbospark_mlx.families.qwen.config import config_from_hf, config_from_manifest

DENSE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}
MOE = copy.deepcopy(DENSE) | {"model_type": "qwen3_5_moe"}
MOE["text_config"] |= {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "layer_types": ([LINEAR] * 3 + [FULL]) * 10,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
del MOE["text_config"]["intermediate_size"]


def changed(config=DENSE, *, without=(), **fields):
    config = copy.deepcopy(config)
    config["text_config"] |= fields
    for name in without:
        del config["text_config"][name]
    return config


def test_published_configurations():
    dense, moe = config_from_hf(DENSE), config_from_hf(MOE)
    assert (dense.model_type, moe.model_type) == ("qwen3_5", "qwen3_5_moe")
    assert (dense.key_width, dense.value_width, dense.convolved_width) == (2048, 6144, 10240)
    assert (moe.convolved_width, moe.num_experts, moe.num_experts_per_tok) == (8192, 256, 8)
    assert [n for n in range(9) if not dense.recurs(n)] == [3, 7]
    frequencies = dense.frequencies()
    assert frequencies.shape == (32,)
    assert frequencies[[0, 1, 2, 31]] == pytest.approx([1.0, 0.60429639, 0.36517413, 1.6548171e-7], rel=1e-7)
    # 16 layers of keys and values, 48 of three states each: 3 MiB and 60 KiB in half precision.
    assert dense.kv_bytes(1, 2) == 64 * 1024 + 48 * 3 * (3 * 2**20 + 60 * 1024)
    assert dense.centered_norms


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_spellings_of_one_model(config):
    parsed = config_from_hf(config)
    assert config_from_hf(config["text_config"] | {"tie_word_embeddings": False}) == parsed
    assert config_from_hf(config["text_config"] | {"model_type": config["model_type"]}) == parsed
    assert config_from_hf(changed(config, without=["layer_types"])) == parsed
    assert config_from_hf(changed(config, without=["full_attention_interval"])) == parsed
    assert config_from_hf(changed(config, without=["partial_rotary_factor"])) == parsed
    flat = {"rope_parameters": {"mrope_section": [11, 11, 10]}, "rope_theta": 1e7, "rope_scaling": None}
    assert config_from_hf(changed(config, **flat)) == parsed
    typed = {"rope_parameters": {"type": "default", "rope_theta": 1e7}}
    assert config_from_hf(changed(config, **typed)) == parsed
    with_vocabulary = changed(config, without=["vocab_size"]) | {"vocab_size": 248320}
    assert config_from_hf(with_vocabulary) == parsed
    before = copy.deepcopy(config)
    config_from_hf(config)
    assert config == before


def test_a_silent_config_leaves_the_head_to_the_tensors():
    config = changed(without=["tie_word_embeddings"])
    assert config_from_hf(config).tie_word_embeddings is False
    del config["tie_word_embeddings"]
    assert config_from_hf(config).tie_word_embeddings is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_parameters: rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e7}, "rope_theta is 10000000.0; but"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 2}}, "factor is 2"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"layer_types": [FULL]}, "full_attention_interval is 4"),
        ({"layer_types": [FULL], "full_attention_interval": None}, "1 layer kind for 64 layers"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer_types has 'sliding_attention'"),
        ({"full_attention_interval": 3}, "full_attention_interval is 3"),
        ({"num_experts": 8}, "num_experts is 8; a qwen3_5 model has no experts"),
        ({"num_key_value_heads": 5}, "24 attention heads cannot share 5"),
        ({"linear_num_value_heads": 40}, "40 value heads of recurrent layers cannot share 16"),
        ({"partial_rotary_factor": 0.5}, "but in rope_parameters it is 0.25"),
        ({"head_dim": 4}, "1 dimensions of a head turn"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_conv_kernel_dim": 10**6}, "linear_conv_kernel_dim"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type is 'qwen3_5_moe_text'; beside 'qwen3_5'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is False; but in text_config it is True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(fields, words):
    with pytest.raises(ConvertError, match=words):
        config_from_hf(changed(**fields))


REQUIRED = sorted(
    DENSE["text_config"].keys()
    & {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "vocab_size", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    }
)


@pytest.mark.parametrize("name", REQUIRED)
def test_sizes_have_no_default(name):
    with pytest.raises(ConvertError, match=f"{name} is missing"):
        config_from_hf(changed(without=[name]))


@pytest.mark.parametrize(
    "name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
)
def test_sizes_of_experts_have_no_default(name):
    with pytest.raises(ConvertError, match=f"{name} is missing"):
        config_from_hf(changed(MOE, without=[name]))
    with pytest.raises(ConvertError, match="300 experts a token"):
        config_from_hf(changed(MOE, num_experts_per_tok=300))


def test_another_model_is_not_taken_for_this_one():
    with pytest.raises(ConvertError, match="model_type is 'qwen3_next'"):
        config_from_hf(DENSE | {"model_type": "qwen3_next"})


class TestManifest:
    @pytest.mark.parametrize(("config", "family"), [(DENSE, "qwen35"), (MOE, "qwen36")], ids=["dense", "moe"])
    def test_what_the_elder_engines_expect(self, config, family):
        parsed = config_from_hf(config)
        arch, extension = json.loads(json.dumps(parsed.to_manifest()))
        assert (arch["family"], arch["attentionScale"], arch["partialRotaryFactor"]) == (family, 0.0625, 0.25)
        assert arch["fullAttentionLayerMask"][:8] == [2, 2, 2, 1] * 2
        assert arch["sharedExpertGated"] == (family == "qwen36")
        assert (arch["ffnIntermediate"], arch["moeIntermediateSize"]) == ((17408, 0) if config is DENSE else (512, 512))
        assert extension == {"rms_norm_eps": 1e-6, "centered_norms": True}
        assert parsed.elder_assumption()["centered_norms"] is False
        assert config_from_manifest(arch, extension) == parsed

    def test_an_install_of_an_elder_engine_has_plain_norms(self):
        arch, _ = config_from_hf(MOE).to_manifest()
        assert config_from_manifest(arch, {}).centered_norms is False

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"attnOutputGate": False}, "attnOutputGate is False"),
            ({"ropeNeoxSubdim": False}, "ropeNeoxSubdim is False"),
            ({"linearOutputGateSigmoid": True}, "linearOutputGateSigmoid is True"),
            ({"attentionScale": 1.0}, "attentionScale is 1.0"),
            ({"sharedExpertGated": False}, "sharedExpertGated is False; this qwen36 model has True"),
            ({"fullHeadDim": 128}, "fullHeadDim is 128"),
            ({"slidingWindow": 8}, "slidingWindow is 8"),
            ({"fullAttentionLayerMask": [0] * 40}, "full .1. and recurrent .2. layers"),
            ({"fullAttentionLayerMask": [1]}, "1 layer kind for 40"),
            ({"family": "qwen35"}, "numExperts is 256; this qwen35 model has 0|sharedExpertGated is True"),
            ({"linearNumVHeads": 31}, "31 value heads"),
            ({"topKExperts": 0}, "topKExperts"),
        ],
    )
    def test_refusals(self, fields, words):
        arch, extension = config_from_hf(MOE).to_manifest()
        with pytest.raises(InstallError, match=words):
            config_from_manifest(arch | fields, extension)

    def test_an_extension_is_complete_or_absent(self):
        arch, extension = config_from_hf(MOE).to_manifest()
        with pytest.raises(InstallError, match="rms_norm_eps is missing"):
            config_from_manifest(arch, {"centered_norms": True})
        with pytest.raises(InstallError, match="unknown field 'folded'"):
            config_from_manifest(arch, extension | {"folded": 1})
