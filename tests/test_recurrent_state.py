"""The state of a recurrent layer: which points it can go back to, and that marks hold what was."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.cache import LinearKV, RecurrentState, mark_all, reusable_prefix, rollback_all, trim_all
from turbospark_mlx.cache.recurrent import SLOTS
from turbospark_mlx.errors import ContextError


def feed(state, *tokens):
    """Add tokens to a state that remembers their sum and the last one, one by one."""
    for token in tokens:
        before = mx.zeros((1, 1)) if state[1] is None else state[1]
        state[0], state[1] = mx.full((1, 1), float(token)), before + token
        state.advance(1)
    return state


def write(state, *tokens):
    """`feed` as a kernel does it: into the next slot of buffers that stay, unless someone else needs what is there."""
    for token in tokens:
        old, new = state.offset % SLOTS, (state.offset + 1) % SLOTS
        buffers = state.place(1, [(1, 1), (1, 1)], [mx.float32, mx.float32])
        mx.eval(buffers)
        rows, sums = (np.array(buffer, copy=False) for buffer in buffers)
        rows[new], sums[new] = token, sums[old] + token
        state.written(mx.zeros(1))
    return state


WAYS = pytest.mark.parametrize("add", [feed, write])


def holds(state):
    return state.offset, *(None if array is None else float(array.item()) for array in (state[0], state[1]))


def test_it_begins_empty_and_counts():
    state = RecurrentState()
    assert holds(state) == (0, None, None)
    assert state.empty()
    assert not state.arrays
    assert state.nbytes == 0
    assert holds(feed(state, 1, 2, 4)) == (3, 4, 7)
    assert state.size() == 3
    assert len(state.arrays) == 2 * 3
    assert state.make_mask(4) is None
    assert state.places(1)
    assert not state.places(2)


@WAYS
def test_the_last_two_tokens_can_be_taken_back_and_no_more(add):
    state = add(RecurrentState(), 1, 2, 4, 8)
    assert [state.reusable(n) for n in (0, 1, 2, 3, 4, 9)] == [0, 0, 2, 3, 4, 4]
    with pytest.raises(ContextError, match="after 4 tokens cannot go back to 1"):
        state.trim(3)
    assert holds(state) == (4, 8, 15)
    assert state.trim(1) == 1
    assert holds(state) == (3, 4, 7)
    assert state.trim(1) == 1
    assert holds(state) == (2, 2, 3)
    assert holds(add(state, 16)) == (3, 16, 19)
    assert state.trim(99) == 3
    assert holds(state) == (0, None, None)


@WAYS
def test_marks_hold_what_was(add):
    state = add(RecurrentState(), 1, 2)
    mark, kept = state.mark(), state[1]
    add(state, *range(20))
    state.rollback(mark)
    assert holds(state) == (2, 2, 3)
    np.testing.assert_array_equal(np.array(state[1]), np.array(kept))
    add(state, 5)
    late = state.mark()
    state.rollback(mark)
    assert holds(state) == (2, 2, 3)
    add(state, 6, 6)
    with pytest.raises(ContextError, match="no longer part of the history"):
        state.rollback(late)
    assert holds(state) == (4, 6, 15)
    with pytest.raises(ContextError, match="another state"):
        RecurrentState().check(mark)


@WAYS
def test_what_was_kept_on_a_path_that_was_left_is_forgotten(add):
    state = add(RecurrentState(), 1, 2, 4)
    mark = state.mark()
    add(state, 8, 16)
    state.rollback(mark)
    add(state, 32)
    assert state.reusable(5) == 4
    assert state.trim(1) == 1
    assert holds(state) == (3, 4, 7)


def test_arrays_that_were_set_without_counting_are_dropped_on_the_way_back():
    """As when a layer fails between the two."""
    state = feed(RecurrentState(), 1)
    state[0] = mx.array([[9.0]])
    assert state.trim(0) == 0
    assert holds(state) == (1, 1, 1)


def test_bytes_are_those_of_all_states_that_are_held():
    state = feed(RecurrentState(), *range(9))
    assert state.nbytes == 3 * 2 * 4


def test_a_mark_of_arrays_is_a_reference():
    state = feed(RecurrentState(), 1, 2)
    mark, kept = state.mark(), state[1]
    state.rollback(mark)
    assert state[1] is kept


@pytest.mark.parametrize("seed", range(20))
def test_however_states_come_about_they_are_the_sums(seed):
    """Both ways in turn, with marks, rollbacks, ways back and copies, beside a list of tokens."""
    rng = np.random.default_rng(seed)
    state, tokens, marks = RecurrentState(), [], []
    for _ in range(80):
        action = rng.choice(["feed", "write", "mark", "rollback", "trim", "copy", "look"], p=[0.2, 0.4, *[0.08] * 5])
        if action in ("feed", "write"):
            tokens.append(int(rng.integers(1, 9)))
            {"feed": feed, "write": write}[action](state, tokens[-1])
        elif action == "mark":
            marks.append((state.mark(), list(tokens)))
        elif action == "rollback" and marks:
            mark, at = marks[int(rng.integers(len(marks)))]
            state.rollback(mark)
            tokens, marks = list(at), [each for each in marks if len(each[1]) <= len(at)]
        elif action == "trim" and tokens:
            back = state.reusable(len(tokens) - int(rng.integers(1, 3)))
            state.trim(len(tokens) - back)
            tokens, marks = tokens[:back], [each for each in marks if len(each[1]) <= back]
        elif action == "copy":
            state, other = copy.deepcopy(state), state
            write(other, 100)
            marks = []
        if action == "look" or rng.random() < 0.3:
            assert holds(state)[0] == len(tokens)
            assert holds(state)[1:] == ((tokens[-1], sum(tokens)) if tokens else (None, None))


def test_nothing_is_left_behind_the_beginning():
    """A step asks for no arrays where it has to say what they look like."""
    state = RecurrentState()
    mark = state.mark()
    write(state, 1, 2)
    state.rollback(mark)
    assert state.arrays == []
    assert holds(write(state, 4)) == (1, 4, 4)


def test_buffers_stay_while_a_kernel_writes():
    state = write(feed(RecurrentState(), 1, 2), 4)
    buffers = state.place(1)
    assert state.nbytes == SLOTS * 2 * 4
    state.trim(1)
    mark = state.mark()
    assert state.place(1) is buffers
    write(state, 8, 8, 8)
    state.rollback(mark)
    assert holds(state) == (3, 4, 7)
    assert state.place(1) is not buffers


@WAYS
def test_a_copy_goes_its_own_way(add):
    state = add(RecurrentState(), 1, 2)
    mark = state.mark()
    twin = copy.deepcopy(state)
    add(twin, 4)
    assert (holds(state), holds(twin)) == ((2, 2, 3), (3, 4, 7))
    add(state, 8)
    state.rollback(mark)
    assert holds(state) == (2, 2, 3)


@WAYS
def test_its_state_can_be_given_to_another(add):
    state, other = add(RecurrentState(), 1, 2, 4), RecurrentState()
    other.state = state.state
    assert holds(other) == (3, 4, 7)
    assert other.reusable(2) == 0
    assert other.reusable(3) == 3


def test_beside_keys_and_values_all_go_back_or_none():
    layers = [RecurrentState(), LinearKV()]

    def run(count):
        for _ in range(count):
            feed(layers[0], 1)
            layers[1].update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))

    run(4)
    marks = mark_all(layers)
    run(6)
    assert reusable_prefix(layers, 10) == 10
    assert reusable_prefix(layers, 9) == 9
    assert reusable_prefix(layers, 7) == 0
    trim_all(layers, 9)
    assert [layer.offset for layer in layers] == [9, 9]
    rollback_all(layers, marks)
    assert [layer.offset for layer in layers] == [4, 4]
    np.testing.assert_array_equal(np.array(layers[0][1]), [[4]])
