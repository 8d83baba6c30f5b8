"""Our kernels compiled for this CPU, against numpy float64."""

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from tests.kernels.test_reference_ops import check_greedy_head
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import affine, gated, gemv, rotary, sdpa
from turbospark_mlx.custom_kernels.append_attention import append_attention_reference
from turbospark_mlx.custom_kernels.append_attention import plan as plan_fused
from turbospark_mlx.custom_kernels.backends import blas, compiler, host
from turbospark_mlx.custom_kernels.backends.kernel import read_source
from turbospark_mlx.errors import BackendError, OptionError

pytestmark = [
    pytest.mark.usefixtures("on_the_cpu"),
    pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine"),
]


@pytest.fixture
def backend():
    return ck.backends.select("host")


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def check_product(backend, rng, bits, group_size, dtype, rows):
    matrix = oracle.random_affine(rng, 45, 384, bits, group_size, dtype)
    x = normal(rng, rows, 384)
    y = ck.affine_matmul(x, *matrix, bits=bits, group_size=group_size, backend=backend)
    assert oracle.relative_error(y, oracle.float64(x) @ oracle.unpack(*matrix, bits, group_size).T) < 1e-5
    assert backend.counters == {("affine_matmul", "kernel"): 1}


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"),
    [(4, 32, mx.float16), (8, 32, mx.float16), (4, 64, mx.bfloat16), (8, 128, mx.float32)],
)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_affine_matmul_at_the_formats_of_installs(backend, rng, bits, group_size, dtype, rows):
    check_product(backend, rng, bits, group_size, dtype, rows)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6])
def test_affine_matmul_at_other_widths(backend, rng, bits):
    check_product(backend, rng, bits, 64, mx.float16, 1)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_affine_matmul_at_every_format(backend, rng, bits, group_size, dtype, rows):
    check_product(backend, rng, bits, group_size, dtype, rows)


def rms_normalized(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (1056, 1),
        (96, 3),
        *(pytest.param(k, m, marks=pytest.mark.slow) for k in (32, 576, 4128) for m in (1, 3, 7, 8)),
    ],
)
def test_what_stands_around_the_product(backend, rng, columns, rows):
    out = 130
    matrix = oracle.random_affine(rng, out, columns, 4, 32, mx.float16)
    full = oracle.unpack(*matrix, 4, 32)
    x, weight = normal(rng, 1, rows, columns) * 4, normal(rng, columns, dtype=mx.bfloat16)
    bias, residual = normal(rng, out, dtype=mx.float16), normal(rng, 1, rows, out) * 100
    wide, added = oracle.float64(x), oracle.float64(residual) + oracle.float64(bias)
    normalized = rms_normalized(wide, oracle.float64(weight), 0.25)
    centered = {"norm_weight": weight, "eps": 0.25, "centered": True}
    shifted = rms_normalized(wide, oracle.float64(weight) + 1, 0.25)
    formats = {"bits": 4, "group_size": 32}
    for options, expected in (
        ({"bias": bias, "residual": residual}, wide @ full.T + added),
        ({"norm_weight": weight, "eps": 0.25}, normalized @ full.T),
        (centered, shifted @ full.T),
        ({"norm_weight": weight, "eps": 0.25, "bias": bias, "residual": residual}, normalized @ full.T + added),
    ):
        y = ck.affine_matmul(x, *matrix, **formats, **options, backend=backend)
        assert oracle.relative_error(y, expected) < 1e-5
        assert oracle.relative_error(affine.affine_matmul_reference(x, *matrix, **formats, **options), expected) < 1e-5
    for options, product in (
        ({}, wide @ full.T),
        ({"norm_weight": weight, "eps": 0.25}, normalized @ full.T),
        (centered, shifted @ full.T),
    ):
        gate, up = np.split(product, 2, axis=-1)
        expected = gate / (1 + np.exp(-np.maximum(gate, -700))) * up
        y = ck.gated_affine_matmul(x, *matrix, **formats, **options, backend=backend)
        assert oracle.relative_error(y, expected) < 1e-5
        reference = affine.gated_affine_matmul_reference(x, *matrix, **formats, **options)
        assert oracle.relative_error(reference, expected) < 1e-5
    assert {path for _, path in backend.counters} == {"kernel"}


@pytest.mark.parametrize(
    ("activation", "limit"), [("gelu_tanh", None), ("gelu_erf", None), ("clamped_swiglu", 1.5), ("sigmoid", None)]
)
@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_gated_products(backend, rng, rows, activation, limit):
    matrix = oracle.random_affine(rng, 2 * 37, 96, 4, 32, mx.float16)
    x, bias = normal(rng, rows, 96), normal(rng, 74, dtype=mx.bfloat16) * 3
    both = oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T + oracle.float64(bias)
    expected = oracle.gated(*np.split(both, 2, axis=-1), activation, limit)
    options = {"bits": 4, "group_size": 32, "activation": activation, "limit": limit, "bias": bias}
    y = ck.gated_affine_matmul(x, *matrix, **options, backend=backend)
    assert oracle.relative_error(y, expected) < 1e-5
    assert backend.counters == {("gated_affine_matmul", "kernel"): 1}


