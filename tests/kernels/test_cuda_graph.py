"""A recording as a CUDA graph, on a stand-in for the driver (`fake_cuda`): what it refuses, and who waits for what."""

import gc
import weakref
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.families.oracles import assert_exact
from tests.kernels import fake_cuda
from tests.kernels.variants import normal, packed
from turbospark_mlx.custom_kernels import affine_embedding, affine_matmul, backends, largest, rms_norm
from turbospark_mlx.custom_kernels.backends import compiler, cuda
from turbospark_mlx.custom_kernels.backends.cuda_graph import IN_FLIGHT, GraphRecording, bring
from turbospark_mlx.custom_kernels.backends.replay import Known, NotRecordable
from turbospark_mlx.errors import BackendError

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not compiler.candidates(), reason="needs a CPU's kernels, and a C++ compiler"
)
WIDTH, VOCAB = 64, 96
OPTIONS = {"bits": 4, "group_size": 32}


@pytest.fixture(params=["late", "early"])
def device(request, monkeypatch):
    return fake_cuda.on(monkeypatch, getattr(fake_cuda, request.param))


@pytest.fixture
def lazy(monkeypatch):
    """A device that is late."""
    return fake_cuda.on(monkeypatch)


def backend():
    return replace(backends.select("host"), device="gpu", launch=cuda.launch)


class Chain:
    """A model of one matrix, in which a token leads to the next; ``shift [WIDTH]`` is lent, and ``factor`` is told."""

    def __init__(self):
        self.backend = backend()
        self.table, self.matrix = packed(VOCAB, WIDTH, 8, 32, mx.float32), packed(VOCAB, WIDTH, 4, 32, mx.float32)
        mx.eval(self.table, self.matrix)

    def logits(self, ids, factor, shift):
        x = affine_embedding(ids, *self.table, bits=8, group_size=32, dtype=mx.float32, backend=self.backend)
        x = rms_norm(rms_norm(x, factor, eps=1e-5, backend=self.backend), shift, eps=1e-5, backend=self.backend)
        return affine_matmul(x, *self.matrix, **OPTIONS, backend=self.backend)[0, 0]

    def recorded(self, shift, instead=None):
        told = [np.zeros((1, 1), np.int32), np.ones(WIDTH, np.float32)]
        recording = GraphRecording([*self.table, *self.matrix], [shift], told)
        with recording.noting():
            logits = self.logits(*recording.inputs, shift)
            recording.finish(logits, largest(logits, backend=self.backend), instead=instead)
        return recording

    def expected(self, token, factor, shift):
        logits = self.logits(mx.array([[token]], mx.int32), mx.array(factor), shift)
        return logits, int(mx.argmax(logits))


@pytest.fixture
def chain():
    return Chain()


def factors(count):
    rng = np.random.default_rng(count)
    return list(rng.normal(0.0, 1.0, (count, WIDTH)).astype(np.float32))


def check(ticket, logits, token):
    assert ticket.small[0].item() == token
    assert ticket.small[1].item() == mx.max(logits).item()
    assert ticket.small[0].shape == (1, 1)
    assert_exact(ticket.large, logits)


def ids(token):
    return np.array([[token]], np.int32)


def test_each_launch_is_told_something_else(device, chain):
    shift = normal(WIDTH)
    recording = chain.recorded(shift)
    for token, factor in enumerate(factors(3 * IN_FLIGHT)):
        check(recording.begin([ids(token), factor]), *chain.expected(token, factor, shift))
    assert device.calls["launch"] == 3 * IN_FLIGHT


@pytest.mark.parametrize("seed", range(4))
def test_launches_that_follow_each_other_before_anyone_waits(monkeypatch, chain, seed):
    """Each takes the token of the one in front, and its own of what else it is told; more than have turns."""
    fake_cuda.on(monkeypatch, fake_cuda.anyhow(seed) if seed else fake_cuda.late)
    shift, count = normal(WIDTH), 3 * IN_FLIGHT + seed
    recording, told = chain.recorded(shift), factors(3 * IN_FLIGHT + seed)
    tickets = [recording.begin([ids(5) if i == 0 else None, told[i]]) for i in range(count)]
    token, small, large = 5, [], []
    for factor in told:
        logits, token = chain.expected(token, factor, shift)
        small.append(token)
        large.append(logits)
    assert len(set(small)) > 3
    assert [ticket.small[0].item() for ticket in tickets] == small
    for ticket, logits in list(zip(tickets, large, strict=True))[-IN_FLIGHT:]:
        assert_exact(ticket.large, logits)
    with pytest.raises(BackendError, match="asked for after others had taken its place"):
        _ = tickets[-IN_FLIGHT - 1].large


def test_a_result_that_was_asked_for_in_time_stays(device, chain):
    shift = normal(WIDTH)
    recording, told = chain.recorded(shift), factors(IN_FLIGHT + 2)
    first = recording.begin([ids(1), told[0]])
    logits, token = chain.expected(1, told[0], shift)
    check(first, logits, token)
    for factor in told[1:]:
        recording.begin([None, factor])
    check(first, logits, token)


