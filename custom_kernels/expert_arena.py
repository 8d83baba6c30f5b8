"""Routed experts in memory as they lie on disk: one blob an expert, read in place by the number of its slot.

Where the matrices of an expert begin inside its blob is the same for all experts of a layer; ``ExpertBlob`` says it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import mlx.core as mx
import numpy as np

from turbospark_mlx.errors import OptionError

WORD = 4
NUMPY_DTYPES = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint8: np.uint8,
}
"""numpy has no bfloat16, so views of it are of its bits."""


@dataclass(frozen=True)
class BlobMatrix:
    """``W [rows, columns]`` of an expert. Offsets are in bytes from the start of the blob.

    An affine matrix has ``bits`` and ``group_size``, its words at ``offset``, and companions of ``dtype`` at ``scales``
    and ``biases``; with ``mode`` ``"mxfp4"`` it has exponents at ``scales`` alone, of which ``dtype`` is uint8. Without
    ``bits`` it is stored plainly in ``dtype``. ``bias``, where there is one, is ``[rows]`` in
    ``bias_dtype`` and is added to the product.
    """

    rows: int
    columns: int
    offset: int
    dtype: mx.Dtype
    bits: int | None = None
    group_size: int | None = None
    scales: int = 0
    biases: int = 0
    mode: Literal["affine", "mxfp4"] = "affine"
    bias: int | None = None
    bias_dtype: mx.Dtype = mx.float32

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], mx.Dtype]]:
        """``(offset, shape, dtype)`` of the words, scales and biases, or of the plain matrix; then of the bias."""
        if self.bits is None:
            found = [(self.offset, (self.rows, self.columns), self.dtype)]
        else:
            groups = (self.rows, self.columns // self.group_size)
            words = (self.rows, self.columns * self.bits // 32)
            found = [
                (self.offset, words, mx.uint32),
                (self.scales, groups, self.dtype),
                *([(self.biases, groups, self.dtype)] if self.mode == "affine" else []),
            ]
        return found if self.bias is None else [*found, (self.bias, (self.rows,), self.bias_dtype)]


@dataclass(frozen=True)
class ExpertBlob:
    """What one expert of a layer is: ``down(activation(gate(x), up(x)))``; see ``protocols.Activation``."""

    gate: BlobMatrix
    up: BlobMatrix
    down: BlobMatrix
    activation: str
    alpha: float
    limit: float

    def __post_init__(self) -> None:
        for name, matrix in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for offset, _, dtype in matrix.parts:
                if offset % dtype.size:
                    raise OptionError(f"{name} has a part of {dtype} at byte {offset}, which is not aligned to it")

    @property
    def matrices(self) -> tuple[BlobMatrix, BlobMatrix, BlobMatrix]:
        return self.gate, self.up, self.down


class ExpertArena:
    """Blobs of experts of one layer: ``blobs[slot]`` is a flat view of bytes, wherever it lies.

    GPUs need them in one array ``[slots, stride / 4]`` of uint32, of which ``blobs`` are the rows, and so do the
    kernels of a decode step on a CPU. There it may be a view of other memory, with more rows than slots: ``places`` are
    then the rows where the slots begin.
    """

    def __init__(
        self,
        blob: ExpertBlob,
        blobs: Sequence[np.ndarray],
        array: mx.array | np.ndarray | None = None,
        places: np.ndarray | None = None,
    ):
        self.blob, self.blobs, self.array, self.places = blob, blobs, array, places
        self._views: dict[int, list[list[np.ndarray]]] = {}

    @classmethod
    def allocate(cls, blob: ExpertBlob, slots: int, stride: int) -> ExpertArena:
        """An arena of zeros to be read into; ``stride`` is in bytes and a multiple of 4."""
        array = mx.zeros((slots, stride // WORD), mx.uint32)
        mx.eval(array)
        return cls(blob, list(np.array(array, copy=False).view(np.uint8)), array)

    @classmethod
    def reserve(cls, blob: ExpertBlob, slots: int, stride: int) -> ExpertArena:
        """`allocate` for a CPU. The system gives each page when it is first written, where MLX would write it twice."""
        memory = mmap.mmap(-1, slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint32).reshape(slots, stride // WORD)
        return cls(blob, list(array.view(np.uint8)), array)

    def views(self, slot: int) -> list[list[np.ndarray]]:
        """The parts of the three matrices in one slot, as ``BlobMatrix.parts`` lists them."""
        if slot not in self._views:
            self._views[slot] = [[self._view(slot, *part) for part in matrix.parts] for matrix in self.blob.matrices]
        return self._views[slot]

    def _view(self, slot: int, offset: int, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
        count = int(np.prod(shape)) * dtype.size
        return self.blobs[slot][offset : offset + count].view(NUMPY_DTYPES[dtype]).reshape(shape)

    @cached_property
    def stacked(self) -> list[list[mx.array]]:
        """The parts of the three matrices as arrays ``[slots, ...]`` that share the arena's memory."""
        made = [[self._stack(*part) for part in matrix.parts] for matrix in self.blob.matrices]
        mx.eval(made)
        return made

    def _stack(self, offset: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        slots, words = self.array.shape
        stride = words * WORD // dtype.size
        inner = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        flat = self.array.reshape(-1).view(dtype)
        return mx.as_strided(flat, (slots, *shape), (stride, *inner), offset // dtype.size)
