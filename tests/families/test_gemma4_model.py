"""Gemma 4's names, and what short random prompts hardly show of the model."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.families import reference_gemma4
from tests.families.models import build, config_of, model_of, weights_of
from tests.families.oracles import FAMILIES, PROMPT, assert_close
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.families.gemma4 import FAMILY
from turbospark_mlx.families.layers import RMSNorm, RoPE
from turbospark_mlx.protocols import Dropped, Placement, RoutedPart
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, variants

STACKS = "language_model.model.layers.2.experts.switch_glu."


def spellings(name):
    """The text model's, mlx-lm's, and the published one."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("variant", "name", "role"),
    [
        ("gemma4-moe", "model.embed_tokens.weight", "embedding"),
        ("gemma4-moe", "model.norm.weight", "vector"),
        ("gemma4-moe", "model.layers.0.self_attn.v_proj.weight", "attention"),
        ("gemma4-moe", "model.layers.1.mlp.down_proj.weight", "shared_expert"),
        ("gemma4-moe", "model.layers.1.router.proj.weight", "router"),
        ("gemma4-moe", "model.layers.1.router.scale", "vector"),
        ("gemma4-moe", "model.layers.1.router.per_expert_scale", "vector"),
        ("gemma4-moe", "model.layers.1.post_feedforward_layernorm_2.weight", "vector"),
        ("gemma4-moe", "model.layers.1.layer_scalar", "vector"),
        ("gemma4-small", "model.embed_tokens_per_layer.weight", "embedding"),
        ("gemma4-small", "model.per_layer_model_projection.weight", "shared_expert"),
        ("gemma4-small", "model.layers.6.per_layer_input_gate.weight", "shared_expert"),
    ],
)
def test_where_tensors_go(variant, name, role):
    for spelling in spellings(name):
        assert FAMILY.place(spelling, config_of("gemma4", variant)) == Placement(f"language_model.{name}", role, name)


@pytest.mark.parametrize(
    ("name", "tensor", "part"),
    [
        ("experts.gate_up_proj", "gate_proj.weight", RoutedPart(2, ("gate", "up"))),
        ("experts.down_proj", "down_proj.weight", RoutedPart(2, ("down",))),
        ("experts.switch_glu.up_proj.weight", "up_proj.weight", RoutedPart(2, ("up",))),
    ],
)
def test_where_routed_experts_go(name, tensor, part):
    stack = STACKS + tensor
    for spelling in spellings(f"model.layers.2.{name}"):
        place = FAMILY.place(spelling, config_of("gemma4", "gemma4-moe"))
        assert place == Placement(stack, "routed_expert", stack.removeprefix("language_model."), part)


def test_what_is_left_out():
    small, tied = config_of("gemma4", "gemma4-small"), config_of("gemma4", "gemma4-moe")
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        for layer, source in ((3, 1), (5, 2)):
            for spelling in spellings(f"model.layers.{layer}.self_attn.{name}"):
                reason = f"layer {layer} reads the keys and values of layer {source}"
                assert FAMILY.place(spelling, small) == Dropped(reason)
    for name in ("vision_tower.encoder.layers.0.mlp.up_proj.weight", "audio_tower.x", "embed_vision.y.weight"):
        for spelling in (name, f"model.{name}"):
            assert isinstance(FAMILY.place(spelling, tied), Dropped)
    assert isinstance(FAMILY.place("lm_head.weight", tied), Dropped)
    assert FAMILY.place("language_model.lm_head.weight", config_of("gemma4", "gemma4-untied")).role == "head"


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.1.self_attn.v_proj.weight", "model.layers.0.experts.down_proj.bias", "model.altup.weight"),
        *("model.layers.4.mlp.up_proj.weight", "model.layers.0.per_layer_projection.weight", "vision.tower"),
        *("model.layers.0.self_attn.q_proj.bias", "model.embed_tokens_per_layer.weight"),
    ],
)
def test_unknown_tensors_are_refused_by_name(name):
    with pytest.raises(ConvertError) as error:
        FAMILY.place(name, config_of("gemma4", "gemma4-moe"))
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("variant", variants("gemma4"))
def test_far_positions(variant):
    """Close, at the end of 400 tokens."""
    prompt = (PROMPT * 7)[:400]
    oracle = reference_gemma4.logits(tiny_config("gemma4", variant), weights_of("gemma4", variant), prompt)
    model = model_of("gemma4", variant)
    assert_close(model(mx.array([prompt]))[0, -40:], oracle[-40:], variant)
    with Runner(model, prefill_chunk=64) as runner:
        runner.prefill(prompt[:-1])
        assert_close(runner.decode(prompt[-1]), oracle[-1], variant)