@pytest.mark.parametrize("rows", [1, 3, 6, 9])
def test_rows_times_gates(backend, rng, rows):
    """Before the residual is added; more rows than are read together have each its own."""
    matrix = oracle.random_affine(rng, 45, 96, 4, 32, mx.float16)
    x, residual, gate = normal(rng, 1, rows, 96), normal(rng, 1, rows, 45), normal(rng, 1, rows, 1) * 3
    product = oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T
    expected = product / (1 + np.exp(-oracle.float64(gate))) + oracle.float64(residual)
    options = {"bits": 4, "group_size": 32, "residual": residual, "row_gate": gate}
    assert oracle.relative_error(ck.affine_matmul(x, *matrix, **options, backend=backend), expected) < 1e-5


@pytest.mark.parametrize(("activation", "limit"), [("sigmoid", None), ("gelu_erf", None), ("clamped_swiglu", 1.5)])
def test_one_gate_for_several_neighbours(backend, rng, activation, limit):
    """As a gate of a whole head: each of 5 is for 7 values."""
    gate, up = normal(rng, 2, 3, 5) * 3, normal(rng, 2, 3, 35)
    expected = oracle.gated(np.repeat(oracle.float64(gate), 7, axis=-1) / 4, oracle.float64(up) / 4, activation, limit)
    options = {"activation": activation, "limit": limit, "scale": 0.25}
    assert oracle.relative_error(ck.gated_product(gate, up, **options, backend=backend), expected) < 1e-6
    assert oracle.relative_error(gated.gated_product_reference(gate, up, **options), expected) < 1e-6
    assert backend.counters == {("gated_product", "kernel"): 1}
    for wrong in (up[..., :34], up[:1], up[..., :0]):
        with pytest.raises(OptionError, match=r"they are \[\.\.\., D\] and \[\.\.\., D \* S\]"):
            ck.gated_product(gate, wrong, **options, backend=backend)


@pytest.mark.parametrize(("softcap", "scale"), [(0.5, 1.0), (1e4, 1.0), (3.0, 0.2)])
def test_a_softcapped_head(backend, rng, softcap, scale):
    matrix = oracle.random_affine(rng, 301, 96, 8, 32, mx.float16)
    x = normal(rng, 1, 96)
    expected = softcap * np.tanh(scale * oracle.float64(x) @ oracle.unpack(*matrix, 8, 32).T / softcap)
    y = ck.affine_matmul(x, *matrix, bits=8, group_size=32, scale=scale, softcap=softcap, backend=backend)
    assert oracle.relative_error(y, expected) < 1e-5
    assert backend.counters == {("affine_matmul", "kernel"): 1}


@pytest.mark.parametrize("rows", [1, 7])
def test_greedy_head(backend, rng, rows):
    check_greedy_head(backend, rng, rows)
    assert set(backend.counters) == {("greedy_head", "kernel")}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 99), (7, 264), pytest.param(3, 7, marks=pytest.mark.slow)])
def test_matrices_in_half_precision(backend, rng, rows, columns, dtype):
    weight, bias = normal(rng, 301, columns, dtype=dtype), normal(rng, 301)
    x = normal(rng, 1, rows, columns)
    expected = oracle.float64(x) @ oracle.float64(weight).T + oracle.float64(bias)
    assert oracle.relative_error(ck.dense_matmul(x, weight, bias=bias, backend=backend), expected) < 1e-5
    residual = normal(rng, 1, rows, 301)
    found = ck.dense_matmul(x, weight, bias=bias, residual=residual, backend=backend)
    assert oracle.relative_error(found, expected + oracle.float64(residual)) < 1e-5
    assert backend.counters == {("dense_matmul", "kernel"): 2}
    with pytest.raises(OptionError, match=r"bias is \[300\]"):
        ck.dense_matmul(x, weight, bias=bias[1:], backend=backend)
    with pytest.raises(OptionError, match=r"residual is \[1, \d, 300\]"):
        ck.dense_matmul(x, weight, residual=residual[..., 1:], backend=backend)


