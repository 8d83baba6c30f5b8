"""Streamed experts are the resident ones to the bit, and read what the rules say and nothing more."""

import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.experts import layers
from tests.experts.simulation import Simulation
from turbospark_mlx.custom_kernels.backends import Backend, select
from turbospark_mlx.errors import BackendError, OptionError
from turbospark_mlx.experts import chunks, open_experts
from turbospark_mlx.gturbo import Install
from turbospark_mlx.gturbo.files import OpenFile

SPEC = layers.SPEC
STRIDE = 32768
EVERY_COUNT = range(SPEC.top_k, SPEC.num_experts + 1)
GPU = Backend("reference", "gpu", "MLX's own operations")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return layers.write(tmp_path_factory.mktemp("experts") / "i.gturbo")


@pytest.fixture(params=["cpu", "gpu"])
def backend(request):
    """The CPU's way and, on whatever device there is, the one of GPUs, which evaluates late."""
    return select("auto") if request.param == "cpu" else GPU


def steps(seed=0, *, sizes=(1, 1, 1, 30, 1, 3, 1, 30, 1, 1)):
    """Rows of a conversation, some of them whole chunks: ``(indices, x, weights)`` each."""
    rng = np.random.default_rng(seed)
    return [
        (layers.route(rng, SPEC, rows, pool=16 if rows > 3 else 9), *layers.inputs(rng, SPEC, rows)) for rows in sizes
    ]


def run(store, work, spec=SPEC, layer_count=2):
    """What each layer makes of each step. Nothing is evaluated before the end, so that late reads would show."""
    experts = [store(position, spec) for position in range(layer_count)]
    results = [layer.finish(layer.begin(i), x, w) for i, x, w in work for layer in experts]
    return [np.array(y) for y in results]


def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def resident(written):
    made = {}

    def outputs(backend, seed=0):
        key = backend.device, seed
        if key not in made:
            with written.open() as install, open_experts(install, backend=backend, residency="resident") as store:
                made[key] = run(store, steps(seed))
        return made[key]

    return outputs


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("slots", EVERY_COUNT)
def test_streamed_is_resident_and_reads_what_a_simulation_reads(written, resident, backend, slots, policy):
    with (
        written.open() as install,
        open_experts(install, backend=backend, residency="streamed", slots=slots, policy=policy) as store,
    ):
        assert same(run(store, steps()), resident(backend))
        simulated = Simulation(slots, SPEC.num_experts, policy)
        for indices, _, _ in steps():
            simulated.chunk(indices.tolist())
        used = max(t.offset + t.size for t in install.experts.layers[0].tensors.values())
        for counters in store.counters:
            assert counters.misses == len(simulated.read)
            assert counters.bytes_read == len(simulated.read) * used
            # Once every expert has a slot, a GPU's router is not read any more.
            if backend.device == "cpu" or slots < SPEC.num_experts:
                assert counters.hits == simulated.hits
                assert store.routing() == [simulated.uses] * 2


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_change_nothing(written, resident, backend, threads, monkeypatch):
    """With pieces that are far smaller than an expert, read in any order."""
    monkeypatch.setattr("turbospark_mlx.experts.reader.PIECE_BYTES", 1000)
    read, rng = OpenFile.read_into, random.Random(threads)

    def delayed(self, offset, buffer):
        time.sleep(rng.random() / 5000)
        read(self, offset, buffer)

    monkeypatch.setattr(OpenFile, "read_into", delayed)
    with (
        written.open() as install,
        open_experts(install, backend=backend, residency="streamed", slots=5, threads=threads) as store,
    ):
        assert same(run(store, steps(sizes=(1, 6, 1))), run_resident(written, backend, steps(sizes=(1, 6, 1))))


def run_resident(written, backend, work):
    with written.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        return run(store, work)


def test_history_changes_nothing(written, resident, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=6) as store:
        layer = store(0, SPEC)
        for seed in (7, 0, 7, 0):
            found = [np.array(layer.finish(layer.begin(i), x, w)) for i, x, w in steps(seed)]
            assert same(found, resident(backend, seed)[::2])


def test_mapped_is_resident(written, resident, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="mapped") as store:
        assert same(run(store, steps()), resident(backend))


