"""The kernel ``embed_lookup``: rows of an affine-quantized matrix."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits

KERNEL = Kernel(
    "embed_lookup",
    inputs=("ids", "w", "scales", "biases"),
    outputs=("out",),
    headers=("eight", "affine", "affine_block"),
)
VALUES_PER_GROUP = 1 << 15


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    companion: mx.Dtype,
    dtype: mx.Dtype,
    scale: float = 1.0,
    copies: int = 1,
) -> Launch:
    """The launch for flat int32 ids whose rows, times ``scale``, make ``[*shape, copies * columns]``; ``rows`` are
    those of the table."""
    count = prod(shape)
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("S", companion),
            ("V", rows),
            ("K", columns),
            ("BITS", bits),
            ("GROUP", group_size),
            ("SCALE_BITS", float_bits(scale)),
            ("COPIES", copies),
        ),
        groups=(min(count, -(-count * columns // VALUES_PER_GROUP)) if backend == "host" else count, 1),
        simdgroups=1 if backend == "host" else min(8, -(-columns // 1024)),
        input_dtypes=(mx.int32, mx.uint32, companion, companion),
        output_shapes=((*shape, copies * columns),),
        output_dtypes=(dtype,),
    )
