"""The runner: what it refuses, failures in the middle, marks and reuse, threads, and opening installs."""

import itertools
import os
import signal
import threading
import warnings

import mlx.core as mx
import numpy as np
import pytest

from tests.families.models import build, model_of
from tests.families.oracles import PROMPT, assert_close, assert_exact
from tests.runners import interrupted
from turbospark_mlx import cache
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import BackendError, ContextError, InstallError, OptionError, TurbosparkError
from turbospark_mlx.families.llama import Model
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, tiny_config

WINDOW = 8


@pytest.fixture(scope="module")
def model():
    """One full layer and one with a window of ``WINDOW``."""
    return model_of("llama", "mistral-mixed")


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return make_tiny_install("llama", tmp_path_factory.mktemp("runner") / "tiny.gturbo", variant="mistral-mixed")


def offsets(runner):
    return [layer.offset for layer in runner._cache]


class TestAdmission:
    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([], "the prompt is empty"),
            ([320], "Token id 320 is not one of this model's, which go from 0 to 319"),
            ([1, -1], "Token id -1"),
            (list(range(41)), "max_context 40 has no room for 41 tokens after 0"),
        ],
    )
    def test_what_cannot_run_is_refused_before_anything_is_computed(self, model, ids, message):
        with Runner(model, max_context=40) as runner:
            model.backend.counters.clear()
            with pytest.raises(ContextError, match=message):
                runner.prefill(ids)
            assert not model.backend.counters
            assert runner.history == []

    @pytest.mark.parametrize("ids", [3, None, "text", [1.0], [[1, 2]], mx.array([1.0]), mx.array(3)])
    def test_what_are_no_ids_is_refused(self, model, ids):
        with Runner(model, max_context=40) as runner, pytest.raises(OptionError, match="Token ids are whole numbers"):
            runner.prefill(ids)

    def test_the_last_place_of_the_context_can_be_used(self, model):
        with Runner(model, max_context=12) as runner:
            runner.prefill(PROMPT[:11])
            runner.decode(PROMPT[11])
            with pytest.raises(ContextError, match=r"max_context 12 has no room for 1 token after 12\."):
                runner.decode(1)
            assert runner.position == 12

    @pytest.mark.parametrize("ids", [np.array(PROMPT[:9]), mx.array(PROMPT[:9]), tuple(PROMPT[:9])])
    def test_ids_come_in_any_sequence_of_whole_numbers(self, model, ids):
        with Runner(model) as runner, Runner(model) as other:
            assert_exact(runner.prefill(ids), other.prefill(PROMPT[:9]))

    @pytest.mark.parametrize("value", [0, -1, 2.5, "4", True])
    def test_options_that_cannot_work(self, model, value):
        with pytest.raises(OptionError, match="max_context="):
            Runner(model, max_context=value)
        with pytest.raises(OptionError, match="prefill_chunk="):
            Runner(model, prefill_chunk=value)

    def test_a_context_beyond_the_trained_one_is_the_callers_choice(self, model):
        assert Runner(model, max_context=600).max_context == 600

    def test_a_context_that_memory_cannot_hold_is_refused_with_the_arithmetic(self, model):
        with pytest.raises(OptionError, match=r"max_context=\d+: its caches take .* GB, and .* Up to \d+ tokens fit"):
            Runner(model, max_context=10**12)


class TestLongRope:
    def test_frequencies_follow_the_context_the_model_is_made_for(self):
        """16 tokens were trained without scaling, so a model for 16 uses the short factors, as transformers does."""
        short, long = build(tiny_config("llama", "llama-longrope"), max_context=16), model_of("llama", "llama-longrope")
        a, b = short(mx.array([PROMPT[:16]])), long(mx.array([PROMPT[:16]]))
        assert mx.abs(a - b).max() > 0.01
        assert Runner(short).max_context == 16
        assert Runner(long).max_context == 512
        with pytest.raises(OptionError, match=r"loaded for contexts of up to 16 tokens.*Load it with max_context=17"):
            Runner(short, max_context=17)


