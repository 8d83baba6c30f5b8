"""The steps of sparse attention, on every back end of a CPU, against float64 and against choices made one by one."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import sparse
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
        sparse.pool_blocks_reference(keys, weight, table, **options),
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


@pytest.mark.parametrize("keys", [40, 41, 43, 4000, 4003])
@pytest.mark.parametrize("levels", [1, 2, 5, None])
@pytest.mark.parametrize("top_k", [1, 7, 10])
def test_choices(backend, rng, keys, levels, top_k):
    """The lower of equals; few levels make many of them."""
    blocks = keys // 4
    scores = rng.normal(size=(3, blocks)) if levels is None else rng.integers(0, levels, (3, blocks)) / 4
    scores = mx.array(scores.astype(np.float32))
    start = mx.array([keys - 1], mx.int32)
    found = ck.choose_positions(scores, start, keys=keys, block=4, top_k=top_k, backend=backend)
    assert found.dtype == mx.int32
    assert np.array(found).tolist() == [by_hand(row, top_k, 4, keys) for row in np.array(scores).tolist()]
    seen = np.array(ck.sparse_mask(scores[:, None], keys - 1, keys, block=4, top_k=top_k))[:, 0, 0]
    assert [np.flatnonzero(row).tolist() for row in seen] == np.array(found).tolist()


def test_zeros_of_both_signs_are_equal(backend):
    scores = mx.array([[0.0, -0.0, 0.0, -0.0, -1.0]])
    found = ck.choose_positions(scores, mx.array([4], mx.int32), keys=5, block=1, top_k=3, backend=backend)
    assert np.array(found).tolist() == [[0, 1, 2]]


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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "listed", "width"), [(24, 2, 3000, 2051, 256), (3, 3, 50, 7, 20), (8, 1, 9, 9, 64)]
)
def test_attention_to_a_list(backend, rng, heads, kv_heads, keys, listed, width):
    """Keys and values are views of a cache."""
    q, kv = normal(rng, 1, heads, 1, width), normal(rng, 2, 1, kv_heads, keys + 5, width)
    positions = np.sort(rng.permutation(keys)[:listed]).astype(np.int32)
    expected = np.zeros((1, heads, 1, width))
    for head in range(heads):
        k, v = (oracle.float64(kv)[part, 0, head // (heads // kv_heads), positions] for part in (0, 1))
        scores = k @ oracle.float64(q)[0, head, 0] * 0.2
        chances = np.exp(scores - scores.max())
        expected[0, head, 0] = chances @ v / chances.sum()
    given = q, kv[0, :, :, :keys], kv[1, :, :, :keys], mx.array(positions[None])
    for y in (
        ck.indexed_attention(*given, scale=0.2, backend=backend),
        sparse.indexed_attention_reference(*given, scale=0.2),
    ):
        assert oracle.relative_error(y, expected) < 1e-5
    if backend.name == "host":
        everything = mx.arange(keys, dtype=mx.int32)[None]
        dense = ck.attention(*given[:3], scale=0.2, backend=backend)
        listed_all = ck.indexed_attention(*given[:3], everything, scale=0.2, backend=backend)
        np.testing.assert_allclose(np.array(listed_all), np.array(dense), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_named(backend):
    options = {"eps": 1e-6, "centered": False, "backend": backend}
    with pytest.raises(OptionError, match=r"pool_blocks: keys \[1, 2, 4, 8\]"):
        ck.pool_blocks(mx.zeros((1, 2, 4, 8)), mx.zeros(8), mx.zeros((3, 2, 2)), **options)
    with pytest.raises(OptionError, match="score_blocks"):
        ck.score_blocks(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 3, 4)), mx.zeros(1, mx.int32), block=4, backend=backend)
    last = mx.array([8], mx.int32)
    for scores, top_k in ((mx.zeros((1, 2)), 3), (mx.zeros((1, 1)), 1)):
        with pytest.raises(OptionError, match=f"are no choice of {top_k} blocks of 4"):
            ck.choose_positions(scores, last, keys=9, block=4, top_k=top_k, backend=backend)
    q, k = mx.zeros((1, 4, 2, 8)), mx.zeros((1, 2, 9, 8))
    with pytest.raises(OptionError, match="indexed_attention"):
        ck.indexed_attention(q, k, k, mx.zeros((1, 3), mx.int32), scale=1.0, backend=backend)
