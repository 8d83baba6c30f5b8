"""Kernels on an Apple GPU, through `mx.fast.metal_kernel`."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends.kernel import METAL, Kernel, Launch, launch_on_gpu, read_source


@cache
def _function(kernel: Kernel):
    headers = [read_source(METAL / f"{name}.h") for name in ("prelude", *kernel.headers)]
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header="\n".join(headers),
        ensure_row_contiguous=not kernel.strided,
    )


def launch(call: Launch, inputs: tuple[mx.array, ...]) -> list[mx.array]:
    """Add one kernel to the graph."""
    return launch_on_gpu(_function(call.kernel), call, inputs)
