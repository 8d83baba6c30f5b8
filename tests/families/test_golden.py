"""Every variant and every shape against transformers' logits and states, which ``golden/make_transformers.py`` made."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.families.models import build
from tests.families.oracles import assert_close
from tests.families.shapes import EVERY, SHAPES, prompt_of, shape_config, shape_weights
from tests.golden.make_transformers import checksum, kept, kept_state
from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.runner import Runner

each = pytest.mark.parametrize(("family", "name"), EVERY)
QUICK = ("v3-below-zero", "odd-moe", "all-slide", "mixtral-odd")
"""Shapes whose every way of running is in the quick suite."""
OWN = [
    pytest.param(family, name, marks=[] if name in QUICK else [pytest.mark.slow])
    for family, names in SHAPES.items()
    for name in names
]


@cache
def golden(family):
    with np.load(GOLDEN / f"transformers_{family}.npz") as arrays:
        return dict(arrays)


@cache
def model_of(family, name):
    return build(shape_config(family, name), shape_weights(family, name))


def check_chunks(family, name, chunk):
    """Logits of all 65 positions and, where there are any, the recurrent states behind them."""
    model, prompt = model_of(family, name), prompt_of(shape_config(family, name))
    caches, what = model.make_cache(), f"{name}, by {chunk}"
    rows = [model(mx.array([prompt[at : at + chunk]]), cache=caches)[0] for at in range(0, len(prompt), chunk)]
    assert_close(kept(np.array(mx.concatenate(rows))), golden(family)[name], what)
    states = [mx.flatten(cache[1][0], 0, -3) for cache in caches if isinstance(cache, RecurrentState)]
    assert bool(states) == (family == "qwen")
    for state, theirs in zip(states, golden(family).get(f"{name}:states", ()), strict=True):
        assert_close(kept_state(np.array(state)), theirs, f"{what}, states")


@each
def test_the_golden_file_is_of_these_weights(family, name):
    made_of = golden(family)[f"{name}:weights"]
    assert made_of == checksum(shape_weights(family, name)), "run tests/golden/make_transformers.py again"


@each
def test_logits_at_every_position(family, name):
    """Close: without a cache, and in chunks of 7 and 64, whose borders lie before, on and behind those of windows."""
    expected, prompt = golden(family)[name], prompt_of(shape_config(family, name))
    assert expected.shape == (65, 16)
    assert_close(kept(np.array(model_of(family, name)(mx.array([prompt]))[0])), expected, f"{name}, at once")
    for chunk in (7, 64):
        check_chunks(family, name, chunk)


@pytest.mark.parametrize(("family", "name"), OWN)
def test_small_chunks(family, name):
    """Close, states too."""
    for chunk in (1, 3):
        check_chunks(family, name, chunk)


@pytest.mark.parametrize(("family", "name"), OWN)
def test_token_by_token_and_going_back(family, name):
    """Close at positions 0 to 40, gone back to 11 and 30 in between."""
    expected, prompt = golden(family)[name][:41], prompt_of(shape_config(family, name))[:41]
    with Runner(model_of(family, name)) as runner:
        rows = []
        for position, token in enumerate(prompt):
            if position in (11, 30):
                mark = runner.mark()
                runner.prefill(prompt[:9])
                runner.decode(prompt[3])
                runner.rollback(mark)
            rows.append(np.array(runner.decode(token)))
        assert_close(kept(np.array(rows)), expected, name)
