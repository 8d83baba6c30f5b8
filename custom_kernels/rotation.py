"""Rotary position embedding (Su et al., 2021) by a table, for every way in which families pair dimensions.

`rotary.qkv_epilogue` does the same right behind a joint projection, where heads are turned as a whole and in halves.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.errors import OptionError

KERNEL = Kernel("rope", inputs=("x", "rotation"), outputs=("y",), headers=("rotary",))
ROTATE = Op("rotate", (KERNEL,))
VALUES_PER_GROUP = 1 << 14
"""Values that are worth a hand-over to another core."""


def rotations(frequencies: np.ndarray, positions: np.ndarray, *, magnitude: float = 1.0) -> np.ndarray:
    """Cosines and sines ``[L, P, 2]``, float32, of ``positions * frequencies``, times ``magnitude``.

    ``frequencies [P]`` are radians a position. ``positions`` are ``[L]``, or ``[L, P]`` where pairs follow positions of
    their own, as the temporal, vertical and horizontal ones of mRoPE (Wang et al., 2024). ``magnitude`` is YaRN's
    attention factor (Peng et al., 2023).
    """
    positions = np.asarray(positions, dtype=np.float64)
    angles = (positions if positions.ndim == 2 else positions[:, None]) * frequencies
    return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * magnitude).astype(np.float32)


def rotate_reference(x, rotation, *, interleaved: bool = False, start: int = 0, span: int | None = None) -> mx.array:
    """Definition of `rotate`."""
    pairs = rotation.shape[1]
    first = start + mx.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs if span is None else span // 2)
    cosine, sine = rotation[..., 0], rotation[..., 1]
    y = x.astype(mx.float32)
    a, b = y[..., first], y[..., second]
    y[..., first], y[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return y.astype(x.dtype)


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    pairs: int,
    interleaved: bool,
    start: int,
    distance: int,
    dtype: mx.Dtype,
    table_dtype: mx.Dtype,
) -> Launch:
    """The launch for ``x`` of ``shape``."""
    batch, heads, length, head_dim = shape
    units, host = batch * heads * length, backend == "host"
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("PAIRS", pairs),
            ("START", start),
            ("DISTANCE", distance),
            ("INTERLEAVED", interleaved),
        ),
        groups=(min(units, -(-units * head_dim // VALUES_PER_GROUP)) if host else -(-units // 4), 1),
        simdgroups=1 if host else 4,
        input_dtypes=(dtype, table_dtype),
        output_shapes=(shape,),
        output_dtypes=(dtype,),
    )


def rotate(
    x: mx.array,
    rotation: mx.array,
    *,
    interleaved: bool = False,
    start: int = 0,
    span: int | None = None,
    backend: Backend,
) -> mx.array:
    """Turn pairs of dimensions of each head: ``x [B, H, L, D]`` by ``rotation [L, P, 2]`` (see `rotations`).

    ``span`` dimensions from ``start`` on take part, by default ``2 P``. Pair ``i`` is ``(i, i + span / 2)`` among them,
    or ``(2 i, 2 i + 1)`` where ``interleaved``. Other dimensions stay as they are, and so does what a ``span`` holds
    beyond the pairs of ``rotation``, as in proportional RoPE (``span = D`` and few pairs). The result is contiguous, in
    the dtype of ``x``, which may be any view. Raises OptionError for parts that do not fit.
    """
    if x.ndim != 4 or rotation.ndim != 3 or rotation.shape[0] != x.shape[2] or rotation.shape[2] != 2:
        raise OptionError(
            f"rotate: x {list(x.shape)} and rotation {list(rotation.shape)} do not fit [B, H, L, D] and [L, P, 2]"
        )
    pairs, head_dim = rotation.shape[1], x.shape[3]
    width = 2 * pairs if span is None else span
    if width % 2 or width < 2 * pairs or (interleaved and width > 2 * pairs):
        kind = "interleaved pairs" if interleaved else "pairs"
        raise OptionError(f"rotate: {pairs} {kind} cannot span {width} dimensions")
    if start < 0 or start + width > head_dim:
        raise OptionError(f"rotate: {width} dimensions from {start} on are not within the {head_dim} of a head")
    if x.size == 0 or pairs == 0:
        return x
    if ROTATE.serves(backend, x.dtype):
        backend.count(ROTATE.name, "kernel")
        call = plan(backend.name, x.shape, pairs, interleaved, start, width // 2, x.dtype, rotation.dtype)
        return backend.launch(call, (x, rotation))[0]
    backend.count(ROTATE.name, "mlx")
    return rotate_reference(x, rotation, interleaved=interleaved, start=start, span=width)