def test_pairs_that_do_not_turn_stay_as_they_are():
    """Exactly, at any position; the others keep their length."""
    config = config_of("gemma4", "gemma4-moe")
    turning = config.frequencies("full_attention")
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 32)).astype(np.float32)
    y = np.array(RoPE(turning)(mx.array(x), 100000))
    assert (turning[:4] > 0).all()
    assert not turning[4:].any()
    for half in (slice(4, 16), slice(20, 32)):
        np.testing.assert_array_equal(y[..., half], x[..., half])
    assert np.abs(y[..., :4] - x[..., :4]).max() > 0.1


@pytest.mark.parametrize("fused", [True, False])
def test_every_norm_has_the_configured_epsilon(fused):
    """Also those without a weight: values, and what the router sees."""
    config = tiny_config("gemma4", "gemma4-moe")
    model = build(config, fused=fused)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm | nn.RMSNorm)]
    assert len(norms) == 4 * 9 + 1
    assert {norm.eps for norm in norms} == {1e-6}
    weights = dict(weights_of("gemma4", "gemma4-moe"))
    tokens = mx.array([PROMPT[:20]])
    config["text_config"]["rms_norm_eps"] = 0.3
    assert_close(build(config, fused=fused)(tokens)[0], reference_gemma4.logits(config, weights, PROMPT[:20]))


NORMS_AND_ROUTER = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "router",
)


class Wrapped(nn.Module):
    """Does what another module does, and remembers with what."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def __call__(self, x):
        self.seen.append(x.shape)
        return self.inner(x)


@pytest.mark.parametrize("name", NORMS_AND_ROUTER)
def test_a_module_of_another_kind_is_called(name):
    """Norms that meet are one operation, but not one that passes by what somebody put in their place."""
    tokens = mx.array([PROMPT[:20]])
    model = build(tiny_config("gemma4", "gemma4-moe"))
    expected = model(tokens)[0]
    layer = model.layers[1]
    layer[name] = Wrapped(layer[name])
    assert_close(model(tokens)[0], expected)
    assert [np.prod(shape) for shape in layer[name].seen] == [20 * 64]


@pytest.mark.parametrize("name", NORMS_AND_ROUTER)
def test_a_norm_may_have_an_epsilon_of_its_own(name):
    tokens = mx.array([PROMPT[:20]])
    model, plain = (build(tiny_config("gemma4", "gemma4-moe"), fused=fused) for fused in (True, False))
    before = np.array(model(tokens)[0])
    for each in (model, plain):
        each.layers[1][name].eps = 0.3
    assert_close(model(tokens)[0], plain(tokens)[0])
    assert np.abs(np.array(model(tokens)[0]) - before).max() > 1e-3


def test_logits_are_capped():
    """Large ones come near the cap, differ from one another, and never exceed it."""
    model = model_of("gemma4", "gemma4-dense")
    logits = np.array(model.head(100 * model.hidden(mx.array([PROMPT[:9]]))))
    assert 29 < np.abs(logits).max() <= 30


def test_ids_are_needed_where_every_layer_has_an_input():
    model = model_of("gemma4", "gemma4-small")
    embeddings = model.model.embed_tokens(mx.array([PROMPT[:3]]))
    with pytest.raises(OptionError, match="Give tokens beside them"):
        model(None, input_embeddings=embeddings)


def test_only_layers_with_keys_of_their_own_have_a_state():
    model = model_of("gemma4", "gemma4-small")
    assert [type(state).__name__ for state in model.make_cache()] == ["RingKV", "LinearKV", "RingKV"]
    assert len(model.layers) == 7


def test_a_router_weights_by_its_experts_scales():
    """Weights of chosen experts do not add up to 1; the largest logits are chosen whatever the scales are."""
    model = build(tiny_config("gemma4", "gemma4-moe"))
    router = model.layers[0].router
    x = mx.random.normal((5, 64), key=mx.random.key(0))
    indices, weights = router(x)
    router.per_expert_scale = 2 * router.per_expert_scale
    again, doubled = router(x)
    assert again.tolist() == indices.tolist()
    np.testing.assert_allclose(doubled, 2 * weights, rtol=1e-6)
    assert np.abs(np.array(weights.sum(axis=-1)) - 1).max() > 1e-2
    scaled, _ = router(1000 * x)
    assert scaled.tolist() == indices.tolist()


@pytest.mark.parametrize("variant", variants("gemma4"))
def test_the_tensor_without_effect_is_the_oracles(variant):
    config = config_of("gemma4", variant)
    names = {FAMILY.place(name, config).checkpoint_name for name in FAMILY.unused(config)}
    assert names == FAMILIES["gemma4"].cancelled(tiny_config("gemma4", variant))
    assert FAMILY.unused(config).keys() <= FAMILY.expected(config).keys()


def test_an_undecided_head():
    config = dataclasses.replace(config_of("gemma4", "gemma4-moe"), tie_word_embeddings=None)
    with pytest.raises(ConvertError, match="tie_word_embeddings is not decided"):
        FAMILY.expected(config)
