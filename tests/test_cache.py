"""The caches against the plain rule: query i sees key j exactly when i - W < j <= i, however the tokens arrive.

Every cache is driven beside a list that remembers all keys, so the expected answer needs no second cache.
"""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.cache import LinearKV, RingKV, causal_mask, mark_all, reusable_prefix, rollback_all, trim_all
from turbospark_mlx.cache.kv import BUCKET
from turbospark_mlx.errors import ContextError

W = 8
RNG = np.random.default_rng(7)


def token(position: int, branch: int = 0) -> np.ndarray:
    """``[KV=2, D=4]`` values that name their position and branch, so that a wrong row shows as itself."""
    return np.arange(8, dtype=np.float32).reshape(2, 4) / 100 + position + 1000 * branch


class Driven:
    """A cache and the list of everything it was fed; ``placing`` writes rows in place wherever that is allowed."""

    def __init__(self, cache, placing: bool = False):
        self.cache, self.fed, self.placing = cache, [], placing

    @property
    def window(self):
        return getattr(self.cache, "window", None)

    def feed(self, count: int, branch: int = 0) -> None:
        new = [token(len(self.fed) + i, branch) for i in range(count)]
        rows = mx.array(np.stack(new, axis=1)[None])
        start = len(self.fed)
        self.fed += new
        if self.placing and self.cache.places(count):
            keys, values = self.place(mx.stack([rows, -rows]), start)
        else:
            keys, values = self.cache.update_and_fetch(rows, -rows)
        assert self.cache.offset == len(self.fed)
        np.testing.assert_array_equal(np.array(keys), -np.array(values))
        self.see(np.array(keys)[0], start, count)

    def place(self, update: mx.array, start: int) -> mx.array:
        """What the kernels do: write the rows where they belong, and read as many as there are."""
        length = update.shape[3]
        buffer = self.cache.place(length, (1, 2, 4), mx.float32)
        mx.eval(buffer)
        memory = np.array(buffer, copy=False)
        for i in range(length):
            memory[..., (start + i) % buffer.shape[3], :] = np.array(update)[..., i, :]
        return buffer[..., : min(start + length, buffer.shape[3]), :]

    def see(self, keys: np.ndarray, start: int, count: int) -> None:
        """Each new token sees its window, under the attention op's rule that queries are the last of the keys."""
        total = keys.shape[1]
        for i in range(count):
            first = 0 if self.window is None or count == 1 else max(0, total - count + i - self.window + 1)
            seen = keys[:, first : total - count + i + 1] if count > 1 else keys
            position = start + i
            low = 0 if self.window is None else max(0, position - self.window + 1)
            wanted = np.stack(self.fed[low : position + 1], axis=1)
            order = np.argsort(seen[0, :, 0]) if count == 1 else slice(None)
            by_position = np.argsort(wanted[0, :, 0]) if count == 1 else slice(None)
            np.testing.assert_array_equal(seen[:, order], wanted[:, by_position])

    def cut(self, length: int) -> None:
        del self.fed[length:]

    def reach(self) -> list[int]:
        return [self.cache.reusable(n) for n in range(len(self.fed) + 1)]


KINDS = {"linear": LinearKV, "ring": lambda: RingKV(W), "ring of 1": lambda: RingKV(1), "ring of 2": lambda: RingKV(2)}


@pytest.fixture(params=[(kind, placing) for kind in KINDS for placing in (False, True)], ids=str)
def make(request):
    """Makes a driven cache of a kind."""
    kind, placing = request.param
    return lambda: Driven(KINDS[kind](), placing)


@pytest.mark.parametrize(
    "chunks", [(1,) * 20, (20,), (3,) * 7, (7, 1, 1, 9), (8, 8, 1), (9, 1), (1, 7, 1, 2, 30, 1), (16, 1, 1)]
)
def test_every_split_shows_the_same_window(make, chunks):
    driven = make()
    for count in chunks:
        driven.feed(count)


@pytest.mark.parametrize("placing", [False, True])
def test_growth_past_a_bucket_keeps_every_row(placing):
    for cache in (LinearKV(), RingKV(BUCKET + 40)):
        driven = Driven(cache, placing)
        for count in (BUCKET - 1, 1, 1, 60, 1):
            driven.feed(count)