class TestFailures:
    """Nothing leaves layers at different positions, and what follows a failure equals never having tried."""

    def check(self, model, runner, *runs):
        """``runs`` are the ids that stay, as they were run."""
        ids = [id for run in runs for id in run]
        assert offsets(runner) == [len(ids)] * 2
        assert runner.history == ids
        with Runner(model, prefill_chunk=4) as other:
            for run in filter(None, runs):
                other.prefill(run)
            for each in (lambda r: r.prefill(PROMPT[40:50]), lambda r: r.decode(7)):
                assert_exact(each(runner), each(other))

    @pytest.mark.parametrize("start", [0, 3, 8, 20])
    @pytest.mark.parametrize("failing_call", [1, 2, 3, 6])
    @pytest.mark.parametrize(
        ("layer", "error"),
        [(cache.RingKV, RuntimeError), (cache.LinearKV, RuntimeError), (cache.LinearKV, KeyboardInterrupt)],
    )
    def test_an_error_in_a_layer_of_a_chunk(self, model, monkeypatch, start, failing_call, layer, error):
        """The sliding layer comes first, so a fault in the full one finds it already moved on."""
        runner = Runner(model, prefill_chunk=4)
        if start:
            runner.prefill(PROMPT[:start])
        update, calls = layer.update_and_fetch, []

        def fail(self, keys, values):
            calls.append(1)
            if len(calls) == failing_call:
                raise error("in the middle")
            return update(self, keys, values)

        monkeypatch.setattr(layer, "update_and_fetch", fail)
        with pytest.raises(error, match="in the middle"):
            runner.prefill(PROMPT[20:44])
        monkeypatch.undo()
        done = 4 * (failing_call - 1)
        if layer is cache.LinearKV and start + done + 4 > WINDOW:
            self.check(model, runner)  # the window before it has moved on
        else:
            self.check(model, runner, PROMPT[:start], PROMPT[20 : 20 + done])

    @pytest.mark.parametrize("start", [0, 3, 8, 20])
    def test_an_error_in_a_layer_of_a_decode_step(self, model, monkeypatch, start):
        runner = Runner(model, prefill_chunk=4)
        if start:
            runner.prefill(PROMPT[:start])
        monkeypatch.setattr(Model, "head", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.decode(5)
        monkeypatch.undo()
        self.check(model, runner, PROMPT[:start])

    def test_a_progress_callback_that_raises(self, model):
        runner = Runner(model, prefill_chunk=4)
        runner.prefill(PROMPT[:20])
        with pytest.raises(ZeroDivisionError):
            runner.prefill(PROMPT[20:40], progress=lambda done, total: 1 / (done - 12))
        self.check(model, runner, PROMPT[:20], PROMPT[20:32])

    def test_a_failed_evaluation_empties_the_runner(self, model, monkeypatch):
        runner = Runner(model, prefill_chunk=4)
        runner.prefill(PROMPT[:20])

        def fail(*_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(mx, "eval", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.decode(5)
        monkeypatch.undo()
        self.check(model, runner)

    @pytest.mark.parametrize("is_done", [True, False])
    @pytest.mark.parametrize("start", [0, 3, 20])
    @pytest.mark.parametrize("more", [[5], PROMPT[20:24]])
    def test_ctrl_c_at_an_evaluation_loses_nothing(self, model, monkeypatch, start, more, is_done):
        """It is heard of when the evaluation has ended, or just before it began."""
        runner = Runner(model, prefill_chunk=4)
        if start:
            runner.prefill(PROMPT[:start])
        evaluate, interrupts = mx.eval, [KeyboardInterrupt]

        def interrupted(*arrays):
            if is_done:
                evaluate(*arrays)
            if interrupts:
                raise interrupts.pop()
            if not is_done:
                evaluate(*arrays)

        monkeypatch.setattr(mx, "eval", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.decode(5) if len(more) == 1 else runner.prefill(more)
        monkeypatch.undo()
        self.check(model, runner, PROMPT[:start], more)

    def test_ctrl_c_at_every_line_of_a_pass(self, model):
        """Wherever it comes, the layers are at one position, which the history has."""
        for line in itertools.count():
            runner = Runner(model, prefill_chunk=4)
            runner.prefill(PROMPT[:6])
            with interrupted(line, "_forward", "_evaluate") as lines:
                runner.decode(5)
            if len(lines) <= line:
                break
            self.check(model, runner, PROMPT[:6], [5] if runner.position == 7 else [])
        assert line > 8

    def test_cancelling_keeps_the_chunks_that_were_run(self, model):
        runner, seen = Runner(model, prefill_chunk=4), []
        logits = runner.prefill(PROMPT[:20], progress=lambda *p: seen.append(p), cancelled=lambda: len(seen) == 2)
        assert logits is None
        assert seen == [(4, 20), (8, 20)]
        self.check(model, runner, PROMPT[:8])

    def test_cancelling_before_the_start_runs_nothing(self, model):
        runner = Runner(model, prefill_chunk=4)
        assert runner.prefill(PROMPT[:20], cancelled=lambda: True) is None
        self.check(model, runner)


class TestState:
    def test_progress_counts_tokens(self, model):
        seen = []
        with Runner(model, prefill_chunk=4) as runner:
            runner.prefill(PROMPT[:10], progress=lambda *p: seen.append(p))
        assert seen == [(4, 10), (8, 10), (10, 10)]

    def test_only_the_last_row_goes_through_the_head(self, model, monkeypatch):
        shapes, head = [], Model.head
        monkeypatch.setattr(Model, "head", lambda self, hidden: shapes.append(hidden.shape) or head(self, hidden))
        with Runner(model, prefill_chunk=4) as runner:
            runner.prefill(PROMPT[:10])
        assert shapes == [(1, 1, 64)]

    def test_the_history_cannot_be_changed_from_outside(self, model):
        with Runner(model) as runner:
            runner.prefill(PROMPT[:5])
            runner.history.append(1)
            assert runner.history == PROMPT[:5]
            assert runner.position == 5

    def test_marks_of_another_runner_and_from_before_a_reset_are_refused(self, model):
        with Runner(model) as runner, Runner(model) as other:
            for each in (runner, other):
                each.prefill(PROMPT[:5])
            with pytest.raises(ContextError, match="another state, or before a reset"):
                runner.rollback(other.mark())
            assert runner.position == 5
            mark = runner.mark()
            runner.reset()
            runner.prefill(PROMPT[:5])
            with pytest.raises(ContextError, match="another state, or before a reset"):
                runner.rollback(mark)

    def test_reuse_by_hand(self, model):
        with Runner(model) as runner:
            assert runner.reuse(PROMPT[:5]) == 0
            runner.prefill(PROMPT[:6])
            assert runner.reuse(PROMPT[:6]) == 5  # one is left to run
            assert runner.reuse([]) == 0
            runner.prefill(PROMPT[:6])
            assert runner.reuse([*PROMPT[:3], 1, 2]) == 3
            assert runner.history == PROMPT[:3]
            assert offsets(runner) == [3, 3]
            runner.prefill(PROMPT[3:30])
            assert runner.reuse([*PROMPT[:15], 1]) == 0  # the window has moved on
            assert runner.history == []
            assert runner.report().kv_bytes_now == 0
            assert runner.reuse([9]) == 0

    def test_two_conversations_in_turn(self, model):
        """Turn two of each shares a long prefix with its own turn one only."""
        first, second = PROMPT[:30], PROMPT[30:60]
        with Runner(model) as runner:
            for prompt in (first, second, [*first, 5, 6], [*second, 7]):
                reused = runner.reuse(prompt)
                ours = runner.prefill(prompt[reused:])
                with Runner(model) as cold:
                    assert_close(ours, cold.prefill(prompt))

    def test_reset_and_close_give_memory_back(self, model):
        runner = Runner(model)
        runner.prefill(PROMPT)
        assert runner.report().kv_bytes_now > 0
        runner.reset()
        assert runner.report().kv_bytes_now == 0
        runner.close()
        runner.close()
        for call in (runner.report, runner.reset, runner.mark, lambda: runner.prefill([1]), lambda: runner.decode(1)):
            with pytest.raises(TurbosparkError, match="closed"):
                call()

    def test_mlx_arrays_that_are_returned_are_the_callers(self, model):
        with Runner(model) as runner:
            first = runner.prefill(PROMPT[:5])
            kept = np.array(first)
            runner.decode(3)
            assert_exact(first, kept)


class TestThreads:
    def in_thread(self, call):
        caught = []

        def work():
            try:
                caught.append(call())
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=work, name="worker-7")
        thread.start()
        thread.join()
        return caught[0]

    @pytest.mark.parametrize("method", ["reset", "mark", "report", "close", "prefill", "decode", "reuse"])
    def test_another_thread_gets_one_sentence(self, model, method):
        runner = Runner(model)
        arguments = {"prefill": ([1],), "decode": (1,), "reuse": ([1],)}.get(method, ())
        error = self.in_thread(lambda: getattr(runner, method)(*arguments))
        assert isinstance(error, BackendError)
        assert "belongs to thread 'MainThread'" in str(error)
        assert "called from 'worker-7'" in str(error)
        assert runner.prefill(PROMPT[:3]) is not None

    def test_a_fork_gets_one_sentence_and_does_not_hang(self, model):
        """Waiting for the child would hang where it does, so it is given a time to live."""
        runner = Runner(model)
        runner.prefill(PROMPT[:3])
        with warnings.catch_warnings():
            # Newer Pythons warn of forks in processes with threads, which is what this is about.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                runner.decode(1)
            except BackendError as error:
                os._exit(0 if "is a fork" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        runner.decode(1)

    def test_a_runner_made_in_a_worker_outlives_it_only_as_an_error(self, model):
        runner = self.in_thread(lambda: Runner(model))
        with pytest.raises(BackendError, match="belongs to thread 'worker-7'"):
            runner.prefill([1])

    def test_two_workers_in_turn(self, install):
        def answer():
            with Runner.open(install, verify="off", kernels="reference") as runner:
                return np.array(runner.prefill(PROMPT[:20]))

        assert_exact(self.in_thread(answer), self.in_thread(answer))
        assert_exact(self.in_thread(answer), answer())


class TestOpen:
    def test_an_install_is_opened_with_its_tokenizer(self, install):
        with Runner.open(install, verify="off") as runner:
            ids = runner.tokenizer.encode("the cat and the dog")
            assert runner.tokenizer.decode(ids) == "the cat and the dog"
            logits = runner.prefill(ids)
            assert (logits.shape, logits.dtype) == ((runner.vocab_size,), mx.float32)

    def test_what_was_resolved_is_reported(self, install):
        with Runner.open(install, verify="off", kernels="reference", max_context=100, prefill_chunk=7) as runner:
            report = runner.report()
            assert (report.backend, report.device, report.dtype) == ("reference", "cpu", "float32")
            assert (report.max_context, report.context_reason, report.trained_context) == (100, "as asked", 512)
            assert (report.prefill_chunk, report.fused, report.model_type) == (7, True, "llama")
            assert report.kv_bytes == 100 * 512 + 8 * 512
            assert report.kv_bytes_now == 0
            assert report.operations == {}
            # Two layers of 4 x 32 heads over 2, width 64 and 128, two norms; embedding, head and last norm.
            layer = 2 * 128 * 64 + 2 * 64 * 64 + 3 * 64 * 128 + 2 * 64
            assert report.parameters == 2 * layer + 2 * 320 * 64 + 64
            matrices = report.parameters - 5 * 64
            assert report.weight_bytes == matrices // 2 + 4 * matrices // 64 + 2 * 5 * 64
            runner.prefill(PROMPT[:3])
            text = str(runner.report())
            assert "reference on the cpu" in text
            assert "100 tokens (as asked), trained for 512, prompts in chunks of 7" in text
            assert "attention" in text.splitlines()[-2]
            assert text.splitlines()[-1] == "decoding   one operation after the other"

    def test_plain_modules_answer_the_same(self, install):
        with (
            Runner.open(install, verify="off", kernels="reference") as runner,
            Runner.open(install, verify="off", fused=False) as plain,
        ):
            assert plain.report().backend == "reference"
            assert not plain.report().fused
            assert_close(plain.prefill(PROMPT[:30]), runner.prefill(PROMPT[:30]))
            assert_close(plain.decode(3), runner.decode(3))

    def test_the_chosen_back_end_answers_like_the_reference(self, install):
        with (
            Runner.open(install, verify="off") as runner,
            Runner.open(install, verify="off", kernels="reference") as reference,
        ):
            assert_close(runner.prefill(PROMPT[:30]), reference.prefill(PROMPT[:30]))
            for token in PROMPT[30:42]:
                assert_close(runner.decode(token), reference.decode(token))

    def test_the_weights_count_before_the_context(self, install, monkeypatch):
        with Runner.open(install, verify="off", kernels="reference") as runner:
            weights = runner.report().weight_bytes
        monkeypatch.setattr("turbospark_mlx.runner.available_bytes", lambda device: weights + 2 * (256 * 512 + 4096))
        with Runner.open(install, verify="off", kernels="reference") as runner:
            assert (runner.max_context, runner.report().context_reason) == (256, "as memory allows")
        monkeypatch.setattr("turbospark_mlx.runner.available_bytes", lambda device: weights // 2)
        with pytest.raises(OptionError, match="0 bytes of memory are free beside the weights"):
            Runner.open(install, verify="off", kernels="reference")

    def test_refusals(self, install, tmp_path, model):
        with pytest.raises(InstallError):
            Runner.open(tmp_path / "nothing.gturbo")
        with pytest.raises(BackendError, match="kernels='cuda13'"):
            Runner.open(install, kernels="cuda13")
        with pytest.raises(OptionError, match="verify='maybe'"):
            Runner.open(install, verify="maybe")
        with pytest.raises(OptionError, match="max_context=0"):
            Runner.open(install, verify="off", max_context=0)
        with pytest.raises(TurbosparkError, match="made from a model"):
            _ = Runner(model).tokenizer

    def test_verification_is_asked_for(self, install, tmp_path, monkeypatch):
        import shutil

        monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
        damaged = shutil.copytree(install, tmp_path / "damaged.gturbo")
        weights = bytearray((damaged / "model_weights.bin").read_bytes())
        weights[-1] ^= 1
        (damaged / "model_weights.bin").write_bytes(weights)
        with pytest.raises(InstallError, match="SHA-256"):
            Runner.open(damaged, kernels="reference")
        Runner.open(damaged, kernels="reference", verify="off").close()


def test_opening_compiles_what_an_answer_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    path = make_tiny_install("llama", tmp_path / "tiny.gturbo", variant="qwen3")
    with Runner.open(path) as runner:
        if runner.model.backend.name != "host":
            pytest.skip("no C++ compiler on this machine")
        assert not runner.report().operations

        def refuse(*args):
            raise AssertionError("a kernel was compiled after open")

        monkeypatch.setattr(compiler.subprocess, "run", refuse)
        for length in (1, 3, 8, 9, 40):
            runner.reset()
            runner.prefill(list(range(length)))
            runner.decode(1)
