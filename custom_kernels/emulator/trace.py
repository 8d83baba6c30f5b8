"""What MLX makes of a call of a Metal kernel, recorded by tracing it; no Metal is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from turbospark_mlx.errors import OptionError


@dataclass(frozen=True)
class Recorded:
    """One dispatch: the text that Metal's compiler gets, and what MLX binds and launches."""

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    contiguous: bool
    inputs: tuple[mx.array, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]

    @property
    def label(self) -> str:
        """The name that the kernel was given, without what MLX adds: one tag an array, and one for the template."""
        count = len(self.inputs) + len(self.output_shapes)
        plain = re.sub(
            rf"(?:_(?:u?int\d+_t|float|float16_t|bfloat16_t|bool|complex64_t)[sc]*){{{count}}}$", "", self.name
        )
        return plain.removeprefix("custom_kernel_").split("__")[0]


def record(function: Callable[..., Sequence[mx.array]], arrays: Sequence[mx.array]) -> Recorded:
    """Trace ``function(*arrays)``, which calls one kernel of `mx.fast.metal_kernel` and does nothing else.

    Raises OptionError where there is not exactly one kernel, or something stands before it.
    """
    events: list[dict] = []
    mx.export_function(events.append, function, *arrays)
    named: dict[str, mx.array] = {}
    kernels = []
    for event in events:
        if event["type"] == "inputs":
            named |= {name: array for (name, _, _), array in zip(event["inputs"], arrays, strict=True)}
        elif event["type"] == "constants":
            named |= dict(event["constants"])
        elif event["type"] == "primitive" and event["name"] == "CustomKernel":
            kernels.append(event)
    if len(kernels) != 1:
        raise OptionError(f"an emulated function calls one Metal kernel; this one calls {len(kernels)}")
    (event,) = kernels
    strange = [name for name, _, _ in event["inputs"] if name not in named]
    if strange:
        raise OptionError("an emulated function passes its arrays to the kernel as they are, without other operations")
    name, text, *sizes = event["arguments"][:8]
    return Recorded(
        name=name,
        text=text,
        grid=tuple(sizes[:3]),
        threadgroup=tuple(sizes[3:]),
        contiguous=event["arguments"][9],
        inputs=tuple(named[name] for name, _, _ in event["inputs"]),
        output_shapes=tuple(tuple(shape) for _, shape, _ in event["outputs"]),
        output_dtypes=tuple(dtype for _, _, dtype in event["outputs"]),
    )