def test_a_ring_takes_no_more_than_its_window():
    ring, linear = RingKV(W), LinearKV()
    for count in (5, 40, 1, 1):
        rows = mx.zeros((1, 2, count, 4))
        ring.update_and_fetch(rows, rows)
        linear.update_and_fetch(rows, rows)
    assert ring.nbytes == 2 * 2 * W * 4 * 4
    assert linear.nbytes == 2 * 2 * BUCKET * 4 * 4


def test_a_full_linear_cache_refuses_and_stays_as_it_was():
    driven = Driven(LinearKV(max_length=10))
    driven.feed(9)
    rows = mx.zeros((1, 2, 2, 4))
    with pytest.raises(ContextError, match="holds 10 tokens; 11 are wanted"):
        driven.cache.update_and_fetch(rows, rows)
    with pytest.raises(ContextError, match="holds 10 tokens; 11 are wanted"):
        driven.cache.place(2)
    driven.feed(1)


@pytest.mark.parametrize("placing", [False, True])
def test_what_state_gave_out_stays_as_it_was(placing):
    for cache in (LinearKV(), RingKV(W)):
        driven = Driven(cache, placing)
        driven.feed(W)
        buffer, before = cache.state[0], np.array(cache.state[0])
        driven.cache.trim(1)
        driven.cut(W - 1)
        driven.feed(1, branch=1)
        np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_of_feeding_marking_and_going_back(make, seed):
    """Marks are checked against the naive rule: valid while the history was never cut to below them."""
    rng = np.random.default_rng(seed)
    driven, marks = make(), []
    for branch in range(50):
        action = rng.choice(["feed", "mark", "rollback", "trim"], p=[0.45, 0.25, 0.2, 0.1])
        if action == "feed":
            driven.feed(int(rng.choice([1, 1, 1, 2, 3, 7, 8, 9, 20])), branch)
        elif action == "mark":
            marks.append((driven.cache.mark(), list(driven.fed), driven.reach()))
        elif action == "rollback" and marks:
            mark, fed, reach = marks[rng.integers(len(marks))]
            driven.cache.rollback(mark)
            driven.cut(len(fed))
            assert len(driven.fed) == driven.cache.offset
            np.testing.assert_array_equal(driven.fed, fed)
            assert driven.reach() == reach
        elif action == "trim":
            length = driven.cache.reusable(int(rng.integers(len(driven.fed) + 1)))
            trim_all([driven.cache], length)
            driven.cut(length)
        valid = [entry for entry in marks if len(entry[1]) <= len(driven.fed)]
        for mark, *_ in marks:
            if any(mark is kept for kept, *_ in valid):
                driven.cache.check(mark)
            else:
                with pytest.raises(ContextError, match="no longer part of the history"):
                    driven.cache.check(mark)
        marks = valid


@pytest.mark.parametrize("at", [0, 3, 7, 8, 9, 21])
@pytest.mark.parametrize("on", [(1,), (1, 1, 1), (5,), (1,) * 9, (9, 1)])
@pytest.mark.parametrize("again", [(1, 1), (2,), (9, 1)])
def test_going_back_is_never_having_gone_on(make, at, on, again):
    driven = make()
    for _ in range(at):
        driven.feed(1)
    mark = driven.cache.mark()
    for branch in (1, 2):
        for count in on:
            driven.feed(count, branch)
        driven.cache.rollback(mark)
        driven.cut(at)
    for count in again:
        driven.feed(count, branch=3)


def test_a_mark_that_was_passed_below_stays_refused_after_going_on(make):
    driven = make()
    driven.feed(3)
    low = driven.cache.mark()
    driven.feed(3)
    high = driven.cache.mark()
    driven.cache.rollback(low)
    driven.cut(3)
    driven.feed(9, branch=1)
    with pytest.raises(ContextError, match=r"mark at position 6 .* went back to position 3"):
        driven.cache.rollback(high)
    assert driven.cache.offset == 12
    driven.feed(1)


def test_a_mark_of_another_cache_or_of_a_replaced_state_is_refused(make):
    one, other = make(), make()
    for driven in (one, other):
        driven.feed(4)
    with pytest.raises(ContextError, match="another state"):
        one.cache.rollback(other.cache.mark())
    mark = one.cache.mark()
    one.cache.state = other.cache.state
    with pytest.raises(ContextError, match="another state"):
        one.cache.rollback(mark)


def test_a_copy_goes_its_own_way(make):
    driven = make()
    driven.feed(11)
    twin = copy.deepcopy(driven)
    twin.feed(5, branch=1)
    twin.feed(1, branch=1)
    driven.feed(1)
    driven.feed(3)
    twin.feed(1, branch=1)


