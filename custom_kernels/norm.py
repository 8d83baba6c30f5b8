"""Root-mean-square normalization (Zhang and Sennrich, 2019), with what families do right before and after it."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

NORM = Kernel(
    "rms_norm",
    inputs=("x", "weight", "gate", "residual", "scale", "x_weight", "other", "other_weight"),
    outputs=("y",),
    headers=("reduce", "load_some"),
)
ADD_NORM = Kernel(
    "add_rms_norm",
    inputs=("x", "residual", "before", "weight", "second"),
    outputs=("sum", "y", "z"),
    headers=("reduce", "load_some"),
)
RMS_NORM = Op("rms_norm", (NORM,))
GATED_RMS_NORM = Op("gated_rms_norm", (NORM,))
RMS_NORM_ADD = Op("rms_norm_add", (NORM,))
ADD_RMS_NORM = Op("add_rms_norm", (ADD_NORM,))
VALUES_PER_GROUP = 1 << 14
"""Values that are worth a hand-over to another core."""
SHARED_COLUMNS = 1024
"""Columns from which on all simdgroups of a GPU's threadgroup share a row."""
MOST_HELD = 8
"""Values of a row that a thread may keep in registers, of each array that it reads."""

Activation = Literal["silu", "sigmoid"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "sigmoid")


class JoinedNorms(NamedTuple):
    """A second array whose norm is added to that of the first, with the weights of both."""

    x_weight: mx.array
    other: mx.array
    other_weight: mx.array