@pytest.mark.parametrize("name", ["metal", "cuda"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("columns", [32, 1056, 1792, 4096, 14336, 14432, 28672])
def test_what_a_gpu_stages_fits_and_its_tiles_follow_without_a_gap(name, dtype, columns):
    for rows in (n for n in gemv.TOGETHER[name] if gemv.fits(name, n, columns, dtype)):
        kinds = gemv.Dtypes.alike(dtype)
        call = gemv.plan(name, (rows, columns), rows, 100, 4, 32, gemv.Form(), mx.float16, kinds, None, None)
        sizes = dict(call.template)
        steps = -(-sizes["TILE"] // 32)
        assert 0 < sizes["TILE"] <= columns // 32
        assert rows * (steps * 32 * 32 * dtype.size + sizes["TILE"] * 4) <= gemv.STAGED_BYTES[name]
        assert 0 < sizes["AHEAD"] <= steps
        assert sizes["TILE"] == columns // 32 or (sizes["TILE"] % 32 == 0 and steps % sizes["AHEAD"] == 0)
    assert gemv.fits(name, 1, columns, dtype)


def test_many_rows_take_the_same_options_elsewhere(backend, rng):
    matrix = oracle.random_affine(rng, 64, 96, 4, 32, mx.float16)
    x, residual = normal(rng, 40, 96), normal(rng, 40, 64)
    options = {"bits": 4, "group_size": 32, "norm_weight": normal(rng, 96), "eps": 1e-5}
    for function, more in ((ck.affine_matmul, {"residual": residual}), (ck.gated_affine_matmul, {})):
        together = function(x, *matrix, **options, **more, backend=backend)
        apart = [
            function(x[i : i + 1], *matrix, **options, **{k: a[i : i + 1] for k, a in more.items()}, backend=backend)
            for i in range(40)
        ]
        assert oracle.relative_error(together, oracle.float64(mx.concatenate(apart))) < 1e-5
    assert backend.counters["affine_matmul", "blas"] == 2


@pytest.mark.parametrize("bits", [4, 8, 3])
def test_affine_embedding(backend, rng, bits):
    matrix = oracle.random_affine(rng, 50, 96, bits, 32, mx.float16)
    ids = mx.array([[3, 49, 0], [3, 7, 7]], dtype=mx.uint32)
    rows = ck.affine_embedding(ids, *matrix, bits=bits, group_size=32, dtype=mx.float32, backend=backend)
    assert oracle.relative_error(rows, oracle.unpack(*matrix, bits, 32)[np.array(ids)]) < 1e-6
    assert backend.counters == {("affine_embedding", "kernel"): 1}


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_through_dequantized_tiles(backend, rng, bits, monkeypatch):
    matrix = oracle.random_affine(rng, 301, 192, bits, 64, mx.bfloat16)
    x = normal(rng, 31, 192)
    expected = oracle.float64(x) @ oracle.unpack(*matrix, bits, 64).T
    for scratch in (blas.SCRATCH_BYTES, 192 * 4 * 7):
        monkeypatch.setattr(blas, "SCRATCH_BYTES", scratch)
        y = ck.affine_matmul(x, *matrix, bits=bits, group_size=64, backend=backend)
        assert oracle.relative_error(y, expected) < 1e-5


def epilogue(qkv, rotation, heads, kv_heads, q_norm=None, k_norm=None, eps=None):
    """One head of one token at a time, with complex numbers."""
    batch, length, _ = qkv.shape
    split = qkv.reshape(batch, length, heads + 2 * kv_heads, -1)
    turn = rotation[..., 0] + 1j * rotation[..., 1]

    def rotated(head, norm):
        if norm is not None:
            head = head / np.sqrt((head**2).mean(-1, keepdims=True) + eps) * norm
        pairs = turn.shape[1]
        z = (head[..., :pairs] + 1j * head[..., pairs : 2 * pairs]) * turn
        return np.concatenate([z.real, z.imag, head[..., 2 * pairs :]], axis=-1)

    q = np.stack([rotated(split[:, :, h], q_norm) for h in range(heads)], axis=1)
    k = np.stack([rotated(split[:, :, heads + h], k_norm) for h in range(kv_heads)], axis=1)
    return q, np.stack([k, split[:, :, heads + kv_heads :].swapaxes(1, 2)])


@pytest.mark.parametrize("normed", ["not", "learned", "plain"])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim", "pairs"),
    [(1, 1, 9, 3, 64, 32), (2, 5, 4, 1, 10, 5), (2, 3, 4, 2, 11, 3)],
)
def test_qkv_epilogue(backend, rng, batch, length, heads, kv_heads, head_dim, pairs, normed):
    """Heads turn as a whole, or in their first dimensions."""
    qkv = normal(rng, batch, length, (heads + 2 * kv_heads) * head_dim)
    frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
    rotation = mx.array(ck.rotation_table(frequencies, 7, length))
    angle = np.arange(7, 7 + length)[:, None] * frequencies
    assert oracle.relative_error(rotation, np.stack([np.cos(angle), np.sin(angle)], axis=-1)) < 1e-6
    options, wide = {}, {}
    if normed == "learned":
        options = {"q_norm": normal(rng, head_dim, dtype=mx.float16), "k_norm": normal(rng, head_dim), "eps": 0.3}
        wide = {name: value if name == "eps" else oracle.float64(value) for name, value in options.items()}
    elif normed == "plain":
        options, wide = {"head_norm": True, "eps": 0.3}, {"q_norm": 1.0, "k_norm": 1.0, "eps": 0.3}
    expected = epilogue(oracle.float64(qkv), oracle.float64(rotation), heads, kv_heads, **wide)
    sizes = {"heads": heads, "kv_heads": kv_heads}
    for found in (
        ck.qkv_epilogue(qkv, rotation, **sizes, **options, backend=backend),
        rotary.qkv_epilogue_reference(qkv, rotation, **sizes, **options),
    ):
        for array, values in zip(found, expected, strict=True):
            assert oracle.relative_error(array, values) < 1e-5
    assert backend.counters == {("qkv_epilogue", "kernel"): 1}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize(("kv_heads", "shared_values"), [(2, False), (2, True), (1, True), (0, False)])
def test_qkv_epilogue_with_values_from_keys_and_without_any(backend, rng, kv_heads, shared_values, value_norm, normed):
    """Against the plain epilogue of rows that hold the values, already normalized."""
    heads, size, length = 4, 10, 3
    qkv = normal(rng, 2, length, (heads + kv_heads * (1 if shared_values else 2)) * size)
    rotation = mx.array(ck.rotation_table(10000.0 ** (-np.arange(size // 2) / (size // 2)), 7, length))
    options = {"q_norm": normal(rng, size)} if normed else {}
    if normed and kv_heads:
        options["k_norm"] = normal(rng, size)
    eps = {"eps": 0.3} if normed or value_norm else {}
    rows = oracle.float64(qkv).reshape(2, length, -1, size)
    keys = rows[:, :, heads : heads + kv_heads]
    values = keys if shared_values else rows[:, :, heads + kv_heads :]
    if value_norm:
        values = values / np.sqrt((values**2).mean(-1, keepdims=True) + 0.3)
    plain = np.concatenate([rows[:, :, :heads], keys, values], axis=2).reshape(2, length, -1)
    wide = {name: oracle.float64(value) for name, value in options.items()}
    if kv_heads:
        q, kv = epilogue(plain, oracle.float64(rotation), heads, kv_heads, **wide, eps=0.3)
    else:
        padded = np.concatenate([plain, np.ones((2, length, 2 * size))], axis=-1)
        q, kv = (
            epilogue(padded, oracle.float64(rotation), heads, 1, **wide, k_norm=wide.get("q_norm"), eps=0.3)[0],
            None,
        )
    options |= {"heads": heads, "kv_heads": kv_heads, "value_norm": value_norm, "shared_values": shared_values, **eps}
    for found in (
        ck.qkv_epilogue(qkv, rotation, **options, backend=backend),
        rotary.qkv_epilogue_reference(qkv, rotation, **options),
    ):
        assert oracle.relative_error(found[0], q) < 1e-5
        assert (found[1] is None) == (kv is None)
        if kv is not None:
            assert oracle.relative_error(found[1], kv) < 1e-5
    if kv_heads:
        cache = mx.zeros((2, 2, kv_heads, 16, size)) + 1
        mx.eval(cache)
        start = mx.array([14], mx.int32)
        expected_q, expected = rotary.qkv_append_reference(qkv, rotation, cache, start, **options)
        found = ck.qkv_append(qkv, rotation, cache, start, **options, backend=backend)
        assert oracle.relative_error(found, expected_q) < 1e-6
        assert oracle.relative_error(cache, expected) < 1e-6


@pytest.mark.parametrize("length", [1, 3, 40])
@pytest.mark.parametrize(("turned", "centered"), [(16, True), (40, False)])
def test_gated_queries(backend, rng, length, turned, centered):
    """Every query head is followed by its gates; the first dimensions of a head turn, in halves of their own."""
    batch, heads, kv_heads, size = 2, 3, 2, 40
    qkv, norms = normal(rng, batch, length, (2 * heads + 2 * kv_heads) * size), [normal(rng, size), normal(rng, size)]
    rotation = mx.array(ck.rotation_table(100.0 ** (-np.arange(turned // 2) / 9), 5, length))
    options = {"heads": heads, "kv_heads": kv_heads, "q_norm": norms[0], "k_norm": norms[1], "eps": 0.1}
    options |= {"gated": True, "centered": centered}
    x = oracle.float64(qkv).reshape(batch, length, -1, size).transpose(0, 2, 1, 3)
    table = oracle.float64(rotation)

    def turn(heads, weight):
        y = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 0.1) * (oracle.float64(weight) + centered)
        first, second, rest = np.split(y, [turned // 2, turned], axis=-1)
        cosine, sine = table[..., 0], table[..., 1]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)

    queries, keys = turn(x[:, [0, 2, 4]], norms[0]), turn(x[:, 6:8], norms[1])
    for q, kv in (
        ck.qkv_epilogue(qkv, rotation, **options, backend=backend),
        rotary.qkv_epilogue_reference(qkv, rotation, **options),
    ):
        assert oracle.relative_error(q, queries) < 1e-5
        assert oracle.relative_error(kv, np.stack([keys, x[:, 8:]])) < 1e-5


@pytest.mark.parametrize("capacity", [30, 300])
@pytest.mark.parametrize("length", [1, 3])
def test_answers_times_gates(backend, rng, length, capacity):
    """In one chunk of keys and in several."""
    heads, kv_heads, size = 6, 2, 32
    projected = normal(rng, 1, length, (2 * heads + 2 * kv_heads) * size)
    q, kv, start = normal(rng, 1, heads, length, size), normal(rng, 2, 1, kv_heads, capacity, size), capacity - length
    gates = oracle.float64(projected).reshape(1, length, -1, size)[:, :, [1, 3, 5, 7, 9, 11]]
    options = {"scale": 0.3, "mask": "causal"}
    plain = oracle.float64(ck.cache_attention(q, kv, mx.array([start], mx.int32), **options, backend=backend))
    expected = plain / (1 + np.exp(-gates.reshape(1, length, -1)))
    given = (q, kv, mx.array([start], mx.int32))
    assert (
        oracle.relative_error(ck.cache_attention(*given, gates=projected, **options, backend=backend), expected) < 1e-5
    )
    assert oracle.relative_error(sdpa.cache_attention_reference(*given, gates=projected, **options), expected) < 1e-5
    with pytest.raises(OptionError, match=r"gates \[1, 1, 64\]"):
        ck.cache_attention(*given, gates=mx.zeros((1, 1, 64)), **options, backend=backend)


def test_qkv_epilogue_refuses_what_does_not_fit(backend):
    table = mx.zeros((1, 4, 2))
    with pytest.raises(OptionError, match=r"4 \+ 2 \* 2 heads"):
        ck.qkv_epilogue(mx.zeros((1, 1, 60)), table, heads=4, kv_heads=2, backend=backend)
    norms = {"q_norm": mx.zeros(4), "k_norm": mx.zeros(8), "eps": 1e-5}
    with pytest.raises(OptionError, match="q_norm is"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, **norms, backend=backend)
    with pytest.raises(OptionError, match="belong together"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, q_norm=mx.zeros(8), backend=backend)
    with pytest.raises(OptionError, match="belong together"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, value_norm=True, backend=backend)
    with pytest.raises(OptionError, match="belong together"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, head_norm=True, backend=backend)
    norms = {"q_norm": mx.zeros(8), "k_norm": mx.zeros(8), "eps": 1e-5, "head_norm": True}
    with pytest.raises(OptionError, match="head_norm is a norm without weights"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, **norms, backend=backend)
    with pytest.raises(OptionError, match=r"4 \+ 1 \* 2 heads"):
        ck.qkv_epilogue(mx.zeros((1, 1, 64)), table, heads=4, kv_heads=2, shared_values=True, backend=backend)
    for wide in (mx.zeros((1, 5, 2)), mx.zeros((1, 0, 2)), mx.zeros((1, 4, 3)), mx.zeros((4, 2))):
        with pytest.raises(OptionError, match="P at most D / 2"):
            ck.qkv_epilogue(mx.zeros((1, 1, 64)), wide, heads=4, kv_heads=2, backend=backend)


def test_rows_do_not_depend_on_the_number_of_threads(backend, rng, monkeypatch):
    matrix = oracle.random_affine(rng, 3000, 576, 4, 32, mx.float16)
    x = normal(rng, 1, 576)
    call = lambda: np.array(ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=backend))  # noqa: E731
    first = call()
    assert all(np.array_equal(first, call()) for _ in range(50))
    monkeypatch.setattr(host, "runtime", lambda: (host._chosen()[1], 1))
    assert np.array_equal(first, call())


def test_calls_from_several_threads_at_once(backend, rng):
    matrix = oracle.random_affine(rng, 2000, 576, 4, 32, mx.float16)
    inputs = [normal(rng, 1, 576) for _ in range(4)]
    mx.eval(inputs, matrix)
    call = lambda x: np.array(ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=backend))  # noqa: E731
    expected = [call(x) for x in inputs]
    wrong = []

    def repeat(i):
        wrong.extend(i for _ in range(100) if not np.array_equal(call(inputs[i]), expected[i]))

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_has_threads_of_its_own(backend, rng):
    matrix = oracle.random_affine(rng, 2000, 576, 4, 32, mx.float16)
    x = normal(rng, 1, 576)
    mx.eval(x, *matrix)
    call = lambda: np.array(ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=backend))  # noqa: E731
    expected = call()
    child = os.fork()
    if child == 0:
        same, tasks = np.array_equal(call(), expected), Path("/proc/self/task")
        os._exit(0 if same and (not tasks.exists() or len(list(tasks.iterdir())) >= host.thread_count()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_nan_and_infinity_keep_their_meaning(backend, rng):
    matrix = oracle.random_affine(rng, 40, 64, 4, 32, mx.float16)
    options = {"bits": 4, "group_size": 32, "backend": backend}
    x = mx.where(mx.arange(64) == 5, mx.nan, normal(rng, 1, 64))
    assert np.isnan(np.array(ck.affine_matmul(x, *matrix, **options))).all()
    assert np.isnan(np.array(ck.gated_affine_matmul(x, *matrix, **options))).all()
    gates = oracle.random_affine(rng, 2, 64, 4, 32, mx.float16)
    huge = [gates[0], mx.zeros((2, 2), mx.float16), mx.array([[-1000, 0], [1, 0]], dtype=mx.float16)]
    assert np.array(ck.gated_affine_matmul(mx.ones((1, 64)), *huge, **options)).tolist() == [[0.0]]


def test_exp_of_the_shims():
    text = (
        read_source(host.HERE / "host.h")
        + """
extern "C" void many(const float* x, float* y, int n) { for (int i = 0; i < n; ++i) y[i] = exp(x[i]); }
"""
    )
    many = ctypes.CDLL(str(compiler.build("exp", text, host._chosen()[0]))).many
    x = np.concatenate([np.linspace(-87.3, 88.7, 50001), [0.0, -np.inf, np.inf, np.nan, -88.0, 89.0]]).astype(
        np.float32
    )
    y = np.empty_like(x)
    many(*(ctypes.c_void_p(a.ctypes.data) for a in (x, y)), len(x))
    exact = np.exp(x[:-5].astype(np.float64))
    assert np.abs(y[:-5] / exact - 1).max() < 3e-7
    assert y[-6] == 1.0
    np.testing.assert_array_equal(y[-5:], [0.0, np.inf, np.nan, 0.0, np.inf])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_cpu_without_our_vector_instructions(backend, rng, bits, monkeypatch):
    written = host.source_text
    monkeypatch.setattr(host, "source_text", lambda call: "#undef __FLT16_MAX__\n" + written(call))
    matrix = oracle.random_affine(rng, 37, 160, bits, 32, mx.float16)
    x = normal(rng, 1, 160)
    y = ck.affine_matmul(x, *matrix, bits=bits, group_size=32, backend=backend)
    assert oracle.relative_error(y, oracle.float64(x) @ oracle.unpack(*matrix, bits, 32).T) < 1e-5
    # Attention to a single key returns its value: here every finite half of one sign.
    v = mx.array(np.arange(31 * 1024, dtype=np.uint16)).view(mx.float16).reshape(1, 1, 1, -1)
    out = ck.attention(mx.zeros((1, 1, 1, 16)), mx.zeros((1, 1, 1, 16), mx.float16), v, scale=1.0, backend=backend)
    np.testing.assert_array_equal(np.array(out), np.array(v.astype(mx.float32)))


def test_the_cache_of_compiled_code_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    directory = compiler.cache_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o770)
    with pytest.raises(BackendError, match="chmod 700"):
        compiler.cache_directory()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendError, match="TURBOSPARK_HOME"):
        compiler.cache_directory()


def test_a_text_is_compiled_once_and_its_fault_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    chosen = compiler.candidates()[-1]
    text = 'extern "C" int answer() { return 42; }'
    library = compiler.build("answer", text, chosen)
    made = library.stat().st_mtime_ns
    assert compiler.build("answer", text, chosen) == library
    assert library.stat().st_mtime_ns == made
    assert compiler.build("answer", text.replace("42", "43"), chosen) != library
    with pytest.raises(BackendError, match=r"kernel answer:\n(.|\n)*nonsense"):
        compiler.build("answer", "nonsense", chosen)
    assert {path.suffix for path in library.parent.iterdir()} <= {".so", ""}


def test_a_damaged_library_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    chosen = compiler.candidates()[-1]
    text = 'extern "C" int answer() { return 42; }'
    library = compiler.build("answer", text, chosen)
    library.write_bytes(library.read_bytes()[:100])
    assert compiler.load("answer", text, chosen, ctypes.CDLL).answer() == 42


def test_what_killed_builds_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    directory, chosen = compiler.cache_directory(), compiler.candidates()[-1]
    old, young, zig, elsewhere = directory / "tmp1", directory / "tmp2", directory / "zig", tmp_path / "kept"
    for path in (old, young, zig, elsewhere):
        path.mkdir()
        (path / "file").write_text("")
    (directory / "tmp3").symlink_to(elsewhere)
    (half := directory / "tmp4").write_text("half of a file")
    past = time.time() - 2 * compiler.COMPILE_SECONDS - 60
    for path in (old, half, zig, elsewhere):
        os.utime(path, (past, past))
    library = compiler.build("answer", 'extern "C" int answer() { return 42; }', chosen)
    assert {path.name for path in directory.iterdir()} == {"tmp2", "tmp3", "zig", library.name}
    assert (elsewhere / "file").exists()


def test_a_rehearsal_compiles_what_will_be_launched(backend, rng, tmp_path, monkeypatch, caplog):
    x, seen = normal(rng, 1, 3, 5, 24), []
    expected = np.array(ck.rms_norm(x, None, eps=0.5, backend=backend))
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))

    def first():
        thread = threading.Thread(target=lambda: seen.append(np.array(ck.rms_norm(x, None, eps=0.5, backend=backend))))
        thread.start()
        thread.join()
        seen.append(np.array(ck.rms_norm(x, None, eps=0.5, backend=backend)))

    def second():
        seen.append(np.array(ck.rotate(x, mx.ones((5, 12, 2)), backend=backend)))

    with caplog.at_level("INFO", compiler.logger.name):
        backend.rehearse([first, second])
    other, *rehearsed = seen
    assert np.array_equal(other, expected)
    assert not np.any(rehearsed)
    assert [record.kernels for record in caplog.records if hasattr(record, "kernels")] == [(1, 2), (2, 2)]
    assert sorted(path.name.partition("-")[0] for path in compiler.cache_directory().glob("*.so")) == [
        "rms_norm",
        "rope",
    ]
    with caplog.at_level("INFO", compiler.logger.name):
        caplog.clear()
        backend.rehearse([first, second])
    assert not [record for record in caplog.records if hasattr(record, "kernels")]
    assert np.array_equal(np.array(ck.rms_norm(x, None, eps=0.5, backend=backend)), expected)


def test_a_fault_ends_a_rehearsal(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    with pytest.raises(BackendError, match="kernel bad:"):
        compiler.build_all({"nonsense": "bad", "more": "bad"}, compiler.candidates()[-1], 2)
    with pytest.raises(ZeroDivisionError):
        backend.rehearse([lambda: 1 / 0])
    x = mx.ones((1, 8))
    assert np.array(ck.rms_norm(x, None, eps=1e-9, backend=backend)).tolist() == x.tolist()


def test_a_full_disk_is_an_error_that_auto_can_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    with pytest.raises(BackendError, match=r"answer could not be compiled or loaded: .*No space left"):
        compiler.load("answer", 'extern "C" int answer() { return 42; }', compiler.candidates()[-1], ctypes.CDLL)


def test_the_cache_follows_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TURBOSPARK_HOME", "~/store")
    assert compiler.cache_directory() == tmp_path / "store" / "cache" / "kernels"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"biases": mx.zeros((16, 2), mx.float16)}, r"scales are .*float32 and biases .*float16"),
        ({"bits": 0}, "bits 0 in groups of 32"),
        ({"group_size": 48}, "bits 4 in groups of 48"),
        ({"x": mx.array(1.0)}, r"x is \[\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(backend, changes, message):
    weight, scales, biases = mx.quantize(mx.ones((16, 64)), group_size=32, bits=4)
    parts = {"x": mx.ones((1, 64)), "weight": weight, "scales": scales, "biases": biases, "bits": 4, "group_size": 32}
    with pytest.raises(OptionError, match=message):
        ck.affine_matmul(**(parts | changes), backend=backend)


def test_without_a_compiler_the_reference_runs_and_says_what_to_install(tmp_path):
    script = """
import sys
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.backends.kernel import read_source
from turbospark_mlx.errors import BackendError, OptionError
bad = compiler.Compiler("broken", (sys.executable, "-c", "raise SystemExit('it broke')"), "1")
for there in ([], [bad]):
    compiler.candidates = lambda: there
    chosen = backends.select("auto")
    assert chosen.name == "reference" and "pip install ziglang" in chosen.reason, chosen
    assert ("it broke" in chosen.reason) == bool(there)
    try:
        backends.select("host")
    except BackendError as error:
        assert "pip install ziglang" in str(error)
    else:
        raise AssertionError
"""
    environment = os.environ | {"TURBOSPARK_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def check_attention(backend, rng, keys, heads, kv_heads, length, window, dtype, with_sinks):
    q, k, v = normal(rng, 2, heads, length, 64), *normal(rng, 2, 2, kv_heads, keys + 5, 64, dtype=dtype)
    k, v = k[:, :, :keys], v[:, :, :keys]
    sinks = normal(rng, heads, dtype=mx.bfloat16) if with_sinks else None
    position = np.arange(keys - length, keys)[:, None]
    shown = np.arange(keys) <= position
    if window:
        shown &= np.arange(keys) > position - window
    shown = np.broadcast_to(shown, (2, heads, length, keys))
    logits = oracle.float64(sinks) if with_sinks else None
    expected = oracle.attention(*(oracle.float64(a) for a in (q, k, v)), 0.3, visible=shown, sinks=logits)
    y = ck.attention(q, k, v, scale=0.3, mask="causal", window=window, sinks=sinks, backend=backend)
    assert oracle.relative_error(y, expected) < 1e-5
    assert backend.counters == {("attention", "kernel"): 1}


@pytest.mark.parametrize("keys", [8, 31, 33, 1000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "window", "dtype", "with_sinks"),
    [
        (3, 1, 1, None, mx.float16, True),
        (8, 2, 3, 7, mx.bfloat16, True),
        (1, 1, 8, None, mx.float32, False),
    ],
)
def test_decode_attention(backend, rng, keys, heads, kv_heads, length, window, dtype, with_sinks):
    check_attention(backend, rng, keys, heads, kv_heads, length, window, dtype, with_sinks)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 31, 33, 1000, 4097])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 2)])
@pytest.mark.parametrize(("length", "window"), [(1, None), (1, 7), (3, 40), (8, None)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_decode_attention_everywhere(backend, rng, keys, heads, kv_heads, length, window, dtype, with_sinks):
    if length <= keys:
        check_attention(backend, rng, keys, heads, kv_heads, length, window, dtype, with_sinks)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 12), (576, 512)])
