"""The decode step as a whole gives the bits that its operations give one by one, and knows when it must not."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.families import gpt_oss_checkpoints
from tests.families.oracles import PROMPT, assert_close, assert_exact
from tests.runners import TOKENS, walk
from turbospark_mlx.convert import convert
from turbospark_mlx.custom_kernels import backends, rms_norm
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.backends.replay import HostRecording, NotRecordable
from turbospark_mlx.families.layers import Linear
from turbospark_mlx.generation.loop import Request, generate_tokens
from turbospark_mlx.runner import Runner
from turbospark_mlx.step import DecodeStep
from turbospark_mlx.testing import make_tiny_install

needs_compiler = pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's way")
LLAMA = ("llama", "mistral", "qwen3", "llama-biases", "mixtral", "qwen3-moe", "qwen3-moe-sums")
QWEN = ("qwen3.5", "qwen3.5-moe", "qwen3.5-tied")
DEEPSEEK2 = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "deepseek-v3-flat", "deepseek-v3-halves")
GPT_OSS = ("gpt-oss", "gpt-oss-plain")
GEMMA4 = ("gemma4-moe", "gemma4-dense", "gemma4-small", "gemma4-untied")
MUSE = ("muse-glimmer", "muse-glimmer-tied")
SPARK = ("spark", "spark-biases", "spark-one-key", "spark-full")
QWEN4 = ("qwen4", "qwen4-ten", "qwen4-plain")
MXFP4 = "gpt-oss-mxfp4"
"""As gpt-oss is published: its experts in MXFP4."""


class Installs(dict):
    """Tiny installs by variant, made when they are asked for."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        families = {
            "llama": LLAMA,
            "gemma4": GEMMA4,
            "deepseek2": DEEPSEEK2,
            "gpt_oss": GPT_OSS,
            "muse": MUSE,
            "spark": SPARK,
            "qwen": QWEN,
            "qwen4": QWEN4,
        }
        self._family = {variant: family for family, variants in families.items() for variant in variants}

    def __missing__(self, variant):
        path = self._folder / f"{variant}.gturbo"
        if variant == MXFP4:
            gpt_oss_checkpoints.write(self._folder / "checkpoint", "gpt-oss", "published")
            convert(self._folder / "checkpoint", path, bits=8, group_size=32, progress=False)
        else:
            make_tiny_install(self._family[variant], path, variant=variant, group_size=32)
        self[variant] = path
        return path


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return Installs(tmp_path_factory.mktemp("step"))


def plain(model, caches, token):
    """One token, one operation after the other."""
    return model(mx.array([[token]]), cache=caches)[0, 0]


def prefilled(model, caches, prompt):
    """What is behind a prompt, as the runner computes it."""
    return model.head(model.hidden(mx.array([prompt]), caches)[:, -1:])[0, 0]


def follow(runner, tokens, prompt):
    """Run ``tokens`` after ``prompt`` and beside it through the model's own operations; they must agree to the bit."""
    caches = runner.model.make_cache(runner.max_context)
    runner.reset()
    assert_exact(runner.prefill(prompt), prefilled(runner.model, caches, prompt))
    for token in tokens:
        assert_exact(runner.decode(token), plain(runner.model, caches, token))
    return caches


@needs_compiler
@pytest.mark.parametrize("prompt", [1, 5, 8, 250])
@pytest.mark.parametrize("variant", LLAMA[:3])
def test_a_recorded_step_gives_the_same_bits(install, variant, prompt):
    """Over a window's edge, over a cache that grows, and again after it was emptied."""
    with Runner.open(install[variant], kernels="host") as runner:
        for _ in range(2):
            follow(runner, TOKENS[:20], (PROMPT * 5)[:prompt])
        assert runner.report().decode_step == "one list of kernels"


@needs_compiler
@pytest.mark.parametrize("variant", [*LLAMA[3:], *GEMMA4, *MUSE, *SPARK, *QWEN, *QWEN4, *DEEPSEEK2, *GPT_OSS, MXFP4])
def test_every_operation_of_a_step_is_a_kernel(install, variant):
    """Routers, experts in memory, latents, sinks, gates on attention, biases, scaled or normalised embeddings, inputs
    for each layer, over a window's edge."""
    with Runner.open(install[variant], kernels="host") as runner:
        follow(runner, TOKENS[:24], PROMPT[:5])
        assert runner.report().decode_step == "one list of kernels"


