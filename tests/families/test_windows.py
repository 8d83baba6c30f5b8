"""A window counts the query's own token, by every way of running a prompt."""

import mlx.core as mx
import numpy as np
import pytest

from tests.families.models import build
from tests.families.oracles import PROMPT
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config


@pytest.fixture(scope="module")
def single():
    """One layer with a window of 8: with 8 tokens the first reaches the last row, with 9 it does not at all."""
    return build(tiny_config("llama", "mistral") | {"num_hidden_layers": 1})


def last_rows(model, prompt):
    """The last row's logits by every way of running the prompt."""
    rows = {"no cache": model(mx.array([prompt]))[0, -1]}
    for name, chunk in (("prefill", 64), ("chunks of 3", 3), ("token by token", 1)):
        with Runner(model, prefill_chunk=chunk) as runner:
            rows[name] = runner.prefill(prompt)
    with Runner(model) as runner:
        runner.prefill(prompt[:-1])
        rows["decode"] = runner.decode(prompt[-1])
    return {name: np.array(row) for name, row in rows.items()}


@pytest.mark.parametrize(("length", "reaches"), [(8, True), (9, False), (24, False)])
def test_changing_the_first_token(single, length, reaches):
    before = last_rows(single, PROMPT[:length])
    after = last_rows(single, [PROMPT[0] ^ 1, *PROMPT[1:length]])
    for name in before:
        assert np.array_equal(before[name], after[name]) == (not reaches), name


@pytest.mark.parametrize("length", [9, 20])
def test_the_oldest_visible_token_is_eight_back(single, length):
    before = last_rows(single, PROMPT[:length])
    changed = PROMPT[:length]
    changed[length - 8] ^= 1
    for name, row in last_rows(single, changed).items():
        assert not np.array_equal(before[name], row), name
    changed = PROMPT[:length]
    changed[length - 9] ^= 1
    for name, row in last_rows(single, changed).items():
        assert np.array_equal(before[name], row), name
