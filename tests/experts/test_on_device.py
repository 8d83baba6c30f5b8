"""Decode steps that are laid out over slots: the bits of resident experts, and the counts of the slow way.

No GPU is needed: the host's kernels stand in for one's, with steps that are not traced but run as they are; and what
MLX does when it traces is tried on a layer alone.
"""

import gc
import itertools
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from tests.experts import layers
from tests.experts.simulation import Simulation
from tests.families.oracles import PROMPT, assert_exact
from tests.runners import TOKENS, interrupted, walk
from tests.test_step import Installs
from turbospark_mlx import runner as runner_module
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.backends import Backend, compiler
from turbospark_mlx.custom_kernels.backends.replay import NotRecordable
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.experts import Routed, SlotMaps, open_experts
from turbospark_mlx.experts.in_place import InPlace
from turbospark_mlx.experts.streamed import Streamed
from turbospark_mlx.gturbo.files import OpenFile
from turbospark_mlx.runner import Runner
from turbospark_mlx.step import DecodeStep

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not compiler.candidates(), reason="needs a CPU's kernels, and a C++ compiler"
)
SPEC = layers.SPEC
GPU = Backend("reference", "gpu", "MLX's own operations")
COUNTS = {
    "gemma4-moe": (8, 3),
    "qwen3.5-moe": (8, 3),
    "deepseek-v2-lite": (8, 3),
    "gpt-oss": (6, 3),
    "qwen4-ten": (24, 10),
}
"""Experts and top_k."""
WHOLE = "one compiled graph while experts are in their slots"


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return Installs(tmp_path_factory.mktemp("on_device"))


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU, which runs at once what a GPU would be told to run."""
    backend, select = replace(backends.select("host"), device="gpu", rehearse=None), backends.select
    monkeypatch.setattr(backends, "select", lambda kernels: backend if kernels == "auto" else select(kernels))
    monkeypatch.setattr(mx, "compile", lambda function: function)


def opened(path, slots=None, **options):
    where = {"residency": "resident"} if slots is None else {"residency": "streamed", "expert_slots": slots}
    return Runner.open(path, dtype="float32", max_context=60, **where, **options)


class Ways:
    """Counts what is done: steps of both kinds, and choices brought to the host in the middle of one."""

    def __init__(self, monkeypatch):
        self.counts = counts = Counter()
        step, host, settle = DecodeStep.__call__, Streamed._host, SlotMaps.settle

        def stepped(self, token, cache, *, by_layer=False):
            counts["by layer" if by_layer else "whole"] += 1
            return step(self, token, cache, by_layer=by_layer)

        def brought(self, indices):
            counts["brought"] += 1
            return host(self, indices)

        def settled(self, routed):
            counts["settled"] += routed.right is None
            return settle(self, routed)

        monkeypatch.setattr(DecodeStep, "__call__", stepped)
        monkeypatch.setattr(Streamed, "_host", brought)
        monkeypatch.setattr(SlotMaps, "settle", settled)


class Choices:
    """What every layer of a resident model chose in each pass."""

    def __init__(self, monkeypatch):
        self.passes = passes = []
        begin = InPlace.begin

        def recorded(self, indices):
            passes.append((id(self), np.array(indices).tolist()))
            return begin(self, indices)

        monkeypatch.setattr(InPlace, "begin", recorded)

    def by_layer(self):
        order = dict.fromkeys(layer for layer, _ in self.passes)
        return [[chosen for layer, chosen in self.passes if layer == each] for each in order]


def streamed_layers(runner):
    return [layer for _, layer in sorted(runner.experts._layers.items())]


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("variant", COUNTS)
def test_tokens_are_those_of_resident_experts_and_tables_those_of_a_simulation(
    install, gpu, monkeypatch, variant, policy
):
    """With and without looking ahead, in vain too, for all numbers of slots."""
    monkeypatch.setattr(runner_module, "open_experts", partial(open_experts, policy=policy))
    experts, top_k = COUNTS[variant]
    ways, again = Ways(monkeypatch).counts, 0
    with opened(install[variant]) as resident:
        choices = Choices(monkeypatch)
        expected = [resident.prefill(PROMPT[:7])]
        following = []
        for i in range(16):
            # One likely token follows another, and some do not.
            following.append(TOKENS[i] if i % 5 == 4 else int(mx.argmax(expected[-1])))
            expected.append(resident.decode(following[-1]))
        expected = [np.array(logits) for logits in expected]
        chosen = choices.by_layer()
    for slots, ahead in (
        (top_k, True),
        (experts // 2, True),
        (experts - 2, False),
        (experts - 1, True),
        (experts, True),
    ):
        with opened(install[variant], slots) as runner:
            ways.clear()
            found = [runner.prefill(PROMPT[:7])]
            for i, token in enumerate(following):
                # Asked for now and then only, too.
                found.append(runner.decode(token, ahead=ahead and i % 7 > 0))
            for ours, theirs in zip(found, expected, strict=True):
                assert_exact(ours, theirs)
            assert runner.report().decode_step == WHOLE
            again += ways["settled"] > 0 and ways["by layer"] > 0
            for layer, passes in zip(streamed_layers(runner), chosen, strict=True):
                simulated = Simulation(slots, experts, policy)
                for rows in passes:
                    # Once every expert of a layer has a slot, a GPU's hits are not counted.
                    if slots < experts or None in simulated.held:
                        simulated.chunk(rows)
                assert layer.counters.misses == len(simulated.read)
                assert layer.table.expert_of == [-1 if e is None else e for e in simulated.held]
                assert layer.counters.hits == simulated.hits
                assert layer.table.use_count == simulated.uses
                assert layer.table.last_use == simulated.last
    assert again


@pytest.mark.parametrize("variant", COUNTS)
def test_a_text_that_fits_brings_no_choice_to_the_host(install, gpu, monkeypatch, variant):
    experts, top_k = COUNTS[variant]
    count = (experts - 1) // top_k
    with opened(install[variant]) as resident, opened(install[variant], experts - 1) as runner:
        ways = Ways(monkeypatch).counts
        assert_exact(runner.prefill(PROMPT[:9]), resident.prefill(PROMPT[:9]))
        marks, expected = (runner.mark(), resident.mark()), [np.array(resident.decode(t)) for t in TOKENS[:count]]
        for number in range(5):
            ways.clear()
            runner.rollback(marks[0])
            for token, theirs in zip(TOKENS[:count], expected, strict=True):
                assert_exact(runner.decode(token), theirs)
            if number > 1:
                assert ways == {"whole": count, "settled": count}
        runner.rollback(marks[0])
        for token, theirs in zip(TOKENS[:count], expected, strict=True):
            assert_exact(runner.decode(token, ahead=True), theirs)
            assert (runner._ahead is not None) is runner._looks_ahead


def evict(runner, number, expert):
    """Fill all slots of a layer but that of ``expert`` with the others, and let the next token run as a whole."""
    layer = streamed_layers(runner)[number]
    layer.load([other for other in range(len(layer.table.use_count)) if other != expert])
    assert expert not in layer.table
    runner._slots.expect_hits()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("which", [0, 2])
def test_a_miss_in_one_layer_has_the_token_run_again(install, gpu, monkeypatch, number, ahead, which):
    """The first, a middle and the last; the best expert or the last of those chosen; what was begun is in vain, too."""
    path = install["gemma4-moe"]
    with opened(path) as resident, opened(path, 7) as runner:
        choices, ways = Choices(monkeypatch), Ways(monkeypatch).counts
        for each in (resident, runner):
            each.prefill(PROMPT[:5])
        for token in TOKENS[:12]:
            choices.passes.clear()
            expected = resident.decode(token)
            evict(runner, number, choices.by_layer()[number][0][0][which])
            others = {layer for i in (0, 1, 2, 3) if i != number for layer in [streamed_layers(runner)[i]]}
            ways.clear()
            assert_exact(runner.decode(token, ahead=ahead), expected)
            assert ways["settled"] >= 1
            assert ways["by layer"] >= 1
            assert runner.likeliest() is None
            assert runner.history == resident.history
            assert len(others) == 3


def test_experts_that_are_loaded_while_a_step_is_on_its_way(install, gpu):
    """What was begun by the maps of then does not count, even if all that it lacked is here now."""
    path = install["qwen3.5-moe"]
    with opened(path) as resident, opened(path, 7) as runner:
        for each in (resident, runner):
            logits = each.prefill(PROMPT[:5])
        for i in range(20):
            token = int(mx.argmax(logits))
            logits = resident.decode(token)
            assert_exact(runner.decode(token, ahead=True), logits)
            runner.experts.warm([[float((e + i) % 8) for e in range(8)]] * 2)
            runner._slots.expect_hits()


def test_once_all_experts_are_here_nothing_is_checked(install, gpu, monkeypatch):
    path = install["gemma4-moe"]
    with opened(path) as resident, opened(path, 8) as runner:
        for each in (resident, runner):
            each.prefill(PROMPT[:5])
        runner.experts.warm([list(range(8))] * 4)
        ways = Ways(monkeypatch).counts
        for token in TOKENS[:8]:
            assert_exact(runner.decode(token, ahead=True), resident.decode(token))
            assert runner._ahead is not None
        assert ways["by layer"] == ways["settled"] == ways["brought"] == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("variant", ["gemma4-moe", "qwen3.5-moe", "deepseek-v2-lite"])
def test_a_read_error_where_a_token_is_run_again(install, gpu, monkeypatch, variant, ahead):
    def fail(self, offset, buffer):
        raise InstallError(f"{self.label}: no such luck")

    path = install[variant]
    with opened(path) as resident, opened(path, 7) as runner:
        choices = Choices(monkeypatch)
        for each in (resident, runner):
            each.prefill(PROMPT[:12])
        for i, token in enumerate(TOKENS[:12]):
            choices.passes.clear()
            expected = resident.decode(token)
            if i % 3 == 0:
                number = i % len(choices.by_layer())
                evict(runner, number, choices.by_layer()[number][0][0][1])
                before = runner.history
                with monkeypatch.context() as patch:
                    patch.setattr(OpenFile, "read_into", fail)
                    for _ in range(2):
                        with pytest.raises(InstallError, match=r"could not be read.* no such luck"):
                            runner.decode(token, ahead=ahead)
                        assert runner.history == before
                        assert runner.likeliest() is None
            assert_exact(runner.decode(token, ahead=ahead), expected)


@pytest.mark.parametrize(("variant", "misses"), [("gemma4-moe", False), ("gemma4-moe", True), ("qwen3.5-moe", True)])
def test_ctrl_c_at_every_line_of_a_pass(install, gpu, monkeypatch, variant, misses):
    """Wherever it comes, the history has no token that lacked experts, and what follows is right."""
    names = ("_forward", "_is_right", "_run_again", "_decode_step", "_begin_next", "settle")
    path = install[variant]
    with opened(path) as resident, opened(path, 7) as runner:
        choices = Choices(monkeypatch)
        resident.prefill(PROMPT[:12])
        likeliest = int(mx.argmax(resident.decode(5)))
        choices.passes.clear()
        expected = resident.decode(6), resident.decode(7)
        for line in itertools.count():
            runner.reset()
            runner.prefill(PROMPT[:12])
            runner.experts.warm([list(range(8))] * len(streamed_layers(runner)))
            runner._slots.expect_hits()
            runner.decode(5, ahead=True)
            if misses:
                evict(runner, -1, choices.by_layer()[-1][0][0][0])
            runner._slots.expect_hits()
            with interrupted(line, *names) as lines:
                runner.decode(6, ahead=True)
            if runner.position == 13:
                assert runner.likeliest() in (None, likeliest)
                assert_exact(runner.decode(6, ahead=True), expected[0])
            assert runner.history == [*PROMPT[:12], 5, 6]
            assert_exact(runner.decode(7, ahead=True), expected[1])
            if len(lines) <= line:
                break
        assert line > 20


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", COUNTS)
def test_going_back_after_tokens_that_were_run_again(install, gpu, monkeypatch, variant, seed):
    """Any order of tokens, chunks, marks, ways back and resets: as where everything is resident."""
    rng, (experts, _) = np.random.default_rng(seed), COUNTS[variant]
    ways = Ways(monkeypatch).counts
    with opened(install[variant]) as oracle, opened(install[variant], experts - 1 - seed) as runner:
        chances = {"likeliest": 0.5, "other": 0.2, "prefill": 0.08, "mark": 0.08}
        walk(runner, oracle, rng, 50, chances | {"rollback": 0.07, "reuse": 0.05, "reset": 0.02})
        assert ways["settled"] > 5
        assert ways["by layer"] > 5


@pytest.mark.parametrize("variant", COUNTS)
def test_kernels_are_compiled_when_a_model_is_opened(install, gpu, monkeypatch, variant):
    """Also those of tokens that are run layer by layer, while no expert is here."""
    backend, launched = backends.select("auto"), set()

    def launch(call, inputs):
        launched.add((call.kernel.name, call.template))
        return backend.launch(call, inputs)

    monkeypatch.setattr(backends, "select", lambda kernels: replace(backend, launch=launch))
    ways = Ways(monkeypatch).counts
    with opened(install[variant], COUNTS[variant][1]) as runner:
        known = set(launched)
        runner.prefill(PROMPT[:4])
        for token in TOKENS[:8]:
            runner.decode(token)
        assert ways["by layer"] > 5
        assert launched == known


def test_a_step_that_cannot_be_laid_out_reads_on_the_way(install, gpu, monkeypatch):
    def refuse(*_):
        raise NotRecordable("it is Sunday")

    path = install["deepseek-v2-lite"]
    with opened(path) as resident, opened(path, 5) as runner:
        for each in (resident, runner):
            each.prefill(PROMPT[:5])
        runner._step._run = refuse
        runner._slots.expect_hits()
        ways = Ways(monkeypatch).counts
        for token in TOKENS[:6]:
            assert_exact(runner.decode(token, ahead=True), resident.decode(token))
            assert runner._ahead is None
        assert runner.report().decode_step == "one operation after the other, because it is Sunday"
        assert ways["settled"] == 0
        # Nothing was run in vain: five tokens of a prompt and six more, three experts each.
        for counters in runner.experts.counters:
            assert counters.hits + counters.misses <= 5 * 3 + 6 * 3
        assert ways["by layer"] == 5


def test_a_closed_runner_lets_go_of_its_slots(install, gpu):
    runner = opened(install["gpt-oss"], 4)
    runner.prefill(PROMPT[:5])
    for token in TOKENS[:4]:
        runner.decode(token, ahead=True)
    layer = weakref.ref(streamed_layers(runner)[0])
    runner.close()
    gc.collect()
    assert layer() is None


@pytest.fixture
def layer(tmp_path):
    """One layer of seven slots with MLX's own operations, and how its mixtures are laid out."""
    written = layers.write(tmp_path / "i.gturbo", layers=1)
    with written.open() as install, open_experts(install, backend=GPU, residency="streamed", slots=7) as store:
        yield store(0, SPEC), store.slot_maps


