"""config.json and manifests of gpt-oss: spellings of one fact, defaults, rotary borders, and refusals by name."""

import json
from math import prod

import numpy as np
import pytest
from transformers import GptOssConfig as PeerConfig

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.gpt_oss import FAMILY
from turbospark_mlx.families.gpt_oss.config import FULL, SLIDING
from turbospark_mlx.families.rope import attention_factor, frequencies

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
PUBLISHED_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def parse(without=(), **fields):
    return FAMILY.config_from_hf({k: v for k, v in (PUBLISHED_20B | fields).items() if k not in without})


def test_the_published_models():
    """Parameters as the model card counts them."""
    small, large = parse(), parse(num_hidden_layers=36, num_local_experts=128, layer_types=[SLIDING, FULL] * 18)
    for config, billions in ((small, 20.91), (large, 116.83)):
        assert round(sum(map(prod, FAMILY.expected(config).values())) / 1e9, 2) == billions
    assert [small.slides(n) for n in range(4)] == [True, False, True, False]
    assert small.kv_bytes(4096, 2) == 2 * 12 * (4096 + 128) * 8 * 64 * 2
    spec = FAMILY.experts(small)["model.layers.5.mlp.experts"]
    assert (spec.num_experts, spec.top_k, spec.activation, spec.alpha, spec.limit, spec.biases) == (
        *(32, 4, "clamped_swiglu", 1.702),
        *(7.0, True),
    )


def test_the_spelling_of_transformers_5_and_absent_fields():
    config = parse()
    in_one = parse(without=("rope_scaling", "rope_theta"), rope_parameters={**YARN, "rope_theta": 150000.0})
    assert in_one == config
    absent = ("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit", "head_dim", "rms_norm_eps")
    assert parse(without=(*absent, "attention_bias", "max_position_embeddings")) == config
    assert parse(rope_scaling=None) == config
    assert parse(without=("num_local_experts",), num_experts=32) == config
    assert parse(without=("num_experts_per_tok",)) == config
    assert parse(rope_scaling_factor=32.0, rope_ntk_alpha=1.0, rope_ntk_beta=32.0) == config
    assert parse(without=("tie_word_embeddings",)).tie_word_embeddings is None


