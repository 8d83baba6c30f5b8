"""Kernels on an Apple GPU, through `mx.fast.metal_kernel`."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends.kernel import METAL, Kernel, Launch, bind, body, given, read_source


@cache
def _function(kernel: Kernel, names: tuple[tuple[str, ...], tuple[str, ...]]):
    headers = [read_source(METAL / f"{name}.h") for name in ("prelude", *kernel.headers)]
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(names[0]),
        output_names=list(names[1]),
        source=body(kernel, names),
        header="\n".join(headers),
        ensure_row_contiguous=not kernel.strided,
    )


@cache
def _bound(call: Launch):
    return bind(_function(call.kernel, call.names), call)


def launch(call: Launch, inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
    """Add one kernel to the graph."""
    return _bound(call)(inputs=given(inputs))
