"""What each family is compared with. Adding a family means adding one entry to ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.peers import mlx_lm_twin
from tests.families import (
    reference_deepseek2,
    reference_gemma4,
    reference_gpt_oss,
    reference_llama,
    reference_muse,
    reference_qwen,
    reference_qwen4,
    reference_spark,
)

PROMPT = np.random.default_rng(11).integers(0, 320, 65).tolist()


@dataclass(frozen=True)
class Oracle:
    """``reference(config, weights, ids)`` gives float64 logits. ``mlx_lm`` maps the variants that mlx-lm computes
    rightly to its module. ``cancelled(config)`` names the parameters that an exact forward pass does not depend on.
    ``moved`` is a number of tokens with which it depends on all others."""

    reference: Callable
    mlx_lm: dict[str, str]
    cancelled: Callable = lambda config: frozenset()
    moved: int = 12


FAMILIES = {
    "deepseek2": Oracle(
        reference=reference_deepseek2.logits,
        # Not here: mlx-lm chooses experts of groups that were not chosen where biased scores are negative, and knows
        # no pairs of halves.
        mlx_lm={
            **dict.fromkeys(("deepseek-v2-lite", "deepseek-v2"), "deepseek_v2"),
            "deepseek-v3-flat": "deepseek_v3",
        },
    ),
    "gemma4": Oracle(
        reference=reference_gemma4.logits,
        mlx_lm=dict.fromkeys(("gemma4-moe", "gemma4-dense", "gemma4-small", "gemma4-untied"), "gemma4_text"),
        # The final norm divides the last layer's scalar out again.
        cancelled=lambda config: {f"model.layers.{config['text_config']['num_hidden_layers'] - 1}.layer_scalar"},
    ),
    "gpt_oss": Oracle(
        reference=reference_gpt_oss.logits,
        # Not here: mlx-lm always rounds the borders of YaRN's blend, and knows no biasless attention, no tied head and
        # no other limit.
        mlx_lm={"gpt-oss-truncated": "gpt_oss"},
    ),
    "llama": Oracle(
        reference=reference_llama.logits,
        # Not here: mlx-lm runs Mistral without layer_types and Qwen2 unwindowed, has no biases in Qwen3, ignores YaRN's
        # attention_factor and truncate, has no window in Mixtral and no scaling in Qwen3-MoE.
        mlx_lm={
            **{
                f"llama{suffix}": "llama"
                for suffix in (
                    *("", "-tied", "-biases", "-one-head", "-three-heads"),
                    *("-linear", "-llama3", "-yarn", "-yarn-mscale", "-longrope"),
                )
            },
            "mistral-mixed": "llama",
            "qwen2": "qwen2",
            "qwen3": "qwen3",
            "mixtral": "mixtral",
            "qwen3-moe": "qwen3_moe",
        },
    ),
    "muse": Oracle(
        reference=reference_muse.logits,
        mlx_lm=dict.fromkeys(("muse-glimmer", "muse-glimmer-three-heads", "muse-glimmer-tied"), "muse_glimmer"),
    ),
    "qwen": Oracle(
        reference=reference_qwen.logits,
        mlx_lm={"qwen3.5": "qwen3_5", "qwen3.5-moe": "qwen3_5_moe", "qwen3.5-tied": "qwen3_5"},
    ),
    # mlx-lm has no such model: test_qwen4_golden.py guards this oracle.
    "qwen4": Oracle(reference=reference_qwen4.logits, mlx_lm={}, moved=28),
    "spark": Oracle(
        reference=reference_spark.logits,
        mlx_lm=dict.fromkeys(("spark", "spark-biases", "spark-one-key", "spark-full"), "spark2_5"),
    ),
}


def mlx_lm_model(module: str, config: dict, weights: dict):
    """mlx-lm's model of ``config`` with ``weights`` (numpy, by checkpoint name)."""
    return mlx_lm_twin({name: mx.array(array) for name, array in weights.items()}, config, module=module)


def assert_close(ours, oracle, what: str = "") -> None:
    """``close``: within 1e-4 of the standard deviation of the oracle's logits."""
    ours, oracle = np.asarray(ours, dtype=np.float64), np.asarray(oracle, dtype=np.float64)
    assert ours.shape == oracle.shape, what
    off = np.abs(ours - oracle).max() / oracle.std()
    assert off < 1e-4, f"{what}: logits are off by {off:.2g} standard deviations"


def assert_exact(ours, other, what: str = "") -> None:
    """``exact``: bit for bit."""
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(other), err_msg=what)


SWITCHES = {
    *("llama-biases", "mistral", "qwen2-windows", "mixtral-windows", "qwen3-moe"),
    *("gemma4-moe", "gemma4-small", "gpt-oss", "qwen3.5", "qwen3.5-moe", "qwen4"),
    *("deepseek-v2-lite", "deepseek-v3", "spark", "muse-glimmer"),
}
"""Variants that between them have every switch of every family that is about more than a number."""


def slow_without_switches(cases):
    """Cases that begin with a family and a variant as parameters, outside the slow run for ``SWITCHES`` alone."""
    return [pytest.param(*case, marks=[] if case[1] in SWITCHES else [pytest.mark.slow]) for case in cases]
