"""States that go on and back together, and keys of blocks, against lists that do the same."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.cache import BlockKeys, JointState, LinearKV, RecurrentState, mark_all, rollback_all, trim_all
from turbospark_mlx.errors import ContextError

BLOCK, WIDTH = 3, 4


def pool(keys, first):
    """Tells blocks apart by number, and what is in them."""
    return keys.sum(axis=2) + mx.arange(first, first + keys.shape[1])[None, :, None] * 1000


def expected(rows):
    """Of rows ``[tokens, width]``: the keys of whole blocks."""
    count = len(rows) // BLOCK
    sums = rows[: count * BLOCK].reshape(count, BLOCK, WIDTH).sum(axis=1)
    return sums + 1000 * np.arange(count)[:, None]


def whole(length):
    return np.random.default_rng(length).integers(0, 9, (length, WIDTH)).astype(np.float32)


def append(cache, rows):
    return np.array(cache.append(mx.array(rows[None]), pool))[0]


@pytest.mark.parametrize("most", [None, 40])
def test_blocks_are_those_of_the_tokens_that_are_left(most):
    """However they came, and wherever the others went: appended in pieces, cut, appended otherwise."""
    rng = np.random.default_rng(3)
    cache, rows, marks = BlockKeys(BLOCK, most), np.zeros((0, WIDTH), np.float32), []
    for _ in range(400):
        kind = rng.integers(4)
        if kind == 0 and len(rows):
            n = int(rng.integers(1, 5))
            assert cache.trim(n) == min(n, len(rows))
            rows = rows[: max(0, len(rows) - n)]
            marks = [(at, mark) for at, mark in marks if at <= len(rows)]
        elif kind == 1:
            marks.append((len(rows), cache.mark()))
        elif kind == 2 and marks:
            at, mark = marks[rng.integers(len(marks))]
            cache.rollback(mark)
            rows = rows[:at]
            marks = [(at, mark) for at, mark in marks if at <= len(rows)]
        elif len(rows) < 34:
            fresh = rng.integers(0, 9, (int(rng.integers(1, 7)), WIDTH)).astype(np.float32)
            rows = np.concatenate([rows, fresh])
            np.testing.assert_array_equal(append(cache, fresh), expected(rows))
        assert cache.offset == len(rows)


def place(cache, row):
    """One token as a kernel appends it; the keys of all whole blocks come back."""
    at = cache.offset
    tokens, blocks = (np.array(buffer, copy=False) for buffer in cache.place(1, (1, WIDTH), mx.float32))
    tokens[0, 0, 0, at] = row
    if (at + 1) % BLOCK == 0:
        blocks[0, 0, 0, at // BLOCK] = tokens[0, 0, 0, at + 1 - BLOCK : at + 1].sum(axis=0) + 1000 * (at // BLOCK)
    cache.written(mx.zeros(1))
    return blocks[0, 0, 0, : (at + 1) // BLOCK]


@pytest.mark.parametrize("most", [None, 70])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_kernels_write_are_those_that_are_appended(most, seed):
    """In any order, over trims, marks, and states that were given out, which do not change."""
    rng = np.random.default_rng(seed)
    cache, rows, given = BlockKeys(BLOCK, most), np.zeros((0, WIDTH), np.float32), []
    for _ in range(300):
        kind = rng.integers(6)
        if kind == 0 and len(rows):
            n = int(rng.integers(1, 5))
            cache.trim(n)
            rows = rows[: max(0, len(rows) - n)]
        elif kind == 1 and len(rows):
            twin = copy.deepcopy(cache)
            given = [*given[-2:], (twin, rows)]
        elif len(rows) < 60:
            fresh = rng.integers(0, 9, (1 if kind > 2 else int(rng.integers(1, 5)), WIDTH)).astype(np.float32)
            rows = np.concatenate([rows, fresh])
            found = place(cache, fresh[0]) if kind > 2 else append(cache, fresh)
            np.testing.assert_array_equal(found, expected(rows))
        assert cache.offset == len(rows)
    for twin, then in given:
        tokens, blocks = twin.state
        np.testing.assert_array_equal(np.array(tokens[0])[0, 0, 0, : len(then)], then)
        if len(then) >= BLOCK:
            np.testing.assert_array_equal(np.array(blocks[0])[0, 0, 0, : len(then) // BLOCK], expected(then))


def test_a_context_shorter_than_a_block_has_room_for_one():
    """A kernel that writes none is given a buffer all the same."""
    cache = BlockKeys(BLOCK, 2)
    assert place(cache, np.ones(WIDTH)).shape == (0, WIDTH)
    assert (cache.offset, cache.nbytes) == (1, (2 + 1) * WIDTH * 4)


def test_room_for_blocks_grows_with_those_that_kernels_write():
    cache, count = BlockKeys(BLOCK), 256 * BLOCK + BLOCK
    for token in range(count):
        blocks = place(cache, np.full(WIDTH, token))
    assert blocks.shape == (257, WIDTH)
    np.testing.assert_array_equal(blocks[-1], sum(range(count - BLOCK, count)) + 256 * 1000)


def test_a_mark_of_a_past_that_was_left():
    cache = BlockKeys(BLOCK)
    append(cache, whole(7))
    mark = cache.mark()
    cache.trim(2)
    with pytest.raises(ContextError, match="no longer part of the history"):
        cache.check(mark)


def test_a_copy_goes_its_own_way():
    cache = BlockKeys(BLOCK)
    append(cache, whole(7))
    twin = copy.deepcopy(cache)
    append(cache, whole(5))
    np.testing.assert_array_equal(append(twin, whole(4)), expected(np.concatenate([whole(7), whole(4)])))
    other = BlockKeys(BLOCK)
    other.state = cache.state
    both = np.concatenate([whole(7), whole(5), whole(2)])
    np.testing.assert_array_equal(append(other, whole(2)), expected(both))


def test_too_many_tokens_are_refused():
    cache = BlockKeys(BLOCK, 7)
    assert append(cache, whole(7)).shape == (2, WIDTH)
    assert cache.nbytes == (7 + 2) * WIDTH * 4
    with pytest.raises(ContextError, match="the cache holds 7 tokens"):
        append(cache, whole(1))


def advance(state, n):
    """What a layer does: each part in turn, the second by two steps."""
    keys, memory = state.parts
    keys.update_and_fetch(mx.zeros((1, 1, n, 2)), mx.zeros((1, 1, n, 2)))
    for step in [n] if n == 1 else [n - 1, 1]:
        memory[0] = mx.full((1, 1), memory.offset + step)
        memory[1] = memory[0]
        memory.advance(step)


def test_all_parts_go_back_or_none():
    state = JointState(LinearKV(), RecurrentState())
    advance(state, 5)
    assert (state.offset, state.reusable(5), state.reusable(4), state.reusable(3)) == (5, 5, 4, 0)
    assert not state.is_trimmable()
    marks = mark_all([state])
    advance(state, 2)
    with pytest.raises(ContextError, match="cannot go back to 2"):
        state.trim(5)
    rollback_all([state], marks)
    assert [part.offset for part in state.parts] == [5, 5]
    assert state.parts[1][0].item() == 5
    advance(state, 1)
    trim_all([state], 5)
    assert [part.offset for part in state.parts] == [5, 5]
    assert state.trim(9) == 5
    assert [part.offset for part in state.parts] == [0, 0]


def test_a_layer_that_failed_half_way_is_brought_back():
    """Its first part has the token, its second has not."""
    state = JointState(LinearKV(), RecurrentState())
    advance(state, 4)
    state.parts[0].update_and_fetch(mx.zeros((1, 1, 1, 2)), mx.zeros((1, 1, 1, 2)))
    trim_all([state], 4)
    assert [part.offset for part in state.parts] == [4, 4]
    assert state.nbytes == sum(part.nbytes for part in state.parts)
    assert len(state.arrays) == sum(len(part.arrays) for part in state.parts)
