"""load, generate and stream_generate: prompts, options, the independence of calls."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from tests.generation.fakes import VOCAB, Letters, ScriptedRunner
from turbospark_mlx import GenerationResponse, SamplingOptions, api, generate, stream_generate
from turbospark_mlx.errors import ContextError, OptionError

TOKENIZER = Letters()


def letters(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def made(monkeypatch):
    """A model whose every answer is "hello", and the runners that calls make for it."""
    runners = []

    def make(model, *, max_context=None):
        runner = ScriptedRunner([*letters("hello"), 31], max_context=max_context or 300)
        runner.model = model
        runners.append(runner)
        return runner

    monkeypatch.setattr(api, "Runner", make)
    return SimpleNamespace(model=object(), runners=runners)


def test_generate_gives_the_text_and_stream_generate_the_responses(made):
    assert generate(made.model, TOKENIZER, "hi") == "hello"
    responses = list(stream_generate(made.model, TOKENIZER, "hi"))
    assert all(isinstance(r, GenerationResponse) for r in responses)
    assert [r.text for r in responses] == ["h", "e", "l", "l", "o", ""]
    assert responses[-1].finish_reason == "stop"


def test_every_call_has_its_own_runner(made):
    for _ in range(2):
        assert next(stream_generate(made.model, TOKENIZER, "hi")).reused_tokens == 0
    assert len(made.runners) == 2


def test_a_given_runner_is_used_and_keeps_its_prefix(made):
    runner = ScriptedRunner([*letters("hello"), 31])
    for reused in (0, 2):
        last = list(stream_generate(runner.model, TOKENIZER, "hi", max_tokens=20, runner=runner))[-1]
        assert last.reused_tokens == reused
    assert made.runners == []
    assert not runner.closed
    with pytest.raises(OptionError, match="another model"):
        generate(made.model, TOKENIZER, "hi", runner=runner)
    with pytest.raises(OptionError, match="max_context"):
        generate(runner.model, TOKENIZER, "hi", runner=runner, max_context=10)


def test_the_default_answer_has_256_tokens_at_most(made):
    with pytest.raises(ContextError, match="max_tokens 256"):
        generate(made.model, TOKENIZER, "hi", max_context=258)
    assert generate(made.model, TOKENIZER, "hi", max_context=259) == "hello"
    assert len(list(stream_generate(made.model, TOKENIZER, "hi", 3))) == 3
    assert generate(made.model, TOKENIZER, "hi", max_tokens=None, max_context=6) == "hel"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [30, 0, 1]),
        ([5, 6, 7], [5, 6, 7]),
        ((5, 6), [5, 6]),
        (mx.array([5, 6]), [5, 6]),
        (np.array([5, 6], dtype=np.uint32), [5, 6]),
        ([{"role": "user", "content": "ab"}], Letters().encode("u ab\na ")),
    ],
)
def test_kinds_of_prompts(made, prompt, ids):
    assert generate(made.model, TOKENIZER, prompt) == "hello"
    assert made.runners[0].history[: len(ids)] == ids
    assert made.runners[0].prompt_end == len(ids)


@pytest.mark.parametrize("prompt", [None, 5, b"hi", ["hi"], [1, "hi"], [1.5], [{"role": "user"}, 4], mx.array(5)])
def test_other_prompts_are_refused(made, prompt):
    with pytest.raises(OptionError, match="prompt is a"):
        generate(made.model, TOKENIZER, prompt)
    assert made.runners == []


def test_an_empty_prompt_is_refused(made):
    with pytest.raises(ContextError, match="empty"):
        generate(made.model, TOKENIZER, [])


def test_template_variables_reach_the_template(made, monkeypatch):
    seen = {}
    monkeypatch.setattr(Letters, "apply_chat_template", lambda self, messages, **given: seen.update(given) or [1])
    generate(made.model, TOKENIZER, [{"role": "user", "content": "x"}], template_variables={"enable_thinking": False})
    assert seen == {"enable_thinking": False}


def test_sampling_options_come_as_keywords_or_as_one_object(made):
    options = {"temperature": 9.0, "top_k": 20, "seed": 11}
    tokens = [
        [r.token for r in stream_generate(made.model, TOKENIZER, "hi", max_tokens=5, **keywords)]
        for keywords in (
            options,
            {"sampling": SamplingOptions(**options)},
            {"sampling": SamplingOptions(**{**options, "seed": 3}), "seed": 11},
        )
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    assert generate(made.model, TOKENIZER, "hi", logit_bias={letters("j")[0]: 9.0}, max_tokens=3) == "jjj"


def test_wrong_options_are_refused_at_the_call(made):
    for options, message in (
        ({"temp": 0.5}, "temp is not an option. Did you mean temperature?"),
        ({"topk": 5}, "Did you mean top_k?"),
        ({"zzz": 1}, "Sampling options are frequency_context_size, "),
        ({"top_p": 2}, "top_p is 2"),
        ({"logit_bias": {VOCAB: 1.0}}, "token 32"),
        ({"stop": ""}, "stop contains ''"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ):
        with pytest.raises(OptionError, match=message.replace("?", r"\?")):
            stream_generate(made.model, TOKENIZER, "hi", **options)


def test_stop_may_be_one_string_or_several(made):
    assert generate(made.model, TOKENIZER, "hi", stop="l") == "he"
    assert generate(made.model, TOKENIZER, "hi", stop=["x", "lo"]) == "hel"


def test_cancelled_and_progress_are_passed_on(made):
    calls = []
    *_, last = stream_generate(
        made.model,
        TOKENIZER,
        "hi",
        prompt_progress_callback=lambda done, total: calls.append((done, total)),
        cancelled=lambda: bool(calls),
    )
    assert calls == [(3, 3)]
    assert last.finish_reason == "cancelled"
    assert generate(made.model, TOKENIZER, "hi", cancelled=lambda: True) == ""


def test_verbose_prints_the_answer_and_its_figures(made, capsys):
    assert generate(made.model, TOKENIZER, "hi", verbose=True) == "hello"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "hello"
    assert printed[1].startswith("prompt: 3 tokens, ")
    assert printed[2].startswith("generated: 6 tokens, ")
    assert printed[-1] == "finish reason: stop"
