"""Muse Glimmer's names, and what short random prompts hardly show of the model."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.families import reference_muse
from tests.families.models import build, config_of, model_of, weights_of
from tests.families.oracles import PROMPT, assert_close, assert_exact, mlx_lm_model
from turbospark_mlx.cache import LinearKV, RingKV
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families.layers import PlainRMSNorm, RMSNorm
from turbospark_mlx.families.muse import FAMILY
from turbospark_mlx.protocols import Dropped, Placement
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, variants


def spellings(name):
    """The text model's, mlx's, and the published one."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "vector"),
        ("model.layers.0.self_attn.gate_proj.weight", "attention"),
        ("model.layers.3.self_attn.v_proj.weight", "attention"),
        ("model.layers.1.mlp.gate_proj.weight", "shared_expert"),
        ("model.layers.2.post_feedforward_layernorm.weight", "vector"),
    ],
)
def test_where_tensors_go(name, role):
    for spelling in spellings(name):
        assert FAMILY.place(spelling, config_of("muse", "muse-glimmer")) == Placement(
            f"language_model.{name}", role, name
        )


def test_what_is_left_out():
    config, tied = config_of("muse", "muse-glimmer"), config_of("muse", "muse-glimmer-tied")
    towers = (
        "vision_tower.layers.0.attn.q_proj.weight",
        "vision_tower.patch_embedder.patch_embedding.weight",
        "vision_adapter.fc1.weight",
        "vision_projection.weight",
    )
    for name in towers:
        for spelling in (name, f"model.{name}"):
            assert FAMILY.place(spelling, config) == Dropped("of the tower for images and video; text alone is run")
    assert isinstance(FAMILY.place("model.layers.0.self_attn.rotary_emb.inv_freq", config), Dropped)
    assert isinstance(FAMILY.place("lm_head.weight", tied), Dropped)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up"),
        *("model.layers.4.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight", "vision.tower", "model.norm.bias"),
    ],
)
def test_unknown_tensors_are_refused_by_name(name):
    with pytest.raises(ConvertError) as error:
        FAMILY.place(name, config_of("muse", "muse-glimmer"))
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("variant", variants("muse"))
def test_far_positions(variant):
    """Close, at the end of 200 tokens. (Scores are some times as large as in other families, and so are the rounding
    errors of MLX's angles, which grow with the position.)"""
    prompt = (PROMPT * 4)[:200]
    oracle = reference_muse.logits(tiny_config("muse", variant), weights_of("muse", variant), prompt)
    model = model_of("muse", variant)
    assert_close(model(mx.array([prompt]))[0, -40:], oracle[-40:], variant)
    with Runner(model, prefill_chunk=64) as runner:
        runner.prefill(prompt[:-1])
        assert_close(runner.decode(prompt[-1]), oracle[-1], variant)


@pytest.mark.parametrize("variant", variants("muse"))
def test_mlx_lm_in_chunks_over_its_own_caches(variant):
    """Close: prefilled in threes, both decode past the window."""
    peer = mlx_lm_model("muse_glimmer", tiny_config("muse", variant), weights_of("muse", variant))
    theirs, model = peer.make_cache(), model_of("muse", variant)
    ours = model.make_cache()
    for start in (*range(0, 30, 3), *range(30, 40)):
        tokens = mx.array([PROMPT[start : start + (3 if start < 30 else 1)]])
        assert_close(model(tokens, cache=ours), peer(tokens, cache=theirs), f"{variant}, from {start}")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["rms_norm_eps", "post_norm_eps"])
def test_every_norm_has_its_own_epsilon(fused, name):
    """Close, with an epsilon that shows: also in the norms without weights."""
    config = tiny_config("muse")
    config["text_config"][name] = 0.3
    model = build(config, fused=fused)
    oracle = reference_muse.logits(config, weights_of("muse", "muse-glimmer"), PROMPT[:20])
    assert_close(model(mx.array([PROMPT[:20]]))[0], oracle, name)
    found = [norm.eps for norm in model.modules() if isinstance(norm, RMSNorm | nn.RMSNorm)]
    assert found.count(0.3) == (9 if name == "rms_norm_eps" else 8)
    assert len(found) == 17