def test_absent_fields_mean_what_they_mean_to_transformers():
    peer = PeerConfig(num_hidden_layers=5)
    ours = FAMILY.config_from_hf(
        {
            key: getattr(peer, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        }
        | {"model_type": "gpt_oss", "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4}
    )
    same = ("head_dim", "sliding_window", "max_position_embeddings", "rms_norm_eps", "attention_bias")
    for name in (*same, "swiglu_alpha", "swiglu_limit"):
        assert getattr(ours, name) == getattr(peer, name), name
    assert list(ours.layer_types) == peer.layer_types
    assert ours.rope_theta == peer.rope_parameters["rope_theta"]
    for name in ("factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"):
        assert getattr(ours.rope_scaling, name) == peer.rope_parameters[name]


def test_rotary_borders_are_real_numbers():
    """By the formula of openai/gpt-oss, gpt_oss/torch/model.py; rounding the borders changes pairs 9 to 17."""
    config = parse()
    found = frequencies(64, config.rope_theta, config.rope_scaling, 4096)
    freq = 150000.0 ** (np.arange(0, 64, 2) / 64)
    low, high = (32 * np.log(4096 / (turns * 2 * np.pi)) / np.log(150000) for turns in (32, 1))
    assert (round(low, 4), round(high, 4)) == (8.0928, 17.398)
    mask = 1 - np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(found, 1 / (32 * freq) * (1 - mask) + 1 / freq * mask, rtol=1e-14)
    assert round(attention_factor(config.rope_scaling), 5) == 1.34657
    rounded = parse(rope_scaling=YARN | {"truncate": True})
    differs = np.abs(frequencies(64, 150000.0, rounded.rope_scaling, 4096) / found - 1) > 1e-3
    assert np.flatnonzero(differs).tolist() == list(range(9, 18))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"initial_context_length": 8192}, "initial_context_length is 8192; .* 4096"),
        ({"rope_scaling_factor": 16.0}, "rope_scaling_factor is 16.0"),
        ({"experts_per_token": 8}, "experts_per_token is 8; num_experts_per_tok is 4"),
        ({"num_experts": 64}, "num_experts is 64; num_local_experts is 32"),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, "33 experts a token"),
        ({"layer_types": [SLIDING] * 3}, "3 layer kinds for 24"),
        ({"layer_types": ["chunked_attention"] * 24}, "'chunked_attention'"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"rope_scaling": YARN | {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": YARN | {"ramp": 2}}, "ramp"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"num_key_value_heads": 7}, "evenly"),
        ({"head_dim": 63}, "pairs"),
        ({"model_type": "gpt_oss2"}, "model_type"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_refusals(fields, match):
    with pytest.raises(ConvertError, match=match):
        parse(**fields)


@pytest.mark.parametrize("missing", ["hidden_size", "num_key_value_heads", "num_local_experts", "vocab_size"])
def test_sizes_are_required(missing):
    with pytest.raises(ConvertError, match=f"{missing} is missing"):
        parse(without=(missing,))


class TestManifest:
    def test_what_the_elder_engine_is_told(self):
        arch, _ = parse().to_manifest()
        yarn = [arch[f"ropeScaling{key}"] for key in ("Factor", "OriginalContext", "BetaFast", "BetaSlow")]
        assert yarn == [32.0, 4096, 32.0, 1.0]
        assert (arch["swigluLimit"], arch["fullAttentionLayerMask"][:4]) == (7.0, [0, 1, 0, 1])

    def test_the_elder_engine_rounds_borders(self):
        extension = parse().to_manifest()[1]
        assumed = parse().elder_assumption()
        assert [key for key in extension if extension[key] != assumed[key]] == ["rope_scaling"]
        rounded = parse(rope_scaling=YARN | {"truncate": True})
        assert rounded.to_manifest()[1] == rounded.elder_assumption()

    def test_an_install_of_the_elder_engine_is_the_published_model(self):
        arch, _ = parse().to_manifest()
        assert FAMILY.config_from_manifest(arch, {}) == parse()

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"ropeScalingFactor": 0}, "ropeScalingFactor is 0"),
            ({"ropeScalingFactor": None}, "ropeScalingFactor is missing"),
            ({"fullAttentionLayerMask": [2] * 24}, "fullAttentionLayerMask"),
            ({"ffnIntermediate": 5}, "ffnIntermediate is 5"),
            ({"attnOutputGate": True}, "attnOutputGate"),
            ({"attentionScale": 1.0}, "attentionScale"),
            ({"routerScoringFunc": "sigmoid"}, "routerScoringFunc"),
        ],
    )
    def test_refusals(self, change, match):
        arch, _ = parse().to_manifest()
        with pytest.raises(InstallError, match=match):
            FAMILY.config_from_manifest(arch | change, {})

    def test_a_scaling_that_contradicts_the_extension(self):
        arch, extension = json.loads(json.dumps(parse().to_manifest()))
        with pytest.raises(InstallError, match="ropeScalingFactor is 8"):
            FAMILY.config_from_manifest(arch | {"ropeScalingFactor": 8.0}, extension)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.layers.24.mlp.router.weight", "layer 24; the configuration has 24"),
        ("model.layers.0.mlp.experts.gate_proj_blocks", "no place"),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "no place"),
        ("model.layers.0.self_attn.q_norm.weight", "no place"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "no place"),
        ("vision.weight", "not one of the gpt-oss family"),
    ],
)
def test_names_that_no_model_has(name, match):
    with pytest.raises(ConvertError, match=match):
        FAMILY.place(name, parse())


def test_gguf_files_are_refused():
    with pytest.raises(ConvertError, match="'gpt-oss', whose GGUF files this version does not convert"):
        FAMILY.hf_config_from_gguf({"general.architecture": "gpt-oss"})
