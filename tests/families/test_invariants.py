"""What must hold for every variant of every family. A family joins by its entry in ``oracles.FAMILIES``.

Each test says which equality it means: ``exact`` (bit for bit) or ``close`` (1e-4 of the logits' standard deviation).
"""

import json
from dataclasses import replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from tests.families.models import build, config_of, model_of, weights_of
from tests.families.oracles import (
    FAMILIES,
    PROMPT,
    assert_close,
    assert_exact,
    mlx_lm_model,
    slow_without_switches,
)
from turbospark_mlx.errors import ContextError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.protocols import Placement
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, variants

EVERY = [(family, variant) for family in FAMILIES for variant in variants(family)]
WITH_MLX_LM = [(family, variant) for family, variant in EVERY if variant in FAMILIES[family].mlx_lm]
LENGTHS = (1, 2, 7, 8, 9, 63, 65)

each_variant = pytest.mark.parametrize(("family", "variant"), EVERY, ids=[v for _, v in EVERY])
each_in_turn = pytest.mark.parametrize(("family", "variant"), slow_without_switches(EVERY), ids=[v for _, v in EVERY])
"""For what takes seconds."""


def windowed(family, variant):
    """Whether some layer cannot go back to any earlier point: for its window, or because its state is recurrent."""
    config = config_of(family, variant)
    kinds = [getattr(config, name) for name in ("slides", "recurs") if hasattr(config, name)]
    return any(kind(layer) for kind in kinds for layer in range(config.num_hidden_layers))


def each_variant_at(name, if_windowed, otherwise):
    """Every variant with values for ``name``; those that are about a window's edge only where there is one."""
    cases = [(f, v, x) for f, v in EVERY for x in (if_windowed if windowed(f, v) else otherwise)]
    ids = [f"{v}-{x}" for _, v, x in cases]
    return pytest.mark.parametrize(("family", "variant", name), slow_without_switches(cases), ids=ids)


@cache
def oracle_logits(family, variant):
    """Float64 ``[65, vocab]``; a shorter prompt's are its first rows."""
    return FAMILIES[family].reference(tiny_config(family, variant), weights_of(family, variant), PROMPT)


def runner_of(family, variant, **options):
    return Runner(model_of(family, variant), **options)


@each_variant
def test_a_prompt_of_any_length_gives_the_oracles_logits(family, variant):
    """Close."""
    model, oracle = model_of(family, variant), oracle_logits(family, variant)
    for length in LENGTHS:
        assert_close(model(mx.array([PROMPT[:length]]))[0], oracle[:length], f"{variant}, {length} tokens at once")
        with runner_of(family, variant) as runner:
            logits = runner.prefill(PROMPT[:length])
        assert (logits.shape, logits.dtype) == ((oracle.shape[1],), mx.float32)
        assert_close(logits, oracle[length - 1], f"{variant}, prefill of {length}")


@pytest.mark.parametrize(("family", "variant"), WITH_MLX_LM, ids=[v for _, v in WITH_MLX_LM])
def test_mlx_lm_agrees_where_it_is_right(family, variant):
    """Close. Guards the oracle itself: two programs that we did not write from each other."""
    config = tiny_config(family, variant)
    peer = mlx_lm_model(FAMILIES[family].mlx_lm[variant], config, weights_of(family, variant))
    assert_close(peer(mx.array([PROMPT]))[0], oracle_logits(family, variant), f"mlx-lm's {variant}")
    assert_close(model_of(family, variant)(mx.array([PROMPT]))[0], peer(mx.array([PROMPT]))[0], variant)


@each_in_turn
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_cutting_the_prompt_changes_nothing(family, variant, chunk):
    """Close, at every position."""
    oracle = oracle_logits(family, variant)
    with runner_of(family, variant, prefill_chunk=chunk) as runner:
        for length in LENGTHS:
            runner.reset()
            assert_close(runner.prefill(PROMPT[:length]), oracle[length - 1], f"{variant}, {length} by {chunk}")
    model, caches = model_of(family, variant), model_of(family, variant).make_cache()
    rows = [model(mx.array([PROMPT[i : i + chunk]]), cache=caches)[0] for i in range(0, len(PROMPT), chunk)]
    assert_close(mx.concatenate(rows), oracle, f"{variant}, all rows by {chunk}")