@needs_compiler
@pytest.mark.parametrize("residency", ["streamed", "mapped"])
@pytest.mark.parametrize("variant", ["gemma4-moe", "deepseek-v2-lite", "qwen3.5-moe", "qwen4", MXFP4])
def test_experts_that_are_read_on_the_way_give_the_bits_of_a_recorded_step(install, variant, residency):
    slots = {"expert_slots": 3} if residency == "streamed" else {}
    with (
        Runner.open(install[variant], kernels="host", residency="resident") as runner,
        Runner.open(install[variant], kernels="host", residency=residency, **slots) as other,
    ):
        assert_exact(runner.prefill(PROMPT[:9]), other.prefill(PROMPT[:9]))
        other.model.backend.counters.clear()
        for token in TOKENS[:20]:
            assert_exact(runner.decode(token), other.decode(token))
        assert runner.report().decode_step == "one list of kernels"
        assert "because experts are chosen on the way" in other.report().decode_step
        assert ("expert_mixture", "kernel") not in other.model.backend.counters
        routed = len(other.experts.counters)
        assert other.model.backend.counters["moe_phase2_down_reduce", "kernel"] == 20 * routed


@needs_compiler
@pytest.mark.parametrize("variant", ["mistral", "qwen3.5", "qwen4", "qwen4-ten"])
def test_a_step_after_going_back_is_the_step_that_was(install, variant):
    with Runner.open(install[variant], kernels="host") as runner:
        runner.prefill(PROMPT[:20])
        mark = runner.mark()
        first = [np.array(runner.decode(t)) for t in TOKENS[:12]]
        for _ in range(2):
            runner.rollback(mark)
            for ours, theirs in zip([runner.decode(t) for t in TOKENS[:12]], first, strict=True):
                assert_exact(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("variant", ["qwen3.5", "qwen4", "qwen4-ten"])
def test_recorded_steps_of_a_recurrent_model_are_taken_back(install, variant):
    """The last two, to the states that they came from; and a mark's state outlives the steps after it."""
    with Runner.open(install[variant], kernels="host") as runner:
        runner.prefill(PROMPT[:7])
        first = [np.array(runner.decode(t)) for t in TOKENS[:6]]
        for back in (1, 2):
            ids = runner.history[:-back]
            assert runner.reuse([*ids, 0]) == len(ids)
            for token, theirs in zip(TOKENS[6 - back : 6], first[-back:], strict=True):
                assert_exact(runner.decode(token), theirs)
        mark = runner.mark()
        last = np.array(runner.decode(TOKENS[6]))
        for token in TOKENS[7:12]:
            runner.decode(token)
        runner.rollback(mark)
        assert_exact(runner.decode(TOKENS[6]), last)
        assert runner.report().decode_step == "one list of kernels"


@needs_compiler
@pytest.mark.parametrize("variant", QWEN4)
def test_a_recorded_step_looks_up_ngrams_and_chooses_blocks(install, variant):
    """From the first token on, over ends of texts and over caches that grow, as when all tokens run at once; and
    beside a model that sees everything."""
    ids = [int(t) for t in np.random.default_rng(5).integers(0, 320, 300)]
    ids[6] = ids[7] = ids[30] = 41
    with Runner.open(install[variant], kernels="host") as runner:
        model, sparse = runner.model, []
        at_once = np.array(model(mx.array([ids]))[0])
        for prompt in (1, 3, 11):
            runner.reset()
            rows = [np.array(runner.prefill(ids[:prompt])), *(np.array(runner.decode(t)) for t in ids[prompt:])]
            assert_close(rows, at_once[prompt - 1 :], f"{variant} behind {prompt}")
            sparse.append(rows[-1])
        follow(runner, ids[11:40], ids[:11])
        model.attend_sparsely(False)
        dense = np.array(model(mx.array([ids[:60]]))[0])
        assert np.abs(dense - at_once[:60]).max() > 1e-2 * at_once.std()
        runner.reset()
        rows = [np.array(runner.prefill(ids[:2])), *(np.array(runner.decode(t)) for t in ids[2:60])]
        assert_close(rows, dense[1:], f"{variant}, dense")
        assert runner.report().decode_step == "one list of kernels"


@needs_compiler
def test_small_matrices_that_are_not_packed_are_kernels_too(install):
    """As copies for MLX may have those around residual streams, and the indexer's."""
    with Runner.open(install["qwen4"], kernels="host") as runner:
        layer = runner.model.layers[2]
        names = ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")
        owners = [(getattr(layer, f"{part}_hyper_connection"), name) for part in ("attn", "mlp") for name in names]
        for owner, name in [*owners, (layer.self_attn.indexer, "index_qk_proj")]:
            packed = owner[name]
            parts = packed["weight"], packed["scales"], packed["biases"]
            weight = mx.dequantize(*parts, group_size=packed.group_size, bits=packed.bits)
            options = {"stored": "bfloat16", "bias": None, "backend": runner.model.backend}
            owner[name] = Linear(weight.shape[1], weight.shape[0], **options)
            owner[name].weight = weight.astype(mx.bfloat16)
        mx.eval(runner.model.parameters())
        follow(runner, TOKENS[:24], PROMPT[:5])
        assert runner.report().decode_step == "one list of kernels"


@needs_compiler
def test_a_step_among_equal_scores_chooses_the_lower_blocks(install):
    """Keys that are all alike: behind a prompt, and in blocks that steps complete."""
    with Runner.open(install["qwen4"], kernels="host") as runner:
        indexer = runner.model.layers[2].self_attn.indexer
        product, width = indexer.index_qk_proj, indexer.q_layernorm["weight"].shape[0]
        # Keys of zeros have scores of 0, whatever the queries.
        for name in ("scales", "biases"):
            product[name] = mx.concatenate([product[name][:-width], mx.zeros_like(product[name][-width:])])
        ids = TOKENS[:50]
        at_once = runner.model(mx.array([ids]))[0]
        rows = [runner.prefill(ids[:9]), *map(runner.decode, ids[9:])]
        assert_close(mx.stack(rows), at_once[8:])
        follow(runner, TOKENS[:24], PROMPT[:5])
        assert runner.report().decode_step == "one list of kernels"


def test_a_model_that_looks_up_by_ids_does_not_begin_without_them(install):
    """A GPU's next token is still there when a step begins ahead."""
    for variant, looks_up in (("qwen4", True), ("qwen4-plain", False), ("qwen3.5", False)):
        with Runner.open(install[variant], kernels="reference") as runner:
            runner.model.backend = replace(runner.model.backend, device="gpu")
            with Runner(runner.model, max_context=16) as other:
                assert other._looks_ahead is not looks_up


@needs_compiler
def test_a_step_notices_what_was_replaced(install):
    with Runner.open(install["llama"], kernels="host") as runner:
        caches = follow(runner, TOKENS[:3], PROMPT[:4])
        layer = runner.model.layers[1]
        layer.mlp.down_proj.scales = layer.mlp.down_proj.scales * 2
        for token in TOKENS[3:6]:
            assert_exact(runner.decode(token), plain(runner.model, caches, token))
        layer.self_attn, runner.model.layers[0].self_attn = runner.model.layers[0].self_attn, layer.self_attn
        for token in TOKENS[6:9]:
            assert_exact(runner.decode(token), plain(runner.model, caches, token))
        assert runner.report().decode_step == "one list of kernels"


class Halved(nn.Module):
    """More than kernels."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x, *, norm, residual):
        return self.inner(x, norm=norm, residual=residual) * 0.5


@needs_compiler
def test_a_model_that_does_more_than_kernels_runs_one_operation_after_the_other(install):
    with Runner.open(install["llama"], kernels="host") as runner:
        caches = follow(runner, TOKENS[:3], PROMPT[:4])
        runner.model.layers[0].mlp = Halved(runner.model.layers[0].mlp)
        for token in TOKENS[3:8]:
            assert_exact(runner.decode(token), plain(runner.model, caches, token))
        assert "because input x of dequant_gemv_simd comes from an operation" in runner.report().decode_step


@needs_compiler
def test_a_state_that_no_kernel_writes_is_known_from_the_first(install):
    class Never:
        def places(self, length):
            return False

    with Runner.open(install["llama"], kernels="host") as runner:
        how = DecodeStep(runner.model, [*runner.model.make_cache(), Never()]).how
        assert how == "one operation after the other, because a state is not written in place"


@needs_compiler
def test_two_runners_of_one_model_do_not_meet(install):
    with Runner.open(install["qwen3"], kernels="host") as runner, Runner(runner.model, max_context=64) as other:
        caches, others = (runner.model.make_cache(each.max_context) for each in (runner, other))
        assert_exact(runner.prefill(PROMPT[:6]), prefilled(runner.model, caches, PROMPT[:6]))
        assert_exact(other.prefill(PROMPT[6:9]), prefilled(runner.model, others, PROMPT[6:9]))
        for token in TOKENS[:6]:
            assert_exact(runner.decode(token), plain(runner.model, caches, token))
            assert_exact(other.decode(token + 1), plain(runner.model, others, token + 1))


@needs_compiler
def test_a_recording_refuses_what_it_could_not_repeat():
    backend = backends.select("host")
    x, weight = mx.random.normal((1, 64)), mx.ones((64,))
    mx.eval(x, weight)
    options = {"eps": 1e-5, "backend": backend}
    with HostRecording([x, weight]) as recording, pytest.raises(NotRecordable, match="input x of rms_norm comes from"):
        rms_norm(rms_norm(x, weight, **options) + 1, weight, **options)
    with HostRecording([x, weight]) as recording, pytest.raises(NotRecordable, match="the result comes from"):
        recording.finish(mx.array(rms_norm(x, weight, **options)) + 0)
    with HostRecording([x, weight]) as recording:
        recording.finish(rms_norm(rms_norm(x, weight, **options), weight, **options))
    np.array(x, copy=False)[...] = 3.0
    np.testing.assert_allclose(recording.replay(), np.ones((1, 64)), rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "mistral"])
@pytest.mark.parametrize("seed", range(4))
def test_looking_ahead_changes_nothing(install, variant, seed):
    """A GPU begins with the likeliest next token; here the same code runs on the reference back end."""
    rng = np.random.default_rng(seed)
    with (
        Runner.open(install[variant], kernels="reference", max_context=60) as runner,
        Runner.open(install[variant], kernels="reference", max_context=60) as oracle,
    ):
        runner._looks_ahead = True
        chances = {"likeliest": 0.5, "other": 0.2} | dict.fromkeys(("prefill", "mark", "rollback", "reuse"), 0.075)
        walk(runner, oracle, rng, 60, chances)


def test_an_answer_that_takes_the_likeliest_is_the_same_looking_ahead(install):
    with (
        Runner.open(install["llama"], kernels="reference") as runner,
        Runner.open(install["llama"], kernels="reference") as oracle,
    ):
        runner._looks_ahead = True
        request = Request(max_tokens=20)
        ours, theirs = (list(generate_tokens(r, r.tokenizer, PROMPT[:9], request)) for r in (runner, oracle))
        assert [response.token for response in ours] == [response.token for response in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert_exact(one.logits, other.logits)
        known = []
        for _ in range(4):
            runner.decode(5, ahead=True)
            known.append(runner.likeliest())
        assert all(isinstance(token, int) for token in known)


def test_logits_that_are_no_numbers_have_no_likeliest(install):
    with Runner.open(install["llama"], kernels="reference") as runner:
        runner._looks_ahead = True
        runner.prefill(PROMPT[:4])
        runner.model.model.norm.weight = runner.model.model.norm.weight * mx.nan
        runner.decode(5, ahead=True)
        assert runner.likeliest() is None


def test_a_step_in_vain_has_ended_before_another_begins(install, monkeypatch):
    """It writes the same rows, and MLX does not know."""
    with Runner.open(install["llama"], kernels="reference") as runner:
        runner._looks_ahead = True
        runner.prefill(PROMPT[:4])
        evaluate, evaluated = mx.eval, []
        for forget in (
            runner.mark,
            lambda: runner.prefill([7]),
            lambda: runner.decode((runner.likeliest() + 1) % 320),
            lambda: runner.reuse([1, 2]),
        ):
            runner.decode(5, ahead=True)
            begun = runner._ahead.logits
            evaluated.clear()
            with monkeypatch.context() as patch:
                patch.setattr(mx, "eval", lambda *arrays: [evaluated.append(arrays[0]), evaluate(*arrays)])
                forget()
            assert evaluated[0] is begun
