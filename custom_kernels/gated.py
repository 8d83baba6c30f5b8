"""Activation of one product times another, where no product's own kernel can do it."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import mlx.core as mx

from turbospark_mlx.custom_kernels import gemv
from turbospark_mlx.custom_kernels.affine import gated
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH, Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

KERNEL = Kernel("gated_product", inputs=("gate", "up"), outputs=("y",), headers=("activation",))
GATED_PRODUCT = Op("gated_product", (KERNEL,), rows=gemv.ROWS)


def gated_product_reference(
    gate, up, *, activation: gemv.Activation, limit: float | None = None, scale: float = 1.0
) -> mx.array:
    """Definition of `gated_product`."""
    shares = scale * up.astype(mx.float32).reshape(*gate.shape, up.shape[-1] // max(1, gate.shape[-1]))
    gates = scale * gate.astype(mx.float32)[..., None]
    return gated(gates, shares, activation, limit).reshape(up.shape).astype(gate.dtype)


@lru_cache(maxsize=1024)
def plan(
    backend: str,
    shape: tuple[int, ...],
    share: int,
    activation: gemv.Activation,
    limit: float,
    scale: float,
    dtypes: tuple[mx.Dtype, mx.Dtype],
) -> Launch:
    """The launch for ``up`` of ``shape``, ``share`` of whose values have one gate. Few rows are not worth a hand-over
    to another core."""
    count, simdgroups = prod(shape), 4
    return Launch(
        KERNEL,
        template=(
            ("T", dtypes[0]),
            ("COUNT", count),
            ("SHARE", share),
            ("ACTIVATION", gemv.ACTIVATIONS.index(activation)),
            ("LIMIT_BITS", float_bits(limit)),
            ("SCALE_BITS", float_bits(scale)),
        ),
        groups=(1 if backend == "host" else -(-count // (SIMD_WIDTH * simdgroups)), 1),
        simdgroups=1 if backend == "host" else simdgroups,
        input_dtypes=dtypes,
        output_shapes=(shape,),
        output_dtypes=dtypes[:1],
    )


def gated_product(
    gate: mx.array,
    up: mx.array,
    *,
    activation: gemv.Activation,
    limit: float | None = None,
    scale: float = 1.0,
    backend: Backend,
) -> mx.array:
    """``activation(scale * gate) * scale * up`` in float32; see `gated_affine_matmul` for the activations and
    ``limit``.

    ``gate [..., D]``, ``up [..., D * S]`` -> the shape of ``up`` in the dtype of ``gate``: each gate is for ``S``
    neighbours, as one gate a head is. Up to 8 rows run in our kernel. Raises OptionError for parts that do not fit.
    """
    share, rest = divmod(up.shape[-1], gate.shape[-1] or 1) if gate.ndim and up.ndim else (0, 1)
    if rest or (not share and gate.size) or gate.shape[:-1] != up.shape[:-1]:
        raise OptionError(
            f"gated_product: gate is {list(gate.shape)} and up {list(up.shape)}; they are [..., D] and [..., D * S]"
        )
    gemv.check_activation(GATED_PRODUCT.name, activation, limit)
    if gate.size and GATED_PRODUCT.serves(backend, gate.dtype, up.dtype, rows=gate.size // gate.shape[-1]):
        backend.count(GATED_PRODUCT.name, "kernel")
        call = plan(backend.name, up.shape, share, activation, limit or 0.0, scale, (gate.dtype, up.dtype))
        return backend.launch(call, (gate, up))[0]
    backend.count(GATED_PRODUCT.name, "mlx")
    return gated_product_reference(gate, up, activation=activation, limit=limit, scale=scale)
