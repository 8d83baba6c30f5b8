"""mlx-lm's own loops, unchanged, on our models and caches."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.perplexity import eval_ppl

from tests.families.models import model_of
from tests.families.oracles import PROMPT, assert_close
from turbospark_mlx.runner import Runner


@pytest.fixture(scope="module")
def model():
    """One sliding layer with a window of 8 and one full layer."""
    return model_of("llama", "mistral-mixed")


@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_generate_step(variant, chunk):
    model = model_of("llama", variant)
    theirs = [t for t, _ in generate_step(mx.array(PROMPT[:12]), model, max_tokens=20, prefill_step_size=chunk)]
    with Runner(model) as runner:
        logits, ours = runner.prefill(PROMPT[:12]), []
        for _ in range(20):
            ours.append(int(mx.argmax(logits)))
            logits = runner.decode(ours[-1])
    assert theirs == ours
    assert len(set(ours)) > 3


def test_generate_step_from_embeddings():
    model = model_of("llama", "llama")
    embeddings = model.model.embed_tokens(mx.array(PROMPT[:12]))
    tokens = list(generate_step(mx.array(PROMPT[:12]), model, max_tokens=4))
    from_embeddings = list(generate_step(mx.array([], mx.int32), model, max_tokens=4, input_embeddings=embeddings))
    assert [t for t, _ in tokens] == [t for t, _ in from_embeddings]


def test_perplexity(model, capsys):
    rows = mx.array([PROMPT[:32], PROMPT[32:64]])
    perplexity, _ = eval_ppl(model, rows, batch_size=2)
    losses = []
    for row in rows.tolist():
        with Runner(model) as runner:
            logits = runner.prefill(row[:1])
            for token in row[1:]:
                losses.append(float(mx.logsumexp(logits) - logits[token]))
                logits = runner.decode(token)
    assert np.exp(np.mean(losses)) == pytest.approx(perplexity, rel=1e-4)


def test_evaluations_prompt_cache(model):
    """mlx-lm's evaluate.py runs a prompt into a cache, copies the cache, and goes on from the copy."""
    prompt_cache = make_prompt_cache(model)
    whole = model(mx.array([PROMPT[:12]]))
    model(mx.array([PROMPT[:7]]), cache=prompt_cache)
    mx.eval([layer.state for layer in prompt_cache])
    assert can_trim_prompt_cache(prompt_cache)
    assert trim_prompt_cache(prompt_cache, 2) == 2
    for _ in range(2):
        rest = model(mx.array([PROMPT[5:12]]), cache=copy.deepcopy(prompt_cache))
        assert_close(rest[0], whole[0, 5:])
    wrapped = model.make_cache()
    model(mx.array([PROMPT[:20]]), cache=wrapped)
    assert not can_trim_prompt_cache(wrapped)
