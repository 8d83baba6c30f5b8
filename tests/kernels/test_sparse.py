"""The steps of sparse attention, on every back end of a CPU, against float64 and against choices made one by one."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import indexer, sparse
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference"])
def backend(request):
    return ck.backends.select(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(6)


@pytest.mark.parametrize(
    ("batch", "count", "block", "width", "pairs"), [(1, 5, 4, 128, 32), (2, 3, 3, 20, 10), (1, 1, 8, 7, 1)]
)
@pytest.mark.parametrize("centered", [False, True])
def test_keys_of_blocks(backend, rng, batch, count, block, width, pairs, centered):
    keys, weight = normal(rng, batch, count, block, width), normal(rng, width)
    frequencies = 50.0 ** -(np.arange(pairs) / pairs)
    table = mx.array(ck.rotations(frequencies, block * np.arange(7, 7 + count)))
    mean = oracle.float64(keys).mean(axis=2)
    normed = mean / np.sqrt((mean * mean).mean(-1, keepdims=True) + 1e-2) * (oracle.float64(weight) + centered)
    expected = normed.copy()
    for pair in range(pairs):
        angle = block * np.arange(7, 7 + count) * frequencies[pair]
        a, b = normed[..., pair], normed[..., pair + pairs]
        expected[..., pair] = a * np.cos(angle) - b * np.sin(angle)
        expected[..., pair + pairs] = b * np.cos(angle) + a * np.sin(angle)
    options = {"eps": 1e-2, "centered": centered}
    for y in (
        ck.pool_blocks(keys, weight, table, **options, backend=backend),
        indexer.pool_blocks_reference(keys, weight, table, **options),
    ):
        assert oracle.relative_error(y, expected) < 2e-6


@pytest.mark.parametrize(("batch", "heads", "length", "width", "blocks", "start"), [
    (1, 4, 1, 128, 700, 2803), (2, 3, 5, 20, 9, 33), (1, 1, 8, 7, 3, 5), (1, 2, 12, 16, 4, 5),
])  # fmt: skip
def test_scores(backend, rng, batch, heads, length, width, blocks, start):
    """The positive part is taken of each head; a block that a query does not see whole has no score."""
    queries, rows = normal(rng, batch, length, heads, width), normal(rng, batch, blocks + 3, width)
    queries, keys = queries.swapaxes(1, 2), rows[:, 2:-1]
    products = np.einsum("bhld,bnd->bhln", oracle.float64(queries), oracle.float64(keys))
    expected = np.maximum(products, 0).sum(1) / np.sqrt(width)
    hidden = np.arange(blocks) >= (start + 1 + np.arange(length))[:, None] // 4
    given = queries, keys, mx.array([start], mx.int32)
    for scores in (
        ck.score_blocks(*given, block=4, backend=backend),
        sparse.score_blocks_reference(*given, block=4),
    ):
        found = np.array(scores)
        assert (found[:, hidden] == -np.inf).all()
        assert oracle.relative_error(mx.array(np.where(hidden, 0, found)), np.where(hidden, 0, expected)) < 2e-6


def by_hand(scores, top_k, block, keys):
    order = sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:top_k]
    return [n * block + i for n in sorted(order) for i in range(block)] + list(range(keys // block * block, keys))


def listed(found):
    """The lists of a choice, without what is behind their ends."""
    positions, last = found
    assert (positions.dtype, last.dtype, last.shape) == (mx.int32, mx.int32, (1,))
    end = last.item() + 1
    assert not np.array(positions)[:, end:].any()
    return np.array(positions)[:, :end].tolist()


@pytest.mark.parametrize("keys", [1, 3, 4, 27, 40, 41, 43, 4000, 4003])
@pytest.mark.parametrize("levels", [1, 2, 5, None])
@pytest.mark.parametrize("top_k", [1, 7, 10])
def test_choices(backend, rng, keys, levels, top_k):
    """The lower of equals, of which few levels make many. Scores of blocks that are not whole are none."""
    blocks = keys // 4
    scores = rng.normal(size=(3, blocks)) if levels is None else rng.integers(0, levels, (3, blocks)) / 4
    scores = mx.array(scores.astype(np.float32))
    start = mx.array([keys - 1], mx.int32)
    room = mx.concatenate([scores, mx.full((3, 5), 99.0)], axis=1)
    found = ck.choose_positions(room, start, block=4, top_k=top_k, backend=backend)
    assert found[0].shape == (3, 4 * top_k + 3)
    assert listed(found) == [by_hand(row, top_k, 4, keys) for row in np.array(scores).tolist()]
    seen = np.array(ck.sparse_mask(scores[:, None], keys - 1, keys, block=4, top_k=top_k))[:, 0, 0]
    assert [np.flatnonzero(row).tolist() for row in seen] == listed(found)


def test_zeros_of_both_signs_are_equal(backend):
    scores = mx.array([[0.0, -0.0, 0.0, -0.0, -1.0]])
    found = ck.choose_positions(scores, mx.array([4], mx.int32), block=1, top_k=3, backend=backend)
    assert listed(found) == [[0, 1, 2]]


def test_a_mask_of_several_queries(rng):
    """Each has its own blocks and its own tail; blocks that end within them count from there on."""
    scores = np.full((1, 6, 5), -np.inf, np.float32)
    for row, position in enumerate(range(9, 15)):
        scores[0, row, : (position + 1) // 3] = rng.random((position + 1) // 3)
    mask = np.array(ck.sparse_mask(mx.array(scores), 9, 15, block=3, top_k=2))[0, 0]
    for row, position in enumerate(range(9, 15)):
        whole = (position + 1) // 3
        expected = by_hand(scores[0, row, :whole].tolist(), 2, 3, position + 1)
        assert np.flatnonzero(mask[row]).tolist() == expected


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "count", "width"), [(24, 2, 3000, 2051, 256), (3, 3, 50, 7, 20), (8, 1, 9, 9, 64)]
)
def test_attention_to_a_list(backend, rng, heads, kv_heads, keys, count, width, gated):
    """What is behind the end of the list is not seen."""
    q, kv = normal(rng, 1, heads, 1, width), normal(rng, 2, 1, kv_heads, keys + 5, width)
    gates = normal(rng, 1, 1, (2 * heads + 2 * kv_heads) * width) if gated else None
    positions = np.sort(rng.permutation(keys)[:count]).astype(np.int32)
    expected = np.zeros((1, heads, 1, width))
    for head in range(heads):
        k, v = (oracle.float64(kv)[part, 0, head // (heads // kv_heads), positions] for part in (0, 1))
        scores = k @ oracle.float64(q)[0, head, 0] * 0.2
        chances = np.exp(scores - scores.max())
        expected[0, head, 0] = chances @ v / chances.sum()
    if gated:
        logits = oracle.float64(gates).reshape(-1, width)[1 : 2 * heads : 2]
        expected[0, :, 0] /= 1 + np.exp(-logits)
    room = mx.array(np.pad(positions, (0, 3))[None])
    given = q, kv, room, mx.array([count - 1], mx.int32)
    for y in (
        ck.indexed_attention(*given, scale=0.2, gates=gates, backend=backend),
        sparse.indexed_attention_reference(*given, scale=0.2, gates=gates),
    ):
        assert y.shape == (1, 1, heads * width)
        assert oracle.relative_error(y, expected.reshape(y.shape)) < 1e-5


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
@pytest.mark.parametrize(("batch", "heads", "width", "block", "pairs"), [(1, 4, 128, 4, 32), (2, 3, 20, 3, 10)])
@pytest.mark.parametrize("centered", [False, True])
def test_what_an_indexer_keeps(rng, batch, heads, width, block, pairs, centered):
    """Token by token: the queries, the rows of keys, and the keys of blocks where they get whole."""
    backend, tokens = ck.backends.select("host"), 2 * block + 1
    norms = normal(rng, width), normal(rng, width)
    options = {"q_norm": norms[0], "k_norm": norms[1], "block": block, "eps": 1e-2, "centered": centered}
    keys, blocks = (mx.full((1, batch, 1, room, width), -7.0) for room in (tokens + 2, 3))
    mx.eval(keys, blocks)
    kept = np.full(blocks.shape, -7.0)
    for token in range(tokens):
        rows = normal(rng, batch, 1, (heads + 1) * width)
        rotation, other = normal(rng, 1, pairs, 2), normal(rng, 1, pairs, 2)
        start = mx.array([token], mx.int32)
        given = rows, rotation, other, keys, blocks, start
        defined = indexer.index_append_reference(*given, **options)
        q = ck.index_append(*given, **options, backend=backend)
        mx.eval(q)
        own = rows.reshape(batch, heads + 1, 1, width)
        normed = ck.rms_norm(own[:, :-1], norms[0], eps=1e-2, centered=centered, backend=backend)
        turned = ck.rotate(normed, rotation, backend=backend)
        np.testing.assert_array_equal(np.array(keys)[0, :, 0, token], np.array(own)[:, -1, 0])
        assert (np.array(keys)[0, :, 0, token + 1 :] == -7).all()
        if token % block == block - 1:
            members = keys[0, :, 0, token + 1 - block : token + 1][:, None]
            pooled = ck.pool_blocks(members, norms[1], other, eps=1e-2, centered=centered, backend=backend)
            kept[0, :, 0, token // block] = np.array(pooled)[:, 0]
        assert oracle.relative_error(blocks, kept) < 1e-6
        for found, expected in zip(defined, (turned, keys, blocks), strict=True):
            assert oracle.relative_error(found, oracle.float64(expected)) < 1e-6
        assert oracle.relative_error(q, oracle.float64(turned)) < 1e-6
    with pytest.raises(OptionError, match="index_append: rows"):
        ck.index_append(rows, rotation, other, keys, blocks[..., :-1], start, **options, backend=backend)


def test_what_does_not_fit_is_named(backend):
    options = {"eps": 1e-6, "centered": False, "backend": backend}
    with pytest.raises(OptionError, match=r"pool_blocks: keys \[1, 2, 4, 8\]"):
        ck.pool_blocks(mx.zeros((1, 2, 4, 8)), mx.zeros(8), mx.zeros((3, 2, 2)), **options)
    with pytest.raises(OptionError, match="score_blocks"):
        ck.score_blocks(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 3, 4)), mx.zeros(1, mx.int32), block=4, backend=backend)
    q, kv, last = mx.zeros((1, 4, 1, 8)), mx.zeros((2, 1, 2, 9, 8)), mx.array([2], mx.int32)
    for queries, gates in ((mx.zeros((1, 4, 2, 8)), None), (q, mx.zeros((1, 1, 63)))):
        with pytest.raises(OptionError, match="indexed_attention"):
            ck.indexed_attention(queries, kv, mx.zeros((1, 3), mx.int32), last, scale=1.0, gates=gates, backend=backend)
