"""The default model against its golden file, which an independent float64 path made (golden/make_smollm2_golden.py)."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import Runner

QUICK = 128
FORMATS = {
    # options, the golden losses to meet, relative tolerance of the perplexity
    "as stored": ({}, "losses", 1e-3),
    "INT8": ({"bits": 8}, "losses", 5e-3),
    "INT4": ({"bits": 4}, "int4_losses", 1e-3),
}


def _losses(runner: Runner, ids) -> np.ndarray:
    logits = np.array(runner.model(mx.array([ids[:-1]]))[0].astype(mx.float32), dtype=np.float64)
    top = logits.max(-1, keepdims=True)
    return np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - logits[np.arange(len(ids) - 1), ids[1:]]


def test_the_golden_file_is_of_this_checkpoint(smollm2_gguf, golden):
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == golden["source_sha256"]


@pytest.mark.parametrize("tokens", [QUICK, pytest.param(None, marks=pytest.mark.slow)], ids=["128", "passage"])
@pytest.mark.parametrize("form", FORMATS)
def test_perplexity(smollm2, golden, form, tokens):
    options, key, tolerance = FORMATS[form]
    with Runner.open(smollm2(**options)) as runner:
        losses = _losses(runner, golden["ids"][:tokens])
    expected = np.array(golden[key][: len(losses)])
    assert np.exp(losses.mean()) == pytest.approx(np.exp(expected.mean()), rel=tolerance)
    if form != "INT8":
        # The same weights, so every single token agrees, not only their mean.
        np.testing.assert_allclose(losses, expected, atol=5e-3)


def test_int4_is_told_apart(golden):
    """The tolerance of INT4 would not pass the losses of the stored weights."""
    stored, rounded = (np.exp(np.mean(golden[key][: QUICK - 1])) for key in ("losses", "int4_losses"))
    assert abs(rounded / stored - 1) > 0.1


def test_token_ids_of_the_passage(smollm2, golden):
    from tests.conftest import GOLDEN

    with Runner.open(smollm2()) as runner:
        assert runner.tokenizer.encode((GOLDEN / golden["passage"]).read_text()) == golden["ids"]
        for prompt in golden["prompts"]:
            assert runner.tokenizer.encode(prompt["text"]) == prompt["ids"]


def test_greedy_continuations(smollm2, golden):
    with Runner.open(smollm2()) as runner:
        for prompt in golden["prompts"]:
            runner.reset()
            token = int(mx.argmax(runner.prefill(prompt["ids"])))
            for step, (expected, gap) in enumerate(zip(prompt["greedy"], prompt["gaps"], strict=True)):
                assert token == expected or gap < 1e-3, f"{prompt['text']!r}, token {step}"
                token = int(mx.argmax(runner.decode(expected)))
