"""Spark 2.5's model: what a random model hardly shows, or shows only beyond what the invariants run."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.families import reference_spark
from tests.families.models import build, config_of, model_of, weights_of
from tests.families.oracles import PROMPT, assert_close
from turbospark_mlx.families.layers import Positions, RMSNorm, RoPE, gelu_erf
from turbospark_mlx.families.spark.config import FULL, SLIDING
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import WINDOW, tiny_config, variants


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.slow] * (v != "spark")) for v in variants("spark")]
)
def test_far_positions(variant):
    """Close, at the end of 400 tokens, in chunks of 7 and 64 and behind rollbacks across the window."""
    prompt = (PROMPT * 7)[:400]
    oracle = reference_spark.logits(tiny_config("spark", variant), weights_of("spark", variant), prompt)
    model = model_of("spark", variant)
    assert_close(model(mx.array([prompt]))[0, -40:], oracle[-40:], variant)
    for chunk in (7, 64):
        with Runner(model, prefill_chunk=chunk) as runner:
            runner.prefill(prompt[:-30])
            mark = runner.mark()
            for other in (prompt[:3], prompt[:20]):
                runner.prefill(other)
                runner.rollback(mark)
            assert_close(runner.prefill(prompt[-30:-10]), oracle[-11], f"{variant}, by {chunk}")
            for position in range(390, 400):
                assert_close(runner.decode(prompt[position]), oracle[position], f"{variant}, {position}")


def turned(config, kind, position):
    """What a head of 1, 2, 3, ... is at ``position``, by our rotation and by a table's kernel."""
    head = np.arange(1, config.head_dim + 1, dtype=np.float32)
    rope = RoPE(config.frequencies(kind))
    return head, np.array(rope(mx.array(head.reshape(1, 1, 1, -1)), position))[0, 0, 0], rope.table(position, 1)[0]


@pytest.mark.parametrize("position", [1, 1000])
def test_each_kind_of_layer_turns_its_own_way(position):
    """Full layers turn 8 of 32 dimensions by base 5e6, sliding ones all 32 by base 1e4; pairs are halves of what turns,
    and the rest stays exactly."""
    config = config_of("spark", "spark")
    for kind, width, base in ((FULL, 8, 5e6), (SLIDING, 32, 1e4)):
        head, found, table = turned(config, kind, position)
        assert table.shape == (width // 2, 2)
        for pair in range(width // 2):
            angle = position * base ** (-2 * pair / width)
            a, b = head[pair], head[pair + width // 2]
            expected = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
            np.testing.assert_allclose(table[pair], [np.cos(angle), np.sin(angle)], atol=1e-7)
            np.testing.assert_allclose(found[[pair, pair + width // 2]], expected, atol=5e-3)
        np.testing.assert_array_equal(found[width:], head[width:])


def test_layers_have_the_rotation_and_the_window_of_their_kind():
    model, config = model_of("spark", "spark"), config_of("spark", "spark")
    for number, layer in enumerate(model.layers):
        kind = config.layer_types[number]
        np.testing.assert_array_equal(layer.self_attn.rope.table(7, 1), RoPE(config.frequencies(kind)).table(7, 1))
        assert layer.self_attn.window == (WINDOW if kind == SLIDING else None)
    assert [type(state).__name__ for state in model.make_cache()] == ["RingKV"] * 3 + ["LinearKV"]


def test_the_activation_is_the_error_function_and_not_its_approximation():
    """At 2 the two differ by 5e-4: 2 Phi(2) = 1.9544997."""
    assert abs(float(gelu_erf(mx.array(2.0))) - 1.9544997) < 1e-6
    assert abs(float(gelu_erf(mx.array(-0.75))) + 0.75 * 0.22662735) < 1e-6


@pytest.mark.parametrize("fused", [True, False])
def test_a_closed_gate_silences_its_head_and_an_open_one_changes_nothing(fused):
    """Gates read the layer's normalised input. Rows of +-60 times a positive feature are sigmoids of 1 and 0."""
    config = tiny_config("spark", "spark-biases")
    model = build(config, fused=fused)
    attention = model.layers[0].self_attn
    size, gates = attention.head_dim, np.array([1, 0, 1, 1, 0, 1])
    attention.g_proj.weight = mx.zeros((6, 64))
    attention.g_proj.bias = mx.array(np.where(gates, 60.0, -60.0).astype(np.float32))
    x = mx.random.normal((1, 5, 64), key=mx.random.key(0))
    weights = {name: np.array(array, np.float64) for name, array in weights_of("spark", "spark-biases").items()}
    h = reference_spark.rms(np.array(x[0], np.float64), weights["model.layers.0.input_layernorm.weight"], 1e-6)
    path = "model.layers.0.self_attn"
    rows = (h @ weights[f"{path}.q_k_v_proj.weight"].T + weights[f"{path}.q_k_v_proj.bias"]).reshape(5, 12, size)
    q, k, v = rows[:, :6], rows[:, 6:9], rows[:, 9:]
    block = config["rope_parameters"][FULL]
    y = reference_spark.attend(reference_spark.rotate(block, q), reference_spark.rotate(block, k), v, None)
    y = (y * gates[:, None]).reshape(5, -1) @ weights[f"{path}.o_proj.weight"].T + weights[f"{path}.o_proj.bias"]
    found = attention(x, Positions(0, 5), norm=model.layers[0].input_layernorm, residual=x)
    assert_close(found[0], np.array(x[0]) + y)


@pytest.mark.parametrize("fused", [True, False])
def test_every_norm_has_the_configured_epsilon(fused):
    config = tiny_config("spark", "spark") | {"rms_norm_eps": 0.3}
    model = build(config, fused=fused)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm | nn.RMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert {norm.eps for norm in norms} == {0.3}
    weights = weights_of("spark", "spark")
    assert_close(model(mx.array([PROMPT[:20]]))[0], reference_spark.logits(config, weights, PROMPT[:20]))


@pytest.mark.parametrize("fused", [True, False])
def test_the_residual_stream_stays_in_float32(fused):
    """With all else in half precision. What a layer adds to a stream of 10000 is below half of bfloat16's step there,
    and is not lost; what matrices see is in the dtype of activations, and so are caches and logits."""
    model = build(tiny_config("spark", "spark"), fused=fused, dtype=mx.bfloat16)
    model.set_dtype(mx.bfloat16)
    x = model.model.embed_tokens(mx.array([PROMPT[:5]]))
    assert x.dtype == (mx.float32 if fused else mx.bfloat16)
    stream = x.astype(mx.float32) + 10000.0
    after = model.layers[0](stream)
    assert after.dtype == mx.float32
    added = np.array(after - stream)
    assert 0 < np.abs(added).max() < 32
    exact = model_of("spark", "spark").layers[0](stream) - stream
    assert np.abs(added - np.array(exact)).max() < 0.05 * np.abs(np.array(exact)).max()
    assert model.layers[0].input_layernorm(stream).dtype == mx.bfloat16
    assert model.hidden(mx.array([PROMPT[:5]])).dtype == mx.bfloat16
    cache = model.make_cache()
    logits = model(mx.array([PROMPT[:20]]), cache=cache)
    assert cache[0].state[0].dtype == mx.bfloat16
    assert logits.dtype == mx.bfloat16
