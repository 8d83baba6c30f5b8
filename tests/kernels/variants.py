"""Calls of every kernel in the variants that models use, as (function, example arrays) to be traced, not run."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import gemv
from turbospark_mlx.custom_kernels.backends import Backend

Call = tuple[Callable[..., mx.array], list[mx.array]]

DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def affine(
    backend, rows, columns, out, bits, group_size, dtype, companions, *, op=ck.affine_matmul, more=None, **arrays
):
    """One product as (function, example arrays); ``arrays`` are shapes of optional inputs, ``more`` plain options."""
    optional = {name: mx.zeros(shape, dtype) for name, shape in arrays.items()}
    parts = [
        mx.zeros((rows, columns), dtype),
        mx.zeros((out, columns * bits // 32), mx.uint32),
        mx.zeros((out, columns // group_size), companions),
        mx.zeros((out, columns // group_size), companions),
        *optional.values(),
    ]
    more = (more or {}) | ({"eps": 1e-5} if "norm_weight" in optional else {})

    def call(x, weight, scales, biases, *rest):
        named = dict(zip(optional, rest, strict=True)) | more
        return op(x, weight, scales, biases, bits=bits, group_size=group_size, **named, backend=backend)

    return call, parts


def dense(backend, rows, columns, out, dtype, weights, *, biased):
    arrays = [mx.zeros((rows, columns), dtype), mx.zeros((out, columns), weights)]
    arrays += [mx.zeros((out,), dtype)] * biased
    return lambda x, w, b=None: ck.dense_matmul(x, w, bias=b, backend=backend), arrays


def attend(backend, heads, kv_heads, length, keys, head_dim, value_dim, dtype, kv_dtype, *, sinks=False, **options):
    arrays = [
        mx.zeros((1, heads, length, head_dim), dtype),
        mx.zeros((1, kv_heads, keys, head_dim), kv_dtype),
        mx.zeros((1, kv_heads, keys, value_dim), kv_dtype),
        *([mx.zeros((heads,), dtype)] if sinks else []),
    ]

    def call(q, k, v, logits=None):
        return ck.attention(q, k, v, scale=0.125, sinks=logits, **options, backend=backend)

    return call, arrays


def look_up(backend, count, bits, group_size, dtype):
    arrays = [
        mx.zeros((1, count), mx.uint32),
        mx.zeros((500, 128 * bits // 32), mx.uint32),
        mx.zeros((500, 128 // group_size), mx.bfloat16),
        mx.zeros((500, 128 // group_size), mx.bfloat16),
    ]

    def call(ids, *matrix):
        options = {"bits": bits, "group_size": group_size, "dtype": dtype}
        return ck.affine_embedding(ids, *matrix, **options, backend=backend)

    return call, arrays


def epilogue(backend, length, heads, kv_heads, head_dim, dtype, *, normed):
    norms = [mx.zeros((head_dim,), dtype)] * (2 if normed else 0)
    arrays = [
        mx.zeros((1, length, (heads + 2 * kv_heads) * head_dim), dtype),
        mx.zeros((length, head_dim // 2, 2)),
        *norms,
    ]

    def call(qkv, rotation, *weights):
        named = dict(zip(("q_norm", "k_norm"), weights, strict=False)) | ({"eps": 1e-6} if normed else {})
        return ck.qkv_epilogue(qkv, rotation, heads=heads, kv_heads=kv_heads, **named, backend=backend)

    return call, arrays


def norms(backend, shape, dtype, weight_dtype):
    """Every norm at one shape, as models call them; the residual stream may be wider than the activations."""
    x, weight, stream = mx.zeros(shape, dtype), mx.ones(shape[-1:], weight_dtype), mx.zeros(shape, mx.float32)
    options = {"eps": 1e-6, "backend": backend}
    yield partial(ck.rms_norm, weight=None, **options), [x]
    for centered in (False, True):
        yield partial(ck.rms_norm, centered=centered, **options), [x, weight]
        yield partial(ck.add_rms_norm, centered=centered, **options), [x, stream, weight]
        yield partial(ck.rms_norm_add, centered=centered, **options), [x, weight, x]
    for activation in ("silu", "sigmoid"):
        yield partial(ck.gated_rms_norm, activation=activation, **options), [x, x, weight]

    def scaled(x, weight, stream, scale):
        return ck.rms_norm_add(x, weight, stream, scale=scale, **options)

    yield scaled, [x, weight, stream, mx.ones((1,), weight_dtype)]


def variants(backend: Backend) -> Iterator[Call]:
    for bits in (1, 2, 3, 4, 5, 6, 8):
        for dtype in DTYPES:
            yield affine(backend, 1, 384, 45, bits, 32, dtype, mx.float16)
    for rows in (1, 3, 8):
        yield affine(backend, rows, 14336, 4096, 4, 64, mx.bfloat16, mx.bfloat16)
        yield affine(backend, rows, 28672, 8192, 8, 128, mx.float32, mx.float32, residual=(rows, 8192))
        gated = {"op": ck.gated_affine_matmul, "norm_weight": (4096,)}
        yield affine(backend, rows, 4096, 28672, 4, 64, mx.bfloat16, mx.bfloat16, **gated)
        yield affine(backend, rows, 1792, 3000, 4, 64, mx.float16, mx.float16, op=ck.greedy_head)
    yield affine(
        backend, 1, 576, 960, 4, 32, mx.float16, mx.float16, norm_weight=(576,), bias=(960,), residual=(1, 960)
    )
    for activation in gemv.ACTIVATIONS[1:]:
        more = {"activation": activation} | ({"limit": 7.0} if activation == "clamped_swiglu" else {})
        options = {"op": ck.gated_affine_matmul, "more": more, "bias": (5760,)}
        yield affine(backend, 1, 2880, 5760, 4, 64, mx.bfloat16, mx.bfloat16, **options)
    yield affine(backend, 1, 2560, 262144, 4, 64, mx.bfloat16, mx.bfloat16, more={"softcap": 30.0})
    for rows in (1, 3, 8):
        yield dense(backend, rows, 1023, 130, mx.float16, mx.bfloat16, biased=True)
        yield dense(backend, rows, 128, 64, mx.bfloat16, mx.float32, biased=False)
    for head_dim, value_dim in ((16, 16), (64, 64), (80, 80), (128, 128), (256, 256), (512, 512), (576, 512)):
        yield attend(backend, 9, 3, 1, 100, head_dim, value_dim, mx.bfloat16, mx.float16)
    for bits in (3, 4, 8):
        yield look_up(backend, 1, bits, 64, mx.bfloat16)
        yield look_up(backend, 9, bits, 64, mx.float32)
    for dtype in DTYPES:
        yield epilogue(backend, 1, 32, 8, 128, dtype, normed=False)
        yield epilogue(backend, 3, 4, 2, 64, dtype, normed=True)
    for dtype in DTYPES:
        yield attend(backend, 8, 1, 8, 5000, 128, 128, dtype, dtype, sinks=True, mask="causal", window=4096)
        yield attend(backend, 8, 2, 1, 30, 128, 128, dtype, mx.float16, sinks=True, window=7)
    for dtype in DTYPES:
        yield from norms(backend, (1, 3, 4096), dtype, mx.bfloat16)
        yield from norms(backend, (2, 5, 3, 80), dtype, dtype)
