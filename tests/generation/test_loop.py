"""The generation loop over a scripted runner."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from tests.generation.fakes import VOCAB, Letters, ScriptedRunner
from turbospark_mlx.errors import ContextError, GenerationError, OptionError
from turbospark_mlx.generation import loop
from turbospark_mlx.generation.loop import Request, admit, generate_tokens
from turbospark_mlx.generation.sampling import Sampler, SamplingOptions

PROMPT = [30, 1, 2, 3, 4, 5]


def letters(text):
    return Letters().encode(text, add_special_tokens=False)


def run(runner, prompt=PROMPT, **request):
    request = Request(**{"stop_ids": Letters.eos_token_ids, **request})
    return list(generate_tokens(runner, Letters(), prompt, request))


def text(responses):
    return "".join(response.text for response in responses)


def test_one_response_a_token():
    runner = ScriptedRunner([*letters("hello"), 31])
    responses = run(runner)
    assert text(responses) == "hello"
    assert [r.token for r in responses] == [*letters("hello"), 31]
    assert [r.finish_reason for r in responses] == [None] * 5 + ["stop"]
    assert [r.generation_tokens for r in responses] == [1, 2, 3, 4, 5, 6]
    assert {r.prompt_tokens for r in responses} == {6}
    assert {r.reused_tokens for r in responses} == {0}
    assert responses[0].generation_tps == 0
    assert all(r.generation_tps > 0 for r in responses[1:])
    assert all(r.prompt_tps > 0 and r.peak_memory >= 0 and r.seed is None for r in responses)
    assert runner.history == PROMPT + letters("hello")  # the last token is never fed


def test_a_stop_id_as_the_very_first_token_gives_an_empty_answer():
    for stop in (31, 29):
        responses = run(ScriptedRunner([stop]))
        assert [(r.text, r.token, r.finish_reason) for r in responses] == [("", stop, "stop")]


def test_length_and_stop_on_the_last_allowed_token():
    assert [r.finish_reason for r in run(ScriptedRunner(letters("abcdef")), max_tokens=3)] == [None, None, "length"]
    assert run(ScriptedRunner([*letters("ab"), 31]), max_tokens=3)[-1].finish_reason == "stop"
    last = run(ScriptedRunner(letters("abc")), max_tokens=3, stop_strings=("bc",))
    assert (text(last), last[-1].finish_reason) == ("a", "stop")
    assert [r.finish_reason for r in run(ScriptedRunner(letters("a")), max_tokens=1)] == ["length"]


def test_stop_strings_end_the_answer_and_are_not_shown():
    runner = ScriptedRunner(letters("one two three"))
    responses = run(runner, stop_strings=("two", "tw zzz"))
    assert text(responses) == "one "
    assert responses[-1].finish_reason == "stop"
    assert len(runner.history) == len(PROMPT) + len("one two") - 1


def test_text_held_back_for_a_stop_string_is_shown_at_the_end():
    responses = run(ScriptedRunner([*letters("one tw"), 31]), stop_strings=("two",))
    assert text(responses) == "one tw"
    assert responses[-1].text == "tw"
    assert text(run(ScriptedRunner(letters("one two")), max_tokens=6, stop_strings=("two",))) == "one tw"


def test_a_stop_string_completed_by_the_last_flush():
    responses = run(ScriptedRunner([*letters("ab"), 28]), max_tokens=3, stop_strings=("b\ufffd",))
    assert (text(responses), responses[-1].finish_reason) == ("a", "stop")


def test_half_a_character_waits_for_the_end():
    responses = run(ScriptedRunner([0, 28, 31]))
    assert [r.text for r in responses] == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        (0, 5, ContextError, "empty"),
        (0, None, ContextError, "empty"),
        (10, 0, OptionError, "at least 1"),
        (10, -1, OptionError, "None to fill"),
        (10, 2.5, OptionError, "whole number"),
        (10, True, OptionError, "whole number"),
        (10, 55, ContextError, "10 tokens; with max_tokens 55 that is 65, and max_context is 64"),
        (64, None, ContextError, "one more token"),
        (65, 1, ContextError, "66"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_computed(prompt, max_tokens, error, message):
    runner = ScriptedRunner([0])
    with pytest.raises(error, match=message):
        generate_tokens(runner, Letters(), [1] * prompt, Request(max_tokens=max_tokens))
    assert runner.fed == []


def test_the_context_can_be_filled_to_the_last_position():
    assert admit(10, 54, 64) == 54
    assert admit(10, None, 64) == 54
    assert admit(63, None, 64) == 1
    responses = run(ScriptedRunner([0] * 99, max_context=16), max_tokens=None)
    assert (len(responses), responses[-1].finish_reason) == (10, "length")


def test_the_same_prompt_twice_reuses_all_but_one_token():
    runner = ScriptedRunner([*letters("hi"), 31])
    first = run(runner)
    runner.fed.clear()
    second = run(runner)
    assert text(second) == text(first)
    assert {r.reused_tokens for r in second} == {5}
    assert runner.fed[0] == PROMPT[-1:]
    third = run(runner, [30, 1, 2, 9])
    assert third[0].reused_tokens == 3


def test_progress_counts_the_whole_prompt():
    runner = ScriptedRunner([31])
    calls = []
    run(runner, list(range(10)), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(4, 10), (8, 10), (10, 10)]
    calls.clear()
    run(runner, [0, 1, 2, 3, 4, 9, 9, 9], progress=lambda done, total: calls.append((done, total)))
    assert calls == [(8, 8)]
    assert runner.fed[-1] == [9, 9, 9]


def test_cancellation_between_tokens():
    for event in (True, False):
        runner, stop = ScriptedRunner(letters("hello world")), threading.Event()
        request = Request(cancelled=stop if event else stop.is_set, stop_strings=("lo!",))
        seen = []
        for response in generate_tokens(runner, Letters(), PROMPT, request):
            seen.append(response)
            if len(seen) == 4:
                stop.set()
        assert text(seen) == "hell"  # "l" was held back for the stop string
        assert [(r.token, r.finish_reason) for r in seen[3:]] == [(letters("l")[0], None), (None, "cancelled")]
        assert seen[-1].generation_tokens == 4
        assert seen[-1].logprobs is None
        assert runner.history == PROMPT + letters("hel")
        assert runner.resets == 0
        assert text(run(runner, max_tokens=5)) == "hello"


def test_cancellation_inside_the_prompt():
    runner, stop = ScriptedRunner(letters("hello")), threading.Event()
    responses = run(runner, list(range(10)), progress=lambda done, total: stop.set(), cancelled=stop)
    assert [(r.text, r.token, r.finish_reason, r.generation_tokens) for r in responses] == [("", None, "cancelled", 0)]
    assert runner.history == [0, 1, 2, 3]
    again = run(runner, list(range(10)), max_tokens=5)
    assert (text(again), again[0].reused_tokens) == ("hello", 4)


def test_logits_that_are_not_finite_reset_the_runner():
    poisoned = np.zeros(VOCAB)
    poisoned[3] = np.nan
    runner = ScriptedRunner([0, poisoned])
    with pytest.raises(GenerationError, match="logit 3"):
        run(runner)
    assert runner.resets == 1
    assert runner.history == []
    runner.script = [*letters("ok"), 31]
    assert text(run(runner)) == "ok"


@pytest.mark.parametrize("failure", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_failure_of_the_runner_comes_through_and_it_works_again(failure):
    runner = ScriptedRunner([*letters("o"), failure])
    with pytest.raises(type(failure)):
        run(runner)
    runner.script = [*letters("ok"), 31]
    again = run(runner)
    assert text(again) == "ok"
    assert again[0].reused_tokens == len(PROMPT) - 1


def test_a_generator_closed_half_way_leaves_the_runner_as_it_is():
    runner = ScriptedRunner(letters("hello"))
    generator = generate_tokens(runner, Letters(), PROMPT, Request())
    next(generator)
    next(generator)
    generator.close()
    assert runner.resets == 0
    assert runner.history == PROMPT + letters("h")
    assert text(run(runner, max_tokens=5)) == "hello"


def test_an_answer_does_not_go_on_behind_another_ones_tokens():
    runner = ScriptedRunner(letters("hello"))
    first, second = (generate_tokens(runner, Letters(), prompt, Request()) for prompt in (PROMPT, PROMPT[::-1]))
    next(first)
    next(second)
    with pytest.raises(ContextError, match="its runner has run something else"):
        next(first)
    # The other one is not disturbed.
    assert next(second).token == letters("e")[0]
    assert runner.resets == 0


def test_logprobs_are_those_that_the_token_was_chosen_from():
    row = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    (plain,) = run(ScriptedRunner([row]), max_tokens=1)
    assert isinstance(plain.logprobs, mx.array)
    assert plain.logprobs.shape == (VOCAB,)
    expected = row - np.log(np.exp(row).sum())
    np.testing.assert_allclose(np.array(plain.logprobs), expected, atol=1e-6)
    assert plain.token == int(row.argmax())
    biased = SamplingOptions(logit_bias={5: 100.0})
    (forced,) = run(ScriptedRunner([row]), max_tokens=1, sampling=biased)
    assert forced.token == 5
    assert forced.logprobs[5].item() == pytest.approx(0, abs=1e-6)


def test_penalties_see_prompt_and_answer():
    row = np.zeros(VOCAB, dtype=np.float32)
    row[[7, 8, 9]] = [3.0, 2.9, 2.8]
    penalty = SamplingOptions(presence_penalty=1.0)
    tokens = [r.token for r in run(ScriptedRunner([row] * 3), [30, 7], max_tokens=3, sampling=penalty)]
    assert tokens == [8, 9, 7]  # 7 is in the prompt; then 8, then 9 are in the answer


def test_draws_do_not_depend_on_reuse():
    rows = np.random.default_rng(1).standard_normal((20, VOCAB)).astype(np.float32)
    rows[:, [29, 31]] = -30
    runner = ScriptedRunner(rows)
    sampling = SamplingOptions(temperature=1.0, seed=4)
    first = run(runner, max_tokens=15, sampling=sampling)
    second = run(runner, max_tokens=15, sampling=sampling)
    assert second[0].reused_tokens == 5
    assert [r.token for r in first] == [r.token for r in second]
    assert {r.seed for r in first} == {4}
    other = run(runner, max_tokens=15, sampling=SamplingOptions(temperature=1.0))
    again = run(runner, max_tokens=15, sampling=SamplingOptions(temperature=1.0, seed=other[0].seed))
    assert [r.token for r in again] == [r.token for r in other]
    assert [r.token for r in other] != [r.token for r in first]
    sampler = Sampler(sampling, VOCAB)
    drawn = [sampler.choose(sampler.process(row), len(PROMPT) + n) for n, row in enumerate(rows[:15])]
    assert [r.token for r in first] == drawn


def test_rates_count_what_was_run(monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(seconds))  # every step takes one second
    runner = ScriptedRunner(letters("abcde"))
    assert {r.prompt_tps for r in run(runner, max_tokens=5)} == {6.0}
    second = run(runner, max_tokens=5)
    assert {r.prompt_tps for r in second} == {1.0}
    # A token after the first takes one step of the model and one of the sampler; the first only the latter.
    assert [r.generation_tps for r in second] == [0, 1 / 3, 2 / 5, 3 / 7, 4 / 9]
    stop = threading.Event()
    (cancelled,) = run(runner, list(range(10, 28)), progress=lambda done, total: stop.set(), cancelled=stop)
    assert cancelled.prompt_tps == 4.0  # of 18 tokens, one chunk was run


def test_mlx_lm_logits_processors_and_samplers_plug_in():
    seen = []

    def only_even(tokens, logits):
        seen.append(tokens.tolist())
        return mx.where(mx.arange(VOCAB) % 2 == 0, logits, -mx.inf)

    def second_best(logprobs):
        assert logprobs.shape == (1, VOCAB)
        return mx.argsort(logprobs, axis=-1)[:, -2]

    row = np.arange(VOCAB, dtype=np.float32)
    responses = run(
        ScriptedRunner([row] * 2),
        max_tokens=2,
        logits_processors=[only_even],
        sampler=second_best,
        stop_ids=frozenset(),
    )
    assert [r.token for r in responses] == [28, 28]
    assert seen == [PROMPT, [*PROMPT, 28]]


def test_a_sampler_that_cannot_work_is_refused():
    with pytest.raises(OptionError, match="sampler and temperature"):
        run(ScriptedRunner([0]), sampler=lambda x: x, sampling=SamplingOptions(temperature=1.0))
    with pytest.raises(GenerationError, match="sampler chose token 99"):
        run(ScriptedRunner([0]), sampler=lambda logprobs: mx.array([99]))
