"""The public ops on a CPU without a compiler, against numpy float64."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import affine, dense, head, sdpa
from turbospark_mlx.custom_kernels.backends import blas
from turbospark_mlx.errors import BackendError, OptionError

DTYPES = (mx.float16, mx.bfloat16, mx.float32)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def backend():
    return ck.backends.select("reference")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def check_greedy_head(backend, rng, rows):
    """Also what decides where values are equal, and where they are no numbers."""
    options = {"bits": 8, "group_size": 32, "backend": backend}
    matrix = oracle.random_affine(rng, 301, 96, 8, 32, mx.float16)
    x, bias, weight = normal(rng, 1, rows, 96), normal(rng, 301), normal(rng, 96)
    wide = oracle.float64(x)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.25) * oracle.float64(weight)
    logits = wide @ oracle.unpack(*matrix, 8, 32).T + oracle.float64(bias)
    ids = ck.greedy_head(x, *matrix, bias=bias, norm_weight=weight, eps=0.25, **options)
    assert ids.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(ids), logits.argmax(-1))
    defined = head.greedy_head_reference(x, *matrix, bits=8, group_size=32, bias=bias, norm_weight=weight, eps=0.25)
    np.testing.assert_array_equal(np.array(defined), logits.argmax(-1))
    # Rows 20, 40 and 299 are the largest; row 5 is NaN.
    offsets = np.zeros((301, 3), np.float32)
    offsets[[20, 40, 299]], offsets[5] = 1, np.nan
    constant = (mx.zeros((301, 24), mx.uint32), mx.zeros((301, 3), mx.float16), mx.array(offsets).astype(mx.float16))
    ones = mx.ones_like(x)
    assert set(np.array(ck.greedy_head(ones, *constant, **options)).flat) == {20}
    assert set(np.array(ck.greedy_head(ones * mx.nan, *constant, **options)).flat) == {0}
    assert ck.greedy_head(x[:, :0], *matrix, **options).shape == (1, 0)
    with pytest.raises(OptionError, match="greedy_head: x is"):
        ck.greedy_head(x[..., :64], *matrix, **options)


def test_select_names_what_exists():
    assert ck.backends.select("auto").device in ("cpu", "gpu")
    with pytest.raises(BackendError, match=r"kernels='warp'.*reference"):
        ck.backends.select("warp")


def test_the_environment_says_what_auto_takes(monkeypatch):
    monkeypatch.setenv("TURBOSPARK_KERNELS", "reference")
    assert ck.backends.select("auto").name == ck.backends.select().name == "reference"
    monkeypatch.setenv("TURBOSPARK_KERNELS", "warp")
    with pytest.raises(BackendError, match="warp"):
        ck.backends.select("auto")
    assert ck.backends.select("reference").name == "reference"
    monkeypatch.setenv("TURBOSPARK_KERNELS", "")
    assert ck.backends.select("auto").name in ck.backends.KERNELS[1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_affine_matmul_at_every_format(backend, rng, bits, group_size, dtype):
    matrix = oracle.random_affine(rng, 45, 384, bits, group_size, dtype)
    full = oracle.unpack(*matrix, bits, group_size)
    for rows in (1, 2, 7, 65):
        x = normal(rng, rows, 384)
        y = ck.affine_matmul(x, *matrix, bits=bits, group_size=group_size, backend=backend)
        assert y.dtype == mx.float32
        assert oracle.relative_error(y, oracle.float64(x) @ full.T) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 63, 65, 128])
def test_affine_matmul_with_bias_over_leading_axes(backend, rng, rows):
    matrix = oracle.random_affine(rng, 130, 576, 4, 32, mx.float16)
    x, bias = normal(rng, 1, rows, 576), normal(rng, 130, dtype=mx.bfloat16)
    expected = oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T + oracle.float64(bias)
    y = ck.affine_matmul(x, *matrix, bits=4, group_size=32, bias=bias, backend=backend)
    assert oracle.relative_error(y, expected) < 1e-5
    reference = affine.affine_matmul_reference(x, *matrix, bits=4, group_size=32, bias=bias)
    assert oracle.relative_error(reference, expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 40])
def test_affine_matmul_sums_in_float32_whatever_the_activations(backend, rng, rows):
    matrix = oracle.random_affine(rng, 33, 2816, 4, 64, mx.bfloat16)
    x = normal(rng, rows, 2816, dtype=mx.bfloat16)
    y = ck.affine_matmul(x, *matrix, bits=4, group_size=64, backend=backend)
    assert y.dtype == mx.bfloat16
    assert oracle.relative_error(y, oracle.float64(x) @ oracle.unpack(*matrix, 4, 64).T) < 2**-8


def test_affine_matmul_of_views_and_of_nothing(backend, rng):
    matrix = oracle.random_affine(rng, 45, 96, 4, 32, mx.float16)
    full = oracle.unpack(*matrix, 4, 32)
    for base, cut in (
        (normal(rng, 96, 9), lambda x: x.T),
        (normal(rng, 9, 200), lambda x: x[:, 7:103]),
        (normal(rng, 3, 2, 96), lambda x: x.swapaxes(0, 1)),
        (normal(rng, 18, 96), lambda x: x[1::2]),
    ):
        x = cut(base)
        expected = np.array(cut(oracle.float64(base))) @ full.T
        assert (
            oracle.relative_error(ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=backend), expected) < 1e-5
        )
    for rows in (1, 9):
        x = normal(rng, rows, 96)
        sliced = [a[5:20] for a in matrix]
        y = ck.affine_matmul(x, *sliced, bits=4, group_size=32, backend=backend)
        assert oracle.relative_error(y, oracle.float64(x) @ full[5:20].T) < 1e-5
    empty = ck.affine_matmul(mx.zeros((1, 0, 96)), *matrix, bits=4, group_size=32, backend=backend)
    assert empty.shape == (1, 0, 45)


def test_affine_matmul_repeats_bit_for_bit_and_does_not_depend_on_its_tiles(backend, rng, monkeypatch):
    matrix = oracle.random_affine(rng, 301, 192, 4, 32, mx.float16)
    x = normal(rng, 31, 192)
    call = lambda: np.array(ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=backend))  # noqa: E731
    whole = call()
    assert np.array_equal(whole, call())
    monkeypatch.setattr(blas, "SCRATCH_BYTES", 192 * 4 * 7)
    assert np.abs(whole - call()).max() < 1e-5 * np.abs(whole).max()


def test_affine_scratch_stays_bounded(backend, rng, monkeypatch):
    seen = []
    dequantize = mx.dequantize
    monkeypatch.setattr(mx, "dequantize", lambda w, *a, **k: seen.append(w.shape[0]) or dequantize(w, *a, **k))
    matrix = oracle.random_affine(rng, 5000, 576, 4, 32, mx.float16)
    ck.affine_matmul(normal(rng, 4, 576), *matrix, bits=4, group_size=32, backend=backend)
    assert sum(seen) == 5000
    assert max(seen) * 576 * 4 <= blas.SCRATCH_BYTES


def test_affine_parts_that_do_not_fit_are_named(backend, rng):
    weight, scales, biases = oracle.random_affine(rng, 8, 64, 4, 32, mx.float16)
    call = lambda x, w, s, b, **k: ck.affine_matmul(x, w, s, b, **{"bits": 4, "group_size": 32, **k}, backend=backend)  # noqa: E731
    with pytest.raises(OptionError, match=r"x is \[1, 32\], but the matrix has 64 columns"):
        call(mx.zeros((1, 32)), weight, scales, biases)
    with pytest.raises(OptionError, match=r"biases are \[8, 1\]"):
        call(mx.zeros((1, 64)), weight, scales, biases[:, :1])
    with pytest.raises(OptionError, match=r"scales are \[8, 2\].*needs \[8, 1\]"):
        call(mx.zeros((1, 64)), weight, scales, biases, group_size=64)
    with pytest.raises(OptionError, match="uint32"):
        call(mx.zeros((1, 64)), weight.view(mx.uint8), scales, biases)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_affine_embedding(backend, rng, bits):
    matrix = oracle.random_affine(rng, 50, 128, bits, 32, mx.float16)
    ids = mx.array([[3, 49, 0], [3, 7, 7]])
    expected = oracle.unpack(*matrix, bits, 32)[np.array(ids)]
    rows = ck.affine_embedding(ids, *matrix, bits=bits, group_size=32, dtype=mx.float32, backend=backend)
    assert oracle.relative_error(rows, expected) < 1e-6
    half = ck.affine_embedding(ids, *matrix, bits=bits, group_size=32, dtype=mx.bfloat16, backend=backend)
    assert half.dtype == mx.bfloat16
    assert ck.affine_embedding(
        ids[:, :0], *matrix, bits=bits, group_size=32, dtype=mx.float32, backend=backend
    ).shape == (2, 0, 128)


@pytest.mark.parametrize(
    ("activation", "limit"),
    [("silu", None), ("gelu_tanh", None), ("gelu_erf", None), ("clamped_swiglu", 1.5), ("sigmoid", None)],
)
@pytest.mark.parametrize("rows", [1, 9])
def test_gated_affine_matmul(backend, rng, rows, activation, limit):
    matrix = oracle.random_affine(rng, 2 * 21, 96, 4, 32, mx.float16)
    x, bias = normal(rng, rows, 96), normal(rng, 42) * 3
    both = oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T + oracle.float64(bias)
    expected = oracle.gated(*np.split(both, 2, axis=-1), activation, limit)
    options = {"bits": 4, "group_size": 32, "activation": activation, "limit": limit, "bias": bias}
    y = ck.gated_affine_matmul(x, *matrix, **options, backend=backend)
    assert oracle.relative_error(y, expected) < 1e-5
    assert oracle.relative_error(affine.gated_affine_matmul_reference(x, *matrix, **options), expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 9])
def test_scale_and_softcap_stand_between_the_bias_and_the_residual(backend, rng, rows):
    matrix = oracle.random_affine(rng, 45, 96, 4, 32, mx.float16)
    x, bias, residual = normal(rng, rows, 96), normal(rng, 45) * 5, normal(rng, rows, 45)
    product = oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T + oracle.float64(bias)
    gate = normal(rng, rows, 1) * 3
    opened = 1 / (1 + np.exp(-oracle.float64(gate)))
    options = {"bits": 4, "group_size": 32, "bias": bias, "residual": residual, "scale": 0.25}
    capped = 3 * np.tanh(0.25 * product / 3)
    for more, made in (
        ({}, 0.25 * product),
        ({"softcap": 3.0}, capped),
        ({"softcap": 3.0, "row_gate": gate}, capped * opened),
    ):
        for y in (
            ck.affine_matmul(x, *matrix, **options, **more, backend=backend),
            affine.affine_matmul_reference(x, *matrix, **options, **more),
        ):
            assert oracle.relative_error(y, made + oracle.float64(residual)) < 1e-5
    with pytest.raises(OptionError, match=rf"row_gate is \[{rows}, 45\], but the result needs \[{rows}, 1\]"):
        ck.affine_matmul(x, *matrix, **options, row_gate=residual, backend=backend)
    with pytest.raises(OptionError, match="softcap is 0"):
        ck.affine_matmul(x, *matrix, **options, softcap=0.0, backend=backend)


@pytest.mark.parametrize("rows", [1, 9])
def test_greedy_head(backend, rng, rows):
    check_greedy_head(backend, rng, rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "'relu' is not one of silu"),
        ({"activation": "clamped_swiglu"}, "limit is None"),
        ({"limit": 7.0}, "limit is 7.0"),
        ({"bias": mx.zeros((8,))}, r"bias is \[8\]"),
    ],
)
def test_gated_options_that_do_not_fit_are_named(backend, rng, changes, message):
    matrix = oracle.random_affine(rng, 16, 64, 4, 32, mx.float16)
    with pytest.raises(OptionError, match=message):
        ck.gated_affine_matmul(mx.zeros((1, 64)), *matrix, bits=4, group_size=32, **changes, backend=backend)


@pytest.mark.parametrize("bad", [-1, 50])
def test_affine_embedding_refuses_ids_outside_the_table(backend, rng, bad):
    matrix = oracle.random_affine(rng, 50, 64, 4, 32, mx.float16)
    with pytest.raises(OptionError, match=f"{bad}.*50 rows"):
        ck.affine_embedding(mx.array([3, bad]), *matrix, bits=4, group_size=32, dtype=mx.float32, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_matmul(backend, rng, dtype, monkeypatch):
    weight, bias = normal(rng, 77, 99, dtype=dtype), normal(rng, 77)
    for rows in (1, 2, 9, 65):
        x = normal(rng, 2, rows, 99)
        added = {"bias": bias, "residual": normal(rng, 2, rows, 77)}
        expected = oracle.float64(x) @ oracle.float64(weight).T + sum(map(oracle.float64, added.values()))
        assert oracle.relative_error(ck.dense_matmul(x, weight, **added, backend=backend), expected) < 1e-5
        assert oracle.relative_error(dense.dense_matmul_reference(x, weight, **added), expected) < 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(blas, "SCRATCH_BYTES", 99 * 4 * 10)
            assert oracle.relative_error(ck.dense_matmul(x, weight, **added, backend=backend), expected) < 1e-5
    assert ck.dense_matmul(mx.zeros((0, 99)), weight, backend=backend).shape == (0, 77)
    with pytest.raises(OptionError, match="do not fit"):
        ck.dense_matmul(mx.zeros((1, 98)), weight, backend=backend)


def visible(length, keys, *, causal, window):
    position = np.arange(keys - length, keys)[:, None]
    key = np.arange(keys)
    shown = np.ones((length, keys), bool)
    if causal:
        shown &= key <= position
    if window is not None:
        shown &= key > position - window
    return shown


def both_paths(q, k, v, backend, **options):
    yield ck.attention(q, k, v, **options, backend=backend)
    yield sdpa.attention_reference(q, k, v, **options)


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (8, 2), (1, 1)])
def test_attention_masks_windows_and_groups(backend, rng, heads, kv_heads, mask, window):
    for length, keys in ((1, 1), (1, 33), (2, 2), (7, 31), (9, 70), (150, 160)):
        q, k = normal(rng, 1, heads, length, 16), normal(rng, 1, kv_heads, keys, 16)
        v = normal(rng, 1, kv_heads, keys, 12)
        shown = np.broadcast_to(visible(length, keys, causal=mask is not None, window=window), (1, heads, length, keys))
        expected = oracle.attention(*map(oracle.float64, (q, k, v)), 0.25, visible=shown)
        for y in both_paths(q, k, v, backend, scale=0.25, mask=mask, window=window):
            assert oracle.relative_error(y, expected) < 1e-5


def test_attention_arrays_sinks_and_batches(backend, rng):
    q, k, v = normal(rng, 2, 6, 5, 8), normal(rng, 2, 2, 11, 8), normal(rng, 2, 2, 11, 8)
    wide = [oracle.float64(a) for a in (q, k, v)]
    shape = (2, 6, 5, 11)
    shown = np.array(rng.integers(0, 2, (2, 1, 5, 11)), bool)
    shown[1, 0, 2] = False
    additive = rng.normal(size=(6, 5, 11)).astype(np.float32)
    additive[0, 0, 3] = -np.inf
    sinks = normal(rng, 6, dtype=mx.bfloat16)
    near = visible(5, 11, causal=False, window=4)
    for mask, arguments in (
        (mx.array(shown), {"visible": np.broadcast_to(shown & near, shape)}),
        (mx.array(additive), {"additive": np.broadcast_to(additive, shape), "visible": np.broadcast_to(near, shape)}),
    ):
        for with_sinks in (None, sinks):
            logits = None if with_sinks is None else oracle.float64(with_sinks)
            expected = oracle.attention(*wide, 0.3, **arguments, sinks=logits)
            for y in both_paths(q, k, v, backend, scale=0.3, mask=mask, window=4, sinks=with_sinks):
                assert oracle.relative_error(y, expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_transposed_and_half_precision_keys(backend, rng, dtype, monkeypatch):
    q = normal(rng, 1, 9, 6, 3).transpose(0, 3, 1, 2)[:, :, 2:]
    cache = normal(rng, 2, 1, 20, 1, 6, dtype=dtype)
    k, v = (a.swapaxes(1, 2)[:, :, :17] for a in cache)
    shown = np.broadcast_to(visible(7, 17, causal=True, window=None), (1, 3, 7, 17))
    expected = oracle.attention(*map(oracle.float64, (q, k, v)), 1.0, visible=shown)
    for scratch in (blas.SCRATCH_BYTES, 3 * 17 * 4 * 2):
        monkeypatch.setattr(blas, "SCRATCH_BYTES", scratch)
        for y in both_paths(q, k, v, backend, scale=1.0, mask="causal"):
            assert y.dtype == mx.float32
            assert oracle.relative_error(y, expected) < 1e-5


def test_attention_keeps_nan_and_refuses_what_does_not_fit(backend, rng):
    q, k, v = normal(rng, 1, 3, 2, 8), normal(rng, 1, 1, 4, 8), normal(rng, 1, 1, 4, 8)
    poisoned = mx.where(mx.arange(4)[:, None] == 3, mx.nan, k)
    y = oracle.float64(ck.attention(q, poisoned, v, scale=1.0, mask="causal", backend=backend))
    assert not np.isnan(y[:, :, 0]).any()
    assert np.isnan(y[:, :, 1]).all()
    assert ck.attention(q[:, :, :0], k, v, scale=1.0, backend=backend).shape == (1, 3, 0, 8)
    for arguments, message in (
        ((q, k[:, :, :1], v[:, :, :1]), "S at least L"),
        ((q[:, :2], mx.zeros((1, 4, 4, 8)), mx.zeros((1, 4, 4, 8))), "H a multiple of KV"),
    ):
        with pytest.raises(OptionError, match=message):
            ck.attention(*arguments, scale=1.0, backend=backend)
    with pytest.raises(OptionError, match="'causal'"):
        ck.attention(q, k, v, scale=1.0, mask="casual", backend=backend)
    with pytest.raises(OptionError, match="window=0"):
        ck.attention(q, k, v, scale=1.0, window=0, backend=backend)


def test_every_call_is_counted_by_the_path_it_took(backend, rng):
    matrix = oracle.random_affine(rng, 8, 64, 4, 32, mx.float16)
    for rows in (1, 64, 64):
        ck.affine_matmul(normal(rng, rows, 64), *matrix, bits=4, group_size=32, backend=backend)
    assert backend.counters == {("affine_matmul", "mlx"): 1, ("affine_matmul", "blas"): 2}


@pytest.mark.parametrize(("columns", "calls"), [(64, 0), (128, 1)])
def test_narrow_matrices_avoid_mlxs_gpu_product(rng, monkeypatch, columns, calls):
    """It is wrong for them. Only the choice is seen here: the arithmetic runs on this machine's device."""
    seen = []
    product = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **k: seen.append(1) or product(*a, **k))
    matrix = oracle.random_affine(rng, 40, columns, 4, 32, mx.float32)
    x = normal(rng, 20, columns)
    gpu = ck.backends.Backend("reference", "gpu", "a stand-in")
    y = ck.affine_matmul(x, *matrix, bits=4, group_size=32, backend=gpu)
    assert oracle.relative_error(y, oracle.float64(x) @ oracle.unpack(*matrix, 4, 32).T) < 1e-5
    assert len(seen) == calls
