"""The matrix-vector kernel ``dequant_gemv_simd``, and what it can do before and after the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Literal, NamedTuple

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "dequant_gemv_simd",
    inputs=("w", "scales", "biases", "x", "norm_weight", "bias", "row_gate", "residual"),
    outputs=("y", "largest", "largest_row"),
    headers=("eight", "affine", "affine_block", "activation"),
    weights=("w", "scales", "biases"),
)
COMBINE = Kernel("greedy_head_combine", inputs=("largest", "largest_row"), outputs=("ids",))
Activation = Literal["silu", "gelu_tanh", "gelu_erf", "clamped_swiglu", "sigmoid"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu_erf", "clamped_swiglu", "sigmoid")
"""In the order of ``metal/activation.h``."""
ROWS = 8
"""Rows of x up to which the kernel is used: more belong to a matrix product."""
TOGETHER = {"metal": (1, 2, 4, 8), "cuda": (1, 2, 4, 8), "host": (1, 4)}
"""Numbers of rows that are read together. Each is a variant to compile, which takes the host a second."""
STAGED_BYTES = {"metal": 31 << 10, "cuda": 46 << 10, "host": 256 << 10}
"""Threadgroup memory for activations: under 32 KB on Metal and 48 KB on CUDA; on the host it is a thread's stack."""
PRODUCTS_PER_GROUP = 1 << 16
"""Products that are worth a hand-over to another core: some microseconds."""


