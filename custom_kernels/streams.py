"""Residual streams side by side: mixed before a sublayer, added to after it, told about n-grams.

Hyper-connections (Zhu et al. 2024, arXiv:2409.19606) in the low-rank form of Qwen4-Exp. Streams lie one after the other
in a row, ``[..., C * H]``.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

MIX = Kernel("stream_mix", inputs=("gate", "x"), outputs=("y",))
INJECT = Kernel("stream_inject", inputs=("x", "added", "logits"), outputs=("y",))
GATE = Kernel("ngram_gate", inputs=("key", "query", "value"), outputs=("y",), headers=("reduce",))
STREAM_MIX = Op("stream_mix", (MIX,))
STREAM_INJECT = Op("stream_inject", (INJECT,))
NGRAM_GATE = Op("ngram_gate", (GATE,))
VALUES_PER_GROUP = 1 << 13
"""Values that are worth a hand-over to another core."""
_SIMDGROUPS = 8
_LEAST_ROOT = 1e-6


def stream_mix_reference(gate, x, *, streams: int) -> mx.array:
    """Definition of `stream_mix`."""
    shape = (*x.shape[:-1], streams, -1)
    opened = mx.sigmoid(gate.astype(mx.float32)).reshape(shape)
    return (opened * x.astype(mx.float32).reshape(shape)).mean(axis=-2).astype(x.dtype)


def stream_inject_reference(x, y, logits) -> mx.array:
    """Definition of `stream_inject`."""
    streams = logits.shape[-1]
    share = 2 * mx.sigmoid(logits.astype(mx.float32) / streams)
    added = share[..., None] * y.astype(mx.float32)[..., None, :]
    return (x.astype(mx.float32) + added.reshape(x.shape)).astype(x.dtype)


def ngram_gate_reference(key, query, value) -> mx.array:
    """Definition of `ngram_gate`."""
    width = value.shape[-1]
    shape = (*value.shape[:-1], -1, width)
    alike = (key.astype(mx.float32) * query.astype(mx.float32)).reshape(shape).sum(axis=-1, keepdims=True) * width**-0.5
    root = mx.sign(alike) * mx.sqrt(mx.maximum(mx.abs(alike), _LEAST_ROOT))
    return (mx.sigmoid(root) * value.astype(mx.float32)[..., None, :]).reshape(key.shape).astype(value.dtype)


@lru_cache(maxsize=1024)
def plan(
    backend: str,
    kernel: Kernel,
    shape: tuple[int, ...],
    streams: int,
    dtype: mx.Dtype,
    input_dtypes: tuple[mx.Dtype, ...],
) -> Launch:
    """The launch of a kernel of this module, where all streams together have ``shape``."""
    width, host = shape[-1] // streams, backend == "host"
    rows, scale = prod(shape[:-1]), (("SCALE_BITS", float_bits(width**-0.5)),) if kernel is GATE else ()
    units = rows * streams if kernel is GATE else -(-rows * width // (SIMD_WIDTH * _SIMDGROUPS))
    return Launch(
        kernel,
        template=(("T", dtype), ("NDIM", len(shape)), ("STREAMS", streams), ("H", width), *scale),
        groups=(min(rows, -(-rows * shape[-1] // VALUES_PER_GROUP)) if host else units, 1),
        simdgroups=1 if host else _SIMDGROUPS,
        input_dtypes=input_dtypes,
        output_shapes=((*shape[:-1], width) if kernel is MIX else shape,),
        output_dtypes=(dtype,),
    )


def _run(kernel: Kernel, shape: tuple[int, ...], streams: int, dtype: mx.Dtype, given, backend: Backend) -> mx.array:
    call = plan(backend.name, kernel, shape, streams, dtype, tuple(a.dtype for a in given))
    return backend.launch(call, given)[0]


def stream_mix(gate: mx.array, x: mx.array, *, streams: int, backend: Backend) -> mx.array:
    """The mean of ``sigmoid(gate) * x`` over ``streams`` streams: ``gate``, ``x [..., C * H]`` -> ``[..., H]`` in the
    dtype of ``x``. Raises OptionError for parts that do not fit."""
    if gate.shape != x.shape or x.shape[-1] % streams:
        raise OptionError(
            f"stream_mix: gate {list(gate.shape)} and x {list(x.shape)} have to be alike, of {streams} streams"
        )
    if x.size and STREAM_MIX.serves(backend, gate.dtype, x.dtype):
        backend.count(STREAM_MIX.name, "kernel")
        return _run(MIX, x.shape, streams, x.dtype, (gate, x), backend)
    backend.count(STREAM_MIX.name, "mlx")
    return stream_mix_reference(gate, x, streams=streams)


def stream_inject(x: mx.array, y: mx.array, logits: mx.array, *, backend: Backend) -> mx.array:
    """``x + 2 sigmoid(logits / C) y``, where each of the C streams has a logit: ``x [..., C * H]``, ``y [..., H]``,
    ``logits [..., C]`` -> the shape and dtype of ``x``. Raises OptionError for parts that do not fit."""
    if x.shape != (*y.shape[:-1], logits.shape[-1] * y.shape[-1]) or logits.shape[:-1] != y.shape[:-1]:
        raise OptionError(
            f"stream_inject: x {list(x.shape)}, y {list(y.shape)}, logits {list(logits.shape)} do not fit"
            " [..., C * H], [..., H], [..., C]"
        )
    if x.size and STREAM_INJECT.serves(backend, x.dtype, y.dtype, logits.dtype):
        backend.count(STREAM_INJECT.name, "kernel")
        return _run(INJECT, x.shape, logits.shape[-1], x.dtype, (x, y, logits), backend)
    backend.count(STREAM_INJECT.name, "mlx")
    return stream_inject_reference(x, y, logits)


def ngram_gate(key: mx.array, query: mx.array, value: mx.array, *, backend: Backend) -> mx.array:
    """``value`` for each stream, times the sigmoid of the signed square root of how alike its key and its query are.

    ``key``, ``query [..., C * H]``, ``value [..., H]`` -> ``[..., C * H]`` in the dtype of ``value``: with ``t = key .
    query / sqrt(H)``, ``sigmoid(sign(t) sqrt(max(|t|, 1e-6))) value``. Raises OptionError for parts that do not fit.
    """
    if key.shape != query.shape or key.shape[:-1] != value.shape[:-1] or key.shape[-1] % value.shape[-1]:
        raise OptionError(
            f"ngram_gate: key {list(key.shape)}, query {list(query.shape)}, value {list(value.shape)} do not fit"
            " [..., C * H] twice and [..., H]"
        )
    if key.size and NGRAM_GATE.serves(backend, key.dtype, query.dtype, value.dtype):
        backend.count(NGRAM_GATE.name, "kernel")
        streams = key.shape[-1] // value.shape[-1]
        return _run(GATE, key.shape, streams, value.dtype, (key, query, value), backend)
    backend.count(NGRAM_GATE.name, "mlx")
    return ngram_gate_reference(key, query, value)
