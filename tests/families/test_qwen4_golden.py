"""Qwen4-Exp against transformers, by the file that tests/golden/make_qwen4_golden.py wrote. Close, everywhere."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families import reference_qwen4
from tests.families.oracles import assert_close
from tests.golden.make_qwen4_golden import CASES, FILE, KEPT, PROMPT, case
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.backends import compiler, host
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.families.qwen4.model import Model
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install

GOLDEN = np.load(FILE)
ABOUT = json.loads(str(GOLDEN["about"]))


def model_of(name):
    config, weights = case(name)
    model = Model(family_for_model_type("qwen4_exp").config_from_hf(config), backend=backends.select("reference"))
    mx.eval(model.parameters())
    for key, array in tree_flatten(model.parameters()):
        np.array(array, copy=False)[...] = weights[key].reshape(array.shape)
    return model


def test_the_file_has_what_it_is_for():
    """At least 20 of 48 positions choose between blocks, in one case mostly between equals, and a text ends inside."""
    assert GOLDEN.files == ["about", *CASES]
    for name, about in ABOUT["cases"].items():
        assert about["choices"] >= 20, name
    assert ABOUT["cases"]["ties"]["ties"] >= 20
    assert case("qwen4")[0]["text_config"]["eos_token_id"] in PROMPT[:16]


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_transformers(name):
    """At once, in pieces, and token by token."""
    model = model_of(name)
    assert_close(model(mx.array([PROMPT]))[0, :, KEPT], GOLDEN[name], f"{name}, at once")
    caches, rows, at = model.make_cache(), [], 0
    for count in (5, 1, 7, 3, 1, 1, 1, 20, 9):
        rows.append(model(mx.array([PROMPT[at : at + count]]), cache=caches)[0])
        at += count
    assert at == len(PROMPT)
    assert_close(mx.concatenate(rows)[:, KEPT], GOLDEN[name], f"{name}, in pieces")
    caches = model.make_cache()
    rows = [model(mx.array([[token]]), cache=caches)[0] for token in PROMPT]
    assert_close(mx.concatenate(rows)[:, KEPT], GOLDEN[name], f"{name}, by one")


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_transformers(name):
    config, weights = case(name)
    assert_close(reference_qwen4.logits(config, weights, PROMPT)[:, KEPT], GOLDEN[name], name)


def test_choices_between_equals_matter():
    """Taking the upper of equals, or everything, gives other logits: the file would notice."""
    model = model_of("ties")
    model.attend_sparsely(False)
    dense = np.array(model(mx.array([PROMPT]))[0, :, KEPT])
    off = np.abs(dense - GOLDEN["ties"]).max(axis=1) / GOLDEN["ties"].std()
    assert off[:11].max() < 1e-4
    assert off[11:].max() > 1e-2


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
def test_a_budget_beyond_the_context_takes_nothing(tmp_path):
    """What a manifest says of it decides about no allocation: the keys that it speaks of would fill any memory."""
    path = make_tiny_install("qwen4", tmp_path / "x.gturbo")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["arch"] |= {"caIndexBudget": 2**31 - 4, "caIndexTopK": 2**29 - 1}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with Runner.open(path, kernels="host") as runner:
        runner.prefill(PROMPT[:24])
        assert np.isfinite(np.array(runner.decode(PROMPT[24]))).all()
        assert np.isfinite(np.array(runner.decode(PROMPT[25]))).all()
        assert runner.report().decode_step == "one list of kernels"


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
def test_no_kernel_is_compiled_in_the_middle_of_an_answer(tmp_path):
    """Opening loads those that choose blocks too, which no short pass comes to."""
    path = make_tiny_install("qwen4", tmp_path / "x.gturbo")
    host._compiled.cache_clear()
    host.prepared.cache_clear()
    with Runner.open(path, kernels="host") as runner:
        loaded = host._compiled.cache_info().misses
        runner.prefill(PROMPT[:9])
        for token in PROMPT[9:24]:
            runner.decode(token)
        assert host._compiled.cache_info().misses == loaded
        kernels = {op for op, way in runner.report().operations if way == "kernel"}
    assert kernels >= {"score_blocks", "choose_positions", "indexed_attention"}
