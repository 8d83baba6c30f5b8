"""The default model against its golden file, which an independent float64 path made (golden/make_smollm2_golden.py)."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import Runner
from turbospark_mlx.perplexity import perplexity

QUICK = 128
FORMATS = {"as stored": ({}, "losses"), "INT8": ({"bits": 8}, "int8_losses"), "INT4": ({"bits": 4}, "int4_losses")}
"""Conversion options, and the golden losses of the same weights."""


def _losses(runner: Runner, ids) -> np.ndarray:
    logits = np.array(runner.model(mx.array([ids[:-1]]))[0].astype(mx.float32), dtype=np.float64)
    top = logits.max(-1, keepdims=True)
    return np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - logits[np.arange(len(ids) - 1), ids[1:]]


def test_the_golden_file_is_of_this_checkpoint(smollm2_gguf, golden):
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == golden["source_sha256"]


@pytest.mark.parametrize("tokens", [QUICK, pytest.param(None, marks=pytest.mark.slow)], ids=["128", "passage"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_loss(smollm2, golden, form, tokens):
    options, key = FORMATS[form]
    with Runner.open(smollm2(**options)) as runner:
        losses = _losses(runner, golden["ids"][:tokens])
    expected = np.array(golden[key][: len(losses)])
    # A code that a tie in float32 moves by one shows in the fourth digit of a loss; nothing else may.
    np.testing.assert_allclose(losses, expected, atol=5e-3)
    assert np.exp(losses.mean()) == pytest.approx(np.exp(expected.mean()), rel=1e-3)


def test_the_perplexity_tool_adds_no_error_of_its_own(smollm2, golden):
    with Runner.open(smollm2()) as runner:
        found = perplexity(runner.model, golden["ids"][:QUICK])
    assert found.tokens == QUICK - 1
    assert found.nll == pytest.approx(np.mean(golden["losses"][: QUICK - 1]), abs=1e-5)


def test_what_rounding_costs(golden):
    """8 bits stay within half a percent of the stored weights; 4 bits are far enough away for the tests to tell."""
    stored, int8, int4 = (np.exp(np.mean(golden[key])) for key in ("losses", "int8_losses", "int4_losses"))
    assert int8 == pytest.approx(stored, rel=5e-3)
    assert int4 > 1.1 * stored


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


def test_compiled_kernels_choose_the_references_tokens(smollm2, golden):
    """64 greedy tokens of a packed model, the recorded decode step against plain MLX operations and the BLAS."""
    path, ids = smollm2(bits=4), golden["prompts"][0]["ids"]
    with Runner.open(path, kernels="auto") as runner, Runner.open(path, kernels="reference") as reference:
        ours, theirs = runner.prefill(ids), np.array(reference.prefill(ids))
        for step in range(64):
            second, first = np.sort(theirs)[-2:]
            token = int(theirs.argmax())
            assert int(mx.argmax(ours)) == token or first - second < 1e-3, f"token {step}"
            np.testing.assert_allclose(ours, theirs, atol=1e-3 * theirs.std(), err_msg=f"token {step}")
            ours, theirs = runner.decode(token), np.array(reference.decode(token))
