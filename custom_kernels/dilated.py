"""A causal convolution of each channel by itself whose taps are several tokens apart, one token at a time."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch
from turbospark_mlx.custom_kernels.backends.op import Op, spell_arrays
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "dilated_convolution",
    inputs=("x", "told", "residual", "tail", "start", "weight"),
    outputs=("y",),
    writes=("tail",),
)
DILATED_CONVOLUTION = Op("dilated_convolution_step", (KERNEL,), rows=1)
VALUES_PER_GROUP = 1 << 13
"""Values of the tail that are worth a hand-over to another core."""
_SIMDGROUPS = 4


def dilated_convolution(rows: mx.array, weight: mx.array, *, apart: int) -> mx.array:
    """``silu`` of what taps ``weight [W, T]``, ``apart`` tokens apart, make of ``rows [B, (T - 1) * apart + L, W]``,
    oldest first: float32 ``[B, L, W]``."""
    weight, taps = weight.astype(mx.float32), weight.shape[1]
    length = rows.shape[1] - (taps - 1) * apart
    y = sum(rows[:, tap * apart : tap * apart + length].astype(mx.float32) * weight[:, tap] for tap in range(taps))
    return y * mx.sigmoid(y)


def dilated_convolution_step_reference(
    x, told, residual, tail, start, weight, *, apart: int
) -> tuple[mx.array, mx.array]:
    """Definition of `dilated_convolution_step`: the result, and ``tail`` with the slot that was written."""
    slots, tail = tail.shape[0], mx.array(tail)
    rows = mx.concatenate([tail[start.item() % slots], x], axis=1)
    tail[(start.item() + 1) % slots] = rows[:, 1:]
    wide = residual.astype(mx.float32) + told.astype(mx.float32)
    return (wide + dilated_convolution(rows, weight, apart=apart)).astype(residual.dtype), tail


@lru_cache(maxsize=1024)
def plan(
    backend: str, batch: int, width: int, taps: int, apart: int, dtype: mx.Dtype, weight_dtype: mx.Dtype
) -> Launch:
    """The launch for one token of ``batch`` sequences."""
    values, host = (taps - 1) * apart * width, backend == "host"
    groups = -(-values // VALUES_PER_GROUP) if host else -(-width // (_SIMDGROUPS * SIMD_WIDTH))
    return Launch(
        KERNEL,
        template=(("T", dtype), ("W", width), ("TAPS", taps), ("APART", apart)),
        groups=(min(groups, width), batch),
        simdgroups=1 if host else _SIMDGROUPS,
        input_dtypes=(dtype, dtype, dtype, dtype, mx.int32, weight_dtype),
        output_shapes=((batch, 1, width),),
        output_dtypes=(dtype,),
    )


def convolves(x: mx.array, backend: Backend) -> bool:
    """Whether `dilated_convolution_step` takes these rows: one a sequence, in a dtype that the back end computes in."""
    return x.size >= 8 and DILATED_CONVOLUTION.serves(backend, x.dtype, rows=x.shape[1])


def dilated_convolution_step(
    x: mx.array,
    told: mx.array,
    residual: mx.array,
    tail: mx.array,
    start: mx.array,
    weight: mx.array,
    *,
    apart: int,
    backend: Backend,
) -> mx.array:
    """``residual + told + dilated_convolution``, where ``x`` is the newest row, for what `convolves` accepts.

    ``x``, ``told``, ``residual [B, 1, W]``, ``weight [W, T]``. ``tail [S, B, (T - 1) * apart, W]``, S at least 2,
    evaluated or not, is changed: the rows behind p tokens lie in slot ``p % S``, ``start``, an int32 array ``[1]``, is
    their number, and the slot after it is written. MLX does not know of it: wait for the result, or for what is
    computed from it, before it is read by anything else. Raises OptionError for parts that do not fit.
    """
    (batch, _, width), taps = x.shape, weight.shape[-1]
    shape = (tail.shape[0], batch, (taps - 1) * apart, width)
    alike = (told.shape, residual.shape) == (x.shape, x.shape) and {a.dtype for a in (told, residual, tail)} == {
        x.dtype
    }
    if not alike or weight.shape != (width, taps) or tail.shape != shape or tail.shape[0] < 2 or taps < 2:
        given = {"x": x, "told": told, "residual": residual, "tail": tail, "weight": weight}
        raise OptionError(
            f"dilated_convolution_step: {spell_arrays(given)} do not fit [B, 1, W] three times,"
            f" [S, B, (T - 1) * {apart}, W] and [W, T]"
        )
    backend.count(DILATED_CONVOLUTION.name, "kernel")
    call = plan(backend.name, batch, width, taps, apart, x.dtype, weight.dtype)
    return backend.launch(call, (x, told, residual, tail, start, weight))[0]
