"""Names and row orders of the llama family, and what GGUF metadata means."""

import dataclasses

import numpy as np
import pytest

from tests.families import reference_llama
from tests.families.oracles import PROMPT
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families.llama import FAMILY
from turbospark_mlx.protocols import Dropped, Placement, RoutedPart
from turbospark_mlx.testing import tiny_config, tiny_weights, variants


def config_of(variant="llama", **fields):
    return FAMILY.config_from_hf(tiny_config("llama", variant) | fields)


@pytest.mark.parametrize(
    ("name", "install", "role"),
    [
        ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "language_model.lm_head.weight", "head"),
        ("model.norm.weight", "language_model.model.norm.weight", "vector"),
        (
            "model.layers.1.self_attn.q_proj.weight",
            "language_model.model.layers.1.self_attn.q_proj.weight",
            "attention",
        ),
        ("model.layers.1.self_attn.o_proj.bias", "language_model.model.layers.1.self_attn.o_proj.bias", "vector"),
        ("model.layers.0.mlp.down_proj.weight", "language_model.model.layers.0.mlp.down_proj.weight", "shared_expert"),
        (
            "model.layers.0.post_attention_layernorm.weight",
            "language_model.model.layers.0.post_attention_layernorm.weight",
            "vector",
        ),
    ],
)
def test_where_tensors_go(name, install, role):
    config = config_of("llama-biases")
    assert FAMILY.place(name, config) == Placement(install, role, name)
    assert FAMILY.place(f"language_model.{name}", config) == Placement(install, role, name)


def test_what_is_left_out():
    tied, untied, open_ = (config_of(tie_word_embeddings=said) for said in (True, False, None))
    assert isinstance(FAMILY.place("lm_head.weight", tied), Dropped)
    assert isinstance(FAMILY.place("language_model.lm_head.weight", tied), Dropped)
    assert isinstance(FAMILY.place("lm_head.weight", untied), Placement)
    assert isinstance(FAMILY.place("lm_head.weight", open_), Placement)
    assert isinstance(FAMILY.place("model.layers.0.self_attn.rotary_emb.inv_freq", tied), Dropped)
    assert ("language_model.lm_head.weight" in FAMILY.expected(untied)) is True
    assert ("language_model.lm_head.weight" in FAMILY.expected(tied)) is False
    with pytest.raises(ConvertError, match="tie_word_embeddings is not decided"):
        FAMILY.expected(open_)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.2.self_attn.q_proj.weight", "is of layer 2; the configuration has 2 layers"),
        ("model.layers.01.self_attn.q_proj.weight", "is of layer 01"),
        ("model.layers.0.self_attn.q_proj.bias", "attention_bias False"),
        ("model.layers.0.self_attn.q_norm.weight", "qk_norm False"),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", "no place"),
        ("model.layers.0.self_attn.sinks", "no place"),
        ("model.vision_tower.weight", "not one of the llama family"),
        ("", "not one of the llama family"),
    ],
)
def test_unknown_tensors_are_refused_by_name(name, message):
    with pytest.raises(ConvertError, match=message) as error:
        FAMILY.place(name, config_of())
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("variant", variants("llama"))
def test_expected_shapes_are_those_of_the_published_modules(variant):
    """Against numbers worked out from config.json alone."""
    hf, config = tiny_config("llama", variant), config_of(variant)
    dim = reference_llama.head_dim(hf)
    shapes = FAMILY.expected(config)
    layer = "language_model.model.layers.1."
    assert shapes[f"{layer}self_attn.q_proj.weight"] == (hf["num_attention_heads"] * dim, 64)
    assert shapes[f"{layer}self_attn.v_proj.weight"] == (hf["num_key_value_heads"] * dim, 64)
    assert shapes[f"{layer}self_attn.o_proj.weight"] == (64, hf["num_attention_heads"] * dim)
    if hf["model_type"] == "mixtral" or variant == "qwen3-moe-sums":
        count, wide = (4, 128) if hf["model_type"] == "mixtral" else (8, 64)
        assert shapes[f"{layer}mlp.gate.weight"] == (count, 64)
        assert shapes[f"{layer}mlp.switch_mlp.up_proj.weight"] == (count, wide, 64)
        assert shapes[f"{layer}mlp.switch_mlp.down_proj.weight"] == (count, 64, wide)
        assert f"{layer}mlp.up_proj.weight" not in shapes
    else:
        assert shapes[f"{layer}mlp.up_proj.weight"] == (128, 64)
        assert shapes[f"{layer}mlp.down_proj.weight"] == (64, 128)
        assert f"{layer}mlp.gate.weight" not in shapes
    normed = hf["model_type"] in ("qwen3", "qwen3_moe")
    assert shapes.get(f"{layer}self_attn.k_norm.weight") == ((dim,) if normed else None)
    bias = hf["model_type"] == "qwen2" or hf.get("attention_bias", False)
    assert (f"{layer}self_attn.k_proj.bias" in shapes) == bias