def test_decode_attention_at_other_head_sizes_and_views(backend, rng, head_dim, value_dim):
    q = normal(rng, 1, 2, 6, head_dim).swapaxes(1, 2)
    k, v = normal(rng, 1, 70, 2, head_dim).swapaxes(1, 2), normal(rng, 1, 2, value_dim, 70).swapaxes(2, 3)
    expected = oracle.attention(*(oracle.float64(a) for a in (q, k, v)), 0.1)
    y = ck.attention(q, k, v, scale=0.1, backend=backend)
    assert oracle.relative_error(y, oracle.attention(*(oracle.float64(a) for a in (q, k, v)), 0.1)) < 1e-5
    assert oracle.relative_error(sdpa.attention_reference(q, k, v, scale=0.1), expected) < 1e-5
    assert backend.counters == {("attention", "kernel"): 1}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("capacity", [37, 64, 600])
def test_cache_attention_reads_the_rows_up_to_the_last_query(backend, rng, length, capacity, dtype):
    keys = 37
    q = normal(rng, 2, 6, length, 16)
    kv = mx.where(mx.arange(capacity)[:, None] >= keys, mx.nan, normal(rng, 2, 2, 3, capacity, 16)).astype(dtype)
    shown = np.broadcast_to(np.arange(keys) <= np.arange(keys - length, keys)[:, None], (2, 6, length, keys))
    k, v = (oracle.float64(a)[:, :, :keys] for a in kv)
    expected = oracle.attention(oracle.float64(q), k, v, 0.3, visible=shown)
    expected = expected.swapaxes(1, 2).reshape(2, length, -1)
    start, options = mx.array([keys - length], mx.int32), {"scale": 0.3, "mask": "causal"}
    assert oracle.relative_error(ck.cache_attention(q, kv, start, **options, backend=backend), expected) < 1e-5
    assert oracle.relative_error(sdpa.cache_attention_reference(q, kv, start, **options), expected) < 1e-5
    with pytest.raises(OptionError, match="do not fit"):
        ck.cache_attention(q, kv[:, :1], start, scale=0.3, backend=backend)


