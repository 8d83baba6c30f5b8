"""Samplers against mlx-lm's, and against values worked out by hand."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from turbospark_mlx.errors import GenerationError, OptionError
from turbospark_mlx.generation import sampling
from turbospark_mlx.generation.sampling import Sampler, SamplingOptions, log_softmax, uniform


def distribution(logits, history=(), **options):
    sampler = Sampler(SamplingOptions(**options), len(logits))
    return sampler.distribution(sampler.process(np.asarray(logits, dtype=np.float32), history))


def mlx_lm_distribution(logits, *, temperature, top_p, min_p, top_k):
    """mlx-lm's chain with the draw replaced by the ids and probabilities that it draws from."""
    row = mx.array(logits)[None]
    logprobs = row - mx.logsumexp(row, axis=-1, keepdims=True)
    if top_p < 1:
        logprobs = sample_utils.apply_top_p(logprobs, top_p)
    if min_p > 0:
        logprobs = sample_utils.apply_min_p(logprobs, min_p)
    if 0 < top_k < len(logits):
        logprobs = sample_utils.apply_top_k(logprobs, top_k)
    kept = np.flatnonzero(np.array(logprobs)[0] > -np.inf)
    return kept, np.array(mx.softmax(logprobs / temperature, axis=-1))[0, kept]


