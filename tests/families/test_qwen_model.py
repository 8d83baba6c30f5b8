"""Qwen 3.5: the delta rule and its states against float64, and what a state cannot do."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from tests.families import reference_qwen
from tests.families.models import model_of, weights_of
from tests.families.oracles import FAMILIES, PROMPT, assert_close, mlx_lm_model
from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config


def states(caches):
    return [cache for cache in caches if isinstance(cache, RecurrentState)]


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-tied"])
@pytest.mark.parametrize("chunk", [1, 3, 21])
def test_states_are_the_references(variant, chunk):
    """After a prompt cut in any way, and after a rollback past it: the recurrent state and the convolution's rows."""
    model, weights, config = model_of("qwen", variant), weights_of("qwen", variant), tiny_config("qwen", variant)

    def check(caches, ids):
        _, expected = reference_qwen.run(config, weights, ids)
        for cache, theirs in zip(states(caches), expected, strict=True):
            assert (cache.offset, cache[1].dtype) == (len(ids), mx.float32)
            assert_close(cache[1][0], theirs, f"state after {len(ids)} tokens")

    caches = model.make_cache()
    for start in range(0, 21, chunk):
        model(mx.array([PROMPT[start : start + chunk]]), cache=caches)
    check(caches, PROMPT[:21])
    marks, tails = [cache.mark() for cache in caches], [np.array(cache[0]) for cache in states(caches)]
    model(mx.array([PROMPT[40:47]]), cache=caches)
    for cache, mark in zip(caches, marks, strict=True):
        cache.rollback(mark)
    check(caches, PROMPT[:21])
    for cache, tail in zip(states(caches), tails, strict=True):
        np.testing.assert_array_equal(np.array(cache[0]), tail)
    model(mx.array([PROMPT[21:25]]), cache=caches)
    check(caches, PROMPT[:25])


def test_a_prompt_that_shares_less_than_the_state_holds_is_run_again():
    """Nothing of the first conversation is left in the second one."""
    with Runner(model_of("qwen", "qwen3.5")) as runner, Runner(model_of("qwen", "qwen3.5")) as cold:
        runner.prefill(PROMPT[:21])
        other = PROMPT[:7] + PROMPT[30:40]
        assert runner.reuse(other) == 0
        np.testing.assert_array_equal(np.array(runner.prefill(other)), np.array(cold.prefill(other)))


def test_a_long_prompt_is_not_kept_by_its_last_rows():
    """What the convolution needs again is a copy: a slice would hold the memory of all rows."""
    model = model_of("qwen", "qwen3.5")
    caches = model.make_cache(1024)
    model(mx.array([[1] * 16]), cache=caches)
    mx.eval([cache.arrays for cache in caches])
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = model.make_cache(1024)
    mx.eval(model(mx.array([[1] * 1024]), cache=caches)[0, -1, 0], [cache.arrays for cache in caches])
    held = sum(cache.nbytes for cache in caches)
    assert mx.get_active_memory() - before < 1.5 * held


@pytest.mark.parametrize("variant", FAMILIES["qwen"].mlx_lm)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 65])
def test_states_are_mlx_lms(variant, chunk):
    """Close, behind each chunk; so are the rows that the convolution needs again."""
    model, peer = (
        model_of("qwen", variant),
        mlx_lm_model(FAMILIES["qwen"].mlx_lm[variant], tiny_config("qwen", variant), weights_of("qwen", variant)),
    )
    caches, theirs = model.make_cache(), peer.make_cache()
    for start in range(0, 65, chunk):
        tokens = mx.array([PROMPT[start : start + chunk]])
        model(tokens, cache=caches)
        peer(tokens, cache=theirs)
        for ours, other in zip(states(caches), (c for c in theirs if isinstance(c, ArraysCache)), strict=True):
            assert_close(ours[0], other[0], f"rows, {start}")
            assert_close(mx.flatten(ours[1], 1, -3), other[1], f"state, {start}")
