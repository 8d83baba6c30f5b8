"""Routers of mixtures of experts: which experts a token goes to, and what their answers weigh."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.dense import dense_matmul
from turbospark_mlx.custom_kernels.gemv import ROWS
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "router_topk_select",
    inputs=("x", "w", "logits", "bias", "expert_scale", "choice_bias"),
    outputs=("indices", "weights"),
    headers=("eight", "reduce", "order"),
)
ROUTER_TOPK_SELECT = Op("router_topk_select", (KERNEL,), rows=ROWS, only="of up to 1,024 experts")
MOST_EXPERTS = 1024
"""Each is compared with all others."""
PRODUCTS_OF_A_THREADGROUP = 1 << 16
"""On a GPU, more products are spread over many threadgroups, by another launch."""
LEAST_SUM = 1e-20
"""What a sum of sigmoids is increased by, so that it can be divided by."""


def router_topk_select_reference(
    x,
    weight=None,
    *,
    top_k: int,
    normalize: bool,
    bias=None,
    logit_scale: float = 1.0,
    scale: float = 1.0,
    expert_scale=None,
    sigmoid: bool = False,
    choice_bias=None,
    groups: int = 1,
    kept_groups: int = 1,
) -> tuple[mx.array, mx.array]:
    """Definition of `router_topk_select`."""
    logits = x.astype(mx.float32)
    if weight is not None:
        logits = logits @ weight.astype(mx.float32).T
    if bias is not None:
        logits = logits + bias.astype(mx.float32)
    logits = logits * logit_scale
    ranked = scores = mx.sigmoid(logits) if sigmoid else logits
    if choice_bias is not None:
        ranked = scores + choice_bias.astype(mx.float32)
    if groups > 1:
        ranked = _within_the_best_groups(ranked, groups, kept_groups, best=2 if sigmoid else 1)
    indices = mx.stop_gradient(mx.argsort(-ranked, axis=-1)[:, :top_k])
    if sigmoid:
        weights = mx.take_along_axis(scores, indices, axis=-1)
        if normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + LEAST_SUM)
    elif normalize:
        weights = mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)
    else:
        weights = mx.take_along_axis(mx.softmax(logits, axis=-1), indices, axis=-1)
    weights = weights * scale
    if expert_scale is not None:
        weights = weights * expert_scale.astype(mx.float32)[indices]
    return indices.astype(mx.int32), weights


def _within_the_best_groups(ranked: mx.array, groups: int, kept: int, *, best: int) -> mx.array:
    """``ranked [rows, experts]`` with those outside of the ``kept`` best groups at minus infinity."""
    grouped = ranked.reshape(ranked.shape[0], groups, -1)
    totals = -mx.sort(-grouped, axis=-1)[..., :best].sum(axis=-1)
    rank = mx.argsort(mx.argsort(-totals, axis=-1), axis=-1)
    return mx.where((rank < kept)[..., None], grouped, -mx.inf).reshape(ranked.shape)


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    rows: int,
    columns: int,
    experts: int,
    top_k: int,
    normalize: bool,
    logit_scale: float,
    scale: float,
    sigmoid: bool,
    groups: int,
    kept_groups: int,
    dtypes: tuple[mx.Dtype | None, ...],
) -> Launch:
    """The launch for ``x [rows, columns]`` or logits ``[rows, experts]``; ``dtypes`` are those of the inputs."""
    dtype, weight, _, bias, expert_scale, choice_bias = dtypes
    threads = SIMD_WIDTH * (1 if weight is None else 8)
    return Launch(
        KERNEL,
        template=(
            ("T", dtype or mx.float32),
            ("W", weight or mx.float32),
            ("H", columns),
            ("E", experts),
            ("TOP", top_k),
            ("PRODUCT", weight is not None),
            ("BIAS", bias is not None),
            ("LOGIT_SCALE_BITS", float_bits(logit_scale)),
            ("NORMALIZE", normalize),
            ("SCALE_BITS", float_bits(scale)),
            ("EXPERT_SCALE", expert_scale is not None),
            ("SIGMOID", sigmoid),
            ("CHOICE_BIAS", choice_bias is not None),
            ("GROUPS", groups),
            ("KEPT", kept_groups),
        ),
        groups=(rows, 1),
        simdgroups=1 if backend == "host" else min(32, -(-max(experts, threads) // SIMD_WIDTH)),
        input_dtypes=dtypes,
        output_shapes=((rows, top_k), (rows, top_k)),
        output_dtypes=(mx.int32, mx.float32),
    )


def _check(x, weight, top_k, bias, logit_scale, expert_scale, sigmoid, choice_bias, groups, kept_groups) -> int:
    """Check that the parts of a router belong together; returns the number of experts. Raises OptionError."""
    if x.ndim != 2 or (weight is not None and (weight.ndim != 2 or weight.shape[1] != x.shape[1])):
        given = "" if weight is None else f" and weight {list(weight.shape)}"
        raise OptionError(f"router_topk_select: x {list(x.shape)}{given} do not fit [rows, H] and [experts, H]")
    experts = x.shape[1] if weight is None else weight.shape[0]
    if not 0 < top_k <= experts:
        raise OptionError(f"router_topk_select: top_k is {top_k}; there are {experts} experts")
    if not (isfinite(logit_scale) and logit_scale > 0):
        raise OptionError(f"router_topk_select: logit_scale is {logit_scale}; it is a positive number")
    if choice_bias is not None and not sigmoid:
        raise OptionError("router_topk_select: choice_bias is for sigmoid=True; a softmax is chosen from by its logits")
    if groups < 1 or experts % groups or not 0 < kept_groups <= groups or kept_groups * experts < top_k * groups:
        raise OptionError(
            f"router_topk_select: {kept_groups} of {groups} groups of {experts} experts have no {top_k} to choose"
        )
    if sigmoid and groups > 1 and experts < 2 * groups:
        raise OptionError(
            f"router_topk_select: {experts} experts in {groups} groups, which are ranked by their two best"
        )
    for name, given in (("bias", bias), ("expert_scale", expert_scale), ("choice_bias", choice_bias)):
        if given is not None and given.shape != (experts,):
            raise OptionError(f"router_topk_select: {name} is {list(given.shape)}, but there are {experts} experts")
    return experts


def router_topk_select(
    x: mx.array,
    weight: mx.array | None = None,
    *,
    top_k: int,
    normalize: bool,
    bias: mx.array | None = None,
    logit_scale: float = 1.0,
    scale: float = 1.0,
    expert_scale: mx.array | None = None,
    sigmoid: bool = False,
    choice_bias: mx.array | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    backend: Backend,
) -> tuple[mx.array, mx.array]:
    """The ``top_k`` experts of the largest logits ``(x @ weight.T + bias) * logit_scale``, best first, with weights.

    ``x [rows, H]`` and ``weight [experts, H]``, or logits ``x [rows, experts]`` alone, in any float dtypes; ``bias``
    and ``expert_scale`` ``[experts]``. Returns int32 indices and float32 weights ``[rows, top_k]``. Weights are the
    softmax over all logits; with ``normalize`` they are divided by their sum, which is the softmax over those chosen.
    They are multiplied by ``scale``, and by ``expert_scale`` of their experts.

    With ``sigmoid``, weights are sigmoids of the logits, with ``normalize`` divided by the sum of those chosen; the
    choice is by these, to which ``choice_bias [experts]`` is added for that alone (DeepSeek-V3, arXiv:2412.19437,
    2.1.2). With ``groups`` of as many experts each, in order, only those of the ``kept_groups`` best can be chosen
    (DeepSeek-V2, arXiv:2405.04434, 2.2.2): a group is as good as its best expert, with ``sigmoid`` as its two best
    together.

    Of equal logits the lower index comes first. NaN comes after every number, and makes NaN of each softmax that it is
    part of. Raises OptionError for parts that do not fit.
    """
    limits = (sigmoid, choice_bias, groups, kept_groups)
    experts = _check(x, weight, top_k, bias, logit_scale, expert_scale, *limits)
    rows, there = x.shape[0], ROUTER_TOPK_SELECT.serves(backend, x.dtype, rows=x.shape[0])
    if rows and there and experts <= MOST_EXPERTS:
        if weight is not None and (
            min(x.size, weight.size) < 8 or (backend.device == "gpu" and weight.size > PRODUCTS_OF_A_THREADGROUP)
        ):
            x, weight = dense_matmul(x, weight, dtype=mx.float32, backend=backend), None
        backend.count(ROUTER_TOPK_SELECT.name, "kernel")
        given = (None, None, x) if weight is None else (x, weight, None)
        given = (*given, bias, expert_scale, choice_bias)
        dtypes = tuple(None if a is None else a.dtype for a in given)
        sizes = (rows, x.shape[1], experts, top_k, normalize, logit_scale, scale, sigmoid, groups, kept_groups)
        indices, weights = backend.launch(plan(backend.name, *sizes, dtypes), given)
        return indices, weights
    backend.count(ROUTER_TOPK_SELECT.name, "mlx")
    if weight is not None and rows:
        x, weight = dense_matmul(x, weight, dtype=mx.float32, backend=backend), None
    return router_topk_select_reference(
        x,
        weight,
        top_k=top_k,
        normalize=normalize,
        bias=bias,
        logit_scale=logit_scale,
        scale=scale,
        expert_scale=expert_scale,
        sigmoid=sigmoid,
        choice_bias=choice_bias,
        groups=groups,
        kept_groups=kept_groups,
    )
