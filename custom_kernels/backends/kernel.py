"""A kernel as every back end sees it: one Metal body and the names of its arguments."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

METAL = Path(__file__).parent.parent / "metal"

SIMD_WIDTH = 32
"""Lanes of a simdgroup on GPUs."""

Template = tuple[tuple[str, int | bool | mx.Dtype], ...]


def float_bits(value: float) -> int:
    """A float32 as the int32 with its bits, because template parameters cannot be floats."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@cache
def read_source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Kernel:
    """One file of ``metal/``, whose text is the body of a kernel function.

    The body names its inputs, its outputs, the template parameters of the launch and Metal's thread attributes.
    ``headers`` are files of ``metal/``; a back end may have its own version of one. A body that names ``NAME_shape`` or
    ``NAME_strides`` (in elements) is given them. If it names strides at all, no input is made contiguous for it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return read_source(METAL / f"{self.name}.metal")

    def reads(self, name: str, fact: str) -> bool:
        """Whether the body reads the ``shape`` or the ``strides`` of an input. MLX decides by the same search."""
        return f"{name}_{fact}" in self.source

    @property
    def strided(self) -> bool:
        return any(self.reads(name, "strides") for name in self.inputs)


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a kernel, without its arrays. Ops make one for each combination of sizes and keep it.

    ``template`` gives the compile-time parameters in order. The grid is ``groups`` threadgroups (x, y) of
    ``simdgroups`` simdgroups each; the host back end runs a threadgroup as one simdgroup of one lane.
    """

    kernel: Kernel
    template: Template
    groups: tuple[int, int]
    simdgroups: int
    input_dtypes: tuple[mx.Dtype, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


def launch_on_gpu(
    function: Callable[..., list[mx.array]], call: Launch, inputs: tuple[mx.array, ...]
) -> list[mx.array]:
    """Add one kernel to the graph. ``function`` is what `mx.fast.metal_kernel` or `mx.fast.cuda_kernel` returned."""
    threads = call.simdgroups * SIMD_WIDTH
    return function(
        inputs=list(inputs),
        template=list(call.template),
        # MLX counts threads, and makes threadgroups smaller without a word where the grid is smaller than one.
        grid=(call.groups[0] * threads, call.groups[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=list(call.output_shapes),
        output_dtypes=list(call.output_dtypes),
    )
