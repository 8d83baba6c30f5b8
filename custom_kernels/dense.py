"""Products with matrices that are not quantized."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.gemv import PRODUCTS_PER_GROUP, ROWS, TOGETHER, in_parts
from turbospark_mlx.errors import OptionError

KERNEL = Kernel("dense_gemv", inputs=("w", "x", "bias", "residual"), outputs=("y",), headers=("eight",))
DENSE_MATMUL = Op(
    "dense_matmul", (KERNEL,), rows=ROWS, only="of a matrix in another dtype, or on a GPU a small one", cpu="blas"
)
SMALL = 1 << 20
"""Weights up to which a GPU's product is as long as its launch: MLX's takes a view before it and one behind it."""


def dense_matmul_reference(x, weight, *, bias=None, residual=None, dtype=None) -> mx.array:
    """Definition of `dense_matmul`."""
    y = x.astype(mx.float32) @ weight.astype(mx.float32).T
    y = y if bias is None else y + bias.astype(mx.float32)
    return y.astype(dtype or x.dtype) if residual is None else (y + residual.astype(mx.float32)).astype(residual.dtype)


def serves(x: mx.array, weight: mx.array, dtype: mx.Dtype, backend: Backend) -> bool:
    """Whether the kernel is what is fastest: MLX and the BLAS are good at large matrices in the dtype of x."""
    return (
        (x.dtype != weight.dtype or x.dtype != dtype or (backend.device == "gpu" and weight.size <= SMALL))
        and min(weight.size, x.size) >= 8
        and DENSE_MATMUL.serves(backend, x.dtype, dtype, rows=x.size // x.shape[-1])
    )


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    most: int,
    out: int,
    dtype: mx.Dtype,
    weight: mx.Dtype,
    bias: mx.Dtype | None,
    residual: mx.Dtype | None,
    result: mx.Dtype,
) -> Launch:
    """The launch for ``x`` of ``shape``, whose rows, at most ``most``, are read together, and ``out`` rows of W."""
    columns = shape[-1]
    # More sums at once hide the time that one takes, as long as they fit into registers.
    at_once, batch = 4 if most == 1 else 2 if most <= 4 else 1, 1
    if backend == "host":
        simdgroups = 1
        groups = max(1, min(-(-out // at_once), 4 * thread_count(), most * out * columns // PRODUCTS_PER_GROUP))
    else:
        if most == 1:
            # Columns of one row, read at once, keep more simdgroups at work than a few of several rows.
            at_once, batch = 1, 4
        simdgroups = 4
        groups = -(-out // (at_once * simdgroups))
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("W", weight),
            ("Y", result),
            ("K", columns),
            ("N", out),
            ("M", most),
            ("ROWS", at_once),
            ("BATCH", batch),
            ("BIAS", bias is not None),
            ("RESIDUAL", residual is not None),
        ),
        groups=(groups, 1),
        simdgroups=simdgroups,
        input_dtypes=(weight, dtype, bias, residual),
        output_shapes=((*shape[:-1], out),),
        output_dtypes=(result,),
    )


def dense_matmul(
    x: mx.array,
    weight: mx.array,
    *,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> mx.array:
    """``x @ weight.T + bias + residual``.

    ``x [..., K]``, ``weight [N, K]`` float16, bfloat16 or float32, ``bias [N]``, ``residual [..., N]`` -> ``[..., N]``
    in the dtype of ``residual``, else in ``dtype``, by default that of ``x``. Up to 8 rows run in our kernel where
    ``dtype`` or that of ``weight`` is another than that of ``x``, because a whole array would be cast at each call, and
    on a GPU with up to 2^20 weights. The rest uses MLX's product on GPUs and numpy's BLAS on a CPU. Raises OptionError
    for shapes that do not fit.
    """
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise OptionError(
            f"dense_matmul: x {list(x.shape)} and weight {list(weight.shape)} do not fit [..., K] and [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OptionError(f"dense_matmul: bias is {list(bias.shape)}, but the result needs {list(weight.shape[:1])}")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise OptionError(
            f"dense_matmul: residual is {list(residual.shape)}, but the result is {[*x.shape[:-1], weight.shape[0]]}"
        )
    dtype = dtype or x.dtype
    result = dtype if residual is None else residual.dtype
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype=result)
    if serves(x, weight, dtype, backend):
        backend.count(DENSE_MATMUL.name, "kernel")

        def launch(part: mx.array, most: int, added: mx.array | None) -> mx.array:
            dtypes = (x.dtype, weight.dtype, *(None if array is None else array.dtype for array in (bias, added)))
            call = plan(backend.name, part.shape, most, weight.shape[0], *dtypes, result)
            return backend.launch(call, (weight, part, bias, added))[0]

        return in_parts(launch, x, (residual,), TOGETHER[backend.name], (*x.shape[:-1], weight.shape[0]))
    x = x.astype(dtype)
    if backend.device == "cpu":
        backend.count(DENSE_MATMUL.name, "blas")
        y = blas.dense_matmul(x, weight, bias=bias)
    else:
        backend.count(DENSE_MATMUL.name, "mlx")
        y = x @ weight.T.astype(x.dtype)
        y = y if bias is None else y + bias.astype(x.dtype)
    return y if residual is None else (residual + y).astype(residual.dtype)
