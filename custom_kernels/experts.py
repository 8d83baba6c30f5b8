"""Mixtures of experts over an arena of blobs: the products of a layer's routed experts, summed in the router's order.

The product of one row with one expert never depends on what else is computed, nor on the slot that holds the expert, so
a mixture may be made in several parts as experts come into memory, and is the same to the bit.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import affine, experts_cpu
from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.custom_kernels.expert_arena import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.errors import OptionError


def _check(slots: tuple[int, ...], x: mx.array, weights: mx.array, blob: ExpertBlob) -> None:
    hidden = blob.gate.columns
    if x.ndim != 2 or x.shape[1] != hidden or weights.shape != slots or len(slots) != 2 or slots[0] != x.shape[0]:
        raise OptionError(
            f"expert_mixture: x is {list(x.shape)}, slots {list(slots)} and weights {list(weights.shape)}; needed are"
            f" [rows, {hidden}] and twice [rows, top_k]"
        )


def expert_mixture_reference(arena: ExpertArena, slots, x, weights) -> mx.array:
    """Definition of `expert_mixture`."""
    wide, rows = x.astype(mx.float32), []
    for row, (chosen, factors) in enumerate(zip(slots.tolist(), weights.tolist(), strict=True)):
        total = mx.zeros((1, x.shape[1]))
        for slot, factor in zip(chosen, factors, strict=True):
            gate, up, down = (
                _plain(matrix, [part[slot] for part in parts])
                for matrix, parts in zip(arena.blob.matrices, arena.stacked, strict=True)
            )
            inner = _activate(arena.blob, gate(wide[row : row + 1]), up(wide[row : row + 1]))
            total = total + factor * down(inner)
        rows.append(total)
    return mx.concatenate(rows).astype(x.dtype)


def _plain(matrix: BlobMatrix, parts: list[mx.array]):
    """``x -> x @ W.T + bias`` in float32."""
    wide = [part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts]
    if matrix.mode == "mxfp4":
        w = mx.dequantize(*parts[:2], mode="mxfp4", dtype=mx.float32)
    elif matrix.bits is not None:
        w = mx.dequantize(*wide[:3], group_size=matrix.group_size, bits=matrix.bits)
    else:
        w = wide[0]
    return lambda x: x @ w.T + (0 if matrix.bias is None else wide[-1])


def expert_mixture(
    arena: ExpertArena, slots: mx.array, x: mx.array, weights: mx.array, *, backend: Backend
) -> mx.array:
    """``y[r] = sum_k weights[r, k] * expert(slots[r, k])(x[r])``, added in the order of k.

    ``slots [rows, top_k]`` integer, ``x [rows, hidden]``, ``weights [rows, top_k]`` float32 -> ``[rows, hidden]`` in
    the dtype of ``x``. MLX does not check slots: they come from a bounded router, or from the host, which has checked
    them. On a CPU the result is computed here and now; on a GPU it reads the arena when it is evaluated, so that no
    slot may change before. Raises OptionError for shapes that do not fit.
    """
    _check(slots.shape, x, weights, arena.blob)
    if x.shape[0] == 0 or backend.device == "cpu":
        mixture = Mixture(x, weights, blob=arena.blob, backend=backend)
        mixture.add(arena, np.arange(slots.size), np.array(slots).reshape(-1))
        return mixture.result()
    backend.count(experts_cpu.EXPERT_MIXTURE.name, "mlx")
    rows, top_k = slots.shape
    flat = slots.reshape(-1)
    if rows == 1:
        products = _products(arena, flat, x[None], ordered=False)
    else:
        order = mx.argsort(flat)
        sorted_products = _products(arena, flat[order], x[order // top_k][:, None], ordered=True)
        products = sorted_products[mx.argsort(order)]
    return _weighted_sum(products.reshape(rows, top_k, -1), weights, x.dtype)


class Mixture:
    """`expert_mixture` in several parts: ``add`` each pair of a row and an expert once, then take the ``result``."""

    def __init__(self, x: mx.array, weights: mx.array, *, blob: ExpertBlob, backend: Backend):
        """``x [rows, hidden]`` and ``weights [rows, top_k]``; pair ``row * top_k + k`` is row ``row``'s k-th expert."""
        _check(weights.shape, x, weights, blob)
        self._x, self._weights, self._backend = x, weights, backend
        self._top_k = weights.shape[1]
        self._on_cpu = backend.device == "cpu"
        self._pairs: list[np.ndarray] = []
        self._parts: list[mx.array] = []
        if self._on_cpu:
            self._input = blas.view(x)
            self._products = np.empty((weights.size, x.shape[1]), np.float32)

    def add(self, arena: ExpertArena, pairs: np.ndarray, slots: np.ndarray) -> list[mx.array]:
        """Compute ``pairs``, whose experts are in ``slots`` of the arena. Returns what must be evaluated before those
        slots change."""
        order = np.argsort(slots, kind="stable")
        pairs, slots = pairs[order], slots[order]
        if not self._on_cpu:
            self._backend.count(experts_cpu.EXPERT_MIXTURE.name, "mlx")
            rows = self._x[mx.array(pairs // self._top_k)][:, None]
            made = _products(arena, mx.array(slots.astype(np.uint32)), rows, ordered=True)
            self._pairs.append(pairs)
            self._parts.append(made)
            return [made]
        if len(slots) and (slots[0] < 0 or slots[-1] >= len(arena.blobs)):
            raise OptionError(
                f"expert_mixture: slots run from {slots[0]} to {slots[-1]}, but the arena has {len(arena.blobs)}"
            )
        borders = np.flatnonzero(np.diff(slots)) + 1
        for group in np.split(np.arange(len(slots)), borders) if len(slots) else ():
            chosen = pairs[group]
            rows = self._input[chosen // self._top_k]
            self._products[chosen] = experts_cpu.expert(arena, int(slots[group[0]]), rows, self._backend)
        return []

    def result(self) -> mx.array:
        """The mixture ``[rows, hidden]``, once every pair was added."""
        rows, hidden = self._x.shape
        if self._on_cpu or not rows:
            if not rows:
                return mx.zeros((rows, hidden), self._x.dtype)
            products = self._products.reshape(rows, self._top_k, hidden)
            return mx.array(experts_cpu.weighted_sum(products, blas.view(self._weights))).astype(self._x.dtype)
        where = mx.array(np.argsort(np.concatenate(self._pairs)).astype(np.uint32))
        products = mx.concatenate(self._parts)[where].reshape(rows, self._top_k, hidden)
        return _weighted_sum(products, self._weights, self._x.dtype)


def _weighted_sum(products: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
    return (products.astype(mx.float32) * weights[..., None]).sum(axis=1).astype(dtype)


def _products(arena: ExpertArena, slots: mx.array, x: mx.array, *, ordered: bool) -> mx.array:
    """``expert(slots[i])(x[i])``: ``slots [n]``, ``x [n, 1, hidden]`` or one row for all -> ``[n, hidden]``."""
    (gate, up, down), stacked = arena.blob.matrices, arena.stacked
    inner = _activate(
        arena.blob,
        _product(gate, stacked[0], slots, x, ordered).astype(mx.float32),
        _product(up, stacked[1], slots, x, ordered).astype(mx.float32),
    )
    return _product(down, stacked[2], slots, inner.astype(x.dtype), ordered)[:, 0]


def _product(matrix: BlobMatrix, parts: list[mx.array], slots: mx.array, x: mx.array, ordered: bool) -> mx.array:
    if matrix.bits is None:
        y = mx.gather_mm(x, parts[0].astype(x.dtype).swapaxes(-1, -2), rhs_indices=slots, sorted_indices=ordered)
    elif matrix.mode == "mxfp4":
        options = {"rhs_indices": slots, "transpose": True, "mode": "mxfp4", "sorted_indices": ordered}
        y = mx.gather_qmm(x, *parts[:2], group_size=matrix.group_size, bits=matrix.bits, **options)
    elif matrix.columns < affine.GPU_PRODUCT_COLUMNS:
        # In float32, because MLX dequantizes to the companions' dtype.
        scales, biases = (part.astype(mx.float32) for part in parts[1:3])
        w = mx.dequantize(parts[0], scales, biases, group_size=matrix.group_size, bits=matrix.bits)
        y = mx.gather_mm(x, w.astype(x.dtype).swapaxes(-1, -2), rhs_indices=slots, sorted_indices=ordered)
    else:
        y = mx.gather_qmm(
            x,
            *parts[:3],
            rhs_indices=slots,
            transpose=True,
            group_size=matrix.group_size,
            bits=matrix.bits,
            sorted_indices=ordered,
        )
    return y if matrix.bias is None else y + parts[-1][slots][:, None]


def _activate(blob: ExpertBlob, gate: mx.array, up: mx.array) -> mx.array:
    if blob.activation == "gelu_tanh":
        cubic = gate + 0.044715 * gate * gate * gate
        return 0.5 * gate * (1 + mx.tanh(float(experts_cpu.GELU_SCALE) * cubic)) * up
    slope = 1.0
    if blob.activation == "clamped_swiglu":
        gate, up, slope = mx.minimum(gate, blob.limit), mx.clip(up, -blob.limit, blob.limit) + 1, blob.alpha
    return gate * mx.sigmoid(slope * gate) * up
