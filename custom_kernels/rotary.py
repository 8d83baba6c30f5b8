"""What stands between a joint q, k, v projection and attention: split, head norms, positions (Su et al., 2021)."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotations
from turbospark_mlx.errors import OptionError

KERNEL = Kernel("fused_qkv_epilogue", inputs=("qkv", "rotation", "q_norm", "k_norm"), outputs=("q", "kv"))
VALUES_PER_GROUP = 1 << 14


def rotation_table(frequencies: np.ndarray, offset: int, length: int) -> mx.array:
    """Cosines and sines ``[length, D / 2, 2]``, float32, at positions ``offset`` and on.

    ``frequencies [D / 2]`` are radians a position.
    """
    return rotations(frequencies, np.arange(offset, offset + length))


def qkv_epilogue_reference(qkv, rotation, *, heads: int, kv_heads: int, q_norm=None, k_norm=None, eps=None):
    """Definition of `qkv_epilogue`."""
    batch, length, width = qkv.shape
    split = qkv.astype(mx.float32).reshape(batch, length, -1, width // (heads + 2 * kv_heads)).transpose(0, 2, 1, 3)
    q, k, v = mx.split(split, [heads, heads + kv_heads], axis=1)
    if q_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps=eps), rms_norm_reference(k, k_norm, eps=eps)
    cosine, sine = rotation[..., 0], rotation[..., 1]

    def rotate(x):
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    return rotate(q).astype(qkv.dtype), mx.stack([rotate(k), v]).astype(qkv.dtype)


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    heads: int,
    kv_heads: int,
    eps: float,
    dtype: mx.Dtype,
    q_norm_dtype: mx.Dtype | None,
    k_norm_dtype: mx.Dtype | None,
) -> Launch:
    """The launch for ``qkv`` of ``shape``."""
    batch, length, width = shape
    head_dim, units = width // (heads + 2 * kv_heads), batch * length * (heads + 2 * kv_heads)
    host = backend == "host"
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("NORM", q_norm_dtype is not None),
            ("EPSILON_BITS", float_bits(eps)),
        ),
        groups=(max(1, batch * length * width // VALUES_PER_GROUP) if host else -(-units // 4), 1),
        simdgroups=1 if host else 4,
        input_dtypes=(dtype, mx.float32, q_norm_dtype or dtype, k_norm_dtype or dtype),
        output_shapes=((batch, heads, length, head_dim), (2, batch, kv_heads, length, head_dim)),
        output_dtypes=(dtype, dtype),
    )


def qkv_epilogue(
    qkv: mx.array,
    rotation: mx.array,
    *,
    heads: int,
    kv_heads: int,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float | None = None,
    backend: Backend,
) -> tuple[mx.array, mx.array]:
    """Split ``qkv [B, L, (H + 2 KV) * D]`` into heads, normalize and rotate queries and keys.

    Returns ``q [B, H, L, D]`` and ``kv [2, B, KV, L, D]``, keys first, in the dtype of ``qkv``. Pairs ``(i, i + D /
    2)`` turn by ``rotation [L, D / 2, 2]`` (see `rotation_table`). ``q_norm [D]``, ``k_norm [D]`` with ``eps`` stand
    for `norm.rms_norm` of each head before. Raises OptionError for shapes that do not fit.
    """
    _, length, width = qkv.shape
    head_dim, rest = divmod(width, heads + 2 * kv_heads)
    if rest or head_dim % 2 or rotation.shape != (length, head_dim // 2, 2):
        raise OptionError(
            f"qkv_epilogue: qkv {list(qkv.shape)} of {heads} + 2 * {kv_heads} heads, rotation {list(rotation.shape)} "
            "do not fit [B, L, heads * D] and [L, D / 2, 2]"
        )
    if len({q_norm is None, k_norm is None, eps is None}) > 1:
        raise OptionError("qkv_epilogue: q_norm, k_norm and eps belong together")
    norms = {"q_norm": q_norm, "k_norm": k_norm}
    for name, weight in norms.items():
        if weight is not None and weight.shape != (head_dim,):
            raise OptionError(f"qkv_epilogue: {name} is {list(weight.shape)}, but heads have {head_dim} dimensions")
    if backend.launch is None or qkv.size == 0 or (backend.device == "cpu" and qkv.dtype != mx.float32):
        backend.count("qkv_epilogue", "mlx")
        return qkv_epilogue_reference(qkv, rotation, heads=heads, kv_heads=kv_heads, **norms, eps=eps)
    backend.count("qkv_epilogue", "kernel")
    dtypes = (None if weight is None else weight.dtype for weight in norms.values())
    call = plan(backend.name, qkv.shape, heads, kv_heads, eps or 0.0, qkv.dtype, *dtypes)
    weights = (qkv if weight is None else weight for weight in norms.values())
    return tuple(backend.launch(call, (qkv, rotation, *weights)))
