"""A decode step that is a CUDA graph gives the bits of its kernels one by one, on a stand-in for the driver that does
nothing before it is waited for (`fake_cuda`)."""

import gc
import itertools

import mlx.core as mx
import numpy as np
import pytest

from tests import graphs
from tests.experts.test_on_device import COUNTS, Choices, Ways, evict, streamed_layers
from tests.families.oracles import PROMPT, assert_exact
from tests.kernels import fake_cuda
from tests.runners import TOKENS, interrupted, walk
from tests.test_step import DEEPSEEK2, GEMMA4, GPT_OSS, LLAMA, MUSE, MXFP4, QWEN, QWEN4, SPARK, Halved, Installs
from turbospark_mlx.cache import kv
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import BackendError

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not compiler.candidates(), reason="needs a CPU's kernels, and a C++ compiler"
)
ROWS = 16
"""Caches grow by so many here, so that a short text sees it."""
EVERY = [*LLAMA, *GEMMA4, *MUSE, *SPARK, *QWEN, *QWEN4, *DEEPSEEK2, *GPT_OSS, MXFP4]

TAKEN_BACK = ("qwen3.5", "qwen4-plain")
"""Of their states the last two steps can be taken back, of which one that was begun in vain is one."""


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return Installs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(progress)`` makes the device that everything is opened on."""
    devices = []

    def made(progress=fake_cuda.late):
        devices.append(fake_cuda.installed(monkeypatch, progress))
        return devices[-1]

    monkeypatch.setattr(kv, "BUCKET", ROWS)
    yield made
    gc.collect()
    assert all(device.abandoned == 0 for device in devices)


@pytest.fixture
def device(gpu):
    return gpu()


def opened(path, slots=None, max_context=90):
    return graphs.both(path, slots=slots, dtype="float32", max_context=max_context)


@pytest.mark.parametrize("variant", EVERY)
def test_every_family_decodes_the_same_bits(install, device, variant):
    """Over growing caches and windows that wrap, in vain, back, and after a reset."""
    with opened(install[variant]) as both:
        both.follow()
        assert both.runner.report().decode_step == graphs.GRAPH
        assert device.calls["launch"] > 70
        assert device.calls["change"] > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma4-moe", *TAKEN_BACK, "deepseek-v3"])
def test_however_fast_a_gpu_is(install, gpu, variant, seed):
    gpu(fake_cuda.anyhow(seed) if seed else fake_cuda.early)
    with opened(install[variant]) as both:
        rng = np.random.default_rng(seed)
        chances = {"likeliest": 0.5, "other": 0.2, "prefill": 0.07, "mark": 0.07, "rollback": 0.07}
        reuse = 0.07 * (variant not in TAKEN_BACK)
        walk(both.runner, both.oracle, rng, 60, chances | {"reuse": reuse, "reset": 0.09 - reuse})
        assert both.runner.report().decode_step == graphs.GRAPH


@pytest.mark.parametrize("variant", COUNTS)
def test_streamed_experts(install, gpu, monkeypatch, variant):
    """With as few slots as a token needs, with more, where misses come on the way, and with all."""
    experts, top_k = COUNTS[variant]
    for slots, progress in ((top_k, "late"), (experts - 2, "early"), (experts - 1, "late"), (experts, "late")):
        with monkeypatch.context() as patch:
            device = fake_cuda.installed(patch, getattr(fake_cuda, progress))
            ways = Ways(patch).counts
            with opened(install[variant], slots) as both:
                both.prefill(PROMPT[:7])
                for i in range(22):
                    both.greedily(1, ahead=i % 7 > 0) if i % 5 < 4 else both.in_vain(1)
                assert both.runner.report().decode_step == graphs.GRAPH + graphs.WHILE
                assert ways["by layer"] > 0 or slots == experts
                assert ways["settled"] > 0 or slots in (top_k, experts)
                assert device.calls["launch"] > 0
            gc.collect()
            assert device.abandoned == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", COUNTS)
def test_any_way_through_a_text_with_streamed_experts(install, gpu, variant, seed):
    gpu([fake_cuda.late, fake_cuda.anyhow(seed)][seed])
    with opened(install[variant], COUNTS[variant][0] - 1 - seed) as both:
        chances = {"likeliest": 0.5, "other": 0.2, "prefill": 0.08, "mark": 0.08}
        chances |= {"rollback": 0.07, "reuse": 0.05, "reset": 0.02}
        walk(both.runner, both.oracle, np.random.default_rng(seed), 50, chances)
        assert both.runner.report().decode_step == graphs.GRAPH + graphs.WHILE


def test_a_miss_while_the_next_step_is_on_its_way(install, device, monkeypatch):
    """Of one layer, anywhere: slots are not written while a launch may read them."""
    with opened(install["gemma4-moe"], 7) as both:
        choices = Choices(monkeypatch)
        both.prefill(PROMPT[:5])
        for i, token in enumerate(TOKENS[:12]):
            choices.passes.clear()
            expected = both.oracle.decode(token)
            evict(both.runner, i % 4, choices.by_layer()[i % 4][0][0][i % 3])
            assert_exact(both.runner.decode(token, ahead=i % 2 == 0), expected)
        assert both.runner.history == both.oracle.history


def test_slots_are_written_when_launches_have_read_them(install, device, monkeypatch):
    """Reads for other slots, asked for while two launches are on their way."""
    with opened(install["gemma4-moe"], 7) as both:
        both.prefill(PROMPT[:5])
        runner = both.runner
        runner.experts.warm([list(range(8))] * 4)
        runner._slots.expect_hits()
        runner.decode(TOKENS[0], ahead=True)
        recording = runner._step._recorded._recording
        assert recording._stream.waiting
        layer = streamed_layers(runner)[2]
        layer.load([expert for expert in range(8) if expert not in layer.table][:1])
        assert not recording._stream.waiting


def test_two_runners_of_one_model_do_not_meet(install, device):
    with opened(install["mistral"]) as both:
        one, other = (both.runner.__class__(each.model, max_context=64) for each in (both.runner, both.oracle))
        again = graphs.Both(one, other)
        both.prefill(PROMPT[:6])
        again.prefill(PROMPT[6:9])
        for _ in range(12):
            both.greedily(1)
            again.greedily(1)
        both.in_vain(2)
        again.greedily(3)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_replaced_is_noticed(install, device, ahead):
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3, ahead=ahead)
        both.runner.mark()
        for each in (both.runner, both.oracle):
            down = each.model.layers[1].mlp.down_proj
            down.scales = down.scales * 2
        both.greedily(4, ahead=ahead)
        both.runner.mark()
        for each in (both.runner, both.oracle):
            first, second = each.model.layers[:2]
            first.self_attn, second.self_attn = second.self_attn, first.self_attn
        both.greedily(4, ahead=ahead)
        assert both.runner.report().decode_step == graphs.GRAPH


def test_what_is_replaced_while_a_step_is_on_its_way_is_right_from_the_next_on(install, device):
    """The step that was begun is of the model that was; its memory stays until it has ended."""
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3)
        token = int(mx.argmax(both.logits))
        expected = both.oracle.decode(token)
        for each in (both.runner, both.oracle):
            down = each.model.layers[1].mlp.down_proj
            down.scales = down.scales * 2
        recording = both.runner._step._recorded._recording
        assert_exact(both.runner.decode(token, ahead=True), expected)
        assert both.runner._step._recorded._recording is not recording
        assert not recording._stream.waiting
        both.logits = expected
        both.greedily(3)


def test_a_step_on_its_way_ends_before_its_caches_are_given_up(install, device):
    """It writes into memory that others would be given."""
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3)
        recording = both.runner._step._recorded._recording
        assert recording._stream.waiting
        both.reset()
        assert not recording._stream.waiting
        both.prefill(PROMPT[:4])
        both.greedily(3)


def test_a_step_on_its_way_ends_before_its_graph_is_replaced(install, device):
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3)
        runner = both.runner
        recording, down = runner._step._recorded._recording, runner.model.layers[1].mlp.down_proj
        down.scales = down.scales * 2
        assert recording._stream.waiting
        runner._step.begin(5, runner._cache)
        assert runner._step._recorded._recording is not recording
        assert not recording._stream.waiting


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_that_does_more_than_kernels_is_a_compiled_graph(install, device, ahead):
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3, ahead=ahead)
        both.runner.mark()
        for each in (both.runner, both.oracle):
            each.model.layers[0].mlp = Halved(each.model.layers[0].mlp)
        launches = device.calls["launch"]
        both.greedily(5, ahead=ahead)
        assert device.calls["launch"] == launches
        words = "one compiled graph, because input x of dequant_gemv_simd comes from an operation that is no kernel"
        assert both.runner.report().decode_step == words
        both.runner.mark()
        for each in (both.runner, both.oracle):
            each.reset()
        both.prefill(PROMPT[:7])
        both.greedily(5, ahead=ahead)


@pytest.mark.parametrize("slots", [None, 7])
@pytest.mark.parametrize("call", ["enter", "graph", "compile", "function"])
def test_a_driver_that_records_no_graph_leaves_a_compiled_one(install, device, call, slots):
    device.fails_at(call)
    with opened(install["gemma4-moe"], slots) as both:
        both.prefill(PROMPT[:4])
        both.greedily(6)
        where = graphs.WHILE * (slots is not None)
        assert both.runner.report().decode_step == f"one compiled graph{where}, because {call}: no such luck"
        assert device.calls["launch"] == 0


@pytest.mark.parametrize("call", ["to_device", "launch", "on_device", "to_host", "record", "change", "graph"])
def test_a_driver_that_fails_later_leaves_a_compiled_graph(install, device, call):
    """In the middle of a text, with a step on its way."""
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3)
        device.fails_at(call)
        for count in (3, 14, 3):
            both.greedily(count)
            both.in_vain(1)
            both.prefill(TOKENS[:2])
            both.reset()
            both.prefill(PROMPT[:4])
        assert both.runner.report().decode_step == f"one compiled graph, because {call}: no such luck"


def catch_up(both):
    """What the runner says that it ran, the oracle runs."""
    ids, known = both.runner.history, 4 * (both.runner.history[:4] == PROMPT[:4])
    both.oracle.reset()
    if known:
        both.oracle.prefill(ids[:known])
    for token in ids[known:]:
        both.oracle.decode(token)


@pytest.mark.parametrize("slots", [None, 7, 8])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [3])
def test_an_error_at_a_wait_is_one_of_this_package_and_leaves_a_runner_that_works(install, device, slots, ahead, count):
    """Whichever wait it is, and however often."""
    with opened(install["gemma4-moe"], slots) as both:
        for failing in range(1, 6):
            both.reset()
            both.prefill(PROMPT[:4])
            if slots:
                both.runner.experts.warm([list(range(8))] * 4)
                both.runner._slots.expect_hits()
            both.greedily(3, ahead=ahead)
            for token in (int(mx.argmax(both.logits)), 9, 11)[:count]:
                before = both.runner.history
                device.fails_at("wait", failing)
                error = None
                try:
                    both.runner.decode(token, ahead=ahead)
                except BackendError as raised:
                    error = str(raised)
                device.failing.clear()
                assert error in (None, "wait: no such luck")
                assert both.runner.history in ([[*before, token]] if error is None else [[], before])
            catch_up(both)
            both.decode(13, ahead=ahead)
            both.prefill(TOKENS[:3])
            both.greedily(3, ahead=ahead)
            both.in_vain(1)
        how = both.runner.report().decode_step
        assert how.startswith((graphs.GRAPH, "one compiled graph")), how


LINES = (
    *("_forward", "_is_right", "_run_again", "_decode_step", "_begin_next", "_forget_ahead", "settle", "launched"),
    *("begin", "_advance", "_run_graph", "moved_to", "_told", "wait", "large", "__call__"),
)
"""Functions of a step."""


@pytest.mark.parametrize("after", ["decode", "prefill", "reset"])
@pytest.mark.parametrize(
    ("variant", "slots", "stride"), [("llama", None, 1), ("mistral", None, 5), ("gemma4-moe", 7, 23)]
)
def test_ctrl_c_at_every_line_of_a_step(install, device, monkeypatch, variant, slots, stride, after):
    """Wherever it comes, the history is right, and so is what follows, whatever was on its way: another step, or MLX's
    own operations, which wait for nothing. No cache grows meanwhile."""
    ids = [*PROMPT[:8], 5, 6, 7, 8, 9]
    with opened(install[variant], slots, max_context=40) as both:
        runner, oracle, choices = both.runner, both.oracle, Choices(monkeypatch)
        oracle.prefill(ids[:8])
        oracle.decode(5)
        mark = oracle.mark()
        choices.passes.clear()
        expected = [oracle.decode(token) for token in ids[9:]]
        chosen = slots and choices.by_layer()[-1][0][0][0]
        joined = {}
        for known in (9, 10):
            oracle.rollback(mark)
            for token in ids[9:known]:
                oracle.decode(token)
            joined[known] = oracle.prefill(ids[known:]), oracle.decode(9)
        for line in itertools.count(0, stride):
            runner.reset()
            runner.prefill(ids[:8])
            runner.decode(5, ahead=True)
            if slots:
                runner.experts.warm([list(range(8))] * len(streamed_layers(runner)))
                if line % 2:
                    evict(runner, -1, chosen)
                runner._slots.expect_hits()
            with interrupted(line, *LINES) as lines:
                runner.decode(6, ahead=True)
            assert runner.history in ([], ids[:9], ids[:10])
            if after == "reset" or not runner.history:
                runner.reset()
                runner.prefill(ids[:8])
                runner.decode(5)
            if after == "prefill":
                both.logits, last = joined[runner.position]
                assert_exact(runner.prefill(ids[runner.position :]), both.logits)
                assert_exact(runner.decode(9), last)
            else:
                first = runner.position - 9
                for token, logits in zip(ids[runner.position :], expected[first:], strict=True):
                    assert_exact(runner.decode(token, ahead=True), logits)
            if len(lines) <= line:
                break
        assert line > 40


def test_a_runner_waits_for_its_last_step_when_it_is_closed(install, device):
    """Its memory goes to others."""
    with opened(install["llama"]) as both:
        both.prefill(PROMPT[:4])
        both.greedily(3)
        assert both.runner._ahead is not None
        recording = both.runner._step._recorded._recording
        both.runner.close()
        assert not recording._stream.waiting
