"""Products with matrices that are not quantized."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend, blas
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

DENSE_MATMUL = Op("dense_matmul", cpu="blas")


def dense_matmul_reference(x, weight, *, bias=None) -> mx.array:
    """Definition of `dense_matmul`."""
    y = x.astype(mx.float32) @ weight.astype(mx.float32).T
    return (y if bias is None else y + bias.astype(mx.float32)).astype(x.dtype)


def dense_matmul(x: mx.array, weight: mx.array, *, bias: mx.array | None = None, backend: Backend) -> mx.array:
    """``x @ weight.T + bias``.

    ``x [..., K]``, ``weight [N, K]`` float16, bfloat16 or float32, ``bias [N]`` -> ``[..., N]`` in the dtype of ``x``.
    Uses MLX's product on GPUs and numpy's BLAS on a CPU. Raises OptionError for shapes that do not fit.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise OptionError(
            f"dense_matmul: x {list(x.shape)} and weight {list(weight.shape)} do not fit [..., K] and [N, K]"
        )
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    if backend.device == "cpu":
        backend.count(DENSE_MATMUL.name, "blas")
        return blas.dense_matmul(x, weight, bias=bias)
    backend.count(DENSE_MATMUL.name, "mlx")
    y = x @ weight.T.astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)
