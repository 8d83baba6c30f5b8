"""Calls of every kernel in the variants that models use, as (function, random arrays); small where that is the same."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import gemv
from turbospark_mlx.custom_kernels.append_attention import append_attention_reference
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.delta_net import gated_delta_step_reference
from turbospark_mlx.custom_kernels.dilated import dilated_convolution_step_reference
from turbospark_mlx.custom_kernels.indexer import index_append_reference
from turbospark_mlx.custom_kernels.latent_attention import latent_attention_reference
from turbospark_mlx.custom_kernels.norm import JoinedNorms

Call = tuple[Callable[..., mx.array], list[mx.array]]

DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def normal(*shape, dtype=mx.float32, scale=1.0):
    """The same numbers for the same shape, so that two back ends are given the same."""
    values = np.random.default_rng(shape).normal(scale=scale, size=shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def packed(rows, columns, bits, group_size, companions):
    """An affine-quantized matrix as its three arrays."""
    rng = np.random.default_rng((rows, columns, bits))
    words = mx.array(rng.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32))
    groups = (rows, columns // group_size)
    return [words, normal(*groups, dtype=companions, scale=0.5**bits), normal(*groups, dtype=companions)]


def in_dtype(backend, dtype):
    """The option that brings a wide residual stream to ``dtype``. On a CPU all is float32."""
    return {"dtype": dtype} if backend.device == "gpu" else {}


def affine(
    backend,
    rows,
    columns,
    out,
    bits,
    group_size,
    dtype,
    companions,
    *,
    op=ck.affine_matmul,
    more=None,
    stream=None,
    **arrays,
):
    """One product as (function, example arrays); ``arrays`` are shapes of optional inputs, ``more`` plain options.
    ``stream`` is the dtype of the residual stream, from which x comes where it is normalized."""
    optional = {name: normal(*shape, dtype=dtype) for name, shape in arrays.items()}
    matrix = packed(out, columns, bits, group_size, companions)
    x_dtype, more = dtype, dict(more or {})
    if stream is not None and "residual" in optional:
        optional["residual"] = optional["residual"].astype(stream)
    if stream is not None and "norm_weight" in optional:
        x_dtype, more = stream, more | in_dtype(backend, dtype)
    parts = [normal(rows, columns, dtype=x_dtype), *matrix, *optional.values()]
    more = more | ({"eps": 1e-5} if "norm_weight" in optional else {})

    def call(x, weight, scales, biases, *rest):
        named = dict(zip(optional, rest, strict=True)) | more
        return op(x, weight, scales, biases, bits=bits, group_size=group_size, **named, backend=backend)

    return call, parts


def dense(backend, rows, columns, out, dtype, weights, *, biased, stream=None, result=None):
    """With a bias and what is added, in the dtype ``stream``, or with neither, in the dtype ``result``."""
    arrays = [normal(rows, columns, dtype=dtype), normal(out, columns, dtype=weights)]
    arrays += [normal(out, dtype=dtype), normal(rows, out, dtype=stream or dtype)] * biased

    def call(x, weight, bias=None, residual=None):
        return ck.dense_matmul(x, weight, bias=bias, residual=residual, dtype=result, backend=backend)

    return call, arrays


def attend(backend, heads, kv_heads, length, keys, head_dim, value_dim, dtype, kv_dtype, *, sinks=False, **options):
    arrays = [
        normal(1, heads, length, head_dim, dtype=dtype),
        normal(1, kv_heads, keys, head_dim, dtype=kv_dtype),
        normal(1, kv_heads, keys, value_dim, dtype=kv_dtype),
        *([normal(heads, dtype=dtype)] if sinks else []),
    ]

    def call(q, k, v, logits=None):
        return ck.attention(q, k, v, scale=0.125, sinks=logits, **options, backend=backend)

    return call, arrays


def elementwise(backend, shape, activation, dtype, *, share=1, **more):
    options = {"activation": activation} | more | ({"limit": 0.5} if activation == "clamped_swiglu" else {})
    wide = (*shape[:-1], shape[-1] * share)
    arrays = [normal(*shape, dtype=dtype), normal(*wide, dtype=mx.float32)]
    return partial(ck.gated_product, **options, backend=backend), arrays


def look_up(backend, count, bits, group_size, dtype, **more):
    ids = mx.array(np.random.default_rng(count).integers(0, 500, (1, count), dtype=np.uint32))
    arrays = [ids, *packed(500, 128, bits, group_size, mx.bfloat16)]

    def call(ids, *matrix):
        options = {"bits": bits, "group_size": group_size, "dtype": dtype} | more
        return ck.affine_embedding(ids, *matrix, **options, backend=backend)

    return call, arrays


def largest(backend, size, dtype):
    def call(x):
        return ck.largest(x, backend=backend)

    return call, [normal(size, dtype=dtype)]


def epilogue(backend, length, heads, kv_heads, head_dim, dtype, *, normed, learned=True, pairs=None):
    norms = [normal(head_dim, dtype=dtype)] * (2 if normed and learned else 0)
    more = {"eps": 1e-6, "head_norm": not learned} if normed else {}
    arrays = [
        normal(1, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        normal(length, pairs or head_dim // 2, 2),
        *norms,
    ]

    def call(qkv, rotation, *weights):
        named = dict(zip(("q_norm", "k_norm"), weights, strict=False)) | more
        return ck.qkv_epilogue(qkv, rotation, heads=heads, kv_heads=kv_heads, **named, backend=backend)

    return call, arrays


def gated_epilogue(backend, length, heads, kv_heads, head_dim, pairs, dtype, *, centered):
    """Queries with gates between them, of which a part turns."""
    arrays = [
        normal(1, length, 2 * (heads + kv_heads) * head_dim, dtype=dtype),
        normal(length, pairs, 2),
        *[normal(head_dim, dtype=dtype)] * 2,
    ]
    sizes = {"heads": heads, "kv_heads": kv_heads, "gated": True, "centered": centered, "eps": 1e-6}

    def call(qkv, rotation, q_norm, k_norm):
        return ck.qkv_epilogue(qkv, rotation, q_norm=q_norm, k_norm=k_norm, **sizes, backend=backend)

    return call, arrays


def value_epilogue(backend, length, heads, kv_heads, head_dim, dtype, *, shared_values):
    """Values normalized, and taken from the rows of keys or stored; or queries alone."""
    stored, weights = heads + kv_heads * (1 if shared_values else 2), 2 if kv_heads else 1
    arrays = [
        mx.zeros((1, length, stored * head_dim), dtype),
        mx.zeros((length, head_dim // 2, 2)),
        *[mx.zeros((head_dim,), dtype)] * weights,
    ]
    sizes = {"heads": heads, "kv_heads": kv_heads, "shared_values": shared_values}

    def call(qkv, rotation, q_norm, k_norm=None):
        options = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, "value_norm": True}
        found = ck.qkv_epilogue(qkv, rotation, **sizes, **options, backend=backend)
        return found if kv_heads else found[0]

    return call, arrays


def norms(backend, shape, dtype, weight_dtype):
    """Every norm at one shape, as models call them; the residual stream may be wider than the activations."""
    x, weight, stream = normal(*shape, dtype=dtype), normal(*shape[-1:], dtype=weight_dtype), normal(*shape)
    options = {"eps": 1e-6, "backend": backend}
    yield partial(ck.rms_norm, weight=None, **options), [x]
    yield partial(ck.rms_norm, **in_dtype(backend, dtype), **options), [stream, weight]
    for centered in (False, True):
        yield partial(ck.rms_norm, centered=centered, **options), [x, weight]
        yield partial(ck.add_rms_norm, centered=centered, **options), [x, stream, weight]
        yield partial(ck.rms_norm_add, centered=centered, **options), [x, weight, x]
        around = {"centered": centered, **in_dtype(backend, mx.float32), **options}

        def chain(x, stream, weight, before, second, around=around):
            return ck.add_rms_norm(x, stream, weight, before=before, second=second, **around)

        def branches(x, weight, stream, other, *weights, centered=centered):
            joined = JoinedNorms(weights[0], other, weights[1])
            return ck.rms_norm_add(x, weight, stream, joined=joined, centered=centered, scale=0.375, **options)

        more = [normal(*shape[-1:], dtype=weight_dtype, scale=0.5 + i) for i in range(2)]
        yield chain, [x, stream.astype(dtype), weight, *more]
        yield branches, [x, weight, stream, normal(*shape[:-1], shape[-1], dtype=dtype, scale=3.0), *more]
    for activation in ("silu", "sigmoid"):
        yield partial(ck.gated_rms_norm, activation=activation, **options), [x, x, weight]

    def scaled(x, weight, stream, scale):
        return ck.rms_norm_add(x, weight, stream, scale=scale, **options)

    yield scaled, [x, weight, stream, mx.full((1,), 0.75, weight_dtype)]
    yield partial(ck.rms_norm_add, scale=0.375, **options), [x, weight, stream]


def delta(backend, length, groups, heads, key_dim, value_dim, dtype, *, taps=4, activation="silu", placed=False):
    """A layer of Gated DeltaNet; ``placed`` is one token that finds its state in a slot and fills the next."""
    channels = 2 * groups * key_dim + heads * value_dim
    slots = (3,) if placed else ()
    arrays = [
        normal(1, length, channels + heads * (value_dim + 2), dtype=dtype),
        normal(*slots, 1, taps - 1, channels, dtype=dtype),
        normal(*slots, 1, heads, value_dim, key_dim),
        normal(channels, taps, 1, dtype=dtype),
        normal(heads),
        normal(heads, dtype=dtype),
        normal(value_dim, dtype=dtype),
    ]

    def call(projected, tail, state, *learned):
        weights = ck.DeltaWeights(*learned, 1e-6, activation)
        if not placed:
            found = ck.gated_delta(projected, tail, state, weights, backend=backend)
            return [array for array in found if array is not None]
        start = mx.array([7], mx.int32)
        if not ck.steps(projected, backend):
            return gated_delta_step_reference(projected, tail, state, start, weights)
        tail, state = tail + 0, state + 0  # the test's own are not to change
        return ck.gated_delta_step(projected, tail, state, start, weights, backend=backend), tail, state

    return call, arrays


def step(
    backend,
    length,
    capacity,
    start,
    head_dim,
    dtype,
    *,
    window=None,
    normed=False,
    learned=True,
    sinks=False,
    pairs=None,
    gated=False,
):
    """Attention of a decode step over a cache that the rows are first written into, in place. Norms of ``gated``
    queries are stored less 1."""
    sizes, options = {"heads": 4, "kv_heads": 2}, {"scale": 0.125, "mask": "causal", "window": window}
    if gated:
        sizes |= {"gated": True, "centered": True}
    norms = ("q_norm", "k_norm") if normed and learned else ()
    optional = {name: normal(head_dim, dtype=dtype) for name in norms}
    if normed:
        options |= {"eps": 1e-6, "head_norm": not learned}
    if sinks:
        optional["sinks"] = normal(4, dtype=dtype)
    arrays = [
        normal(1, length, (12 if gated else 8) * head_dim, dtype=dtype),
        normal(length, pairs or head_dim // 2, 2),
        normal(2, 1, 2, capacity, head_dim, dtype=dtype),
        mx.array([start], dtype=mx.int32),
        *optional.values(),
    ]

    def call(qkv, rotation, cache, start, *rest):
        named = sizes | options | dict(zip(optional, rest, strict=True))
        if not ck.appends(qkv, backend):
            return append_attention_reference(qkv, rotation, cache, start, **named)
        cache = cache + 0  # the test's own is not to change
        return ck.append_attention(qkv, rotation, cache, start, **named, backend=backend), cache

    return call, arrays


def latents(backend, heads, sizes, length, capacity, start, stored, dtype, *, transposed=False, interleaved=True):
    """A decode step over latents, into which the rows are first written; ``sizes`` are n, r, R and v, ``stored`` is
    (bits, group). Queries and latents are parts of one product."""
    nope, turned, rank, values = sizes
    joint = normal(1, length, heads * (nope + turned) + rank + turned, dtype=dtype)
    shapes = [(rank, nope), (values, rank)] if transposed else [(nope + values, rank)]
    matrices = [packed(heads * rows, columns, *stored, mx.bfloat16) for rows, columns in shapes]
    arrays = [
        joint,
        normal(rank, dtype=dtype),
        normal(length, turned // 2, 2),
        normal(1, 1, 1, capacity, rank + turned, dtype=dtype),
        mx.array([start], dtype=mx.int32),
        *(part for matrix in matrices for part in matrix),
    ]
    options = {"scale": 0.02, "transposed": transposed, "interleaved": interleaved, "eps": 1e-6, "mask": "causal"}

    def call(joint, norm_weight, rotation, cache, start, *parts):
        q, latent = mx.split(joint, [heads * (nope + turned)], axis=-1)
        if transposed:
            rows = ck.HeadRows(*parts[:3], *stored, 0, rank, rank), ck.HeadRows(*parts[3:], *stored, 0, values, values)
        else:
            rows = [ck.HeadRows(*parts, *stored, *at, nope + values) for at in ((0, nope), (nope, values))]
        given = (q, latent, norm_weight, rotation)
        if not ck.latent_attends(q, rotation, backend):
            return latent_attention_reference(*given, cache, start, *rows, **options)
        cache = cache + 0  # the test's own is not to change
        return ck.latent_attention(*given, cache, start, *rows, **options, backend=backend), cache

    return call, arrays


def rotate(backend, shape, pairs, dtype, **options):
    arrays = [normal(*shape, dtype=dtype), normal(shape[2], pairs, 2)]
    return partial(ck.rotate, **options, backend=backend), arrays


def streams(backend, shape, count, dtype):
    """What is done with ``count`` residual streams, which together have ``shape``."""
    wide, narrow = normal(*shape, dtype=dtype), normal(*shape[:-1], shape[-1] // count, dtype=dtype)
    yield partial(ck.stream_mix, streams=count, backend=backend), [normal(*shape, dtype=dtype, scale=2.0), wide]
    logits = normal(*shape[:-1], count, dtype=dtype, scale=3.0)
    yield partial(ck.stream_inject, backend=backend), [wide, narrow, logits]
    yield partial(ck.ngram_gate, backend=backend), [wide, wide * 0.5 - 0.1, narrow]


def sparse(backend, length, heads, width, keys, block, top_k, dtype, kv_dtype):
    """The steps of sparse attention of the last ``length`` of ``keys`` tokens, among equal scores too."""
    blocks, start = keys // block, mx.array([keys - length], mx.int32)
    pairs = width // 4
    rotation = normal(blocks, pairs, 2)
    pool = partial(ck.pool_blocks, eps=1e-6, centered=width % 8 == 0, backend=backend)
    yield pool, [normal(1, blocks, block, width, dtype=kv_dtype), normal(width, dtype=dtype), rotation]

    def score(queries, keys):
        scores = ck.score_blocks(queries, keys, start, block=block, backend=backend)
        return mx.where(scores == -mx.inf, -1.0, scores)

    yield score, [normal(1, heads, length, width, dtype=dtype), normal(1, blocks, width, dtype=kv_dtype)]
    last = mx.array([keys - 1], mx.int32)
    scores = mx.maximum(normal(2, blocks), 0.0)
    scores = mx.where(mx.arange(blocks) % 4 == 1, mx.roll(scores, 1, axis=1), scores)

    def choose(scores):
        return ck.choose_positions(scores, last, block=block, top_k=top_k, backend=backend)

    yield choose, [scores]
    yield choose, [mx.concatenate([scores, mx.full((2, 70), 9.0)], axis=1)]
    chosen = np.sort(np.random.default_rng(keys).permutation(keys)[: top_k * block])
    chosen = mx.array(np.pad(chosen, (0, block - 1))[None].astype(np.int32))
    listed = partial(ck.indexed_attention, scale=0.125, backend=backend)
    cache, ends = normal(2, 1, 2, keys, width, dtype=kv_dtype), mx.array([top_k * block - 1], mx.int32)

    def attend_to(q, kv, gates=None):
        return listed(q, kv, chosen, ends, gates=gates)

    yield attend_to, [normal(1, 6, 1, width, dtype=dtype), cache]
    yield attend_to, [normal(1, 6, 1, width, dtype=dtype), cache, normal(1, 1, 16 * width, dtype=dtype)]


def index(backend, heads, width, block, token, dtype):
    """One token of an indexer, behind ``token`` others."""
    pairs, start = width // 4, mx.array([token], mx.int32)
    arrays = [normal(1, 1, (heads + 1) * width, dtype=dtype), normal(width, dtype=dtype), normal(width)]
    arrays += [normal(1, pairs, 2), normal(1, pairs, 2) * 0.5]
    arrays += [normal(1, 1, 1, token + 3, width, dtype=dtype), normal(1, 1, 1, token // block + 2, width, dtype=dtype)]
    options = {"block": block, "eps": 1e-6, "centered": heads % 2 == 0}

    def call(rows, q_norm, k_norm, *rest):
        norms = options | {"q_norm": q_norm, "k_norm": k_norm}
        rotation, block_rotation, keys, blocks = rest
        if not ck.index_appends(rows, backend):
            return index_append_reference(rows, *rest, start, **norms)
        keys, blocks = keys + 0, blocks + 0  # the test's own are not to change
        given = rows, rotation, block_rotation, keys, blocks, start
        return ck.index_append(*given, **norms, backend=backend), keys, blocks

    return call, arrays


def convolution(backend, width, taps, apart, dtype, weight_dtype):
    """One token of a dilated convolution, whose state lies in slots."""
    arrays = [normal(2, 1, width, dtype=dtype) * scale for scale in (1.0, 0.5, 2.0)]
    arrays += [normal(3, 2, (taps - 1) * apart, width, dtype=dtype), normal(width, taps, dtype=weight_dtype)]

    def call(x, told, residual, tail, weight):
        start = mx.array([5], mx.int32)
        if not ck.convolves(x, backend):
            return dilated_convolution_step_reference(x, told, residual, tail, start, weight, apart=apart)
        tail = tail + 0  # the test's own are not to change
        given = x, told, residual, tail, start, weight
        return ck.dilated_convolution_step(*given, apart=apart, backend=backend), tail

    return call, arrays


def router(backend, rows, hidden, experts, top_k, dtype, weights, *, normalize, arounds=False, biased=False, **options):
    """Logits alone where there is no ``hidden``, a matrix of ``weights`` otherwise; with what can stand around them, or
    ``biased`` in the choice."""
    optional = {"weight": normal(experts, hidden, dtype=weights)} if hidden else {}
    if arounds:
        optional |= {"bias": normal(experts, dtype=weights), "expert_scale": normal(experts, dtype=weights)}

    if biased:
        optional["choice_bias"] = normal(experts) - 2

    def call(x, *rest):
        named = dict(zip(optional, rest, strict=True)) | options
        return ck.router_topk_select(x, top_k=top_k, normalize=normalize, **named, backend=backend)

    return call, [normal(rows, hidden or experts, dtype=dtype), *optional.values()]


def experts(count, hidden, intermediate, stored, companions, activation, *, biased=False, alpha=1.702):
    """The kind of experts, and ``count`` of them in one array; ``stored`` is (bits, group) of gate and up, and of down,
    with ``"mxfp4"`` for bits where it is that. Each blob has a gap, and begins with one."""
    rng, offset, parts = np.random.default_rng((count, hidden, intermediate)), 48, []

    def place(array):
        nonlocal offset
        offset = -(-offset // 16) * 16
        parts.append((offset, np.array(array.view(mx.uint8)).reshape(count, -1)))
        offset += parts[-1][1].shape[1]
        return parts[-1][0]

    def matrix(rows, columns, bits, group_size):
        if bits == "mxfp4":
            words = mx.array(rng.integers(0, 2**32, (count * rows, columns // 8), dtype=np.uint32))
            exponents = mx.array(rng.integers(118, 124, (count * rows, columns // 32), dtype=np.uint8))
            places = {"offset": place(words), "scales": place(exponents)}
            kind = {"dtype": mx.uint8, "bits": 4, "group_size": group_size, "mode": bits}
        else:
            words, scales, biases = packed(count * rows, columns, bits, group_size, companions)
            places = {"offset": place(words), "scales": place(scales), "biases": place(biases)}
            kind = {"dtype": companions, "bits": bits, "group_size": group_size}
        if biased:
            values = mx.array(rng.normal(size=(count, rows)).astype(np.float32)).astype(companions)
            places |= {"bias": place(values), "bias_dtype": companions}
        return ck.BlobMatrix(rows, columns, **kind, **places)

    gate, up = (matrix(intermediate, hidden, *stored[0]) for _ in range(2))
    blob = ck.ExpertBlob(gate, up, matrix(hidden, intermediate, *stored[1]), activation, alpha, 7.0)
    blobs = np.full((count, -(-offset // 64) * 64), 255, np.uint8)
    for start, array in parts:
        blobs[:, start : start + array.shape[1]] = array
    return blob, mx.array(blobs.view(np.uint32))


def phases(backend, rows, top_k, dtype, kind, *, residual=False, mapped=False):
    """Both halves of the experts of a decode step; ``kind`` is what `experts` gives. ``mapped`` tells by a map of more
    experts in which slots they are."""
    blob, blobs = kind
    chosen = [np.random.default_rng(row).permutation(len(blobs))[:top_k] for row in range(rows)]
    slots = mx.array(np.array(chosen, np.int32))
    hidden, intermediate = blob.gate.columns, blob.down.columns
    weights = mx.softmax(normal(rows, top_k), axis=-1)
    added = [normal(rows, hidden, dtype=dtype)] * residual
    slot_of = []
    if mapped:
        experts = np.random.default_rng(9).permutation(2 * len(blobs))[: len(blobs)]
        slot_of = [mx.zeros((2 * len(blobs),), mx.int32)]
        slot_of[0][mx.array(experts)] = mx.arange(len(blobs))
        slots = mx.array(experts.astype(np.int32))[slots]

    def first(blobs, slots, x, *slot_of):
        options = dict(zip(("slot_of",), slot_of, strict=False))
        return ck.moe_phase1_gate_up_act(ck.ExpertArena(blob, [], blobs), slots, x, **options, backend=backend)

    def second(blobs, slots, inner, weights, *more):
        options = dict(zip(["residual"] * residual + ["slot_of"] * mapped, more, strict=True))
        arena = ck.ExpertArena(blob, [], blobs)
        return ck.moe_phase2_down_reduce(arena, slots, inner, weights, **options, backend=backend)

    yield first, [blobs, slots, normal(rows, hidden, dtype=dtype), *slot_of]
    yield second, [blobs, slots, normal(rows * top_k, intermediate, dtype=dtype), weights, *added, *slot_of]


def grouped(backend, rows, dtype, kind):
    """Experts of rows that stand in their order, as often as chance has it; ``kind`` is what `experts` gives."""
    blob, blobs = kind
    slots = mx.array(np.sort(np.random.default_rng(rows).integers(0, len(blobs), rows)).astype(np.int32))
    # What stands between both products is in dtype, too, and must not overflow it.
    x = normal(rows, blob.gate.columns, dtype=dtype, scale=0.25 if dtype == mx.float16 else 1.0)

    def call(blobs, slots, x):
        return ck.grouped_experts(ck.ExpertArena(blob, [], blobs), slots, x, backend=backend)

    return call, [blobs, slots, x]


INT4, INT8, MXFP4 = ((4, 64), (4, 64)), ((8, 128), (8, 32)), (("mxfp4", 32), ("mxfp4", 32))


def variants(backend: Backend) -> Iterator[Call]:
    for bits in (1, 2, 3, 4, 5, 6, 8):
        for dtype in DTYPES:
            yield affine(backend, 1, 384, 45, bits, 32, dtype, mx.float16)
    for rows in (1, 3, 8):
        yield affine(backend, rows, 14336, 42, 4, 64, mx.bfloat16, mx.bfloat16)
        yield affine(backend, rows, 28672, 42, 8, 128, mx.float32, mx.float32, residual=(rows, 42))
        around = {"row_gate": (rows, 1), "residual": (rows, 42)}
        yield affine(backend, rows, 512, 42, 4, 64, mx.bfloat16, mx.bfloat16, **around)
        centered = {"norm_weight": (384,), "more": {"centered": True}}
        yield affine(backend, rows, 384, 42, 4, 64, mx.bfloat16, mx.bfloat16, **centered)
        gated = {"op": ck.gated_affine_matmul, "norm_weight": (4096,)}
        yield affine(backend, rows, 4096, 42, 4, 64, mx.bfloat16, mx.bfloat16, **gated)
        yield affine(backend, rows, 1792, 300, 4, 64, mx.float16, mx.float16, op=ck.greedy_head)
    for dtype in DTYPES:
        for size in (1, 7, 8, 8192, 8193, 20000):
            yield largest(backend, size, dtype)
    yield affine(
        backend, 1, 576, 960, 4, 32, mx.float16, mx.float16, norm_weight=(576,), bias=(960,), residual=(1, 960)
    )
    for dtype in DTYPES[:2]:
        wide = {"op": ck.gated_affine_matmul, "more": {"activation": "gelu_erf"}, "stream": mx.float32}
        yield affine(backend, 1, 2560, 42, 4, 64, dtype, mx.bfloat16, norm_weight=(2560,), **wide)
        yield affine(backend, 3, 2560, 42, 4, 64, dtype, mx.bfloat16, residual=(3, 42), stream=mx.float32)
    for activation in gemv.ACTIVATIONS[1:]:
        more = {"activation": activation} | ({"limit": 7.0} if activation == "clamped_swiglu" else {})
        options = {"op": ck.gated_affine_matmul, "more": more, "bias": (42,)}
        yield affine(backend, 1, 2880, 42, 4, 64, mx.bfloat16, mx.bfloat16, **options)
    yield affine(backend, 1, 2560, 42, 4, 64, mx.bfloat16, mx.bfloat16, more={"softcap": 30.0})
    yield affine(backend, 1, 6656, 42, 4, 64, mx.bfloat16, mx.bfloat16, more={"scale": 0.2, "softcap": 20.0})
    for rows in (1, 3, 8):
        yield dense(backend, rows, 1023, 130, mx.float16, mx.bfloat16, biased=True)
        yield dense(backend, rows, 128, 64, mx.bfloat16, mx.float32, biased=False)
        yield dense(backend, rows, 2560, 32, mx.bfloat16, mx.bfloat16, biased=False)
        yield dense(backend, rows, 2048, 130, mx.bfloat16, mx.bfloat16, biased=False, result=mx.float32)
        yield dense(backend, rows, 96, 40, mx.bfloat16, mx.float16, biased=True, stream=mx.float32)
    for head_dim, value_dim in ((16, 16), (64, 64), (80, 80), (128, 128), (256, 256), (512, 512), (576, 512)):
        yield attend(backend, 9, 3, 1, 100, head_dim, value_dim, mx.bfloat16, mx.float16)
    for bits in (3, 4, 8):
        yield look_up(backend, 1, bits, 64, mx.bfloat16)
        yield look_up(backend, 9, bits, 64, mx.float32)
        yield look_up(backend, 1, bits, 64, mx.float16, scale=53.0)
        yield look_up(backend, 2, bits, 64, mx.bfloat16, copies=4)
    for dtype in DTYPES:
        yield epilogue(backend, 1, 32, 8, 128, dtype, normed=False)
        yield epilogue(backend, 3, 4, 2, 64, dtype, normed=True)
        yield epilogue(backend, 2, 32, 2, 128, dtype, normed=True, learned=False)
        yield epilogue(backend, 2, 16, 4, 256, dtype, normed=False, pairs=32)
        yield gated_epilogue(backend, 1, 6, 2, 256, 32, dtype, centered=True)
        yield gated_epilogue(backend, 9, 3, 1, 48, 8, dtype, centered=False)
        yield value_epilogue(backend, 1, 16, 8, 256, dtype, shared_values=False)
        yield value_epilogue(backend, 3, 4, 2, 512, dtype, shared_values=True)
        yield value_epilogue(backend, 2, 8, 0, 64, dtype, shared_values=False)
    for dtype in DTYPES:
        yield attend(backend, 8, 1, 8, 1100, 128, 128, dtype, dtype, sinks=True, mask="causal", window=900)
        yield attend(backend, 8, 2, 1, 30, 128, 128, dtype, mx.float16, sinks=True, window=7)
    for dtype in DTYPES:
        yield from norms(backend, (1, 3, 4096), dtype, mx.bfloat16)
        yield from norms(backend, (2, 5, 3, 80), dtype, dtype)
        yield rotate(backend, (1, 8, 3, 128), 64, dtype)
        yield rotate(backend, (1, 4, 3, 256), 32, dtype)
        yield rotate(backend, (1, 4, 1, 512), 64, dtype, span=512)
        yield rotate(backend, (1, 16, 3, 192), 32, dtype, start=128, interleaved=True)
    for dtype in DTYPES:
        for activation in gemv.ACTIVATIONS:
            yield elementwise(backend, (1, 3, 257), activation, dtype)
        yield elementwise(backend, (1, 3, 16), "sigmoid", dtype, share=256)
        yield elementwise(backend, (1, 1, 320), "sigmoid", dtype, scale=0.25)
    for rows in (1, 8):
        yield router(backend, rows, None, 128, 8, mx.float32, mx.bfloat16, normalize=True, arounds=True, scale=2.5)
        yield router(backend, rows, 64, 8, 2, mx.float32, mx.bfloat16, normalize=True)
        limits = {"sigmoid": True, "groups": 8, "kept_groups": 4}
        yield router(backend, rows, 64, 64, 6, mx.float32, mx.bfloat16, normalize=rows == 1, biased=True, **limits)
        yield router(backend, rows, 77, 60, 4, mx.float32, mx.float16, normalize=False, arounds=True, logit_scale=0.1)
        for activation, options in (("silu", {}), ("gelu_tanh", {}), ("clamped_swiglu", {"biased": True})):
            kind = experts(12, 384, 192, INT4, mx.bfloat16, activation, **options)
            yield from phases(backend, rows, 8, mx.bfloat16, kind, residual=activation == "silu")
            yield from phases(backend, rows, 8, mx.bfloat16, kind, residual=rows == 1, mapped=True)
            yield grouped(backend, 7 * rows, mx.bfloat16, kind)
    for dtype in DTYPES:
        yield from phases(backend, 1, 2, dtype, experts(3, 128, 224, ((8, 64), (4, 32)), mx.float16, "silu"))
        kind = experts(4, 352, 96, MXFP4, mx.bfloat16, "clamped_swiglu", biased=True, alpha=1.3)
        yield from phases(backend, 1, 3, dtype, kind, residual=True, mapped=True)
        yield grouped(backend, 50, dtype, kind)
    for dtype in DTYPES:
        yield from streams(backend, (1, 1, 10240), 4, dtype)
        yield from streams(backend, (2, 3, 240), 3, dtype)
        yield from sparse(backend, 1, 4, 128, 403, 4, 64, dtype, dtype)
        yield from sparse(backend, 3, 2, 24, 95, 8, 3, dtype, mx.float16)
        yield from sparse(backend, 1, 2, 24, 30, 8, 5, dtype, dtype)
        for token in (0, 6, 7):
            yield index(backend, 4, 128, 4, token, dtype)
        yield convolution(backend, 300, 4, 3, dtype, mx.bfloat16)
    for dtype in DTYPES:
        yield step(backend, 1, 40, 21, 64, dtype)
        yield step(backend, 1, 300, 290, 128, dtype, normed=True)
        yield step(backend, 1, 300, 290, 128, dtype, normed=True, learned=False)
        yield step(backend, 1, 17, 40, 80, dtype, sinks=True)
        yield step(backend, 1, 40, 21, 256, dtype, pairs=32)
        yield step(backend, 1, 1100, 1050, 128, dtype)
        yield step(backend, 3, 40, 30, 64, dtype, window=9)
        yield step(backend, 1, 40, 21, 256, dtype, normed=True, pairs=32, gated=True)
        yield step(backend, 1, 1100, 1050, 256, dtype, normed=True, pairs=32, gated=True)
        yield step(backend, 3, 40, 30, 80, dtype, normed=True, pairs=10, gated=True)
        yield delta(backend, 1, 2, 4, 128, 128, dtype, placed=True)
        yield delta(backend, 1, 1, 3, 128, 128, dtype, activation="sigmoid", placed=True)
        yield delta(backend, 19, 1, 2, 128, 128, dtype)
        yield delta(backend, 3, 2, 2, 40, 12, dtype, taps=2, activation="sigmoid")
        yield latents(backend, 4, (128, 64, 512, 128), 1, 70, 60, (4, 64), dtype)
        yield latents(backend, 3, (32, 8, 64, 24), 3, 20, 7, (8, 32), dtype, transposed=True, interleaved=False)


def misaligned(variant: Call) -> Call:
    """The same call with every array one element away from where its memory begins, except packed matrices: GPUs load
    four of their words at a time, and are promised that a row begins at 16 bytes."""
    function, arrays = variant
    shapes = [array.shape for array in arrays]
    moved = [array.dtype != mx.uint32 or array.ndim == 1 for array in arrays]

    def call(*flat):
        parts = zip(flat, shapes, moved, strict=True)
        return function(*(a[1:].reshape(shape) if away else a for a, shape, away in parts))

    return call, [
        mx.concatenate([mx.zeros((1,), a.dtype), a.reshape(-1)]) if away else a
        for a, away in zip(arrays, moved, strict=True)
    ]


def awkward(backend: Backend) -> Iterator[Call]:
    """Sizes that no model has and that a fault would show at: to be run, not only compiled."""
    for dtype in DTYPES:
        for bits in (1, 2, 3, 4, 5, 6, 8):
            for group_size, companions in ((32, mx.float16), (64, mx.bfloat16), (128, mx.float32)):
                yield affine(backend, 1, 1056 // group_size * group_size, 130, bits, group_size, dtype, companions)
                yield affine(backend, 3, 640, 45, bits, group_size, dtype, companions)
                yield affine(backend, 8, 384, 301, bits, group_size, dtype, companions)
        for activation in gemv.ACTIVATIONS:
            more = {"activation": activation} | ({"limit": 7.0} if activation == "clamped_swiglu" else {})
            options = {"op": ck.gated_affine_matmul, "more": more, "bias": (90,)}
            yield affine(backend, 3, 2880, 90, 4, 64, dtype, mx.bfloat16, **options)
        yield affine(backend, 1, 2560, 42, 8, 64, dtype, mx.bfloat16, more={"softcap": 30.0}, norm_weight=(2560,))
        if dtype == mx.float32:  # between near ties, halves may choose the other
            yield affine(backend, 3, 256, 3000, 8, 64, dtype, mx.bfloat16, op=ck.greedy_head, norm_weight=(256,))
        yield dense(backend, 5, 1023, 130, dtype, mx.bfloat16 if dtype == mx.float16 else mx.float16, biased=True)
        gated = {"op": ck.gated_affine_matmul}
        wide = {"norm_weight": (14336,), "residual": (5, 514), "stream": mx.float32}
        yield affine(backend, 5, 14336, 514, 4, 64, dtype, mx.bfloat16, **wide)
        for rows in (1, 5):
            around = {"norm_weight": (14336,), "bias": (514,), "residual": (rows, 514)}
            yield affine(backend, rows, 14336, 514, 4, 64, dtype, mx.bfloat16, **around)
            columns = 2048 if dtype == mx.float16 else 14336  # a product of two sums overflows float16
            yield affine(backend, rows, columns, 514, 4, 64, dtype, mx.bfloat16, norm_weight=(columns,), **gated)
        yield look_up(backend, 3, 4, 64, dtype)
        yield router(backend, 5, 200, 130, 6, mx.float32, dtype, normalize=dtype == mx.float16, arounds=True)
        for stored in (INT4, INT8, MXFP4, ((4, 32), (8, 64))):
            kind = experts(9, 1152, 640, stored, dtype, "gelu_tanh", biased=True)
            yield from phases(backend, 5, 7, dtype, kind, residual=True)
            yield grouped(backend, 100, dtype, kind)
        yield router(backend, 3, None, 513, 11, mx.float32, dtype, normalize=dtype == mx.float16)
        for heads, kv_heads, length, keys, head_dim, value_dim, window, sinks in (
            (1, 1, 1, 1, 64, 64, None, False),
            (8, 1, 1, 31, 128, 128, None, True),
            (8, 2, 3, 33, 64, 64, 7, True),
            (32, 8, 1, 1000, 128, 128, None, False),
            (32, 8, 1, 4097, 128, 128, None, True),
            (9, 3, 8, 4097, 64, 64, 1000, False),
            (16, 2, 1, 1000, 512, 512, None, False),
            (16, 1, 1, 1000, 576, 512, None, False),
            (3, 1, 2, 100, 80, 80, None, False),
        ):
            sizes = (heads, kv_heads, length, keys, head_dim, value_dim)
            yield attend(backend, *sizes, dtype, dtype, sinks=sinks, mask="causal", window=window)
        yield step(backend, 3, 37, 30, 80, dtype, normed=True, sinks=True)
        yield step(backend, 3, 7, 12, 16, dtype)
        yield latents(backend, 5, (19, 10, 96, 6), 5, 33, 28, (3, 32), dtype)
        yield latents(backend, 16, (128, 64, 512, 128), 1, 1300, 1290, (4, 64), dtype, interleaved=False)
        yield step(backend, 1, 37, 30, 80, dtype, normed=True, learned=False)
        yield step(backend, 3, 37, 30, 80, dtype, normed=True, learned=False, pairs=9)
        yield delta(backend, 1, 3, 9, 33, 70, dtype, taps=3, placed=True)
        yield delta(backend, 40, 2, 4, 192, 96, dtype)
        yield delta(backend, 1, 1, 1, 16, 300, dtype)
        yield step(backend, 2, 300, 280, 96, dtype, normed=True, pairs=5, gated=True)
        yield epilogue(backend, 31, 3, 1, 80, dtype, normed=True)
        yield epilogue(backend, 5, 3, 1, 81, dtype, normed=True, pairs=7)
        yield epilogue(backend, 5, 3, 1, 81, dtype, normed=True, learned=False, pairs=7)
        yield elementwise(backend, (5, 3), "gelu_erf", dtype, share=11)
        for shape in ((577,), (1, 33, 4099), (3, 5, 2, 31)):
            yield from norms(backend, shape, dtype, mx.float16)
        yield rotate(backend, (2, 3, 5, 46), 7, dtype, start=5, span=20)
        yield from streams(backend, (3, 1, 5, 77), 7, dtype)
        yield from sparse(backend, 8, 5, 44, 1003, 3, 100, dtype, mx.bfloat16)
        yield from sparse(backend, 1, 1, 128, 9000, 4, 512, dtype, dtype)
        yield index(backend, 3, 20, 3, 5, dtype)
        yield convolution(backend, 77, 2, 1, dtype, dtype)
        yield rotate(backend, (2, 3, 5, 23), 10, dtype, interleaved=True)
    for dtype in DTYPES:
        for bits in (3, 4, 8):
            yield misaligned(affine(backend, 1, 96, 45, bits, 32, dtype, mx.float16, residual=(1, 45)))
        yield misaligned(look_up(backend, 3, 3, 64, dtype))
        yield misaligned(attend(backend, 8, 2, 1, 33, 64, 64, dtype, dtype))
        yield misaligned(epilogue(backend, 2, 3, 1, 64, dtype, normed=True))
        wide = {"norm_weight": (128,), "residual": (1, 45), "stream": mx.float32}
        yield misaligned(affine(backend, 1, 128, 45, 4, 64, dtype, mx.float16, **wide))
        yield from map(misaligned, norms(backend, (3, 80), dtype, mx.bfloat16))
        yield misaligned(rotate(backend, (1, 2, 3, 64), 32, dtype))
        yield misaligned(router(backend, 2, 40, 33, 3, mx.float32, dtype, normalize=True, arounds=True))
