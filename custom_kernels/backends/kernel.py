"""A kernel as every back end sees it: one Metal body and the names of its arguments."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import mlx.core as mx

METAL = Path(__file__).parent.parent / "metal"

SIMD_WIDTH = 32
"""Lanes of a simdgroup on GPUs."""

TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.uint32: "uint",
    mx.int32: "int",
    mx.uint8: "uint8_t",
}
"""What the elements of arrays are called in a kernel's text."""

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
    ``NAME_strides`` (in elements) is given them. If it names strides at all, no input is made contiguous for it. Inputs
    and outputs can be left out of a launch. ``writes`` names inputs that are written: caches, whose other rows stay.
    MLX knows nothing of it, so whoever reads the array later has to wait for an output of the kernel first.
    ``weights`` names inputs that no kernel writes. A body that reads those alone up to some place says there
    ``WAIT_FOR_INPUTS``, which is defined where a kernel is started before the one in front of it has ended.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    @cached_property
    def source(self) -> str:
        return read_source(METAL / f"{self.name}.metal")

    @cached_property
    def _facts(self) -> frozenset[tuple[str, str]]:
        every = ((name, fact) for name in self.inputs for fact in ("shape", "strides"))
        return frozenset((name, fact) for name, fact in every if f"{name}_{fact}" in self.source)

    def reads(self, name: str, fact: str) -> bool:
        """Whether the body reads the ``shape`` or the ``strides`` of an input. MLX decides by the same search."""
        return (name, fact) in self._facts

    @cached_property
    def strided(self) -> bool:
        return any(fact == "strides" for _, fact in self._facts)


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a kernel, without its arrays. Ops make one for each combination of sizes and keep it.

    ``template`` gives the compile-time parameters in order. The grid is ``groups`` threadgroups (x, y) of
    ``simdgroups`` simdgroups each; the host back end runs a threadgroup as one simdgroup of one lane. An input
    that this launch does not read has None for its dtype, and None is passed for it; an output that it does not
    write has None for its shape, and is not returned. Fewer arguments cost less time.
    """

    kernel: Kernel
    template: Template
    groups: tuple[int, int]
    simdgroups: int
    input_dtypes: tuple[mx.Dtype | None, ...]
    output_shapes: tuple[tuple[int, ...] | None, ...]
    output_dtypes: tuple[mx.Dtype, ...]

    @cached_property
    def present_inputs(self) -> tuple[tuple[str, mx.Dtype], ...]:
        """Names and dtypes of the inputs that are passed."""
        pairs = zip(self.kernel.inputs, self.input_dtypes, strict=True)
        return tuple((name, dtype) for name, dtype in pairs if dtype is not None)

    @cached_property
    def present_outputs(self) -> tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]:
        """Names, shapes and dtypes of the outputs that are written."""
        every = zip(self.kernel.outputs, self.output_shapes, self.output_dtypes, strict=True)
        return tuple(output for output in every if output[1] is not None)

    @cached_property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The inputs and the outputs that are there. With the kernel, they settle the text."""
        return tuple(name for name, _ in self.present_inputs), tuple(name for name, *_ in self.present_outputs)


def body(kernel: Kernel, names: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    """The text of a kernel for a launch's ``names``: what is left out is declared, so that the text may name it."""
    inputs, outputs = names
    absent = []
    for name in kernel.inputs:
        if name not in inputs:
            absent.append(f"const device float* {name} = nullptr;")
            absent += [f"const constant int* {name}_shape = nullptr;"] * kernel.reads(name, "shape")
            absent += [f"const constant int64_t* {name}_strides = nullptr;"] * kernel.reads(name, "strides")
    absent += [f"device float* {name} = nullptr;" for name in kernel.outputs if name not in outputs]
    return "\n".join([*absent, f'#line 1 "{kernel.name}.metal"', kernel.source])


def constants(call: Launch) -> list[str]:
    """The template parameters of a launch as lines of C++."""
    return [
        f"using {name} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
        for name, value in call.template
    ]


def bind(function: Callable[..., list[mx.array]], call: Launch) -> Callable[..., list[mx.array]]:
    """What `mx.fast.metal_kernel` or `mx.fast.cuda_kernel` returned, with everything but ``inputs`` settled."""
    threads = call.simdgroups * SIMD_WIDTH
    return partial(
        function,
        template=list(call.template),
        # MLX counts threads, and makes threadgroups smaller without a word where the grid is smaller than one.
        grid=(call.groups[0] * threads, call.groups[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for _, shape, _ in call.present_outputs],
        output_dtypes=[dtype for *_, dtype in call.present_outputs],
    )


def given(inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
    """The inputs that are there."""
    return [array for array in inputs if array is not None]
