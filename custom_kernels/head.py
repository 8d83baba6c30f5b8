"""The largest logit: of logits that are there, and of an output head where nothing else is wanted."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels import affine, gemv
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

LARGEST_KERNEL = Kernel("largest", inputs=("x", "places"), outputs=("index", "peak"), headers=("eight",))
GREEDY_HEAD = Op("greedy_head", (gemv.KERNEL, gemv.COMBINE), rows=gemv.ROWS)
LARGEST = Op("largest", (LARGEST_KERNEL,), device="gpu")
SLICE = 8192
"""Values among which one threadgroup finds the largest."""


def _first_largest(logits: mx.array) -> mx.array:
    return mx.argmax(mx.where(mx.isnan(logits), -mx.inf, logits), axis=-1)


def greedy_head_reference(
    x, weight, scales, biases, *, bits: int, group_size: int, bias=None, norm_weight=None, eps=None
) -> mx.array:
    """Definition of `greedy_head`."""
    options = {"bits": bits, "group_size": group_size, "bias": bias, "norm_weight": norm_weight, "eps": eps}
    return _first_largest(affine.affine_matmul_reference(x.astype(mx.float32), weight, scales, biases, **options))


def greedy_head(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    bias: mx.array | None = None,
    norm_weight: mx.array | None = None,
    eps: float | None = None,
    backend: Backend,
) -> mx.array:
    """The row of an affine-quantized ``W [V, K]`` with the largest ``norm(x) @ W.T + bias``, without writing logits.

    ``x [..., K]`` -> uint32 ids ``[...]``; see `affine.affine_matmul` for the rest. Sums are compared in float32,
    before they would be rounded to the dtype of ``x``. The lower row wins where they are equal, NaN never wins, and a
    head whose every value is NaN or -infinity gives 0. A softcap would not change the answer. Raises OptionError for
    parts that do not fit.
    """
    options = {"bits": bits, "group_size": group_size, "bias": bias, "norm_weight": norm_weight}
    affine.check_parts("greedy_head", x, weight, scales, biases, **options, eps=eps)
    if x.size == 0:
        return mx.zeros(x.shape[:-1], dtype=mx.uint32)
    if gemv.serves(GREEDY_HEAD, x, weight, backend):
        backend.count(GREEDY_HEAD.name, "kernel")
        form = gemv.Form(eps=eps or 0.0, argmax=True)
        return gemv.gemv(x, weight, scales, biases, **options, form=form, backend=backend)
    backend.count(GREEDY_HEAD.name, "mlx")
    logits = affine.affine_matmul(x.astype(mx.float32), weight, scales, biases, **options, eps=eps, backend=backend)
    return _first_largest(logits)


def largest_reference(x) -> tuple[mx.array, mx.array]:
    """Definition of `largest`."""
    return mx.argmax(x).astype(mx.int32).reshape(1, 1), mx.max(x).astype(mx.float32).reshape(1)


@lru_cache(maxsize=256)
def _plan(backend: str, size: int, dtype: mx.Dtype, places: bool) -> Launch:
    simdgroups = 1 if backend == "host" else 32
    groups = 1 if places else -(-size // SLICE)
    template = (("T", dtype), ("N", size), ("SLICE", SLICE), ("PLACES", places), ("SIMDS", simdgroups))
    return Launch(
        LARGEST_KERNEL,
        template,
        groups=(groups, 1),
        simdgroups=simdgroups,
        input_dtypes=(dtype, mx.int32 if places else None),
        output_shapes=((1, 1) if groups == 1 else (groups,), (groups,)),
        output_dtypes=(mx.int32, mx.float32),
    )


def largest(x: mx.array, *, backend: Backend) -> tuple[mx.array, mx.array]:
    """The place of the largest of ``x [N]``, int32 ``[1, 1]`` as a token is fed, and its value, float32 ``[1]``.

    The first wins where values are equal. Where one is NaN, so is the value, and the place says nothing. Raises
    OptionError for an array that has another number of axes, or nothing in it.
    """
    if x.ndim != 1 or x.size == 0:
        raise OptionError(f"largest: x is {x.dtype} {list(x.shape)}; it has one axis, and something in it.")
    if not LARGEST.serves(backend, x.dtype):
        backend.count(LARGEST.name, "mlx")
        return largest_reference(x)
    backend.count(LARGEST.name, "kernel")
    index, peak = backend.launch(_plan(backend.name, x.size, x.dtype, False), (x, None))
    if peak.size == 1:
        return index, peak
    if peak.size > SLICE:
        raise OptionError(f"largest: x has {x.size} values; up to {SLICE * SLICE} are compared.")
    return tuple(backend.launch(_plan(backend.name, peak.size, peak.dtype, True), (peak, index)))