def token(seed):
    """Five experts are chosen from."""
    rng = np.random.default_rng(seed)
    return layers.route(rng, SPEC, 1, pool=5), *layers.inputs(rng, SPEC, 1)


def launched(maps, y, chosen, given):
    """A step that gives ``y`` once it is evaluated, and chose ``chosen``, of one layer."""
    return maps.launched(Routed(lambda: np.array(chosen[0]).reshape(-1), given), partial(mx.eval, y))


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles for a CPU by g++")
def test_maps_are_inputs_of_what_was_traced_once(layer):
    layer, maps = layer
    traced = []

    def step(indices, x, weights, given):
        traced.append(1)
        return maps.laid_out(given, lambda: layer.finish(layer.begin(indices), x, weights))

    compiled = mx.compile(step)
    for seed in range(6):
        indices, x, weights = token(seed)
        layer.load([[0, 1, 2, 3, 4, 5, 6], [9, 10, 11, 12, 13, 14], [4, 2, 0, 1, 3]][seed % 3])
        given = maps.arrays()
        y, chosen = compiled(indices, x, weights, given)
        routed = launched(maps, y, chosen, given)
        fits = set(indices.tolist()[0]) <= set(layer.table.expert_of)
        assert fits is (seed % 3 != 1)
        hits = layer.counters.hits
        for _ in range(2):
            assert maps.settle(routed) is fits
        assert layer.counters.hits == hits + SPEC.top_k * fits
        if fits:
            assert_exact(y, layer.finish(layer.begin(indices), x, weights))
    assert len(traced) == 1


