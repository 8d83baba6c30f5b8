"""What short random prompts hardly show: far positions, and the epsilon of the norms."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.families import reference_llama
from tests.families.models import build, model_of, weights_of
from tests.families.oracles import PROMPT, assert_close
from turbospark_mlx.families.layers import RMSNorm, RoPE
from turbospark_mlx.families.rope import frequencies
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, variants

ROPES = [v for v in variants("llama") if tiny_config("llama", v).get("rope_scaling")]


@pytest.mark.parametrize("variant", ["llama", "mistral-mixed", "qwen3", *ROPES])
def test_far_positions(variant):
    """Close, at the end of 400 tokens, where slow pairs have turned too."""
    prompt = (PROMPT * 7)[:400]
    oracle = reference_llama.logits(tiny_config("llama", variant), weights_of("llama", variant), prompt)
    model = model_of("llama", variant)
    assert_close(model(mx.array([prompt]))[0, -40:], oracle[-40:], variant)
    with Runner(model, prefill_chunk=64) as runner:
        runner.prefill(prompt[:-1])
        assert_close(runner.decode(prompt[-1]), oracle[-1], variant)


@pytest.mark.parametrize("variant", ROPES)
def test_every_scaling_makes_another_model(variant):
    """So that a scaling that is parsed and then forgotten cannot pass."""
    plain = tiny_config("llama", variant) | {"rope_scaling": None}
    oracle = reference_llama.logits(tiny_config("llama", variant), weights_of("llama", variant), PROMPT)
    other = reference_llama.logits(plain, weights_of("llama", variant), PROMPT)
    assert np.abs(oracle[8] - other[8]).max() > 1e-2 * oracle.std()


@pytest.mark.parametrize("offset", [0, 1, 127, 4096, 100000])
def test_rotation_by_hand(offset):
    """Pair i of a head turns by position times frequency i; lengths are kept."""
    turning = frequencies(8, 10000.0, None, 512)
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 8)).astype(np.float32)
    y = np.array(RoPE(turning)(mx.array(x), offset), dtype=np.float64)
    angle = (offset + np.arange(3))[:, None] * turning
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(y[..., :4] + 1j * y[..., 4:], turned, atol=1e-6 + offset * 3e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_every_norm_has_the_configured_epsilon(fused):
    model = build(tiny_config("llama", "qwen3"), fused=fused)
    norms = [m for m in model.modules() if isinstance(m, RMSNorm | nn.RMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert {norm.eps for norm in norms} == {model.args.rms_norm_eps} == {1e-6}
    small = mx.full((1, 64), 1e-3)
    norm = model.model.norm
    np.testing.assert_allclose(np.array(norm(small)[0]), np.array(norm["weight"]) / np.sqrt(2), rtol=1e-5)
