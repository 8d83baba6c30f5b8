"""Mixtures of experts over an arena of blobs: the products of a layer's routed experts, summed in the router's order.

The product of one row with one expert never depends on what else is computed, nor on the slot that holds the expert, so
a mixture may be made in several parts as experts come into memory, and is the same to the bit. One row, which is a
decode step, has its experts in memory all at once, and takes the kernels of `expert_phases`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import affine, expert_groups, expert_phases, experts_cpu
from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.custom_kernels.expert_arena import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.errors import OptionError


def _check(slots: tuple[int, ...], x: mx.array, weights: mx.array, residual: mx.array | None, blob: ExpertBlob) -> None:
    hidden = blob.gate.columns
    if x.ndim != 2 or x.shape[1] != hidden or weights.shape != slots or len(slots) != 2 or slots[0] != x.shape[0]:
        raise OptionError(
            f"expert_mixture: x is {list(x.shape)}, slots {list(slots)} and weights {list(weights.shape)}; needed are"
            f" [rows, {hidden}] and twice [rows, top_k]"
        )
    if residual is not None and residual.shape != x.shape:
        raise OptionError(f"expert_mixture: residual is {list(residual.shape)}, but x is {list(x.shape)}")


def _check_slots(slots: np.ndarray, arena: ExpertArena) -> None:
    if slots.size and (slots.min() < 0 or slots.max() >= len(arena.blobs)):
        raise OptionError(
            f"expert_mixture: slots run from {slots.min()} to {slots.max()}, but the arena has {len(arena.blobs)}"
        )


def expert_mixture_reference(arena: ExpertArena, slots, x, weights, *, residual=None) -> mx.array:
    """Definition of `expert_mixture`."""
    inner = expert_phases.moe_phase1_reference(arena, slots, x.astype(mx.float32))
    wide = None if residual is None else residual.astype(mx.float32)
    return expert_phases.moe_phase2_reference(arena, slots, inner, weights, wide).astype(x.dtype)


def _in_two_phases(arena: ExpertArena | None, x: mx.array, top_k: int, blob: ExpertBlob, backend: Backend) -> bool:
    """Whether a mixture is made by the kernels of `expert_phases`; without an arena, whether it will be."""
    return (
        x.shape[0] == 1
        and (arena is None or arena.array is not None)
        and expert_phases.serves(blob, x.dtype, 1, top_k, backend)
    )


def _placed(arena: ExpertArena, slots: np.ndarray) -> mx.array:
    """Rows of the arena's array ``[1, n]`` for ``slots``."""
    return mx.array((slots if arena.places is None else arena.places[slots]).astype(np.int32).reshape(1, -1))


