"""Decode attention over latents against numpy float64, one head and one token at a time, on every back end of a CPU."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import emulator
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.latent_attention import latent_attention_reference
from turbospark_mlx.errors import OptionError

HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))
CLANG = any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates())
EMULATED = pytest.param("emulated", marks=pytest.mark.skipif(not CLANG, reason="needs clang: pip install ziglang"))
SCALE, EPS = 0.07, 1e-3

pytestmark = pytest.mark.usefixtures("on_the_cpu")


class Case:
    """Random inputs: heads, dimensions without a position, turned ones, the latent's width, values; ``split`` stores
    the matrices of keys and values apart."""

    def __init__(self, heads, nope, turned, rank, values, *, length, start, capacity=40, batch=2, split=False, bits=4):
        rng = np.random.default_rng([heads, length, split])
        self.heads, self.nope, self.rank, self.split = heads, nope, rank, split
        self.q = oracle.normal(rng, batch, length, heads * (nope + turned))
        self.latent = oracle.normal(rng, batch, length, rank + turned)
        self.norm_weight = oracle.normal(rng, rank, dtype=mx.bfloat16)
        self.rotation = oracle.normal(rng, length, turned // 2, 2)
        self.cache = oracle.normal(rng, 1, batch, 1, capacity, rank + turned)
        self.start = mx.array([start], mx.int32)

        def matrix(rows, columns):
            parts = oracle.random_affine(rng, heads * rows, columns, bits, 32, mx.float16)
            return parts, oracle.unpack(*parts, bits, 32).reshape(heads, rows, columns)

        if split:
            (keys, k), (read, self.v) = matrix(rank, nope), matrix(values, rank)
            self.k = k.transpose(0, 2, 1)
            self.rows = ck.HeadRows(*keys, bits, 32, 0, rank, rank), ck.HeadRows(*read, bits, 32, 0, values, values)
        else:
            parts, whole = matrix(nope + values, rank)
            self.k, self.v = whole[:, :nope], whole[:, nope:]
            places = ((0, nope), (nope, values))
            self.rows = [ck.HeadRows(*parts, bits, 32, *place, nope + values) for place in places]

    def turn(self, x, token, interleaved):
        cosine, sine = oracle.float64(self.rotation)[token].T
        a, b = (x[0::2], x[1::2]) if interleaved else np.split(x, 2)
        turned = np.stack([a * cosine - b * sine, b * cosine + a * sine])
        return turned.T.ravel() if interleaved else turned.ravel()

    def expected(self, interleaved):
        q, latent, weight = map(oracle.float64, (self.q, self.latent, self.norm_weight))
        cache, start = oracle.float64(self.cache), self.start.item()
        y = []
        for b, t in np.ndindex(q.shape[:2]):
            first, rest = np.split(latent[b, t], [self.rank])
            normed = first / np.sqrt((first**2).mean() + EPS) * weight
            cache[0, b, 0, start + t] = np.concatenate([normed, self.turn(rest, t, interleaved)])
            for h, row in enumerate(q[b, t].reshape(self.heads, -1)):
                seen = cache[0, b, 0, : start + t + 1]
                keys = np.concatenate([seen[:, : self.rank] @ self.k[h].T, seen[:, self.rank :]], axis=1)
                query = np.concatenate([row[: self.nope], self.turn(row[self.nope :], t, interleaved)])
                scores = SCALE * keys @ query
                weights = np.exp(scores - scores.max())
                y.append(weights / weights.sum() @ seen[:, : self.rank] @ self.v[h].T)
        return np.array(y).reshape(*q.shape[:2], -1), cache

    def run(self, backend, interleaved, **changed):
        arrays = [
            changed.get(name, getattr(self, name))
            for name in ("q", "latent", "norm_weight", "rotation", "cache", "start")
        ]
        options = {"scale": SCALE, "transposed": self.split, "interleaved": interleaved, "eps": EPS, "mask": "causal"}
        if backend is None:
            return latent_attention_reference(*arrays, *self.rows, **options)
        cache = arrays[4] = arrays[4] + 0
        return ck.latent_attention(*arrays, *self.rows, **options, backend=backend), cache


CASES = [
    Case(3, 16, 8, 64, 24, length=1, start=20),
    Case(2, 19, 10, 96, 5, length=4, start=33, bits=3),
    Case(3, 64, 8, 32, 16, length=3, start=0, split=True),
    Case(17, 32, 8, 64, 32, length=1, start=39, split=True, bits=8),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", [HOST, EMULATED, "reference"])
def test_attention_over_latents(name, number, interleaved):
    case = CASES[number]
    backend = {"emulated": emulator.backend, "reference": lambda: None}.get(name, lambda: ck.backends.select(name))()
    y, cache = case.run(backend, interleaved)
    mx.eval(y)
    expected = case.expected(interleaved)
    assert oracle.relative_error(y, expected[0]) < 5e-6
    assert oracle.relative_error(cache, expected[1]) < 1e-6


@pytest.mark.parametrize("name", [HOST])
def test_many_keys_in_several_parts(name):
    case = Case(16, 16, 8, 64, 8, length=1, start=700, capacity=900, batch=1)
    y, _ = case.run(ck.backends.select(name), True)
    assert oracle.relative_error(y, case.expected(True)[0]) < 5e-6


@pytest.mark.parametrize("name", [HOST])
def test_parts_that_do_not_fit_are_refused(name):
    case, backend = CASES[0], ck.backends.select(name)
    for changed in (
        {"q": case.q[..., 1:]},
        {"q": case.q.astype(mx.float16)},
        {"latent": case.latent[:, :0]},
        {"rotation": case.rotation[:, 1:]},
        {"cache": case.cache[..., 1:]},
        {"cache": mx.concatenate([case.cache, case.cache])},
        {"norm_weight": case.norm_weight[:32]},
    ):
        with pytest.raises(OptionError, match=r"latent_attention: q .* do not fit"):
            case.run(backend, True, **changed)