def test_state_round_trip(make):
    driven = make()
    driven.feed(11)
    driven.feed(1)
    other = make()
    other.cache.state, other.fed = driven.cache.state, list(driven.fed)
    other.feed(1)
    other.feed(2)


@pytest.mark.parametrize("length", [0, 1, 5, 7, 8, 9, 10, 16, 21])
def test_linear_goes_back_anywhere_and_a_ring_only_where_it_holds_the_window(length):
    for split in ((length,), (1,) * length, (length // 2, length - length // 2)):
        linear, ring = Driven(LinearKV()), Driven(RingKV(W))
        for driven, count in itertools.product((linear, ring), filter(None, split)):
            driven.feed(count)
        # The rows held are the last W; a query at p needs the W - 1 before it.
        for prefix in range(length + 3):
            assert linear.cache.reusable(prefix) == min(prefix, length)
            possible = length <= W or prefix >= length - 1
            assert ring.cache.reusable(prefix) == (min(prefix, length) if possible else 0)
        assert ring.cache.is_trimmable() == (length <= W)


def test_a_wrapped_ring_goes_back_one_token_once():
    driven = Driven(RingKV(W))
    driven.feed(20)
    assert driven.cache.trim(1) == 1
    driven.cut(19)
    assert driven.cache.reusable(18) == 0
    with pytest.raises(ContextError, match="has overwritten what position 18 needs"):
        driven.cache.trim(1)
    driven.feed(1, branch=1)
    driven.feed(3, branch=1)
    assert driven.cache.trim(100) == 23
    assert driven.cache.is_trimmable()
    driven.cut(0)
    driven.feed(9, branch=2)


def test_prefix_reuse_is_what_all_layers_can_do():
    layers = [LinearKV(), RingKV(W), LinearKV()]
    rows = mx.zeros((1, 2, 5, 4))
    for layer in layers:
        layer.update_and_fetch(rows, rows)
    assert reusable_prefix(layers, 3) == 3
    for layer in layers:
        layer.update_and_fetch(mx.zeros((1, 2, 9, 4)), mx.zeros((1, 2, 9, 4)))
    assert [reusable_prefix(layers, n) for n in (5, 12, 13, 14, 99)] == [0, 0, 13, 14, 14]
    trim_all(layers, 13)
    assert [layer.offset for layer in layers] == [13, 13, 13]


def test_all_layers_go_back_or_none():
    layers = [LinearKV(), RingKV(W)]
    rows = mx.zeros((1, 2, 3, 4))
    for layer in layers:
        layer.update_and_fetch(rows, rows)
    marks = mark_all(layers)
    layers[0].update_and_fetch(rows, rows)
    layers[1].trim(1)
    with pytest.raises(ContextError):
        rollback_all(layers, marks)
    assert [layer.offset for layer in layers] == [6, 2]


def test_masks_by_hand():
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]
    assert causal_mask(2, 4, window=2).tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.parametrize("before", [0, 1, 5, 7, 8, 20])
@pytest.mark.parametrize("new", [1, 2, 3, 8, 12])
def test_make_mask_fits_what_update_and_fetch_returns(make, before, new):
    driven = make()
    if before:
        driven.feed(before)
    mask, array = driven.cache.make_mask(new), driven.cache.make_mask(new, return_array=True)
    rows = mx.array(np.stack([token(before + i) for i in range(new)], axis=1)[None])
    keys, _ = driven.cache.update_and_fetch(rows, rows)
    if new == 1:
        assert mask is None
        return
    positions = np.array(keys)[0, 0, :, 0]
    query = np.arange(before, before + new)[:, None]
    wanted = positions[None] <= query
    if driven.window:
        wanted &= positions[None] > query - driven.window
    np.testing.assert_array_equal(np.array(array), wanted)
    if isinstance(mask, str):
        mask = causal_mask(new, keys.shape[2])
    np.testing.assert_array_equal(np.array(mask), wanted)


def test_a_window_is_masked_on_a_linear_cache_too():
    cache = LinearKV()
    assert cache.make_mask(4, window_size=4) == "causal"
    assert cache.make_mask(5, window_size=4).tolist() == causal_mask(5, 5, 4).tolist()
    with pytest.raises(ContextError, match="window of 8"):
        RingKV(W).make_mask(4, window_size=4)
