"""The output head, where only its largest value is wanted."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.custom_kernels import affine, gemv
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.op import Op

GREEDY_HEAD = Op("greedy_head", (gemv.KERNEL, gemv.COMBINE), rows=gemv.ROWS)


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