def test_a_ring_shows_all_its_rows_once_it_has_come_round(backend, rng):
    q, kv = normal(rng, 1, 4, 1, 16), normal(rng, 2, 1, 2, 9, 16)
    expected = oracle.attention(*(oracle.float64(a) for a in (q, kv[0], kv[1])), 0.3).reshape(1, 1, -1)
    for position in (8, 9, 1000):
        start = mx.array([position], mx.int32)
        assert oracle.relative_error(ck.cache_attention(q, kv, start, scale=0.3, backend=backend), expected) < 1e-5
        assert oracle.relative_error(sdpa.cache_attention_reference(q, kv, start, scale=0.3), expected) < 1e-5


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "position", "capacity"), [(1, 1, 5, 9), (2, 3, 0, 3), (1, 8, 100, 11), (1, 1, 11, 4)]
)
def test_qkv_append_writes_its_rows_and_no_others(backend, rng, batch, length, position, capacity, normed):
    heads, kv_heads, head_dim = 6, 3, 16
    qkv = normal(rng, batch, length, (heads + 2 * kv_heads) * head_dim)
    rotation = mx.array(ck.rotation_table(10000.0 ** (-np.arange(8) / 8), position, length))
    sizes = {"heads": heads, "kv_heads": kv_heads}
    if normed:
        sizes |= {"q_norm": normal(rng, head_dim), "k_norm": normal(rng, head_dim, dtype=mx.float16), "eps": 0.3}
    cache = normal(rng, 2, batch, kv_heads, capacity, head_dim)
    mx.eval(cache)
    before, start = np.array(cache), mx.array([position], mx.int32)
    q, kv = ck.qkv_epilogue(qkv, rotation, **sizes, backend=backend)
    reference_q, reference_cache = rotary.qkv_append_reference(qkv, rotation, cache, start, **sizes)
    mx.eval(reference_q, reference_cache)
    found = ck.qkv_append(qkv, rotation, cache, start, **sizes, backend=backend)
    np.testing.assert_array_equal(found, q)
    expected = before.copy()
    expected[..., [(position + i) % capacity for i in range(length)], :] = np.array(kv)
    np.testing.assert_array_equal(cache, expected)
    assert oracle.relative_error(reference_cache, expected) < 1e-5
    assert oracle.relative_error(reference_q, np.array(q)) < 1e-5


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packed_words_may_begin_at_any_word(backend, rng, bits):
    """As in old installs, whose tensors lie at multiples of 4 bytes."""
    weight, scales, biases = oracle.random_affine(rng, 45, 96, bits, 32, mx.float16)
    moved = mx.concatenate([mx.zeros((1,), mx.uint32), weight.reshape(-1)])
    mx.eval(moved)
    x, options = normal(rng, 1, 96), {"bits": bits, "group_size": 32, "backend": backend}
    found = ck.affine_matmul(x, moved[1:].reshape(weight.shape), scales, biases, **options)
    np.testing.assert_array_equal(found, ck.affine_matmul(x, weight, scales, biases, **options))