@each_in_turn
def test_token_by_token(family, variant):
    """Close: decoding from the first token on, and decoding after a prefill to about a window's edge."""
    oracle = oracle_logits(family, variant)
    with runner_of(family, variant) as runner:
        for position, token in enumerate(PROMPT[:20]):
            assert_close(runner.decode(token), oracle[position], f"{variant}, decode at {position}")
        for length in (2, 7, 8, 9, 62):
            runner.reset()
            runner.prefill(PROMPT[:length])
            for position in range(length, length + 3):
                assert_close(runner.decode(PROMPT[position]), oracle[position], f"{variant}, {length} then {position}")


@each_variant_at("at", (0, 1, 6, 7, 8, 9, 30), (0, 7))
def test_going_back_to_a_mark_is_never_having_gone_on(family, variant, at):
    """Exact against a cold runner fed in the same pieces: at 0, before, at and after a window's edge, nested."""
    other = PROMPT[::-1]

    def finish(runner):
        return [runner.decode(PROMPT[40]), runner.prefill(PROMPT[41:50]), runner.decode(PROMPT[50])]

    with runner_of(family, variant) as cold, runner_of(family, variant) as runner:
        for each in (cold, runner):
            if at:
                each.prefill(PROMPT[: at - at // 3])
                for token in PROMPT[at - at // 3 : at]:
                    each.decode(token)
        mark = runner.mark()
        expected = finish(cold)
        for branch in (other[:1], other[:12], other[:40]):
            runner.prefill(branch[:-1] or branch)
            inner = runner.mark()
            before = runner.decode(branch[-1])
            runner.decode(3)
            runner.rollback(inner)
            assert_exact(runner.decode(branch[-1]), before, f"{variant}, inner mark")
            runner.rollback(mark)
            assert runner.history == cold.history[:at]
            for ours, theirs in zip(finish(runner), expected, strict=True):
                assert_exact(ours, theirs, f"{variant}, back at {at} after {len(branch)} tokens")
            runner.rollback(mark)
        runner.decode(1)
        high = runner.mark()
        runner.rollback(mark)
        runner.decode(2)
        runner.decode(2)
        with pytest.raises(ContextError, match="no longer part of the history"):
            runner.rollback(high)
        assert runner.position == at + 2


@each_variant_at("shared", (5, 15, 29, 31, 32), (5, 32))
def test_a_reused_prefix_answers_like_a_cold_run(family, variant, shared):
    """Close. 32 tokens are known; the next prompt shares the first ``shared`` of them and goes another way."""
    known = PROMPT[:32]
    prompt = known[:shared] + [(t + 1) % 320 for t in PROMPT[shared:40]]
    with runner_of(family, variant) as runner, runner_of(family, variant, prefill_chunk=40) as cold:
        runner.prefill(known[:20])
        for token in known[20:]:
            runner.decode(token)
        reused = runner.reuse(prompt)
        assert reused == (shared if not windowed(family, variant) or shared >= len(known) - 1 else 0)
        assert runner.history == prompt[:reused]
        assert_close(runner.prefill(prompt[reused:]), cold.prefill(prompt), variant)


@each_variant
def test_the_same_prompt_again_leaves_one_token_to_run(family, variant):
    """Close, and exact the third time, when both runs feed one token to the same state."""
    with runner_of(family, variant) as runner:
        first = runner.prefill(PROMPT[:20])
        again = []
        for _ in range(2):
            assert runner.reuse(PROMPT[:20]) == 19
            again.append(runner.prefill(PROMPT[19:20]))
        assert_close(again[0], first, variant)
        assert_exact(again[0], again[1], variant)


@each_variant
def test_batches_without_a_cache(family, variant):
    """Close: each row of a batch is its own prompt."""
    rows = [PROMPT[:30], PROMPT[30:60], PROMPT[5:35]]
    model = model_of(family, variant)
    for row, logits in zip(rows, model(mx.array(rows)), strict=True):
        assert_close(logits, model(mx.array([row]))[0], variant)


@each_variant
def test_embeddings_can_stand_for_tokens(family, variant):
    """Exact; embeddings in another dtype are brought to the model's."""
    model, tokens = model_of(family, variant), mx.array([PROMPT[:9]])
    embeddings = model.model.embed_tokens(tokens)
    # Where ids say more than their embedding, both are given.
    by_id = getattr(model.args, "hidden_size_per_layer_input", 0) or getattr(model.args, "ple_layer", None) is not None
    given = tokens if by_id else None
    assert_exact(model(given, input_embeddings=embeddings), model(tokens), variant)
    half = embeddings.astype(mx.float16)
    rounded = model(given, input_embeddings=half)
    assert rounded.dtype == mx.float32
    assert_exact(rounded, model(given, input_embeddings=half.astype(mx.float32)), variant)


@each_in_turn
def test_plain_modules_compute_the_same(family, variant):
    """Close, with parameters of the same names and shapes."""
    fused, plain = model_of(family, variant), model_of(family, variant, fused=False)
    assert {n: a.shape for n, a in tree_flatten(plain.parameters())} == {
        n: a.shape for n, a in tree_flatten(fused.parameters())
    }
    attention = next(layer.self_attn for layer in plain.layers if "self_attn" in layer)
    assert isinstance(attention.o_proj, nn.Linear)
    assert_close(plain(mx.array([PROMPT]))[0], oracle_logits(family, variant), variant)


@each_in_turn
def test_every_tensor_moves_the_logits_together_and_alone(family, variant):
    """Each parameter is changed in place (as the loader writes it, so through the joint matrix) and replaced (as an
    optimizer does, so past it): both change the logits, and to the same (close)."""
    tokens = mx.array([PROMPT[: FAMILIES[family].moved]])
    joint = build(tiny_config(family, variant))
    before = np.array(joint(tokens)[0])
    parameters = dict(tree_flatten(joint.parameters()))
    for name, array in parameters.items():
        memory, kept = np.array(array, copy=False), np.array(array)
        # The other way round, because what only chooses would not notice a factor.
        changed_values = kept[::-1] * 1.5 + 0.1
        memory[...] = changed_values
        changed = np.array(joint(tokens)[0])
        if name not in FAMILIES[family].cancelled(tiny_config(family, variant)):
            assert np.abs(changed - before).max() > 1e-3 * before.std(), f"{variant}: {name} is not used"
        replaced = mx.array(changed_values)
        memory[...] = kept
        joint.update(tree_unflatten([(name, replaced)]))
        assert_close(joint(tokens)[0], changed, f"{variant}: {name} replaced")
        joint.update(tree_unflatten([(name, array)]))
    assert_exact(joint(tokens)[0], before, variant)


@each_variant
def test_names_map_to_themselves_and_back(family, variant):
    config = config_of(family, variant)
    registered = family_for_model_type(tiny_config(family, variant)["model_type"])
    expected = registered.expected(config)
    parameters = {name for name, _ in tree_flatten(model_of(family, variant).parameters())}
    assert len(expected) == len(parameters)
    for name, shape in expected.items():
        place = registered.place(name, config)
        assert isinstance(place, Placement)
        assert place.name == name
        assert registered.place(place.checkpoint_name, config) == place
        assert place.checkpoint_name in parameters
        assert weights_of(family, variant)[place.checkpoint_name].shape == shape
        assert (place.role == "vector") == (len(shape) == 1 or ".conv1d." in name or ".g_proj." in name)


@each_variant
def test_config_json_and_manifest_give_equal_configurations(family, variant):
    config = config_of(family, variant)
    registered = family_for_model_type(tiny_config(family, variant)["model_type"])
    arch, extension = json.loads(json.dumps(config.to_manifest()))
    assert arch["family"] in registered.manifest_families
    assert registered.config_from_manifest(arch, extension) == config
    assert config.elder_assumption().keys() == extension.keys()
    with pytest.raises(Exception, match="tie_word_embeddings"):
        replace(config, tie_word_embeddings=None).to_manifest()


@each_variant
def test_kv_bytes_is_what_the_caches_hold(family, variant):
    """Up to the bucket that buffers grow by."""
    config, model = config_of(family, variant), model_of(family, variant)
    cache = model.make_cache(max_length=37)
    for _ in range(37):
        model(mx.array([[1]]), cache=cache)
    assert sum(layer.nbytes for layer in cache) == config.kv_bytes(37, 4)


@pytest.mark.parametrize(("family", "variant"), WITH_MLX_LM, ids=[v for _, v in WITH_MLX_LM])
def test_our_caches_serve_mlx_lms_model(family, variant):
    """Close: they keep mlx-lm's names and its meaning of masks, in prefill, chunks and decoding."""
    peer = mlx_lm_model(FAMILIES[family].mlx_lm[variant], tiny_config(family, variant), weights_of(family, variant))
    cache, rows, at = model_of(family, variant).make_cache(), [], 0
    for count in (5, 1, 7, 1, 1, 20, 1, 1):
        rows.append(peer(mx.array([PROMPT[at : at + count]]), cache=cache)[0])
        at += count
    assert_close(mx.concatenate(rows), oracle_logits(family, variant)[:at], variant)