STACKS = "language_model.model.layers.2.mlp.switch_mlp."


@pytest.mark.parametrize(
    ("variant", "name", "tensor", "part"),
    [
        ("qwen3-moe", "mlp.experts.7.gate_proj.weight", "gate_proj.weight", RoutedPart(1, ("gate",), 7)),
        ("qwen3-moe", "mlp.experts.0.up_proj.weight", "up_proj.weight", RoutedPart(1, ("up",), 0)),
        ("qwen3-moe", "mlp.experts.0.down_proj.weight", "down_proj.weight", RoutedPart(1, ("down",), 0)),
        ("qwen3-moe", "mlp.experts.gate_up_proj", "gate_proj.weight", RoutedPart(1, ("gate", "up"))),
        ("qwen3-moe", "mlp.experts.down_proj", "down_proj.weight", RoutedPart(1, ("down",))),
        ("qwen3-moe", "mlp.switch_mlp.up_proj.weight", "up_proj.weight", RoutedPart(1, ("up",))),
        ("mixtral", "block_sparse_moe.experts.3.w1.weight", "gate_proj.weight", RoutedPart(2, ("gate",), 3)),
        ("mixtral", "block_sparse_moe.experts.3.w3.weight", "up_proj.weight", RoutedPart(2, ("up",), 3)),
        ("mixtral", "block_sparse_moe.experts.3.w2.weight", "down_proj.weight", RoutedPart(2, ("down",), 3)),
        ("mixtral", "block_sparse_moe.switch_mlp.down_proj.weight", "down_proj.weight", RoutedPart(2, ("down",))),
        ("mixtral", "mlp.experts.gate_up_proj", "gate_proj.weight", RoutedPart(2, ("gate", "up"))),
    ],
)
def test_where_routed_experts_go(variant, name, tensor, part):
    config = dataclasses.replace(config_of(variant), num_hidden_layers=4, layer_types=("full_attention",) * 4)
    place = FAMILY.place(f"model.layers.2.{name}", config)
    assert place == Placement(STACKS + tensor, "routed_expert", STACKS.removeprefix("language_model.") + tensor, part)


def test_routers_and_dense_layers_of_sparse_models():
    mixtral, qwen = config_of("mixtral"), config_of("qwen3-moe")
    gate = "language_model.model.layers.0.mlp.gate.weight"
    for name in ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight", gate):
        assert FAMILY.place(name, mixtral) == Placement(gate, "router", gate.removeprefix("language_model."))
    assert FAMILY.place("model.layers.1.mlp.up_proj.weight", qwen).role == "shared_expert"
    for name in (
        *("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate.weight"),
        *("model.layers.0.mlp.experts.8.up_proj.weight", "model.layers.0.mlp.experts.01.up_proj.weight"),
        *("model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.switch_mlp.up_proj.bias"),
        *("model.layers.0.mlp.experts.0.w4.weight", "model.layers.0.mlp.experts.up_proj"),
    ):
        with pytest.raises(ConvertError, match="no place"):
            FAMILY.place(name, qwen)


GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.bias": "model.layers.0.self_attn.k_proj.bias",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.attn_q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
    "blk.0.attn_k_norm.weight": "model.layers.0.self_attn.k_norm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


@pytest.mark.parametrize("architecture", FAMILY.gguf_architectures)
def test_gguf_names_agree_with_the_gguf_package(architecture):
    import gguf

    kind = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, 2)
    for stored, checkpoint in GGUF_NAMES.items():
        assert FAMILY.gguf_name(stored, config_of()) == checkpoint
        known = names.get_name(checkpoint.rpartition(".")[0])
        # Only architectures with query and key norms have names for them.
        assert known == stored.rpartition(".")[0] or (known is None and "_norm" in stored and architecture != "qwen3")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "foo.weight", "attn_q.weight"])
def test_unknown_gguf_names_are_refused(name):
    with pytest.raises(ConvertError, match="is not one of the llama family"):
        FAMILY.gguf_name(name, config_of())


def test_gguf_rope_factors_are_refused():
    with pytest.raises(ConvertError, match=r"rope_freqs\.weight holds Llama 3's rotary scaling"):
        FAMILY.gguf_name("rope_freqs.weight", config_of())