def rms_norm_reference(x, weight, *, eps: float, centered: bool = False, dtype=None) -> mx.array:
    """Definition of `rms_norm`."""
    x32 = x.astype(mx.float32)
    normalized = x32 * mx.rsqrt(mx.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if weight is not None:
        normalized = normalized * (weight.astype(mx.float32) + (1.0 if centered else 0.0))
    return normalized.astype(dtype or x.dtype)


def gated_rms_norm_reference(x, gate, weight, *, eps: float, activation: Activation) -> mx.array:
    """Definition of `gated_rms_norm`."""
    opened = mx.sigmoid(gate.astype(mx.float32))
    if activation == "silu":
        opened = opened * gate.astype(mx.float32)
    return (rms_norm_reference(x.astype(mx.float32), weight, eps=eps) * opened).astype(x.dtype)


def rms_norm_add_reference(
    x, weight, residual, *, eps: float, centered: bool = False, scale=None, joined: JoinedNorms | None = None
) -> mx.array:
    """Definition of `rms_norm_add`."""
    x, options = x.astype(mx.float32), {"eps": eps, "centered": centered}
    if joined is not None:
        x = rms_norm_reference(x, joined.x_weight, **options)
        x = x + rms_norm_reference(joined.other.astype(mx.float32), joined.other_weight, **options)
    wide = rms_norm_reference(x, weight, **options) + residual.astype(mx.float32)
    if isinstance(scale, mx.array):
        scale = scale.astype(mx.float32)
    return (wide if scale is None else wide * scale).astype(residual.dtype)


def add_rms_norm_reference(
    x, residual, weight, *, eps: float, centered: bool = False, before=None, second=None, dtype=None
) -> tuple[mx.array, ...]:
    """Definition of `add_rms_norm`."""
    wide, options = x.astype(mx.float32), {"eps": eps, "centered": centered}
    if before is not None:
        wide = rms_norm_reference(wide, before, **options)
    total = (residual.astype(mx.float32) + wide).astype(residual.dtype)
    weights = ((weight, dtype or x.dtype), (second, x.dtype))
    return total, *(rms_norm_reference(total, w, dtype=kind, **options) for w, kind in weights if w is not None)


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    kernel: Kernel,
    shape: tuple[int, ...],
    eps: float,
    parameters: tuple[tuple[str, int | bool], ...],
    input_dtypes: tuple[mx.Dtype | None, ...],
    outputs: tuple[tuple[str, mx.Dtype], ...],
    absent: tuple[str, ...] = (),
) -> Launch:
    """The launch of either kernel for ``x`` of ``shape``; ``outputs`` names the template parameter of each dtype, and
    ``absent`` those outputs that are not written."""
    rows, columns = prod(shape[:-1]), shape[-1]
    host = backend == "host"
    shared = not host and columns >= SHARED_COLUMNS
    simdgroups = min(32, -(-columns // (4 * SIMD_WIDTH))) if shared else 4
    if simdgroups > 24 and sum(dtype is not None for dtype in input_dtypes) > 3:
        # What threads keep has to fit into the registers that there are for all of them.
        simdgroups = 16
    held = -(-columns // (simdgroups * SIMD_WIDTH))
    if host:
        groups = min(rows, -(-rows * columns // VALUES_PER_GROUP))
    else:
        groups = rows if shared else -(-rows // simdgroups)
    return Launch(
        kernel,
        template=(
            *outputs,
            ("NDIM", len(shape)),
            ("SHARED", shared),
            ("HELD", held if shared and held <= MOST_HELD else 0),
            ("EPSILON_BITS", float_bits(eps)),
            *parameters,
        ),
        groups=(groups, 1),
        simdgroups=1 if host else simdgroups,
        input_dtypes=input_dtypes,
        output_shapes=tuple(None if name in absent else shape for name, _ in outputs),
        output_dtypes=tuple(dtype for _, dtype in outputs),
    )


def _run(
    x,
    weight,
    *,
    eps: float,
    centered=False,
    gate=None,
    activation=0,
    residual=None,
    scale=None,
    joined: JoinedNorms | None = None,
    dtype=None,
    backend,
):
    """``rms_norm`` with all that it can do."""
    dtype = dtype or (x.dtype if residual is None else residual.dtype)
    number = isinstance(scale, float)
    given = (x, weight, gate, residual, None if number else scale, *(joined or (None,) * 3))
    parameters = (
        ("WEIGHTS", 0 if weight is None else weight.size // x.shape[-1]),
        ("CENTERED", centered),
        ("GATE", activation),
        ("RESIDUAL", residual is not None),
        ("SCALED", 2 if number else 0 if scale is None else 1),
        ("FACTOR_BITS", float_bits(scale if number else 1.0)),
        ("JOINED", joined is not None),
    )
    dtypes = tuple(None if a is None else a.dtype for a in given)
    return backend.launch(plan(backend.name, NORM, x.shape, eps, parameters, dtypes, (("O", dtype),)), given)[0]


def _check(op: str, x: mx.array, weight: mx.array | None, **alike: mx.array) -> None:
    """Raise OptionError unless the parts of an op fit ``x``."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise OptionError(f"{op}: x is {list(x.shape)}, but a norm needs a last axis with something in it")
    if weight is not None and (weight.ndim == 0 or weight.shape != x.shape[-weight.ndim :]):
        raise OptionError(f"{op}: weight is {list(weight.shape)}, but x is {list(x.shape)}; its last axes must agree")
    for name, array in alike.items():
        if array.shape != x.shape:
            raise OptionError(f"{op}: {name} is {list(array.shape)}, but x is {list(x.shape)}; they must agree")


def _check_vector(op: str, x: mx.array, weight: mx.array) -> None:
    if weight.shape != x.shape[-1:]:
        raise OptionError(f"{op}: weight is {list(weight.shape)}; it must be [{x.shape[-1]}]")


def rms_norm(
    x: mx.array,
    weight: mx.array | None,
    *,
    eps: float,
    centered: bool = False,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> mx.array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    ``x [..., D]`` -> its shape, in ``dtype``, by default its own. ``weight`` has the shape of the last axes of ``x``:
    ``[D]``, ``[G, D]`` for groups that have their own, or is None. ``centered`` weights are stored less 1, which is
    added in float32. Runs in our kernel, otherwise in `mx.fast.rms_norm`. Raises OptionError for a weight that does not
    fit.
    """
    _check("rms_norm", x, weight)
    dtype = dtype or x.dtype
    if x.size == 0:
        return x.astype(dtype)
    if RMS_NORM.serves(backend, x.dtype, dtype):
        backend.count(RMS_NORM.name, "kernel")
        return _run(x, weight, eps=eps, centered=centered, dtype=dtype, backend=backend)
    backend.count(RMS_NORM.name, "mlx")
    if centered or (weight is not None and weight.ndim > 1):
        return rms_norm_reference(x, weight, eps=eps, centered=centered, dtype=dtype)
    return mx.fast.rms_norm(x, weight, eps).astype(dtype)


def gated_rms_norm(
    x: mx.array, gate: mx.array, weight: mx.array, *, eps: float, activation: Activation, backend: Backend
) -> mx.array:
    """``rms_norm(x, weight) * activation(gate)``, the output norm of gated linear attention (Yang et al., 2024).

    ``x``, ``gate [..., D]`` -> the dtype of ``x``; ``activation`` is ``"silu"`` or ``"sigmoid"``. Raises OptionError
    for parts that do not fit.
    """
    _check("gated_rms_norm", x, weight, gate=gate)
    if activation not in ACTIVATIONS:
        raise OptionError(f"gated_rms_norm: activation={activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if x.size == 0:
        return x
    if GATED_RMS_NORM.serves(backend, x.dtype):
        backend.count(GATED_RMS_NORM.name, "kernel")
        options = {"gate": gate, "activation": 1 + ACTIVATIONS.index(activation)}
        return _run(x, weight, eps=eps, **options, backend=backend)
    backend.count(GATED_RMS_NORM.name, "mlx")
    return gated_rms_norm_reference(x, gate, weight, eps=eps, activation=activation)


def rms_norm_add(
    x: mx.array,
    weight: mx.array | None,
    residual: mx.array,
    *,
    eps: float,
    centered: bool = False,
    scale: mx.array | float | None = None,
    joined: JoinedNorms | None = None,
    backend: Backend,
) -> mx.array:
    """``(residual + rms_norm(x, weight)) * scale``: a norm after a sublayer, and its way into the residual stream.

    ``x``, ``residual [..., D]``, ``scale [1]`` or a float or None -> the dtype of ``residual``. ``joined`` puts
    ``rms_norm(x, x_weight) + rms_norm(other, other_weight)`` in place of ``x``, for sublayers of two branches. Raises
    OptionError for parts that do not fit.
    """
    _check("rms_norm_add", x, weight, residual=residual, **({} if joined is None else {"other": joined.other}))
    for each in () if joined is None else (joined.x_weight, joined.other_weight):
        _check_vector("rms_norm_add", x, each)
    if isinstance(scale, mx.array) and scale.shape != (1,):
        raise OptionError(f"rms_norm_add: scale is {list(scale.shape)}; it must be [1]")
    if x.size == 0:
        return residual
    options = {"eps": eps, "centered": centered, "scale": scale, "joined": joined}
    if RMS_NORM_ADD.serves(backend, x.dtype, residual.dtype):
        backend.count(RMS_NORM_ADD.name, "kernel")
        return _run(x, weight, residual=residual, **options, backend=backend)
    backend.count(RMS_NORM_ADD.name, "mlx")
    return rms_norm_add_reference(x, weight, residual, **options)


def add_rms_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array,
    *,
    eps: float,
    centered: bool = False,
    before: mx.array | None = None,
    second: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> tuple[mx.array, ...]:
    """``residual + x``, and `rms_norm` of that: the residual stream, and the input of the next sublayer.

    ``x``, ``residual [..., D]``, ``weight [D]`` -> the sum in the dtype of ``residual``, its norm in ``dtype``, by
    default that of ``x``. ``before [D]`` is the weight of a norm of ``x`` before it is added; ``second [D]`` that of
    another norm of the sum, which is returned as well, in the dtype of ``x``. Raises OptionError for parts that do not
    fit.
    """
    _check("add_rms_norm", x, None, residual=residual)
    for each in (before, weight, second):
        if each is not None:
            _check_vector("add_rms_norm", x, each)
    dtype = dtype or x.dtype
    if x.size == 0:
        return (residual, x.astype(dtype), *([] if second is None else [x]))
    if ADD_RMS_NORM.serves(backend, x.dtype, residual.dtype, dtype):
        backend.count(ADD_RMS_NORM.name, "kernel")
        given = (x, residual, before, weight, second)
        outputs = (("S", residual.dtype), ("O", dtype), ("Z", x.dtype))
        parameters = (("CENTERED", centered), ("BEFORE", before is not None), ("SECOND", second is not None))
        dtypes = tuple(None if a is None else a.dtype for a in given)
        absent = () if second is not None else ("Z",)
        call = plan(backend.name, ADD_NORM, x.shape, eps, parameters, dtypes, outputs, absent)
        return tuple(backend.launch(call, given))
    backend.count(ADD_RMS_NORM.name, "mlx")
    options = {"before": before, "second": second, "dtype": dtype}
    return add_rms_norm_reference(x, residual, weight, eps=eps, centered=centered, **options)