def test_nothing_is_done_before_it_is_waited_for(lazy, chain):
    """Of the stand-in, without which the tests here show nothing."""
    recording = chain.recorded(normal(WIDTH))
    small = recording._small
    read = np.ctypeslib.as_array(small.view)
    ticket = recording.begin([ids(1), factors(1)[0]])
    assert set(read.tolist()) == {fake_cuda.GARBAGE}
    ticket.wait()
    assert set(read.tolist()) != {fake_cuda.GARBAGE}
    waits = lazy.calls["wait"]
    ticket.wait()
    assert lazy.calls["wait"] == waits


def test_lent_memory_is_replaced_for_launches_to_come(device, chain):
    """Those that are on their way keep what they were launched with."""
    old, new, told = normal(WIDTH), normal(WIDTH) * 3 + 1, factors(4)
    mx.eval(new)
    recording = chain.recorded(old)
    before = recording.begin([ids(1), told[0]])
    assert len(recording.move([old], [new])) == 1
    assert device.calls["change"] == 1
    after = recording.begin([ids(2), told[1]])
    check(before, *chain.expected(1, told[0], old))
    check(after, *chain.expected(2, told[1], new))
    assert recording.move([new], [old])
    check(recording.begin([ids(3), told[2]]), *chain.expected(3, told[2], old))
    assert recording.move([new], [old]) == []
    assert device.calls["change"] == 2


def test_contents_of_lent_and_known_memory_may_change(device, chain):
    shift, told = normal(WIDTH), factors(2)
    recording = chain.recorded(shift)
    np.array(shift, copy=False)[...] = 2.0
    np.array(chain.table[2], copy=False)[...] *= 2
    check(recording.begin([ids(7), told[0]]), *chain.expected(7, told[0], shift))


def test_a_second_recording_compiles_nothing_again(device, chain):
    shift = normal(WIDTH)
    chain.recorded(shift)
    compiled, functions = list(device.compiled), device.calls["function"]
    assert len(compiled) == functions > 3
    check(chain.recorded(shift).begin([ids(2), factors(1)[0]]), *chain.expected(2, factors(1)[0], shift))
    assert device.compiled == compiled
    assert device.calls["function"] == functions


@pytest.mark.parametrize(("capability", "overlapping"), [((8, 0), False), ((8, 9), False), ((9, 0), True)])
def test_kernels_overlap_where_a_gpu_can(lazy, chain, capability, overlapping):
    lazy.capability = capability
    assert chain.recorded(normal(WIDTH))._graph.overlapping is overlapping


def test_what_stays_is_brought_to_the_device(lazy):
    arrays = [normal(WIDTH), *packed(64, 32, 4, 32, mx.float16)]
    bring(Known(arrays))
    assert sorted(lazy.prefetched) == sorted((np.array(a, copy=False).ctypes.data, a.nbytes) for a in arrays)


def test_one_instead_of_another_takes_its_results_over(lazy, chain):
    """Its stream, too, so that the launches of both come one after the other."""
    shifts, (factor,) = [normal(WIDTH), 2 * normal(WIDTH)], factors(1)
    mx.eval(shifts)
    first = chain.recorded(shifts[0])
    check(first.begin([ids(5), factor]), *chain.expected(5, factor, shifts[0]))
    pinned = dict(lazy.pinned)
    second = chain.recorded(shifts[1], instead=first)
    assert lazy.pinned == pinned
    assert second._stream is first._stream
    check(second.begin([ids(7), factor]), *chain.expected(7, factor, shifts[1]))


def test_a_recording_keeps_its_memory_no_longer_than_itself(lazy, chain):
    recording = chain.recorded(normal(WIDTH))
    ticket = recording.begin([ids(1), factors(1)[0]])
    ticket.wait()
    gone = weakref.ref(recording)
    del recording, ticket
    gc.collect()
    assert gone() is None
    assert not lazy.memory
    assert not lazy.pinned
    assert lazy.abandoned == 0


def test_launches_outside_of_a_recording_are_run(device, chain):
    shift, told = normal(WIDTH), factors(1)[0]
    recording = GraphRecording([*chain.table, *chain.matrix], [shift], [ids(0), told])
    with recording.noting():
        chain.logits(*recording.inputs, shift)
    with pytest.raises(NotRecordable), recording.noting():
        chain.logits(*recording.inputs, shift + 1)
    assert device.calls["launch"] == 0
    logits, token = chain.expected(3, told, shift)
    assert logits[token].item() == mx.max(logits).item() != 0
    assert mx.default_device() == mx.cpu