@pytest.mark.parametrize("variant", ["llama", "llama-three-heads", "llama-one-head"])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_gguf_rows_undo_the_interleaving(variant, projection):
    """The GGUF converter's own permutation, as its authors write it, applied to rows that name themselves."""
    hf, config = tiny_config("llama", variant), config_of(variant)
    heads = hf["num_attention_heads" if projection == "q_proj" else "num_key_value_heads"]
    rows = np.arange(heads * config.head_dim)
    stored = rows.reshape(heads, 2, config.head_dim // 2).swapaxes(1, 2).reshape(-1)
    order = FAMILY.gguf_rows(f"model.layers.0.self_attn.{projection}.weight", config)
    np.testing.assert_array_equal(stored[order], rows)
    assert not np.array_equal(order, rows)
    np.testing.assert_array_equal(order, FAMILY.gguf_rows(f"model.layers.0.self_attn.{projection}.bias", config))


def test_which_gguf_tensors_keep_their_rows():
    assert FAMILY.gguf_rows("model.layers.0.self_attn.v_proj.weight", config_of()) is None
    assert FAMILY.gguf_rows("model.norm.weight", config_of()) is None
    for qwen in ("qwen2", "qwen3"):
        assert FAMILY.gguf_rows("model.layers.0.self_attn.q_proj.weight", config_of(qwen)) is None


class TestGgufMetadata:
    def metadata(self, architecture="llama", **fields):
        values = {
            "block_count": 2,
            "context_length": 512,
            "embedding_length": 64,
            "feed_forward_length": 128,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
            "rope.freq_base": float(np.float32(10000.0)),
            "rope.dimension_count": 16,
            "vocab_size": 320,
            **fields,
        }
        named = {f"{architecture}.{k}": v for k, v in values.items() if v is not None}
        return {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"] * 320, **named}

    def config(self, *args, **fields):
        return FAMILY.config_from_hf(FAMILY.hf_config_from_gguf(self.metadata(*args, **fields)))

    def test_the_same_model_as_config_json(self):
        assert self.config() == config_of(tie_word_embeddings=None)
        assert self.config(vocab_size=None) == self.config()
        qwen3 = config_of("qwen3", tie_word_embeddings=None)
        fields = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": None}
        eps = {"attention.layer_norm_rms_epsilon": float(np.float32(1e-6)), "rope.freq_base": 1e6}
        assert self.config("qwen3", **fields, **eps) == qwen3

    def test_heads_without_a_stated_size_share_the_width(self):
        fields = {"attention.head_count": 1, "attention.head_count_kv": None, "rope.dimension_count": None}
        assert self.config(**fields) == config_of("llama-one-head", tie_word_embeddings=None)

    def test_numbers_kept_in_32_bits_are_read_as_they_were_written(self):
        assert self.config().rms_norm_eps == 1e-5

    def test_scalings(self):
        linear = self.config(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
        assert linear == config_of("llama-linear", tie_word_embeddings=None)
        assert self.config(**{"rope.scale_linear": 4.0}) == linear
        yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
        assert self.config(**yarn) == config_of("llama-yarn", tie_word_embeddings=None)
        assert self.config(**{"rope.scaling.type": "none"}) == self.config()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"expert_count": 8}, "expert_count is 8"),
            ({"rope.dimension_count": 8}, "rope.dimension_count is 8"),
            ({"attention.key_length": 16, "attention.value_length": 32}, "value_length is 32"),
            ({"attention.head_count_kv": [2, 2]}, "head_count_kv is"),
            ({"attention.sliding_window": 128}, "sliding_window is 128"),
            ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rope.scaling.type is 'longrope'"),
            ({"rope.scaling.type": "linear"}, "factor"),
            ({"logit_scale": 0.5}, r"logit_scale is 0\.5"),
            ({"block_count": None}, "block_count is missing"),
        ],
    )
    def test_what_is_not_understood_is_refused_by_name(self, fields, message):
        with pytest.raises(ConvertError, match=message):
            self.config(**fields)

    def test_no_vocabulary_anywhere(self):
        metadata = self.metadata(vocab_size=None)
        del metadata["tokenizer.ggml.tokens"]
        with pytest.raises(ConvertError, match="vocab_size is missing"):
            FAMILY.config_from_hf(FAMILY.hf_config_from_gguf(metadata))


def test_skipping_the_row_order_would_show():
    """The reference with interleaved q and k rows gives other logits, so tests that convert a GGUF catch it."""
    hf, weights = tiny_config("llama"), tiny_weights(tiny_config("llama"))
    right = reference_llama.logits(hf, weights, PROMPT[:9])
    for layer in range(2):
        for projection in ("q_proj", "k_proj"):
            name = f"model.layers.{layer}.self_attn.{projection}.weight"
            weights[name] = weights[name][np.argsort(FAMILY.gguf_rows(name, config_of()))]
    assert np.abs(reference_llama.logits(hf, weights, PROMPT[:9]) - right).max() > 0.1 * right.std()