def test_mapped_copies_in_groups_where_a_chunk_wants_much(written, resident, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.experts.mapped.SCRATCH_BYTES", 5 * STRIDE)
    with written.open() as install, open_experts(install, backend=GPU, residency="mapped") as store:
        assert same(run(store, steps()), resident(GPU))


def test_a_chunk_reads_each_expert_at_most_once(written, backend, monkeypatch):
    reads = Counter()
    read = OpenFile.read_into

    def counted(self, offset, buffer):
        reads[self.label, offset] += 1
        read(self, offset, buffer)

    for slots in EVERY_COUNT:
        with (
            written.open() as install,
            open_experts(install, backend=backend, residency="streamed", slots=slots) as store,
        ):
            layer, offsets = store(0, SPEC), install.experts.layers[0].offsets
            for indices, x, weights in steps(3, sizes=(1, 40, 40)):
                reads.clear()
                with monkeypatch.context() as patch:
                    patch.setattr(OpenFile, "read_into", counted)
                    mx.eval(layer.finish(layer.begin(indices), x, weights))
                assert reads.total() == len(reads)
                assert {offset for _, offset in reads} <= set(offsets)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_read_ahead_names_what_a_chunk_lacks_in_joint_ranges(written, resident, backend, monkeypatch):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: advised.append((start, size, advice)))
    options = {"backend": backend, "residency": "streamed", "slots": 5}
    with written.open() as install, open_experts(install, read_ahead=True, **options) as store:
        layer, (x, weights) = store(0, SPEC), layers.inputs(np.random.default_rng(0), SPEC, 2)
        layer.finish(layer.begin(mx.array([[3, 5, 1, 9]])), x[:1], weights[:1])
        assert advised == []
        # Of eight experts three are here; of the others 10 and 11 are neighbours.
        layer.finish(layer.begin(mx.array([[10, 3, 2, 4], [6, 5, 9, 11]])), x, weights)
        assert [size // STRIDE for _, size, _ in advised] == [1, 1, 1, 2]
        assert [start // STRIDE for start, _, _ in advised] == [2, 4, 6, 10]
        assert {advice for *_, advice in advised} == {os.POSIX_FADV_WILLNEED}
    with written.open() as install, open_experts(install, read_ahead=True, **options) as store:
        assert same(run(store, steps()), resident(backend))


def test_rows_beyond_the_scratch_memory_are_cut_alike_everywhere(written, backend, monkeypatch):
    monkeypatch.setattr(chunks, "SCRATCH_BYTES", 7 * 4 * SPEC.top_k * SPEC.hidden)
    work = steps(5, sizes=(7, 8, 1, 30))
    expected = run_resident(written, backend, work)
    for residency in ("streamed", "mapped"):
        with (
            written.open() as install,
            open_experts(install, backend=backend, residency=residency, **layers.slots_for(residency, 5)) as store,
        ):
            assert same(run(store, work), expected)
            assert store.most_rows == 7


def test_a_warm_start_hits(written, resident, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=9) as store:
        run(store, steps())
        learned = store.routing()
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=9) as store:
        experts = [store(position, SPEC) for position in range(2)]
        store.warm(learned)
        assert [c.misses for c in store.counters] == [9, 9]
        favourite = sorted(range(16), key=lambda e: -learned[0][e])[:4]
        _, x, weights = steps()[0]
        y = experts[0].finish(experts[0].begin(mx.array([favourite])), x, weights)
        mx.eval(y)
        assert store.counters[0].misses == 9
        with pytest.raises(OptionError, match="this model has 16 in 2"):
            store.warm(learned[:1])


def test_a_warm_start_changes_no_bit(written, resident, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=9) as store:
        experts = [store(position, SPEC) for position in range(2)]
        store.warm([list(range(16))] * 2)
        found = [np.array(e.finish(e.begin(i), x, w)) for i, x, w in steps() for e in experts]
        assert same(found, resident(backend))


def test_a_layer_that_raises_between_begin_and_finish_leaves_nothing_behind(written, resident, backend):
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        layer, found = store(0, SPEC), []
        for indices, x, weights in steps():
            layer.begin((indices[:1] + 5) % 16)
            found.append(np.array(layer.finish(layer.begin(indices), x, weights)))
        assert same(found, resident(backend)[::2])


def test_experts_that_do_not_exist_are_refused(written, backend):
    _, x, weights = steps()[0]
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        layer = store(0, SPEC)
        for wrong in (16, -1):
            with pytest.raises(OptionError, match="a layer has 0 to 15"):
                layer.finish(layer.begin(mx.array([[0, 1, 2, wrong]])), x, weights)


def test_two_runners_over_one_install_in_two_threads(written, resident):
    results, backend = {}, select("auto")

    def work(number):
        with (
            written.open() as install,
            open_experts(install, backend=backend, residency="streamed", slots=4 + number) as store,
        ):
            results[number] = run(store, steps())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(results[0], resident(backend))
    assert same(results[1], resident(backend))


def test_two_threads_in_the_middle_of_one_layer_are_refused(written, resident, backend):
    indices, x, weights = steps()[0]
    with written.open() as install, open_experts(install, backend=backend, residency="streamed", slots=5) as store:
        layer, failures = store(0, SPEC), []

        def other():
            try:
                mx.eval(layer.finish(layer.begin(indices), x, weights))
            except BackendError as error:
                failures.append(str(error))

        def in_another_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return len(failures)

        mx.eval(indices, x, weights)
        pending = layer.begin(indices)
        assert in_another_thread() == 1
        assert "serve one thread at a time, and thread 'MainThread' is in the middle" in failures[0]
        assert np.array_equal(layer.finish(pending, x, weights), resident(backend)[0])
        assert in_another_thread() == 1
        layer.begin(indices)
        store.settle()
        assert in_another_thread() == 1


def test_two_processes_over_one_install(written, resident):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for found in pool.map(run_in_a_process, [written.path] * 2, [4, 6]):
            assert same(found, resident(select("auto")))


def run_in_a_process(path, slots):
    install = Install.open(path, verify="off")
    with install, open_experts(install, backend=select("auto"), residency="streamed", slots=slots) as store:
        return run(store, steps())


def test_top_k_of_one_in_one_slot(tmp_path, backend):
    spec = replace(SPEC, top_k=1, num_experts=3)
    made, rng = layers.write(tmp_path / "i.gturbo", spec, layers=1), np.random.default_rng(2)
    work = [(layers.route(rng, spec, rows), *layers.inputs(rng, spec, rows)) for rows in (1, 6, 1)]
    outputs = []
    for residency in ("resident", "streamed"):
        with (
            made.open() as install,
            open_experts(install, backend=backend, residency=residency, **layers.slots_for(residency, 1)) as store,
        ):
            outputs.append(run(store, work, spec, 1))
    assert same(*outputs)