def serves(op: Op, x: mx.array, weight: mx.array, backend: Backend, *dtypes: mx.Dtype) -> bool:
    """Whether the kernel takes this product, with results or a residual in ``dtypes``. Metal gives arrays under eight
    elements another address space."""
    return weight.size >= 8 and op.serves(backend, x.dtype, *dtypes, rows=x.size // x.shape[-1])


def check_activation(op: str, activation: str, limit: float | None) -> None:
    """Raise OptionError for an activation that does not exist, or whose limit is missing or too much."""
    if activation not in ACTIVATIONS:
        raise OptionError(f"{op}: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if (activation == "clamped_swiglu") != (limit is not None):
        raise OptionError(f"{op}: limit is {limit}; clamped_swiglu needs one, and the others have none")


class Form(NamedTuple):
    """What stands around a product, as far as it decides about the kernel's text."""

    eps: float = 0.0
    centered: bool = False
    activation: Activation | None = None
    limit: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    residual: bool = False
    argmax: bool = False


class Dtypes(NamedTuple):
    """What the activations lie in memory as, are multiplied as, and what the result is in."""

    x: mx.Dtype
    staged: mx.Dtype
    y: mx.Dtype

    @classmethod
    def alike(cls, dtype: mx.Dtype) -> Dtypes:
        return cls(dtype, dtype, dtype)


class Sizes(NamedTuple):
    """How a launch shares the work out: output rows a simdgroup, simdgroups a threadgroup, how often a threadgroup does
    that, and the steps that weights are loaded ahead."""

    rows: int
    simdgroups: int
    passes: int
    ahead: int


def sizes_on_gpu(rows: int, columns: int, out: int, bits: int, gated: bool) -> Sizes:
    """The fastest launch for one row of x on an H200 (`benchmarks/kernels.py --sweep`); plain ones for more rows."""
    if rows > 1:
        # Two rows of W share what is read of x, as long as their sums fit into registers.
        return Sizes(2 if rows * (2 if gated else 1) < 8 else 1, 8, 1, 2)
    if bits > 4:
        # Twice the registers for what is loaded ahead.
        if gated:
            return Sizes(1, 8, 1 if out <= 4096 else 4, 1)
        return Sizes(1, 16, 1, 2) if columns > 8192 else Sizes(2, 8, 1, 2)
    # As many rows a simdgroup as leave work for all multiprocessors.
    most = 1 if out < 1024 else 2 if gated or out < 4096 or out > 16384 else 4
    if columns > 8192:
        return Sizes(min(most, 2), 16, 1, 4)
    # Where there is much to read, more simdgroups at work hide more than more loads of one.
    return Sizes(most, 8, 1, 2 if out > (4096 if gated else 16384) else 4)


def staged_blocks(backend: str, rows: int, columns: int, dtype: mx.Dtype) -> int:
    """Blocks of 32 columns whose activations are staged together: all, or a multiple of the simdgroup, or none."""
    blocks, block = columns // 32, 32 * (4 if backend == "host" else dtype.size)
    width = 1 if backend == "host" else SIMD_WIDTH
    padded = -(-blocks // width) * width
    if rows * (padded * block + blocks * 4) <= STAGED_BYTES[backend]:
        return blocks
    return STAGED_BYTES[backend] // (rows * (block + 4)) // width * width


def fits(backend: str, rows: int, columns: int, dtype: mx.Dtype) -> bool:
    """Whether rows can be read together: GPUs take their columns in tiles, but on the host that would be slow."""
    staged = staged_blocks(backend, rows, columns, dtype)
    return staged == columns // 32 if backend == "host" else staged > 0


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    most: int,
    out: int,
    bits: int,
    group_size: int,
    form: Form,
    companion: mx.Dtype,
    dtypes: Dtypes,
    norm_dtype: mx.Dtype | None,
    bias_dtype: mx.Dtype | None,
    gate_dtype: mx.Dtype | None = None,
    sizes: Sizes | None = None,
) -> Launch:
    """The launch for ``x`` of ``shape``, whose rows, at most ``most``, are read together."""
    columns, gated = shape[-1], form.activation is not None
    blocks, tile = columns // 32, staged_blocks(backend, most, columns, dtypes.staged)
    if backend == "host":
        # A few threadgroups a core, so that one that is busy elsewhere does not hold the others up.
        groups = max(1, min(out, 4 * thread_count(), most * out * columns // PRODUCTS_PER_GROUP))
        sizes = Sizes(1, 1, 0, 0)
    else:
        sizes = sizes or sizes_on_gpu(most, columns, out, bits, gated)
        groups = -(-out // (sizes.rows * sizes.simdgroups * sizes.passes))
        steps = -(-tile // SIMD_WIDTH)
        # Tiles follow one another without a gap only where loading ahead divides their steps.
        ahead = min(sizes.ahead, steps) if tile == blocks else gcd(sizes.ahead, steps)
        sizes = sizes._replace(ahead=ahead)
    return Launch(
        KERNEL,
        template=(
            ("X", dtypes.x),
            ("T", dtypes.staged),
            ("O", dtypes.y),
            ("S", companion),
            ("G", norm_dtype or mx.float32),
            ("K", columns),
            ("N", 2 * out if gated else out),
            ("M", most),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", sizes.rows),
            ("SIMDS", sizes.simdgroups),
            ("PASSES", sizes.passes),
            ("AHEAD", sizes.ahead),
            ("TILE", tile),
            ("NORM", norm_dtype is not None),
            ("CENTERED", form.centered),
            ("EPSILON_BITS", float_bits(form.eps)),
            ("BIAS", bias_dtype is not None),
            ("GATED", gated),
            ("ACTIVATION", ACTIVATIONS.index(form.activation) if gated else 0),
            ("LIMIT_BITS", float_bits(form.limit)),
            ("FACTOR_BITS", float_bits(form.scale)),
            ("SOFTCAP", form.softcap is not None),
            ("CAP_BITS", float_bits(form.softcap or 0.0)),
            ("ROW_GATE", gate_dtype is not None),
            ("RESIDUAL", form.residual),
            ("ARGMAX", form.argmax),
        ),
        groups=(groups, 1),
        simdgroups=sizes.simdgroups,
        input_dtypes=(
            *(mx.uint32, companion, companion, dtypes.x, norm_dtype, bias_dtype, gate_dtype),
            dtypes.y if form.residual else None,
        ),
        output_shapes=(None, *[(prod(shape[:-1]), groups)] * 2) if form.argmax else ((*shape[:-1], out), None, None),
        output_dtypes=(dtypes.y, mx.float32, mx.uint32),
    )


@lru_cache(maxsize=4096)
def combine_plan(backend: str, shape: tuple[int, ...], found: int) -> Launch:
    """The launch that makes ids of ``shape`` from what ``found`` threadgroups found for each."""
    simdgroups = 1 if backend == "host" else 8
    return Launch(
        COMBINE,
        template=(("FOUND", found), ("SIMDS", simdgroups)),
        groups=(prod(shape), 1),
        simdgroups=simdgroups,
        input_dtypes=(mx.float32, mx.uint32),
        output_shapes=(shape,),
        output_dtypes=(mx.uint32,),
    )


def in_parts(
    launch: Callable[..., mx.array],
    x: mx.array,
    beside: Sequence[mx.array | None],
    together: Sequence[int],
    shape: tuple[int, ...],
) -> mx.array:
    """``launch(part, most, *beside)`` over all rows of ``x``: a result of ``shape``. A kernel reads at most ``most``
    rows together, one of ``together``. What is given ``beside`` x has as many rows, and is cut with it."""
    columns = x.shape[-1]
    rows = x.size // columns
    if rows == 1:
        return launch(x, 1, *beside)
    # Kernels take the number of rows from the first axis.
    flat, beside = x.reshape(rows, columns), [None if each is None else each.reshape(rows, -1) for each in beside]
    parts = []
    for start in range(0, rows, together[-1]):
        chosen = slice(start, min(start + together[-1], rows))
        most = next(size for size in together if size >= chosen.stop - start)
        parts.append(launch(flat[chosen], most, *(None if each is None else each[chosen] for each in beside)))
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(shape)


def gemv(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    bits: int,
    group_size: int,
    form: Form,
    norm_weight: mx.array | None,
    bias: mx.array | None,
    row_gate: mx.array | None = None,
    residual: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    backend: Backend,
) -> mx.array:
    """The product that the ops of `affine` and `head` define, for what `serves` accepts."""
    columns, out = x.shape[-1], weight.shape[0] // (1 if form.activation is None else 2)
    staged = dtype or x.dtype
    kinds = Dtypes(x.dtype, staged, staged if residual is None else residual.dtype)
    matrix = (out, bits, group_size, form, scales.dtype, kinds)
    dtypes = tuple(None if array is None else array.dtype for array in (norm_weight, bias, row_gate))

    def launch(part: mx.array, most: int, gate: mx.array | None, added: mx.array | None) -> mx.array:
        call = plan(backend.name, part.shape, most, *matrix, *dtypes)
        made = backend.launch(call, (weight, scales, biases, part, norm_weight, bias, gate, added))
        if form.argmax:
            made = backend.launch(combine_plan(backend.name, part.shape[:-1], call.groups[0]), tuple(made))
        return made[0]

    together = [n for n in TOGETHER[backend.name] if n == 1 or fits(backend.name, n, columns, staged)]
    shape = x.shape[:-1] if form.argmax else (*x.shape[:-1], out)
    return in_parts(launch, x, (row_gate, residual), together, shape)
