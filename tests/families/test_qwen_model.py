"""Qwen 3.5: the delta rule and its states against float64, and what a state cannot do."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from tests.families import reference_qwen
from tests.families.models import model_of, weights_of
from tests.families.oracles import FAMILIES, PROMPT, assert_close, mlx_lm_model
from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.families.qwen.delta import CHUNK, delta_chunks, delta_step, unit
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config


def inputs(length, *, batch=2, groups=2, repeats=3, key_dim=48, value_dim=5, decay=0.5, alike=False):
    """Random float32 inputs of the rule and a state; ``alike`` gives all tokens nearly the same key."""
    rng = np.random.default_rng(length)
    q, k = rng.standard_normal((2, batch, length, groups, key_dim))
    if alike:
        k = k[:, :1] + 0.01 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, length, groups, repeats, value_dim))
    log_decay = -decay * rng.random((batch, length, groups, repeats))
    strength = rng.random(log_decay.shape) if not alike else 0.9 + 0.1 * rng.random(log_decay.shape)
    state = rng.standard_normal((batch, groups, repeats, value_dim, key_dim))
    return [mx.array(x.astype(np.float32)) for x in (q, k, v, log_decay, strength, state)]


def by_head(q, k, v, log_decay, strength, state):
    """`reference_qwen.delta_rule` of each head of each sequence."""
    q, k, v, log_decay, strength, state = (np.array(x, np.float64) for x in (q, k, v, log_decay, strength, state))
    y, after = np.zeros_like(v), np.zeros_like(state)
    for at in np.ndindex(*state.shape[:3]):
        b, g, r = at
        rule = q[b, :, g], k[b, :, g], v[b, :, g, r], np.exp(log_decay[b, :, g, r]), strength[b, :, g, r], state[at]
        y[b, :, g, r], after[at] = reference_qwen.delta_rule(*rule)
    return y, after


@pytest.mark.parametrize("length", [1, 2, 3, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
@pytest.mark.parametrize("decay", [0.01, 30.0])
def test_chunks_are_the_rule(length, decay):
    given = inputs(length, decay=decay)
    for ours, theirs in zip(delta_chunks(*given), by_head(*given), strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, atol=3e-6 * np.abs(theirs).max())


def test_tokens_that_are_nearly_alike_are_solved_for():
    """A series of powers of the corrections would lose every digit here."""
    given = inputs(2 * CHUNK, decay=1e-3, alike=True)
    for ours, theirs in zip(delta_chunks(*given), by_head(*given), strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, atol=2e-5 * np.abs(theirs).max())


def test_a_step_is_the_rule():
    given = inputs(1)
    for ours, theirs in zip(delta_step(*given), by_head(*given), strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, atol=1e-6)


@pytest.mark.parametrize("rule", [delta_chunks, "steps"])
def test_by_hand(rule):
    """Three tokens, one key head, two value heads, as another implementation answers."""
    q, k = ([[1, 0], [0, 2], [1, 1]], [[3, 4], [1, -1], [0, 1]])
    v = [[[1, 2], [0.5, -1]], [[-1, 0], [2, 1]], [[0.25, 4], [1, 1]]]
    a, b = np.array([[0, 1], [-1, 0.5], [2, 0]]), np.array([[0, 1], [2, -1], [-2, 0]])
    decay = -np.array([1, 0.5]) * np.log1p(np.exp(a + np.array([0.1, -0.2])))
    q, k = (unit(mx.array(x, mx.float32)[None, :, None]) for x in (q, k))
    v, log_decay, strength = (
        mx.array(np.asarray(x, np.float32)[None, :, None]) for x in (v, decay, 1 / (1 + np.exp(-b)))
    )
    given, state, rows = [q / math.sqrt(2), k, v, log_decay, strength], mx.zeros((1, 1, 2, 2, 2)), []
    if rule == "steps":
        for t in range(3):
            y, state = delta_step(*(x[:, t : t + 1] for x in given), state)
            rows.append(y)
        y = mx.concatenate(rows, axis=1)
    else:
        y, state = rule(*given, state)
    heads = [
        [[0.2121319, 0.4242638], [0.6193456, 0.3578945], [0.0363519, 0.2894082]],
        [[0.1550809, -0.3101617], [-0.1385870, -0.3951792], [0.4101020, 0.1060611]],
    ]
    last = [
        [[-0.0412629, 0.1139666], [0.0533691, 0.5254475]],
        [[0.3928693, 0.4273350], [-0.0806748, 0.2927971]],
    ]
    np.testing.assert_allclose(np.array(y)[0, :, 0].transpose(1, 0, 2), heads, atol=2e-6)
    np.testing.assert_allclose(np.array(state)[0, 0], last, atol=2e-6)


def test_the_epsilon_of_lengths_is_added_to_the_sum():
    x = np.full((1, 100), 1e-4, np.float32)
    np.testing.assert_allclose(np.array(unit(mx.array(x))), 1e-4 / np.sqrt(1e-6 + 1e-6), rtol=1e-5)


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


def test_a_decode_step_says_why_it_is_not_one_piece(tmp_path):
    from turbospark_mlx.testing import make_tiny_install

    with Runner.open(make_tiny_install("qwen", tmp_path / "x.gturbo")) as runner:
        runner.prefill(PROMPT[:3])
        runner.decode(1)
        assert "one operation after the other" in runner.report().decode_step


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
