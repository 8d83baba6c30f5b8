"""Packed models through our compiled kernels give what the reference back end gives, and keep the caches' promises.

The other invariants run unpacked models on the reference back end; these are the same promises where the kernels fuse
norms, residuals, rotation and attention over the cache's own buffer.
"""

import mlx.core as mx
import numpy as np
import pytest

from tests.families.oracles import FAMILIES, PROMPT, assert_close, assert_exact
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, variants

pytestmark = pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")

# Every switch of the fused path once; every variant in the slow run. A kernel compiles in a third of a second.
QUICK = {
    "llama",
    "llama-biases",
    "llama-yarn-mscale",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma4-moe",
    "qwen3.5-moe",
    "muse-glimmer",
    "qwen4",
    "spark",
    "deepseek-v2-lite",
}
EVERY = [
    pytest.param(family, variant, id=variant, marks=[] if variant in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for variant in variants(family)
]


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    made = {}

    def of(family, variant):
        if variant not in made:
            made[variant] = make_tiny_install(
                family, tmp_path_factory.mktemp("kernels") / f"{variant}.gturbo", variant=variant
            )
        return made[variant]

    return of


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.mark.parametrize(("family", "variant"), EVERY)
def test_compiled_kernels_give_the_references_logits(install, family, variant):
    """Close: at once, in chunks, token by token, and across a window's edge."""
    path = install(family, variant)
    with Runner.open(path, kernels="reference") as reference:
        oracle = np.array(reference.model(mx.array([PROMPT]))[0])
    with Runner.open(path, kernels="host") as runner:
        assert_close(runner.model(mx.array([PROMPT]))[0], oracle, f"{variant}, at once")
        for length in (1, 2, 7, 8, 9, 63, 65):
            runner.reset()
            assert_close(runner.prefill(PROMPT[:length]), oracle[length - 1], f"{variant}, prefill of {length}")
        for chunk in (1, 3, 4):
            caches = runner.model.make_cache()
            rows = [
                runner.model(mx.array([PROMPT[i : i + chunk]]), cache=caches)[0] for i in range(0, len(PROMPT), chunk)
            ]
            assert_close(mx.concatenate(rows), oracle, f"{variant}, all rows by {chunk}")
        operations = runner.report().operations
    assert any(way == "kernel" for _, way in operations), operations


@pytest.mark.parametrize(("family", "variant"), EVERY)
def test_going_back_is_never_having_gone_on(install, family, variant):
    """Exact: after a rollback to marks before, at and after a window's edge, the same calls give the same bits."""
    with Runner.open(install(family, variant), kernels="host") as runner:
        for at in (0, 6, 8, 9, 30):
            runner.reset()
            if at:
                runner.prefill(PROMPT[:at])
            mark = runner.mark()
            expected = [np.array(runner.prefill(PROMPT[40:45])), np.array(runner.decode(PROMPT[45]))]
            for branch in (1, 12):
                runner.rollback(mark)
                runner.prefill(PROMPT[::-1][:branch])
                runner.decode(3)
                runner.rollback(mark)
                again = [runner.prefill(PROMPT[40:45]), runner.decode(PROMPT[45])]
                for ours, theirs in zip(again, expected, strict=True):
                    assert_exact(ours, theirs, f"{variant}, back at {at} after {branch}")


def test_several_sequences_at_once(install):
    """Close: a batch without a cache equals its rows alone."""
    with Runner.open(install("llama", "qwen3"), kernels="host") as runner:
        batch = [PROMPT[:9], PROMPT[9:18]]
        together = runner.model(mx.array(batch))
        for row, alone in zip(together, batch, strict=True):
            assert_close(row, runner.model(mx.array([alone]))[0])