@pytest.mark.parametrize(("position", "capacity"), [(0, 3), (5, 9), (11, 4), (40, 41)])
@pytest.mark.parametrize("form", ["plain", "normed", "head_norm", "sinks", "partial", "gated"])
def test_the_fused_launch_is_append_and_attention(backend, rng, position, capacity, form):
    heads, kv_heads, head_dim = 6, 3, 64
    qkv = normal(rng, 2, 1, ((2 if form == "gated" else 1) * heads + 2 * kv_heads) * head_dim)
    pairs = {"partial": 5, "gated": 7}.get(form, 32)
    rotation = mx.array(ck.rotation_table(10000.0 ** (-np.arange(pairs) / pairs), position, 1))
    sizes, options = {"heads": heads, "kv_heads": kv_heads}, {"scale": 0.2}
    if form == "gated":
        sizes |= {"gated": True, "centered": True}
    if form in ("normed", "gated"):
        sizes |= {"q_norm": normal(rng, head_dim), "k_norm": normal(rng, head_dim), "eps": 0.3}
    if form == "head_norm":
        sizes |= {"head_norm": True, "eps": 0.3}
    if form == "sinks":
        options["sinks"] = normal(rng, heads)
    cache, start = normal(rng, 2, 2, kv_heads, capacity, head_dim), mx.array([position], mx.int32)
    expected, rows = append_attention_reference(qkv, rotation, cache, start, **sizes, **options)
    mx.eval(expected, rows)
    norms = [sizes.get(name) for name in ("q_norm", "k_norm")]
    arrays = (*norms, options.get("sinks"))
    dtypes = (None if array is None else array.dtype for array in arrays)
    split = {name: value for name, value in sizes.items() if name not in ("q_norm", "k_norm")}
    made = rotary.Form(**{"eps": None} | split)
    call = plan_fused("host", 2, head_dim, pairs, made, 0.2, mx.float32, *dtypes)
    # Row ``position`` is hidden until it is written, and rows after it always are.
    unwritten = np.arange(capacity) >= (position if position < capacity else capacity)
    np.array(cache, copy=False)[:, :, :, unwritten] = np.nan
    (found,) = backend.launch(call, (qkv, rotation, *norms, cache, start, options.get("sinks")))
    assert oracle.relative_error(found, np.array(expected)) < 1e-5
    shown = np.arange(capacity) <= position
    np.testing.assert_allclose(np.array(cache)[:, :, :, shown], np.array(rows)[:, :, :, shown], rtol=1e-5, atol=1e-6)


def test_qkv_append_refuses_a_cache_that_does_not_fit(backend):
    qkv, table, start = mx.zeros((1, 2, 64)), mx.zeros((2, 4, 2)), mx.zeros((1,), mx.int32)
    for cache in (mx.zeros((2, 1, 2, 1, 8)), mx.zeros((2, 1, 2, 9, 8), mx.float16), mx.zeros((2, 1, 1, 9, 8))):
        with pytest.raises(OptionError, match="qkv_append: the cache is"):
            ck.qkv_append(qkv, table, cache, start, heads=4, kv_heads=2, backend=backend)


def test_decode_attention_reads_no_key_beyond_the_last(backend, rng):
    cache = mx.where(mx.arange(40)[:, None] >= 33, mx.nan, normal(rng, 2, 1, 2, 40, 16))
    y = ck.attention(normal(rng, 1, 4, 1, 16), cache[0][:, :, :33], cache[1][:, :, :33], scale=1.0, backend=backend)
    assert np.isfinite(np.array(y)).all()
