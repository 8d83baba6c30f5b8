"""Metal kernels on any machine, checked: the text that MLX generates, compiled by clang and run thread by thread.

See docs/kernels.md for what is checked and for what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend, metal
from turbospark_mlx.custom_kernels.backends.kernel import METAL, Launch, given, read_source
from turbospark_mlx.custom_kernels.emulator.launch import emulate_recorded
from turbospark_mlx.custom_kernels.emulator.trace import record

__all__ = ["backend", "emulate"]


def emulate(
    kernel: Launch | Callable[..., list[mx.array]],
    inputs: Sequence[mx.array | float | int | bool | None],
    *,
    name: str | None = None,
    source: str | None = None,
    header: str = "",
    written: tuple[str, ...] = (),
    optional_outputs: tuple[str, ...] = (),
    init_value: float | None = None,
    orders: int = 1,
    seconds: int = 60,
    **options,
) -> list[mx.array]:
    """Run one Metal kernel on this machine, with every check there is, and return its outputs.

    ``kernel`` is what `mx.fast.metal_kernel` returned, with that call's ``grid``, ``threadgroup``, ``template``,
    ``output_shapes`` and ``output_dtypes`` as ``options``; or a `Launch` of ours, which knows them. ``source`` and
    ``header`` are the texts that the kernel was made from: with them faults name the author's own lines.

    It runs once with its threads in order and ``orders`` times in shuffled orders, whose results must be the same bits.
    ``optional_outputs`` may stay unwritten. ``written`` names inputs that the kernel writes to. ``seconds`` bound each
    run.

    Raises KernelFault with the kernel's name, the line and the thread, and OptionError for arguments that do not fit.
    """
    if isinstance(kernel, Launch):
        return _emulate_launch(kernel, inputs, orders=orders, seconds=seconds)
    arrays = [x if isinstance(x, mx.array) else _scalar(x) for x in inputs]
    recorded = record(lambda *given: kernel(inputs=list(given), **options), arrays)
    label = name or recorded.label
    pieces = tuple((file, text) for file, text in ((f"{label}.h", header), (f"{label}.metal", source)) if text)
    return emulate_recorded(
        label, recorded, pieces, written=written, optional=optional_outputs, init_value=init_value, orders=orders,
        seconds=seconds,
    )  # fmt: skip


def _scalar(value: float | int | bool) -> mx.array:
    """A Python number as MLX passes it to a kernel."""
    kind = mx.bool_ if isinstance(value, bool) else mx.int32 if isinstance(value, int) else mx.float32
    return mx.array(value, kind)


def _emulate_launch(
    call: Launch, inputs: Sequence[mx.array | None], *, orders: int = 1, seconds: int = 60
) -> list[mx.array]:
    arrays = given(tuple(inputs))
    # The launch takes a place for each input that it leaves out.
    places = [None if array is None else at for at, array in enumerate(inputs)]

    def function(*passed):
        values = iter(passed)
        return metal.launch(call, tuple(None if place is None else next(values) for place in places))

    recorded = record(function, arrays)
    headers = tuple((f"{name}.h", read_source(METAL / f"{name}.h")) for name in ("prelude", *call.kernel.headers))
    pieces = (*headers, (f"{call.kernel.name}.metal", call.kernel.source))
    return emulate_recorded(
        call.kernel.name, recorded, pieces, written=call.kernel.writes, orders=orders, seconds=seconds
    )


def backend(*, orders: int = 1) -> Backend:
    """A back end that takes every decision as on an Apple GPU and emulates its kernels."""
    return Backend("metal", "gpu", "emulated", lambda call, inputs: _emulate_launch(call, inputs, orders=orders))
