"""Models with routed experts: where these live changes no bit of an answer, and no fault of a disk goes unnoticed."""

import errno
import gc
import os

import mlx.core as mx
import numpy as np
import pytest

from tests.families.models import config_of
from tests.families.oracles import FAMILIES, slow_without_switches
from turbospark_mlx import generate, load
from turbospark_mlx.custom_kernels.backends import compiler, host
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.gturbo import files
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, tiny_config, variants


def spec_of(family, variant):
    """The first layer's experts; None for dense models."""
    known = family_for_model_type(tiny_config(family, variant)["model_type"])
    return next(iter(known.experts(config_of(family, variant)).values()), None)


MIXTURES = [(family, v) for family in FAMILIES for v in variants(family) if spec_of(family, v)]
# Compiling the kernels of a variant takes ten seconds, so that outside the slow run one has them.
ON_KERNELS = [
    pytest.param(*each, "auto", marks=[] if each == ("gemma4", "gemma4-moe") else [pytest.mark.slow])
    for each in MIXTURES
]
PROMPT = np.random.default_rng(0).integers(0, 320, 21).tolist()


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    made = {}

    def of(family, variant):
        if (family, variant) not in made:
            path = tmp_path_factory.mktemp("models") / f"{variant}.gturbo"
            made[family, variant] = make_tiny_install(family, path, variant=variant)
        return made[family, variant]

    return of


def answers(runner):
    """Logits behind a prompt in chunks, and behind each of a few tokens."""
    found = [runner.prefill(PROMPT[:-3])]
    found += [runner.decode(token) for token in PROMPT[-3:]]
    return [np.array(logits) for logits in found]


@pytest.mark.parametrize(
    ("family", "variant", "kernels"), [*ON_KERNELS, *slow_without_switches((*each, "reference") for each in MIXTURES)]
)
def test_residency_changes_no_bit(install, family, variant, kernels):
    path, options = install(family, variant), {"kernels": kernels, "prefill_chunk": 8}
    spec = spec_of(family, variant)
    with Runner.open(path, residency="resident", **options) as runner:
        expected = answers(runner)
        assert runner.report().experts.residency == "resident"
    with Runner.open(path, residency="mapped", **options) as runner:
        assert all(map(np.array_equal, answers(runner), expected))
    for slots in range(spec.top_k, spec.num_experts + 1):
        with Runner.open(path, expert_slots=slots, **options) as runner:
            # Opening compiles kernels without running experts.
            assert runner.report().expert_counters.misses == 0
            assert runner.report().expert_counters.hit_rate is None
            for _ in range(2):
                assert all(map(np.array_equal, answers(runner), expected))
                runner.reset()
            assert runner.report().expert_counters.bytes_read > 0


@pytest.mark.parametrize(("family", "variant"), MIXTURES)
def test_experts_as_parameters_are_close(install, family, variant):
    with Runner.open(install(family, variant), residency="resident", kernels="reference") as runner:
        expected = answers(runner)
    with Runner.open(install(family, variant), fused=False) as runner:
        assert runner.experts is None
        for mine, theirs in zip(answers(runner), expected, strict=True):
            assert np.abs(mine - theirs).max() < 1e-4 * theirs.std()


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
def test_a_long_chunk_takes_every_way_and_loads_no_kernel(install):
    """Some experts have more rows than the kernel takes, and some have fewer."""
    path = install("llama", "mixtral")  # no other matrix is of its experts' shape
    prompt = np.random.default_rng(1).integers(0, 320, 90).tolist()
    host._compiled.cache_clear()
    host.prepared.cache_clear()
    with Runner.open(path, residency="resident", kernels="host") as runner:
        loaded = host._compiled.cache_info().misses
        expected = np.array(runner.prefill(prompt))
        assert host._compiled.cache_info().misses == loaded
        assert {way for op, way in runner.report().operations if op == "expert_mixture"} == {"kernel", "blas"}
    for slots in (3, 5, 8):
        with Runner.open(path, kernels="host", expert_slots=slots) as runner:
            assert np.array_equal(runner.prefill(prompt), expected)


def test_a_read_error_in_the_middle_of_a_token(install, monkeypatch):
    path = install("llama", "qwen3-moe")
    with Runner.open(path, residency="resident") as runner:
        expected = answers(runner)
    preadv = os.preadv
    with Runner.open(path, expert_slots=3) as runner:
        runner.prefill(PROMPT[:-3])
        for token, right in zip(PROMPT[-3:], expected[1:], strict=True):
            with monkeypatch.context() as patch:
                left = [1]

                def failing(fd, buffers, offset, left=left):
                    left[0] -= 1
                    if left[0] < 0:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    return preadv(fd, buffers, offset)

                patch.setattr(files.os, "preadv", failing)
                at = runner.position
                with pytest.raises(InstallError, match=r"Expert \d of layer \d .*layer_0\d\.bin: .*Input/output error"):
                    runner.decode(token)
                assert runner.position == at
            assert np.array_equal(runner.decode(token), right)


@pytest.mark.parametrize("residency", ["resident", "streamed"])
def test_closing_gives_all_memory_back(install, residency):
    def opened():
        runner = Runner.open(install("gemma4", "gemma4-moe"), residency=residency)
        answers(runner)
        runner.close()
        return runner

    opened()  # what is kept for later models is there now
    gc.collect()
    before = mx.get_active_memory()
    kept = opened()
    assert mx.get_active_memory() == before
    assert mx.get_cache_memory() == 0
    kept.close()


def test_a_loaded_model_keeps_its_files_as_long_as_it_lives(install):
    path = install("llama", "mixtral")
    gc.collect()  # of what tests before this one left open
    before = len(os.listdir("/dev/fd"))
    model, tokenizer = load(path, expert_slots=2)
    streamed = generate(model, tokenizer, PROMPT, max_tokens=5)
    assert streamed == generate(*load(path, residency="resident"), PROMPT, max_tokens=5)
    assert len(os.listdir("/dev/fd")) > before
    del model
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before


def test_options_that_do_not_go_with_an_install(install, tmp_path):
    dense = make_tiny_install("llama", tmp_path / "dense.gturbo")
    for options in ({"residency": "streamed"}, {"expert_slots": 8}):
        with pytest.raises(OptionError, match="has no routed experts"):
            Runner.open(dense, **options)
    path = install("llama", "mixtral")
    with pytest.raises(OptionError, match="expert_slots=1: every token uses 2 experts"):
        Runner.open(path, expert_slots=1)
    with pytest.raises(OptionError, match="with fused=False experts are parameters"):
        Runner.open(path, residency="mapped", fused=False)
    for wrong in (0, -1, 2.5, "many"):
        with pytest.raises(OptionError, match=r"expert_slots=.*whole number"):
            Runner.open(path, expert_slots=wrong)


def test_a_chunk_fits_the_scratch_memory(install, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.experts.chunks.SCRATCH_BYTES", 7 * 4 * 2 * 64)
    with Runner.open(install("llama", "mixtral")) as runner:
        assert runner.report().prefill_chunk == 7
        mx.eval(runner.prefill(PROMPT))