@pytest.fixture(autouse=True)
def _without_compilation():
    """mlx-lm compiles its filters anew for every value of an option."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_kept_tokens_and_probabilities_are_mlx_lms():
    rng = np.random.default_rng(7)
    sizes = set()
    for _ in range(400):
        vocab = int(rng.choice([2, 5, 63, 300, 3000]))
        logits = (rng.standard_normal(vocab) * rng.choice([0.1, 1, 3, 8])).astype(np.float32)
        options = {
            "temperature": float(rng.uniform(0.2, 2)),
            "top_p": float(rng.choice([1.0, rng.uniform(0.01, 0.999)])),
            "min_p": float(rng.choice([0.0, rng.uniform(0.001, 1)])),
            "top_k": int(rng.choice([0, rng.integers(1, vocab + 1)])),
        }
        ids, probabilities = distribution(logits, **options)
        expected_ids, expected = mlx_lm_distribution(logits, **options)
        assert ids.tolist() == expected_ids.tolist(), options
        np.testing.assert_allclose(probabilities, expected, rtol=2e-4, atol=1e-7, err_msg=str(options))
        sizes.add(ids.size)
    assert len(sizes) > 50  # the cases are not all of one kind


def test_top_p_ranks_more_tokens_when_the_first_ones_hold_too_little_mass():
    logits = np.random.default_rng(3).standard_normal(5000).astype(np.float32) * 0.01
    ids, _ = distribution(logits, temperature=1.0, top_p=0.9)
    expected, _ = mlx_lm_distribution(logits, temperature=1.0, top_p=0.9, min_p=0.0, top_k=0)
    assert ids.size > 4000
    assert ids.tolist() == expected.tolist()


def test_bias_and_penalties_are_mlx_lms():
    rng = np.random.default_rng(11)
    for _ in range(200):
        logits = (rng.standard_normal(40) * 4).astype(np.float32)
        history = rng.integers(0, 40, rng.integers(1, 60)).tolist()
        options = {
            "logit_bias": {int(i): float(rng.normal()) for i in rng.choice(40, 3, replace=False)},
            "repetition_penalty": float(rng.uniform(0.5, 2)),
            "repetition_context_size": int(rng.integers(1, 30)),
            "presence_penalty": float(rng.normal()),
            "presence_context_size": int(rng.integers(1, 30)),
            "frequency_penalty": float(rng.normal()),
            "frequency_context_size": int(rng.integers(1, 30)),
        }
        expected = mx.array(logits)[None]
        for processor in sample_utils.make_logits_processors(**options):
            expected = processor(mx.array(history), expected)
        processed = Sampler(SamplingOptions(**options), 40).process(logits, history)
        np.testing.assert_allclose(processed, np.array(expected)[0], rtol=1e-5, atol=1e-5)


def test_defaults_change_nothing_and_choose_the_maximum():
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    sampler = Sampler(SamplingOptions(), 500)
    processed = sampler.process(logits, [1, 2, 2])
    assert processed.dtype == np.float64
    assert np.array_equal(processed, logits.astype(np.float64))
    assert sampler.choose(processed, 5) == int(np.argmax(logits))
    assert sampler.seed is None


def test_penalties_apply_to_greedy_choices():
    assert distribution([3.0, 2.9, 0.0], [0], repetition_penalty=1.2)[0].tolist() == [1]


def test_ties_go_to_the_lower_id():
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert distribution(logits)[0].tolist() == [1]
    assert distribution(logits, temperature=1.0, top_k=2)[0].tolist() == [1, 2]
    assert distribution(logits, temperature=1.0, top_p=0.01)[0].tolist() == [1]
    assert distribution(logits, temperature=1.0, min_p=1.0)[0].tolist() == [1, 2, 3]  # min-p is a bound, not a rank


def test_filters_apply_before_the_temperature():
    # Probabilities 0.5, 0.3, 0.2 at temperature 1; at temperature 4 the first two would hold only 0.69 of the mass.
    ids, probabilities = distribution(np.log([0.5, 0.3, 0.2]), temperature=4.0, top_p=0.75)
    assert ids.tolist() == [0, 1]
    odds = (0.5 / 0.3) ** 0.25
    np.testing.assert_allclose(probabilities, [odds / (1 + odds), 1 / (1 + odds)], rtol=1e-6)


def test_top_p_counts_the_full_distribution_not_the_top_k():
    # Renormalized over the top 2, token 0 alone would hold 0.57 >= 0.5.
    ids, _ = distribution(np.log([0.4, 0.3, 0.2, 0.1]), temperature=1.0, top_p=0.5, top_k=2)
    assert ids.tolist() == [0, 1]


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-300}])
def test_one_token_always_survives(options):
    ids, probabilities = distribution([0.0, 1.0, -3.0], **{"temperature": 1.0, **options})
    assert ids[np.argmax(probabilities)] == 1
    assert probabilities.max() == 1


def test_banned_tokens_are_never_drawn():
    ids, _ = distribution([5.0, 1.0, 1.0], temperature=1.0, logit_bias={0: -math.inf})
    assert ids.tolist() == [1, 2]
    ids, _ = distribution([5.0, -math.inf, 1.0], temperature=1.0)
    assert ids.tolist() == [0, 2]


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(5).standard_normal(30).astype(np.float32)
    sampler = Sampler(SamplingOptions(temperature=0.8, top_k=12, seed=123), 30)
    processed = sampler.process(logits)
    ids, probabilities = sampler.distribution(processed)
    draws = 10_000
    counts = np.bincount([sampler.choose(processed, position) for position in range(draws)], minlength=30)
    assert counts.sum() == counts[ids].sum()
    chi_square = ((counts[ids] - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    degrees = ids.size - 1
    assert degrees == 11
    assert 2 < chi_square < 31.3  # 11 degrees of freedom: outside with probability 0.002


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.zeros(1000, dtype=np.float32)
    one, other = (Sampler(SamplingOptions(temperature=1.0, seed=9), 1000) for _ in range(2))
    processed = one.process(logits)
    forward = [one.choose(processed, position) for position in range(50)]
    assert [other.choose(processed, position) for position in reversed(range(50))] == forward[::-1]
    third = Sampler(SamplingOptions(temperature=1.0, seed=10), 1000)
    assert sum(third.choose(processed, p) == forward[p] for p in range(50)) < 5
    assert len(set(forward)) > 40


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: 0.0)
    sampler = Sampler(SamplingOptions(temperature=0.01, seed=1), 3)
    assert sampler.choose(sampler.process(np.array([-50.0, 1.0, 1.0], dtype=np.float32)), 0) == 1


def test_uniform_is_philox():
    # The first 64-bit word of numpy's Philox, which numpy promises to keep: independent of our own arithmetic.
    generator = np.random.Generator(np.random.Philox(key=42, counter=6))
    assert uniform(42, 6) == generator.random()
    values = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert all(0 <= v < 1 for v in values)
    assert abs(np.mean(values) - 0.5) < 0.02


def test_a_seed_is_drawn_and_kept_where_none_is_given():
    seeds = {Sampler(SamplingOptions(temperature=1.0), 8).seed for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_log_softmax_of_huge_logits():
    np.testing.assert_allclose(log_softmax(np.array([1e38, 1e38, 0.0])), [-math.log(2), -math.log(2), -1e38])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_logits_that_are_not_finite_are_an_error(bad, at):
    logits = np.array([1.0, 2.0, 3.0, 0.5], dtype=np.float32)
    logits[at] = bad
    with pytest.raises(GenerationError, match=rf"logit {at} is {bad}.*verify"):
        Sampler(SamplingOptions(), 4).process(logits)


def test_no_token_left_is_an_error_that_names_the_cause():
    sampler = Sampler(SamplingOptions(), 2)
    with pytest.raises(GenerationError, match="model computed"):
        sampler.process(np.full(2, -np.inf, dtype=np.float32))
    banning = Sampler(SamplingOptions(logit_bias={0: -math.inf, 1: -math.inf}), 2)
    with pytest.raises(GenerationError, match="logit_bias"):
        banning.process(np.zeros(2, dtype=np.float32))


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(OptionError, match="token 8; this model's ids are 0 to 7"):
        Sampler(SamplingOptions(logit_bias={8: 1.0}), 8)
    sampler = Sampler(SamplingOptions(repetition_penalty=1.1), 8)
    for history in ([8], [-1]):
        with pytest.raises(GenerationError, match="0 to 7"):
            sampler.process(np.zeros(8, dtype=np.float32), history)
    with pytest.raises(GenerationError, match="shape"):
        sampler.process(np.zeros(9, dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-0.1, math.nan, math.inf, "hot", True, None],
        "top_k": [-1, 1.5, True, None],
        "top_p": [0, -0.1, 1.01, math.nan, None],
        "min_p": [-0.1, 1.01, math.nan],
        "repetition_penalty": [0, -1, math.inf],
        "repetition_context_size": [0, -1, 2.0],
        "presence_penalty": [math.nan, math.inf],
        "presence_context_size": [0],
        "frequency_penalty": [math.nan],
        "frequency_context_size": [0],
        "logit_bias": [[1], {-1: 1.0}, {1.5: 1.0}, {1: math.nan}, {1: math.inf}, {1: "much"}],
        "seed": [-1, 2**64, 1.0, True],
    }.items(),
)
def test_options_outside_their_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(OptionError, match=name):
            SamplingOptions(**{name: value})


def test_numbers_of_numpy_are_accepted():
    options = SamplingOptions(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(4), logit_bias={np.int32(1): 2}
    )
    assert Sampler(options, 8).seed == 4
