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
    inputs=("x", "w", "logits", "bias", "expert_scale"),
    outputs=("indices", "weights"),
    headers=("eight", "reduce", "order"),
)
ROUTER_TOPK_SELECT = Op("router_topk_select", (KERNEL,), rows=ROWS, only="of up to 1,024 experts")
MOST_EXPERTS = 1024
"""Each is compared with all others."""
PRODUCTS_OF_A_THREADGROUP = 1 << 16
"""On a GPU, more products are spread over many threadgroups, by another launch."""


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
) -> tuple[mx.array, mx.array]:
    """Definition of `router_topk_select`."""
    logits = x.astype(mx.float32)
    if weight is not None:
        logits = logits @ weight.astype(mx.float32).T
    if bias is not None:
        logits = logits + bias.astype(mx.float32)
    logits = logits * logit_scale
    indices = mx.stop_gradient(mx.argsort(-logits, axis=-1)[:, :top_k])
    if normalize:
        weights = mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)
    else:
        weights = mx.take_along_axis(mx.softmax(logits, axis=-1), indices, axis=-1)
    weights = weights * scale
    if expert_scale is not None:
        weights = weights * expert_scale.astype(mx.float32)[indices]
    return indices.astype(mx.int32), weights


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
    dtypes: tuple[mx.Dtype | None, ...],
) -> Launch:
    """The launch for ``x [rows, columns]`` or logits ``[rows, experts]``; ``dtypes`` are those of the inputs."""
    dtype, weight, _, bias, expert_scale = dtypes
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
        ),
        groups=(rows, 1),
        simdgroups=1 if backend == "host" else min(32, -(-max(experts, threads) // SIMD_WIDTH)),
        input_dtypes=dtypes,
        output_shapes=((rows, top_k), (rows, top_k)),
        output_dtypes=(mx.int32, mx.float32),
    )


def _check(x, weight, top_k, bias, logit_scale, expert_scale) -> int:
    """Check that the parts of a router belong together; returns the number of experts. Raises OptionError."""
    if x.ndim != 2 or (weight is not None and (weight.ndim != 2 or weight.shape[1] != x.shape[1])):
        given = "" if weight is None else f" and weight {list(weight.shape)}"
        raise OptionError(f"router_topk_select: x {list(x.shape)}{given} do not fit [rows, H] and [experts, H]")
    experts = x.shape[1] if weight is None else weight.shape[0]
    if not 0 < top_k <= experts:
        raise OptionError(f"router_topk_select: top_k is {top_k}; there are {experts} experts")
    if not (isfinite(logit_scale) and logit_scale > 0):
        raise OptionError(f"router_topk_select: logit_scale is {logit_scale}; it is a positive number")
    for name, given in (("bias", bias), ("expert_scale", expert_scale)):
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
    backend: Backend,
) -> tuple[mx.array, mx.array]:
    """The ``top_k`` experts of the largest logits ``(x @ weight.T + bias) * logit_scale``, best first, with weights.

    ``x [rows, H]`` and ``weight [experts, H]``, or logits ``x [rows, experts]`` alone, in any float dtypes; ``bias``
    and ``expert_scale`` ``[experts]``. Returns int32 indices and float32 weights ``[rows, top_k]``. Weights are the
    softmax over all logits; with ``normalize`` they are divided by their sum, which is the softmax over those chosen.
    They are multiplied by ``scale``, and by ``expert_scale`` of their experts.

    Of equal logits the lower index comes first. NaN comes after every number, and makes NaN of each softmax that it is
    part of. Raises OptionError for parts that do not fit.
    """
    experts = _check(x, weight, top_k, bias, logit_scale, expert_scale)
    options = {"top_k": top_k, "normalize": normalize, "logit_scale": logit_scale, "scale": scale}
    rows, there = x.shape[0], ROUTER_TOPK_SELECT.serves(backend, x.dtype, rows=x.shape[0])
    if rows and there and experts <= MOST_EXPERTS:
        if weight is not None and (
            min(x.size, weight.size) < 8 or (backend.device == "gpu" and weight.size > PRODUCTS_OF_A_THREADGROUP)
        ):
            x, weight = dense_matmul(x.astype(mx.float32), weight, backend=backend), None
        backend.count(ROUTER_TOPK_SELECT.name, "kernel")
        given = (None, None, x, bias, expert_scale) if weight is None else (x, weight, None, bias, expert_scale)
        dtypes = tuple(None if a is None else a.dtype for a in given)
        sizes = (rows, x.shape[1], experts, top_k, normalize, logit_scale, scale)
        indices, weights = backend.launch(plan(backend.name, *sizes, dtypes), given)
        return indices, weights
    backend.count(ROUTER_TOPK_SELECT.name, "mlx")
    if weight is not None and rows:
        x, weight = dense_matmul(x.astype(mx.float32), weight, backend=backend), None
    return router_topk_select_reference(x, weight, bias=bias, expert_scale=expert_scale, **options)