def test_a_small_output_of_a_block_keeps_its_size():
    """Close. With rms_norm_eps in its place, the norm after a block would make such an output smaller."""
    config = tiny_config("muse")
    weights = dict(weights_of("muse", "muse-glimmer"))
    model = build(config)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        for number in range(4):
            path = f"model.layers.{number}.{name}.weight"
            weights[path] = weights[path] * 1e-4
            module = model.layers[number]
            for part in name.split("."):
                module = module[part]
            np.array(module.weight, copy=False)[...] = weights[path]
    oracle = reference_muse.logits(config, weights, PROMPT[:12])
    wrong = config | {"text_config": config["text_config"] | {"post_norm_eps": 1e-5}}
    assert np.abs(reference_muse.logits(wrong, weights, PROMPT[:12]) - oracle).max() > 0.01 * oracle.std()
    assert_close(model(mx.array([PROMPT[:12]]))[0], oracle)


def test_centered_weights_are_not_rounded_with_the_1():
    """In bfloat16, 1 + 0.003 is 1, so that every value would be 0.3 % too small. Rounding errors cancel out."""
    norm = PlainRMSNorm(64, 1e-5, None, centered=True)
    norm.weight = mx.full((64,), 0.003, mx.bfloat16)
    x = mx.random.normal((3, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    found, wide = norm(x), np.array(x.astype(mx.float32)).astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (1 + float(norm.weight[0]))
    assert found.dtype == mx.bfloat16
    assert abs((np.array(found.astype(mx.float32)) / exact - 1).mean()) < 0.0005


def test_full_layers_know_no_positions():
    """Exact: with full layers alone, what a token leaves in the cache is the same wherever it stands."""
    config = tiny_config("muse")
    config["text_config"] |= {"layer_types": ["full_attention"] * 4, "layer_rope_theta": [0] * 4}
    model, turning = build(config), build(tiny_config("muse"))
    for each, same in ((model, True), (turning, False)):
        cache = each.make_cache()
        each(mx.array([[7, 9, 7]]), cache=cache)
        keys = cache[0].state[0][0]
        assert bool(mx.array_equal(keys[:, :, 0], keys[:, :, 2])) == same


def test_a_closed_gate_leaves_a_layer_without_attention():
    """Gate rows far below 0 close the gate for a positive input."""
    model = build(tiny_config("muse"))
    attention, x = model.layers[0].self_attn, mx.ones((1, 5, 64))
    positions = type("Positions", (), {"offset": 0, "rotation": lambda self, rope: mx.array(rope.table(0, 5))})()
    assert mx.abs(attention(x, positions)).max() > 1e-2
    attention.gate_proj.weight = mx.full((128, 64), -10.0)
    assert mx.abs(attention(x, positions)).max() < 1e-30


def test_logits_are_multiplied_and_then_capped():
    """Large ones come near the cap, differ from one another, and never exceed it."""
    model = model_of("muse", "muse-glimmer")
    hidden = model.hidden(mx.array([PROMPT[:9]]))
    logits = np.array(model.head(100 * hidden))
    assert 19 < np.abs(logits).max() <= 20
    product = np.array(model.lm_head(hidden)).astype(np.float64)
    np.testing.assert_allclose(model.head(hidden), 20 * np.tanh(product * 26**-0.5 / 20), rtol=1e-5, atol=1e-5)


def test_what_a_layer_keeps():
    model = model_of("muse", "muse-glimmer-three-heads")
    assert [type(state) for state in model.make_cache()] == [LinearKV, RingKV, RingKV]
    assert [layer.self_attn.window for layer in model.layers] == [None, 8, 8]


def test_embeddings_of_any_size_are_one_embedding():
    """Close: they are normalised, so that a factor changes little but what epsilon is to them."""
    model, tokens = model_of("muse", "muse-glimmer"), mx.array([PROMPT[:9]])
    embeddings = model.model.embed_tokens(tokens) * 1000
    larger = model(None, input_embeddings=1000 * embeddings)
    assert_close(model(None, input_embeddings=embeddings), larger)
    assert_exact(model(None, input_embeddings=embeddings), model(tokens, input_embeddings=embeddings))


def test_an_undecided_head():
    config = dataclasses.replace(config_of("muse", "muse-glimmer"), tie_word_embeddings=None)
    with pytest.raises(ConvertError, match="tie_word_embeddings is not decided"):
        FAMILY.expected(config)