def expert_mixture(
    arena: ExpertArena,
    slots: mx.array,
    x: mx.array,
    weights: mx.array,
    *,
    residual: mx.array | None = None,
    slot_of: mx.array | None = None,
    backend: Backend,
) -> mx.array:
    """``y[r] = sum_k weights[r, k] * expert(slots[r, k])(x[r]) + residual[r]``, added in the order of k.

    ``slots [rows, top_k]`` integer, ``x [rows, hidden]``, ``weights [rows, top_k]`` float32, ``residual`` like ``x`` ->
    ``[rows, hidden]`` in the dtype of ``x``. On a GPU, ``slot_of [experts]`` int32 makes ``slots`` the numbers of
    experts and says where they are. MLX does not check slots: they come from a bounded router, or from the host, which
    has checked them. On a CPU the result is computed here and now; on a GPU it reads the arena when it is
    evaluated, so that no slot may change before. Raises OptionError for shapes that do not fit.
    """
    _check(slots.shape, x, weights, residual, arena.blob)
    if _in_two_phases(arena, x, slots.shape[1], arena.blob, backend):
        if backend.device == "cpu":
            found = np.array(slots)
            _check_slots(found, arena)
            slots = slots if arena.places is None else _placed(arena, found)
        options = {"slot_of": slot_of, "backend": backend}
        inner = expert_phases.moe_phase1_gate_up_act(arena, slots, x, **options)
        return expert_phases.moe_phase2_down_reduce(arena, slots, inner, weights, residual=residual, **options)
    slots = slots if slot_of is None else slot_of[slots]
    if x.shape[0] == 0 or backend.device == "cpu":
        mixture = Mixture(x, weights, residual=residual, blob=arena.blob, backend=backend)
        mixture.add(arena, np.arange(slots.size), np.array(slots).reshape(-1))
        return mixture.result()
    rows, top_k = slots.shape
    flat = slots.reshape(-1)
    if rows == 1:
        products = _products(arena, flat, x[None], backend, ordered=False)
    else:
        order = mx.argsort(flat)
        sorted_products = _products(arena, flat[order], x[order // top_k][:, None], backend, ordered=True)
        products = sorted_products[mx.argsort(order)]
    return _weighted_sum(products.reshape(rows, top_k, -1), weights, residual, x.dtype)


class Mixture:
    """`expert_mixture` in several parts: ``add`` each pair of a row and an expert once, then take the ``result``.

    With a single row on a CPU, what was added has to stay in its slots until then.
    """

    def __init__(
        self,
        x: mx.array,
        weights: mx.array,
        *,
        residual: mx.array | None = None,
        blob: ExpertBlob,
        backend: Backend,
    ):
        """``x [rows, hidden]`` and ``weights [rows, top_k]``; pair ``row * top_k + k`` is row ``row``'s k-th expert."""
        _check(weights.shape, x, weights, residual, blob)
        self._x, self._weights, self._residual, self._backend = x, weights, residual, backend
        self._top_k = weights.shape[1]
        self._on_cpu = backend.device == "cpu"
        self._two_phases = self._on_cpu and _in_two_phases(None, x, self._top_k, blob, backend)
        self._pairs: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._parts: list[mx.array] = []
        self._arena: ExpertArena | None = None
        if self._on_cpu:
            self._input = blas.view(x)
            self._products = np.empty((weights.size, x.shape[1]), np.float32)

    def add(self, arena: ExpertArena, pairs: np.ndarray, slots: np.ndarray) -> list[mx.array]:
        """Compute ``pairs``, whose experts are in ``slots`` of the arena. Returns what must be evaluated before those
        slots change."""
        order = np.argsort(slots, kind="stable")
        pairs, slots = pairs[order], slots[order]
        if not self._on_cpu:
            rows = self._x[mx.array(pairs // self._top_k)][:, None]
            made = _products(arena, mx.array(slots.astype(np.uint32)), rows, self._backend, ordered=True)
            self._pairs.append(pairs)
            self._parts.append(made)
            return [made]
        _check_slots(slots, arena)
        if self._two_phases:
            self._arena = arena
            self._pairs.append(pairs)
            self._slots.append(slots)
            placed = _placed(arena, slots)
            self._parts.append(expert_phases.moe_phase1_gate_up_act(arena, placed, self._x, backend=self._backend))
            return []
        borders = np.flatnonzero(np.diff(slots)) + 1
        for group in np.split(np.arange(len(slots)), borders) if len(slots) else ():
            chosen = pairs[group]
            rows = self._input[chosen // self._top_k]
            self._products[chosen] = experts_cpu.expert(arena, int(slots[group[0]]), rows, self._backend)
        return []

    def result(self) -> mx.array:
        """The mixture ``[rows, hidden]``, once every pair was added."""
        rows, hidden = self._x.shape
        if not rows:
            return mx.zeros((rows, hidden), self._x.dtype)
        if self._two_phases:
            order = np.argsort(np.concatenate(self._pairs))
            inner = mx.array(np.concatenate(self._parts)[order])
            slots = _placed(self._arena, np.concatenate(self._slots)[order])
            options = {"residual": self._residual, "backend": self._backend}
            return expert_phases.moe_phase2_down_reduce(self._arena, slots, inner, self._weights, **options)
        if self._on_cpu:
            products = self._products.reshape(rows, self._top_k, hidden)
            total = experts_cpu.weighted_sum(products, blas.view(self._weights))
            if self._residual is not None:
                total += blas.view(self._residual)
            return mx.array(total).astype(self._x.dtype)
        where = mx.array(np.argsort(np.concatenate(self._pairs)).astype(np.uint32))
        products = mx.concatenate(self._parts)[where].reshape(rows, self._top_k, hidden)
        return _weighted_sum(products, self._weights, self._residual, self._x.dtype)


def _weighted_sum(products: mx.array, weights: mx.array, residual: mx.array | None, dtype: mx.Dtype) -> mx.array:
    total = (products.astype(mx.float32) * weights[..., None]).sum(axis=1)
    return (total if residual is None else total + residual.astype(mx.float32)).astype(dtype)


def _products(arena: ExpertArena, slots: mx.array, x: mx.array, backend: Backend, *, ordered: bool) -> mx.array:
    """``expert(slots[i])(x[i])``: ``slots [n]``, ``x [n, 1, hidden]`` or one row for all -> ``[n, hidden]``."""
    # Only there is it known to be faster than MLX.
    if ordered and backend.name == "cuda" and expert_groups.serves(arena.blob, x.dtype, backend):
        return expert_groups.grouped_experts(arena, slots, x[:, 0], backend=backend)
    backend.count(experts_cpu.EXPERT_MIXTURE.name, "mlx")
    (gate, up, down), stacked = arena.blob.matrices, arena.stacked
    if backend.device == "gpu" and not mx.metal.is_available():
        # MLX's CUDA products take no strides. Few experts are brought together, many copied as they lie.
        few = 0 < slots.size < len(arena.blobs)
        stacked = [[part[slots] if few else mx.contiguous(part) for part in parts] for parts in stacked]
        slots = mx.arange(slots.size) if few else slots
    inner = expert_phases.activate(
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