class Refusals:
    """A recording of what the tests below make of it."""

    def __init__(self):
        self.backend, self.weight = backend(), mx.ones((WIDTH,))
        self.matrix = packed(VOCAB, WIDTH, 4, 32, mx.float32)
        mx.eval(self.weight, self.matrix)
        self.recording = GraphRecording([self.weight, *self.matrix], [], [np.ones((1, WIDTH), np.float32)])
        (self.x,) = self.recording.inputs

    def norm(self, x):
        return rms_norm(x, self.weight, eps=1e-5, backend=self.backend)

    def product(self, x, matrix=None):
        return affine_matmul(x, *(matrix or self.matrix), **OPTIONS, backend=self.backend)

    def largest(self, x):
        return largest(x, backend=self.backend)


@pytest.fixture
def refusals(lazy):
    return Refusals()


def refused(recording, words, run):
    with pytest.raises(NotRecordable, match=words), recording.noting():
        run()


def test_an_input_that_no_kernel_wrote_is_refused(refusals):
    r = refusals
    refused(r.recording, "input x of rms_norm comes from an operation that is no kernel", lambda: r.norm(r.x + 1))
    refused(r.recording, "input x of rms_norm comes from", lambda: r.norm(r.norm(r.x) * 2))
    refused(r.recording, "input x of rms_norm comes from", lambda: r.norm(mx.zeros((1, WIDTH))))


def test_an_input_that_would_be_copied_is_refused(refusals):
    r = refusals
    with r.recording.noting():
        whole = r.product(r.x)
    for strided in (whole[:, ::-1][:, :WIDTH], mx.broadcast_to(whole[:, :1], (1, WIDTH))):
        refused(r.recording, "input x of rms_norm had to be copied", lambda x=strided: r.norm(x))


def test_an_input_may_be_a_part_of_what_a_kernel_wrote(refusals):
    r = refusals
    with r.recording.noting():
        logits = r.product(r.norm(r.product(r.x)[:, VOCAB - WIDTH :])).reshape(-1)
        r.recording.finish(logits, r.largest(logits))
    x = normal(1, WIDTH)
    expected = r.product(r.norm(r.product(x)[:, VOCAB - WIDTH :])).reshape(-1)
    check(r.recording.begin([np.array(x)]), expected, int(mx.argmax(expected)))


def test_weights_that_a_kernel_wrote_are_refused(refusals):
    """They would be read before that kernel has ended."""
    r = refusals
    with r.recording.noting():
        written = r.norm(r.x)
    parts = [r.matrix[0][:2], written.reshape(32, 2)[:2], r.matrix[2][:2]]
    refused(
        r.recording, "the weights scales of dequant_gemv_simd come from another kernel", lambda: r.product(r.x, parts)
    )


def test_results_are_all_that_one_kernel_wrote(refusals):
    r = refusals
    with r.recording.noting():
        logits = r.product(r.norm(r.x)).reshape(-1)
        small = r.largest(logits)
        with pytest.raises(NotRecordable, match="a result is not all that a kernel wrote"):
            r.recording.finish(logits[:8], small)
        with pytest.raises(NotRecordable, match="a result is not all that a kernel wrote"):
            r.recording.finish(logits[8:], small)
        with pytest.raises(NotRecordable, match="a result is not all that a kernel wrote"):
            r.recording.finish(logits, [small[0], logits[8:16]])
        with pytest.raises(NotRecordable, match="a result comes from an operation that is no kernel"):
            r.recording.finish(logits + 0, small)
        with pytest.raises(NotRecordable, match="a result comes from an operation that is no kernel"):
            r.recording.finish(logits, [small[0] + 0])
        with pytest.raises(NotRecordable, match="a result is not all that a kernel wrote"):
            r.recording.finish(r.x, small)


@pytest.mark.parametrize("call", ["enter", "graph", "compile", "function"])
def test_a_driver_that_fails_says_so(lazy, chain, call):
    lazy.fails_at(call)
    with pytest.raises(BackendError, match=f"{call}: no such luck"):
        chain.recorded(normal(WIDTH))
    lazy.failing.clear()
    shift, told = normal(WIDTH), factors(1)[0]
    check(chain.recorded(shift).begin([ids(1), told]), *chain.expected(1, told, shift))


def test_a_launch_that_failed_is_begun_again(device, chain):
    """Whichever call failed; and a result that could not be waited for is waited for again."""
    shift, told = normal(WIDTH), factors(IN_FLIGHT * 5)
    recording = chain.recorded(shift)
    for i, call in enumerate(("to_device", "launch", "on_device", "to_host", "record") * (IN_FLIGHT - 1)):
        device.fails_at(call)
        with pytest.raises(BackendError, match=f"{call}: no such luck"):
            recording.begin([ids(i), told[i]])
        device.failing.clear()
        check(recording.begin([ids(i), told[i]]), *chain.expected(i, told[i], shift))
    ticket = recording.begin([ids(3), told[0]])
    device.fails_at("wait")
    for _ in range(2):
        with pytest.raises(BackendError, match="wait: no such luck"):
            ticket.wait()
    device.failing.clear()
    check(ticket, *chain.expected(3, told[0], shift))