def test_no_slot_is_written_before_what_reads_it_was_computed(layer):
    layer, maps = layer
    indices, x, weights = token(1)
    expected = np.array(layer.finish(layer.begin(indices), x, weights))
    given = maps.arrays()
    y, chosen = maps.laid_out(given, lambda: layer.finish(layer.begin(indices), x, weights))
    routed = launched(maps, y, chosen, given)
    layer.load(range(8, 15))
    assert_exact(y, expected)
    # Its experts are gone, and it was right when it ran; the table cannot count them any more.
    assert not maps.settle(routed)


def test_experts_that_do_not_exist_are_never_right(layer):
    layer, maps = layer
    _, x, weights = token(1)
    layer.load(range(7))
    given = maps.arrays()
    for wrong in (-1, 16, 1 << 30):
        routed = launched(maps, x, [mx.array([0, 1, 2, wrong], mx.int32)], given)
        maps._sizes = [4]
        assert not maps.settle(routed)
        with pytest.raises(OptionError, match="a layer has 0 to 15"):
            layer.finish(layer.begin(mx.array([[0, 1, 2, wrong]])), x, weights)
    assert layer.counters.hits == 0


def test_only_gpus_have_maps(install):
    with opened(install["gpt-oss"], 4) as runner:
        assert runner.experts.slot_maps is None
        assert "because experts are chosen on the way" in runner.report().decode_step
