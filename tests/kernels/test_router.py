"""The router, on every back end of a CPU and emulated, against numpy float64 and against numbers worked out by hand."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import emulator
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))
CLANG = any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates())
EMULATED = pytest.param("emulated", marks=pytest.mark.skipif(not CLANG, reason="needs clang: pip install ziglang"))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference", EMULATED])
def backend(request):
    return emulator.backend() if request.param == "emulated" else ck.backends.select(request.param)


def expected(x, weight=None, *, top_k, normalize, bias=0.0, logit_scale=1.0, scale=1.0, expert_scale=None, **more):
    logits = ((x if weight is None else x @ weight.T) + bias) * logit_scale
    if more:
        return limited(logits, top_k, normalize, scale, **more)
    indices = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(logits, indices, 1)
    over = chosen if normalize else logits
    most = over.max(1, keepdims=True)
    weights = np.exp(chosen - most) / np.exp(over - most).sum(1, keepdims=True) * scale
    return indices, weights if expert_scale is None else weights * expert_scale[indices]


def limited(logits, top_k, normalize, scale, *, sigmoid=False, choice_bias=None, groups=1, kept_groups=1):
    """One row and one expert at a time."""
    rows = []
    for row in logits:
        scores = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        ranked, size = scores + (0 if choice_bias is None else choice_bias), len(row) // groups
        best = [sum(sorted(ranked[g * size : (g + 1) * size])[-2 if sigmoid else -1 :]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-best[g], g))[:kept_groups]
        there = [e for e in range(len(row)) if e // size in kept]
        chosen = sorted(there, key=lambda e: (-ranked[e], e))[:top_k]
        total = sum(scores[e] for e in chosen) if normalize else 1
        rows.append((chosen, [scores[e] / total * scale for e in chosen]))
    return np.array([chosen for chosen, _ in rows]), np.array([weights for _, weights in rows])


def route(backend, x, weight=None, **options):
    indices, weights = ck.router_topk_select(x, weight, **options, backend=backend)
    assert (indices.dtype, weights.dtype) == (mx.int32, mx.float32)
    wide = {name: oracle.float64(v) if isinstance(v, mx.array) else v for name, v in options.items()}
    right = expected(oracle.float64(x), None if weight is None else oracle.float64(weight), **wide)
    assert np.array(indices).tolist() == right[0].tolist()
    assert oracle.relative_error(weights, right[1]) < 2e-6


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2), (8, 8), (130, 6), (512, 10)])
@pytest.mark.parametrize("normalize", [True, False])
def test_logits(backend, rows, experts, top_k, normalize):
    rng = np.random.default_rng(experts)
    logits = mx.array(rng.normal(size=(rows, experts)).astype(np.float32) * 3)
    route(backend, logits, top_k=top_k, normalize=normalize)
    takes = backend.name != "reference" and rows <= 8
    assert set(backend.counters) == {("router_topk_select", "kernel" if takes else "mlx")}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("rows", "hidden", "experts", "top_k"), [(1, 64, 8, 2), (3, 77, 33, 4), (8, 7, 2, 1)])
def test_a_product_with_everything_around_it(backend, dtype, rows, hidden, experts, top_k):
    rng = np.random.default_rng(hidden)

    def normal(*shape):
        return mx.array(rng.normal(size=shape).astype(np.float32))

    x, weight = normal(rows, hidden), normal(experts, hidden).astype(dtype)
    around = {"bias": normal(experts).astype(dtype), "expert_scale": mx.abs(normal(experts)).astype(dtype)}
    for normalize in (True, False):
        route(backend, x, weight, top_k=top_k, normalize=normalize, **around, logit_scale=0.125, scale=2.5)


@pytest.mark.parametrize(("experts", "top_k", "groups", "kept_groups"), [(64, 6, 1, 1), (8, 3, 4, 2), (160, 6, 8, 3)])
@pytest.mark.parametrize(("sigmoid", "biased"), [(True, True), (True, False), (False, False)])
def test_scores_and_groups(backend, experts, top_k, groups, kept_groups, sigmoid, biased):
    rng = np.random.default_rng(experts)
    options = {"sigmoid": sigmoid, "groups": groups, "kept_groups": kept_groups, "normalize": biased, "scale": 2.5}
    if biased:
        # Below zero, what was dropped must not come before what was kept.
        options["choice_bias"] = mx.array(rng.normal(size=experts).astype(np.float32) - 2)
    route(backend, mx.array(rng.normal(size=(4, experts)).astype(np.float32) * 2), top_k=top_k, **options)
    assert set(backend.counters) == {("router_topk_select", "mlx" if backend.name == "reference" else "kernel")}


def test_groups_by_hand(backend):
    """Of four pairs: the best experts are in pairs 0 and 2, the best two together in 1 and 3."""
    scores = mx.array([[0.9, 0.1, 0.6, 0.6, 0.8, 0.1, 0.7, 0.7]])
    logits = mx.log(scores / (1 - scores))
    options = {"top_k": 3, "groups": 4, "kept_groups": 2, "normalize": True, "backend": backend}
    indices, weights = ck.router_topk_select(logits, sigmoid=True, **options)
    assert indices.tolist() == [[6, 7, 2]]
    np.testing.assert_allclose(weights, [[0.35, 0.35, 0.3]], rtol=1e-6)
    indices, weights = ck.router_topk_select(mx.log(scores), **options)
    assert indices.tolist() == [[0, 4, 1]]
    np.testing.assert_allclose(weights, [[0.5, 8 / 18, 1 / 18]], rtol=1e-6)
    # Equal groups: the first ones. A bias turns the choice and no weight.
    indices, weights = ck.router_topk_select(mx.zeros((1, 8)), sigmoid=True, **options)
    assert indices.tolist() == [[0, 1, 2]]
    bias = mx.array([0.0, 0, 0, 0, 0, 0.5, 0, 0.25])
    indices, weights = ck.router_topk_select(logits, sigmoid=True, choice_bias=bias, **options)
    assert indices.tolist() == [[7, 4, 6]]
    np.testing.assert_allclose(weights, [[0.7 / 2.2, 0.8 / 2.2, 0.7 / 2.2]], rtol=1e-6)


def test_routing_by_hand(backend):
    """exp of the logits is 1, 4, 2, 4, 1: of the two 4s the lower index comes first."""
    logits = mx.log(mx.array([[1.0, 4.0, 2.0, 4.0, 1.0]]))
    indices, weights = ck.router_topk_select(logits, top_k=3, normalize=True, backend=backend)
    assert indices.tolist() == [[1, 3, 2]]
    np.testing.assert_allclose(weights, [[0.4, 0.4, 0.2]], rtol=1e-6)
    _, weights = ck.router_topk_select(logits, top_k=3, normalize=False, backend=backend)
    np.testing.assert_allclose(weights, [[4 / 12, 4 / 12, 2 / 12]], rtol=1e-6)


def test_ties_and_zeros_go_to_the_lower_index(backend):
    rows = np.random.default_rng(0).integers(-1, 2, (7, 130)).astype(np.float32)
    rows[rows == 0] = np.random.default_rng(1).choice([0.0, -0.0], (rows == 0).sum())
    route(backend, mx.array(rows), top_k=40, normalize=True)


def test_what_is_not_a_number_comes_last(backend):
    """Also behind minus infinity, by index; a softmax that it is no part of stays what it is."""
    nan, inf = np.nan, np.inf
    logits = mx.array([[nan, -inf, 0.0, -nan, np.log(3.0)], [nan] * 5])
    indices, weights = ck.router_topk_select(logits, top_k=4, normalize=True, backend=backend)
    assert indices.tolist() == [[4, 2, 1, 0], [0, 1, 2, 3]]
    assert np.isnan(weights).all()
    indices, weights = ck.router_topk_select(logits[:1], top_k=3, normalize=True, backend=backend)
    np.testing.assert_allclose(weights, [[0.75, 0.25, 0.0]], rtol=1e-6)
    _, weights = ck.router_topk_select(logits[:1], top_k=2, normalize=False, backend=backend)
    assert np.isnan(weights).all()


def test_large_logits_do_not_overflow(backend):
    for normalize in (True, False):
        _, weights = ck.router_topk_select(
            mx.array([[1000.0, -1000.0, 999.0]]), top_k=2, normalize=normalize, backend=backend
        )
        np.testing.assert_allclose(weights, [[0.7310586, 0.2689414]], rtol=1e-5)


def test_parts_that_do_not_fit_are_refused(backend):
    x, weight = mx.zeros((2, 16)), mx.zeros((4, 16))
    options = {"top_k": 2, "normalize": True, "backend": backend}
    for arrays in ((x, weight.T), (x[0], weight)):
        with pytest.raises(OptionError, match=r"do not fit \[rows, H\] and \[experts, H\]"):
            ck.router_topk_select(*arrays, **options)
    for wrong, message in (
        ({"top_k": 5}, "top_k is 5; there are 4 experts"),
        ({"bias": mx.zeros((3,))}, r"bias is \[3\], but there are 4 experts"),
        ({"expert_scale": mx.zeros((16,))}, r"expert_scale is \[16\]"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0; it is a positive number"),
        ({"groups": 3}, "1 of 3 groups of 4 experts"),
        ({"groups": 4}, "1 of 4 groups of 4 experts have no 2 to choose"),
        ({"groups": 2, "kept_groups": 3}, "3 of 2 groups"),
        ({"groups": 4, "kept_groups": 3, "sigmoid": True}, "4 experts in 4 groups, which are ranked by their two best"),
        ({"choice_bias": mx.zeros((4,))}, "choice_bias is for sigmoid=True"),
        ({"choice_bias": mx.zeros((3,)), "sigmoid": True}, r"choice_bias is \[3\]"),
    ):
        with pytest.raises(OptionError, match=message):
            ck.router_topk_select(x, weight, **(options | wrong))


def test_no_rows(backend):
    indices, weights = ck.router_topk_select(mx.zeros((0, 8)), top_k=2, normalize=True, backend=backend)
    assert indices.shape == weights.shape == (0, 2)
