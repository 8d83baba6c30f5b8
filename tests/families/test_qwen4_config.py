"""Qwen4-Exp's config.json, in every spelling; what is not understood is refused by name. And its n-gram hash."""

import copy
import json
from math import prod

import numpy as np
import pytest

from tests.families import reference_qwen4
from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families.hybrid import FULL, LINEAR
from turbospark_mlx.families.qwen4.config import config_from_hf, config_from_manifest
from turbospark_mlx.families.qwen4.ngrams import row_ids
from turbospark_mlx.families.qwen4.weights import expected
from turbospark_mlx.testing import tiny_config

PUBLISHED = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "vision_config": {"depth": 27, "model_type": "qwen4_exp"},
    "text_config": {
        "model_type": "qwen4_exp_text",
        "attention_bias": False,
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "head_dim": 256,
        "heads_per_ngram": 8,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 12,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "make_ngram_vocab_size_divisible_by": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 640,
        "mtp_num_hidden_layers": 1,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20000000,
        "num_attention_heads": 24,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "pad_token_id": None,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 640,
        "split_ngram_parts": 128,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}


def changed(*, without=(), **fields):
    config = copy.deepcopy(PUBLISHED)
    config["text_config"] |= fields
    for name in without:
        del config["text_config"][name]
    return config


def test_the_published_configuration():
    config = config_from_hf(PUBLISHED)
    assert (config.wide, config.convolved_width, config.rotary_width) == (10240, 10240, 64)
    assert (config.block_top_k, config.ngram_tail, config.ngram_width) == (512, 9, 160)
    assert (config.ple_layer, config.seed, config.linear_gate) == (1, 1234, "sigmoid")
    assert [n for n in range(9) if not config.recurs(n)] == [3, 7]
    # 12 layers of keys and values and of the indexer's keys, 36 of three states, three tails of n-grams and 4 ids.
    states = 36 * 3 * (3 * 2**20 + 60 * 1024) + 3 * 9 * 10240 * 2 + 4 * 4
    assert config.kv_bytes(4, 2) == 12 * (4 * 2048 + 5 * 256) + states
    assert config.centered_norms


def test_the_published_size():
    """The checkpoint has about 360 GB in bfloat16, the tower and the other head among them."""
    shapes = expected(config_from_hf(PUBLISHED))
    assert 350e9 < 2 * sum(map(prod, shapes.values())) < 360e9
    # A layer has 4 around each of its sublayers, and 5 beside its 3 stacks of experts; a recurrent one 9 more, a sparse
    # one 6 and 3; 7 are about n-grams.
    assert len(shapes) == 2 + 3 + 48 * (8 + 5 + 3) + 36 * 9 + 12 * (6 + 3) + 7


def test_the_published_hash():
    """As the published checkpoint's buffers have it."""
    hashed = config_from_hf(PUBLISHED).ngram_hash
    assert hashed.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert hashed.sizes[:3] + hashed.sizes[-1:] == (20000003, 20000023, 20000033, 20000171)
    assert hashed.offsets[:3] + hashed.offsets[-1:] == (0, 20000003, 40000026, 300001275)
    assert (len(hashed.sizes), hashed.rows) == (16, 320001536)


def test_rows_of_n_grams():
    """By the reference, a token at a time; texts end in a row, at once, and before the first token there was an end."""
    text = tiny_config("qwen4")["text_config"]
    config, eos = config_from_hf(tiny_config("qwen4")), text["eos_token_id"]
    rng = np.random.default_rng(0)
    for ids in ([5], [eos, eos, 3, 4, eos, 7, 8, 9], np.where(rng.random(60) < 0.3, eos, rng.integers(0, 320, 60))):
        ids = np.array(ids)
        before = np.full((1, 2), eos)
        rows = row_ids(ids[None], before, config.ngram_hash, eos)
        assert rows[0].tolist() == reference_qwen4.table_rows(text, ids)
        # In two pieces, the second behind what it needs of the first.
        for cut in range(1, len(ids)):
            seen = np.concatenate([before[0], ids])[cut : cut + 2]
            again = row_ids(ids[None, cut:], seen[None], config.ngram_hash, eos)
            assert again[0].tolist() == rows[0, cut:].tolist()


