"""DeepSeek's names, routing, latent attention and cache: what short random prompts hardly show of the model."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families import reference_deepseek2
from tests.families.models import build, config_of, model_of, weights_of
from tests.families.oracles import PROMPT, assert_close, assert_exact
from turbospark_mlx.cache import LatentKV
from turbospark_mlx.custom_kernels import backends, router_topk_select
from turbospark_mlx.errors import ContextError, ConvertError
from turbospark_mlx.families.deepseek2 import FAMILY
from turbospark_mlx.families.deepseek2.model import per_head, routing
from turbospark_mlx.protocols import Dropped, Placement, RoutedPart
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, variants

LOGITS = [2, -1, 0.5, 0.3, -2, 1.5, 1, 0.9]


def config(variant, **fields):
    return FAMILY.config_from_hf(tiny_config("deepseek2", variant) | fields)


def route(logits, bias, config):
    return router_topk_select(logits, **routing(config), choice_bias=bias, backend=backends.select("reference"))


class TestNames:
    @pytest.mark.parametrize(
        ("name", "installed", "role"),
        [
            ("model.embed_tokens.weight", None, "embedding"),
            ("lm_head.weight", None, "head"),
            ("model.layers.1.self_attn.q_b_proj.weight", None, "attention"),
            ("model.layers.1.self_attn.q_a_layernorm.weight", None, "vector"),
            (
                "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
                "model.layers.1.self_attn.kv_a_proj.weight",
                "attention",
            ),
            (
                "model.layers.1.self_attn.kv_a_layernorm.weight",
                "model.layers.1.self_attn.kv_a_norm.weight",
                "vector",
            ),
            (
                "model.layers.2.mlp.shared_experts.up_proj.weight",
                "model.layers.2.mlp.shared_expert.up_proj.weight",
                "shared_expert",
            ),
            ("model.layers.0.mlp.up_proj.weight", None, "shared_expert"),
            ("model.layers.1.mlp.gate.weight", None, "router"),
            ("model.layers.1.mlp.gate.e_score_correction_bias", None, "vector"),
        ],
    )
    def test_where_tensors_go(self, name, installed, role):
        expected = Placement(f"language_model.{installed or name}", role, name)
        for spelling in (name, expected.name):
            assert FAMILY.place(spelling, config("deepseek-v3")) == expected

    @pytest.mark.parametrize(
        ("name", "tensor", "part"),
        [
            ("experts.5.gate_proj.weight", "gate", RoutedPart(1, ("gate",), 5)),
            ("experts.gate_up_proj", "gate", RoutedPart(1, ("gate", "up"))),
            ("switch_mlp.down_proj.weight", "down", RoutedPart(1, ("down",))),
        ],
    )
    def test_where_routed_experts_go(self, name, tensor, part):
        """Positions count from the first layer that has experts."""
        stack = f"model.layers.2.mlp.switch_mlp.{tensor}_proj.weight"
        expected = Placement(f"language_model.{stack}", "routed_expert", stack, part)
        assert FAMILY.place(f"model.layers.2.mlp.{name}", config("deepseek-v3")) == expected

    def test_what_is_left_out(self):
        more = config("deepseek-v3", num_nextn_predict_layers=1)
        for name in ("eh_proj.weight", "self_attn.q_a_proj.weight", "mlp.experts.3.up_proj.weight"):
            assert isinstance(FAMILY.place(f"model.layers.3.{name}", more), Dropped)
            with pytest.raises(ConvertError, match="is of layer 3; the configuration has 3 layers"):
                FAMILY.place(f"model.layers.3.{name}", config("deepseek-v3"))
        assert isinstance(FAMILY.place("model.layers.0.self_attn.rotary_emb.inv_freq", more), Dropped)
        assert isinstance(FAMILY.place("lm_head.weight", config("deepseek-v3-halves")), Dropped)

    @pytest.mark.parametrize(
        "name",
        [
            *("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight", "model.altup.weight"),
            *("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"),
            *("model.layers.1.mlp.experts.8.up_proj.weight", "model.layers.01.input_layernorm.weight"),
            *("model.layers.1.self_attn.kv_a_proj_with_mqa.bias", "model.layers.1.self_attn.indexer.wk.weight"),
        ],
    )
    def test_unknown_tensors_are_refused_by_name(self, name):
        with pytest.raises(ConvertError) as error:
            FAMILY.place(name, config("deepseek-v3"))
        assert repr(name) in str(error.value)


class TestRouting:
    """Vectors computed by hand from the papers' equations."""

    def test_biased_groups(self):
        bias = mx.array([-0.3, 0.1, 0, 0.2, 0.05, -0.1, 0.02, -0.02])
        indices, weights = route(mx.array([LOGITS]), bias, config("deepseek-v3"))
        assert indices.tolist() == [[3, 6, 7]]
        np.testing.assert_allclose(weights, [[0.7121951, 0.9063680, 0.8814368]], rtol=1e-6)

    def test_groups_without_a_bias(self):
        indices, weights = route(mx.array([LOGITS]), None, config("deepseek-v2"))
        assert indices.tolist() == [[0, 5, 1]]
        np.testing.assert_allclose(weights, [[5.7529173, 3.4893210, 0.2864209]], rtol=1e-6)

    def test_the_best_of_all(self):
        indices, weights = route(mx.array([LOGITS]), None, config("deepseek-v2-lite"))
        chances = np.exp(LOGITS) / np.exp(LOGITS).sum()
        assert indices.tolist() == [[0, 5, 6]]
        np.testing.assert_allclose(weights[0], chances[[0, 5, 6]], rtol=1e-6)

    def test_groups_that_were_not_chosen_stay_out_where_scores_are_negative(self):
        """A bias of -2 puts every score below zero; 0 would then be the best score of all."""
        for seed in range(20):
            logits = np.random.default_rng(seed).standard_normal((1, 8)).astype(np.float32)
            bias = np.full(8, -2.0)
            expected = reference_deepseek2.choose(
                tiny_config("deepseek2", "deepseek-v3"), logits[0].astype(float), bias
            )
            indices, weights = route(mx.array(logits), mx.array(bias), config("deepseek-v3"))
            assert indices[0].tolist() == [expert for expert, _ in expected]
            np.testing.assert_allclose(weights[0], [weight for _, weight in expected], rtol=1e-5)

    def test_of_equal_scores_the_lower_index_comes_first(self):
        for variant in ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"):
            bias = mx.zeros(8) if variant == "deepseek-v3" else None
            assert route(mx.zeros((1, 8)), bias, config(variant))[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("variant", variants("deepseek2"))
def test_far_positions(variant):
    """Close, at the end of 400 tokens."""
    prompt = (PROMPT * 7)[:400]
    oracle = reference_deepseek2.logits(tiny_config("deepseek2", variant), weights_of("deepseek2", variant), prompt)
    model = model_of("deepseek2", variant)
    assert_close(model(mx.array([prompt]))[0, -40:], oracle[-40:], variant)
    with Runner(model, prefill_chunk=64) as runner:
        runner.prefill(prompt[:-1])
        assert_close(runner.decode(prompt[-1]), oracle[-1], variant)


class Standing(nn.Module):
    """What an adapter does: it stands in for a module and applies it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variant", ["deepseek-v2", "deepseek-v3"])
def test_the_expanded_form_is_the_absorbed_one(variant, fused):
    """Close, also from a cache that the other form has filled: both keep the same rows."""
    absorbed = model_of("deepseek2", variant, fused=fused)
    expanded = build(tiny_config("deepseek2", variant), fused=fused)
    for layer in expanded.layers:
        layer.self_attn.kv_b_proj = Standing(layer.self_attn.kv_b_proj)
    tokens = mx.array([PROMPT[:20]])
    assert_close(expanded(tokens)[0], absorbed(tokens)[0], variant)
    cache = absorbed.make_cache()
    absorbed(tokens[:, :12], cache=cache)
    rest = [expanded(tokens[:, 12:19], cache=cache), expanded(tokens[:, 19:], cache=cache)]
    assert_close(mx.concatenate(rest, axis=1)[0], absorbed(tokens)[0, 12:], variant)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32), (3, 64)])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_products_with_rows_of_a_packed_matrix(bits, group_size, length, device):
    """Heads own interleaved rows; those of keys are contracted along rows, those of values along columns."""
    heads, nope, values, rank = 3, 5, 7, 128
    backend = replace(backends.select("reference"), device=device)
    rng = np.random.default_rng(bits)
    w = mx.array(rng.standard_normal((heads * (nope + values), rank)).astype(np.float32))
    linear = nn.QuantizedLinear(rank, w.shape[0], False, group_size, bits)
    linear.weight, linear.scales, linear.biases = mx.quantize(w, group_size=group_size, bits=bits)
    wide = mx.dequantize(linear.weight, linear.scales, linear.biases, group_size=group_size, bits=bits)
    each = np.array(wide, np.float64).reshape(heads, nope + values, rank)
    q, c = rng.standard_normal((2, heads, length, nope)), rng.standard_normal((2, heads, length, rank))
    absorbed = per_head(
        linear, heads, slice(None, nope), mx.array(q.astype(np.float32)), transpose=False, backend=backend
    )
    np.testing.assert_allclose(absorbed, np.einsum("bhln,hnr->bhlr", q, each[:, :nope]), atol=3e-5)
    found = per_head(linear, heads, slice(nope, None), mx.array(c.astype(np.float32)), transpose=True, backend=backend)
    np.testing.assert_allclose(found, np.einsum("bhlr,hvr->bhlv", c, each[:, nope:]), atol=1e-4)


def test_gpus_get_no_packed_product_of_some_rows(monkeypatch):
    """MLX has none on CUDA for what does not lie together, and is wrong there for few columns."""

    def product(*arrays, **options):
        raise AssertionError

    monkeypatch.setattr(mx, "quantized_matmul", product)
    linear = nn.QuantizedLinear(128, 16, False, 64, 4)
    gpu = replace(backends.select("reference"), device="gpu")
    assert per_head(linear, 2, slice(0, 5), mx.ones((1, 2, 1, 5)), transpose=False, backend=gpu).shape == (1, 2, 1, 128)
    assert per_head(linear, 2, slice(0, 5), mx.ones((1, 2, 1, 128)), transpose=True, backend=gpu).shape == (1, 2, 1, 5)


def test_norms_have_their_epsilons():
    """Those of latents have 1e-6 whatever config.json says."""
    hf = {**tiny_config("deepseek2", "deepseek-v3"), "rms_norm_eps": 0.3}
    oracle = reference_deepseek2.logits(hf, weights_of("deepseek2", "deepseek-v3"), PROMPT[:20])
    for fused in (True, False):
        assert_close(build(hf, fused=fused)(mx.array([PROMPT[:20]]))[0], oracle)


def test_a_cache_keeps_one_row_of_latent_and_turned_key():
    model = model_of("deepseek2", "deepseek-v3")
    cache = model.make_cache(max_length=9)
    model(mx.array([PROMPT[:9]]), cache=cache)
    for layer in cache:
        assert isinstance(layer, LatentKV)
        assert layer.state[0].shape == (1, 1, 1, 9, 64 + 8)
    with pytest.raises(ContextError, match="holds 9 tokens; 10 are wanted"):
        model(mx.array([[1]]), cache=cache)


def test_rows_of_two_widths():
    """A cache for other models' keys and values gives both back, each in its width; a held state never changes."""
    cache = LatentKV()
    assert cache.place(3, (2, 5, 10), mx.float32).shape == (1, 2, 5, 256, 10)
    cache.trim(3)
    keys, values = mx.random.normal((2, 5, 5, 4)), mx.random.normal((2, 5, 5, 6))
    k, v = cache.update_and_fetch(keys, values)
    assert_exact(k, keys)
    assert_exact(v, values)
    held = cache.state[0]
    before = np.array(held)
    cache.trim(2)
    k, v = cache.update_and_fetch(-keys[:, :, 3:], -values[:, :, 3:])
    assert_exact(k, mx.concatenate([keys[:, :, :3], -keys[:, :, 3:]], axis=2))
    assert_exact(v, mx.concatenate([values[:, :, :3], -values[:, :, 3:]], axis=2))
    assert_exact(held, before)


def test_gradients_reach_every_parameter_of_plain_modules():
    """All but the bias of the choice, which no gradient passes."""
    model = build(tiny_config("deepseek2", "deepseek-v3"), fused=False)
    tokens = mx.array([PROMPT])

    def loss(model):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    _, gradients = nn.value_and_grad(model, loss)(model)
    for name, gradient in tree_flatten(gradients):
        assert (float(mx.abs(gradient).max()) > 0) != name.endswith("e_score_correction_bias"), name


def test_every_layer_sees_everything():
    assert not any(config_of("deepseek2", "deepseek-v2-lite").slides(layer) for layer in range(3))