def test_products_of_the_hash_stay_whole():
    """The largest id times the largest multiplier is below 2^63."""
    for config in (config_from_hf(PUBLISHED), config_from_hf(tiny_config("qwen4"))):
        assert max(config.ngram_hash.multipliers) * (config.vocab_size - 1) < 2**63


def test_spellings_of_one_model():
    parsed = config_from_hf(PUBLISHED)
    assert config_from_hf(PUBLISHED["text_config"]) == parsed
    assert config_from_hf(PUBLISHED["text_config"] | {"model_type": "qwen4_exp"}) == parsed
    assert config_from_hf(changed(without=["layer_types"])) == parsed
    assert config_from_hf(changed(without=["full_attention_interval"])) == parsed
    saved = [LINEAR if kind == LINEAR else "indexed_attention" for kind in PUBLISHED["text_config"]["layer_types"]]
    assert config_from_hf(changed(layer_types=saved)) == parsed
    flat = {"rope_parameters": {"mrope_section": [11, 11, 10]}, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert config_from_hf(changed(**flat)) == parsed
    assert config_from_hf(changed(eos_token_id=[248044, 248046], seed=1234, norm_topk_prob=True)) == parsed
    assert config_from_hf(changed(ple_layer_ids=[2, 2])) == parsed
    absent = ("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base")
    assert config_from_hf(changed(without=[*absent, "make_ngram_vocab_size_divisible_by"])) == parsed
    assert config_from_hf(changed(without=["output_gate_type"])).linear_gate == "silu"
    assert config_from_hf(changed(without=["split_ngram_parts"])).split_ngram_parts == 512
    assert config_from_hf(changed(without=["ple_layer_ids"])).ple_layer is None
    assert config_from_hf(changed(ple_layer_ids=[], eos_token_id=None)).ple_layer is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_gate_type": "swish"}, "output_gate_type is 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_parameters: rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor is missing"),
        ({"layer_types": [FULL] * 48}, "full_attention_interval is 4"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types has 'sliding_attention'"),
        ({"num_experts_per_tok": 600}, "600 experts a token"),
        ({"hc_count": 1}, "hc_count is 1"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ({"indexer_budget": 2050}, "indexer_budget is 2050; it has to be a multiple of indexer_compress_ratio, 4"),
        ({"indexer_head_dim": 32}, "64 dimensions of a head turn; those of the indexer have 32"),
        ({"indexer_budget": None}, "indexer_budget is missing"),
        ({"ple_layer_ids": [2, 3]}, r"ple_layer_ids is \[2, 3\]; .* at most one"),
        ({"ple_layer_ids": [0]}, r"ple_layer_ids is \[0\]"),
        ({"ple_layer_ids": [[2]]}, r"ple_layer_ids is \[\[2\]\]"),
        ({"ple_layer_ids": [2, "2"]}, r"ple_layer_ids is \[2, '2'\]"),
        ({"ple_layer_ids": [49]}, r"ple_layer_ids is \[49\]"),
        ({"ple_layer_ids": [4]}, "layer 3 is told about n-grams, but is no linear_attention layer"),
        ({"ple_embed_dim": 2561}, "2561 dimensions of an n-gram embedding cannot be shared by 16 heads"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]"),
        ({"eos_token_id": 248320}, "token 248320 ends texts; the vocabulary has 248320"),
        ({"split_ngram_parts": 127}, "320001536 rows cannot be cut into 127 parts"),
        ({"ngram_vocab_size_base": 2**40}, "ngram_vocab_size_base"),
        ({"heads_per_ngram": 10**6}, "heads_per_ngram"),
        ({"num_key_value_heads": 5}, "24 attention heads cannot share 5"),
        ({"linear_num_value_heads": 40}, "40 value heads of recurrent layers cannot share 16"),
        ({"model_type": "qwen3_5_text"}, "model_type is 'qwen3_5_text'; beside 'qwen4_exp'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is False; but in text_config it is True"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(fields, words):
    with pytest.raises(ConvertError, match=words):
        config_from_hf(changed(**fields))


def test_a_refusal_shows_no_more_than_a_line_of_a_value():
    with pytest.raises(ConvertError, match=r"ple_layer_ids is \[49, 49,") as refusal:
        config_from_hf(changed(ple_layer_ids=[49] * 5000))
    assert len(str(refusal.value)) < 400


REQUIRED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "linear_num_key_heads", "linear_num_value_heads", "hc_count"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "hc_lowrank"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "indexer_n_heads"),
    *("indexer_head_dim", "indexer_compress_ratio"),
)


@pytest.mark.parametrize("name", REQUIRED)
def test_sizes_have_no_default(name):
    with pytest.raises(ConvertError, match=f"{name} is missing"):
        config_from_hf(changed(without=[name]))


class TestManifest:
    def test_what_the_elder_engines_expect(self):
        parsed = config_from_hf(PUBLISHED)
        arch, extension = json.loads(json.dumps(parsed.to_manifest()))
        expected = {
            **{"family": "qwen4exp", "hiddenSize": 2560, "ffnIntermediate": 640, "moeIntermediateSize": 640},
            **{"numHeads": 24, "numKVHeads": 2, "headDim": 256, "vocabSize": 248320, "numExperts": 512},
            **{"topKExperts": 10, "attentionScale": 0.0625, "sharedExpertGated": True, "ropeNeoxSubdim": True},
            **{"attnOutputGate": True, "linearOutputGateSigmoid": True, "hcMult": 4, "hcLowrank": 320},
            **{"caIndexNHeads": 4, "caIndexKvHeads": 1, "caIndexHeadDim": 128, "caIndexTopK": 512},
            **{"caIndexBudget": 2048, "caCSACompressRate": 4, "pleNgramSize": 3, "pleHeadsPerNgram": 8},
            **{"pleNgramVocabSizeBase": 20000000, "pleMakeDivisibleBy": 128, "pleSplitNgramParts": 128},
            **{"pleEmbedDim": 2560, "pleConvKernelSize": 4, "pleLayerIds": [2], "pleSeed": 1234},
            "pleEosTokenId": 248044,
        }
        assert {key: arch[key] for key in expected} == expected
        assert arch["fullAttentionLayerMask"][:8] == [2, 2, 2, 1] * 2
        assert extension == {"rms_norm_eps": 1e-6, "centered_norms": True}
        assert config_from_manifest(arch, extension) == parsed
        assert config_from_manifest(arch, {}).centered_norms is False

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"attnOutputGate": False}, "attnOutputGate is False"),
            ({"caIndexKvHeads": 2}, "caIndexKvHeads is 2"),
            ({"caIndexTopK": 2048}, "caIndexTopK is 2048; this qwen4exp model has 512"),
            ({"caIndexBudget": 2050}, "caIndexBudget is 2050|caIndexTopK"),
            ({"hcMult": 0}, "hcMult"),
            ({"pleLayerIds": [2, 3]}, r"pleLayerIds is \[2, 3\]"),
            ({"pleLayerIds": [4]}, "layer 3 is told about n-grams"),
            ({"pleNgramSize": 100}, "pleNgramSize is 100"),
            ({"pleSplitNgramParts": 3}, "cannot be cut into 3 parts"),
            ({"family": "qwen36"}, "family is 'qwen36'"),
        ],
    )
    def test_refusals(self, fields, words):
        arch, extension = config_from_hf(PUBLISHED).to_manifest()
        with pytest.raises(InstallError, match=words):
            config_from_manifest(arch | fields, extension)
