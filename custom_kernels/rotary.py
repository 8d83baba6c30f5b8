"""What stands between a joint q, k, v projection and attention: split, head norms, positions (Su et al., 2021)."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import decode_attention
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotations
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "fused_qkv_epilogue",
    inputs=("qkv", "rotation", "q_norm", "k_norm", "cache", "start"),
    outputs=("q", "kv"),
    headers=("rotated_head",),
    writes=("cache",),
)
QKV_EPILOGUE = Op("qkv_epilogue", (KERNEL,))
QKV_APPEND = Op("qkv_append", (KERNEL,), rows=decode_attention.ROWS, instead=QKV_EPILOGUE.name)
VALUES_PER_GROUP = 1 << 14


def rotation_table(frequencies: np.ndarray, offset: int, length: int) -> np.ndarray:
    """Cosines and sines ``[length, P, 2]``, float32, at positions ``offset`` and on.

    ``frequencies [P]`` are radians a position.
    """
    return rotations(frequencies, np.arange(offset, offset + length))


def stored_heads(heads: int, kv_heads: int, shared_values: bool) -> int:
    """The heads of a joint projection."""
    return heads + kv_heads * (1 if shared_values else 2)


def qkv_epilogue_reference(
    qkv,
    rotation,
    *,
    heads: int,
    kv_heads: int,
    q_norm=None,
    k_norm=None,
    eps=None,
    head_norm: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
):
    """Definition of `qkv_epilogue`."""
    batch, length, width = qkv.shape
    head_dim = width // stored_heads(heads, kv_heads, shared_values)
    split = qkv.astype(mx.float32).reshape(batch, length, -1, head_dim).transpose(0, 2, 1, 3)
    q, k = split[:, :heads], split[:, heads : heads + kv_heads]
    v = k if shared_values else split[:, heads + kv_heads :]
    if q_norm is not None or head_norm:
        q = rms_norm_reference(q, q_norm, eps=eps)
    if k_norm is not None or head_norm:
        k = rms_norm_reference(k, k_norm, eps=eps)
    if value_norm:
        v = rms_norm_reference(v, None, eps=eps)
    cosine, sine, pairs = rotation[..., 0], rotation[..., 1], rotation.shape[1]

    def rotate(x):
        first, second, kept = mx.split(x, [pairs, 2 * pairs], axis=-1)
        return mx.concatenate([first * cosine - second * sine, second * cosine + first * sine, kept], axis=-1)

    return rotate(q).astype(qkv.dtype), mx.stack([rotate(k), v]).astype(qkv.dtype) if kv_heads else None


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    heads: int,
    kv_heads: int,
    pairs: int,
    eps: float,
    dtype: mx.Dtype,
    q_norm_dtype: mx.Dtype | None,
    k_norm_dtype: mx.Dtype | None,
    head_norm: bool,
    value_norm: bool,
    shared_values: bool,
    append: bool,
) -> Launch:
    """The launch for ``qkv`` of ``shape``; ``append`` writes keys and values into a cache."""
    batch, length, width = shape
    head_dim = width // stored_heads(heads, kv_heads, shared_values)
    units = batch * length * (heads + 2 * kv_heads)
    host = backend == "host"
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("PAIRS", pairs),
            ("NORM", 1 if head_norm else 0 if q_norm_dtype is None else 2),
            ("EPSILON_BITS", float_bits(eps)),
            ("VALUE_NORM", value_norm),
            ("SHARED_VALUES", shared_values),
            ("APPEND", append),
        ),
        groups=(max(1, batch * length * width // VALUES_PER_GROUP) if host else -(-units // 4), 1),
        simdgroups=1 if host else 4,
        input_dtypes=(dtype, mx.float32, q_norm_dtype, k_norm_dtype, *((dtype, mx.int32) if append else (None, None))),
        output_shapes=(
            (batch, heads, length, head_dim),
            None if append or not kv_heads else (2, batch, kv_heads, length, head_dim),
        ),
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
    head_norm: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
    backend: Backend,
) -> tuple[mx.array, mx.array | None]:
    """Split ``qkv [B, L, (H + 2 KV) * D]`` into heads, normalize and rotate queries and keys.

    Returns ``q [B, H, L, D]`` and ``kv [2, B, KV, L, D]``, keys first, in the dtype of ``qkv``. Pairs ``(i, i + P)``
    turn by ``rotation [L, P, 2]`` (see `rotation_table`), and dimensions from ``2 P`` on stay as they are. ``q_norm
    [D]``, ``k_norm [D]`` with ``eps`` stand for `norm.rms_norm` of each head before, ``head_norm`` for that without
    weights, ``value_norm`` for that of values.

    With ``shared_values`` the rows of keys, before norm and rotation, are the values too, and ``qkv`` is ``[B, L, (H +
    KV) * D]``. With ``kv_heads`` 0 there are queries alone, and None for ``kv``. Raises OptionError for shapes that do
    not fit.
    """
    _check(
        "qkv_epilogue", qkv.shape, rotation, heads, kv_heads, q_norm, k_norm, eps, head_norm, value_norm, shared_values
    )
    if qkv.size == 0 or not QKV_EPILOGUE.serves(backend, qkv.dtype):
        backend.count(QKV_EPILOGUE.name, "mlx")
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "head_norm": head_norm, "value_norm": value_norm}
        sizes = {"heads": heads, "kv_heads": kv_heads, "shared_values": shared_values}
        return qkv_epilogue_reference(qkv, rotation, **sizes, **norms)
    options = head_norm, value_norm, shared_values
    q, *kv = _launch(qkv, rotation, heads, kv_heads, q_norm, k_norm, eps, *options, None, None, backend)
    return q, kv[0] if kv else None


def qkv_append_reference(qkv, rotation, cache, start, **sizes):
    """Definition of `qkv_append`: ``(q, cache)`` with a cache that has the rows."""
    q, kv = qkv_epilogue_reference(qkv, rotation, **sizes)
    slots = (start + mx.arange(qkv.shape[1])) % cache.shape[3]
    cache = mx.array(cache)
    cache[:, :, :, slots] = kv.astype(cache.dtype)
    return q, cache


def appends(qkv: mx.array, backend: Backend) -> bool:
    """Whether `qkv_append` and `cache_attention` take these rows: few, and in a dtype that the back end computes in."""
    return qkv.size >= 8 and QKV_APPEND.serves(backend, qkv.dtype, rows=qkv.shape[1])


def qkv_append(
    qkv: mx.array,
    rotation: mx.array,
    cache: mx.array,
    start: mx.array,
    *,
    heads: int,
    kv_heads: int,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float | None = None,
    head_norm: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
    backend: Backend,
) -> mx.array:
    """`qkv_epilogue` that writes keys and values into ``cache`` itself, for what `appends` accepts; returns ``q``.

    ``cache [2, B, KV, capacity, D]``, evaluated or not, is changed: the row of position ``p`` is ``p % capacity``, from
    ``start``, an int32 array ``[1]``, on. MLX does not know of it: wait for ``q``, or for what is computed from it,
    before the cache is read by anything but `cache_attention` of this ``q``. Raises OptionError as `qkv_epilogue` does.
    """
    options = head_norm, value_norm, shared_values
    check_append("qkv_append", qkv, rotation, cache, heads, kv_heads, q_norm, k_norm, eps, *options)
    return _launch(qkv, rotation, heads, kv_heads, q_norm, k_norm, eps, *options, cache, start, backend)[0]


def check_append(
    op: str,
    qkv,
    rotation,
    cache,
    heads,
    kv_heads,
    q_norm,
    k_norm,
    eps,
    head_norm=False,
    value_norm=False,
    shared_values=False,
) -> int:
    """Check that rows fit a cache; returns D. Raises OptionError."""
    options = head_norm, value_norm, shared_values
    head_dim = _check(op, qkv.shape, rotation, heads, kv_heads, q_norm, k_norm, eps, *options)
    batch, length, _ = qkv.shape
    if (
        cache.ndim != 5
        or cache.shape != (2, batch, kv_heads, cache.shape[3], head_dim)
        or length > cache.shape[3]
        or cache.dtype != qkv.dtype
    ):
        raise OptionError(
            f"{op}: the cache is {cache.dtype} {list(cache.shape)}; {length} rows of {qkv.dtype} need "
            f"[2, {batch}, {kv_heads}, at least {length}, {head_dim}]"
        )
    return head_dim


def _check(op: str, shape, rotation, heads, kv_heads, q_norm, k_norm, eps, head_norm, value_norm, shared_values) -> int:
    """Check that the parts belong together; returns D. Raises OptionError."""
    _, length, width = shape
    head_dim, rest = divmod(width, stored_heads(heads, kv_heads, shared_values))
    pairs = rotation.shape[1] if rotation.ndim == 3 else 0
    if rest or rotation.shape != (length, pairs, 2) or not 0 < 2 * pairs <= head_dim:
        raise OptionError(
            f"{op}: qkv {list(shape)} of {heads} + {1 if shared_values else 2} * {kv_heads} heads, rotation "
            f"{list(rotation.shape)} do not fit [B, L, heads * D] and [L, P, 2] with P at most D / 2"
        )
    learned = q_norm is not None
    normed = learned or head_norm or value_norm
    if (k_norm is not None) != (learned and kv_heads > 0) or (eps is not None) != normed:
        raise OptionError(f"{op}: q_norm, k_norm and eps belong together")
    if learned and head_norm:
        raise OptionError(f"{op}: head_norm is a norm without weights; q_norm is one")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_dim,):
            raise OptionError(f"{op}: {name} is {list(weight.shape)}, but heads have {head_dim} dimensions")
    return head_dim


def _launch(
    qkv, rotation, heads, kv_heads, q_norm, k_norm, eps, head_norm, value_norm, shared_values, cache, start, backend
) -> list[mx.array]:
    backend.count((QKV_EPILOGUE if cache is None else QKV_APPEND).name, "kernel")
    dtypes = (None if weight is None else weight.dtype for weight in (q_norm, k_norm))
    variant = head_norm, value_norm, shared_values, cache is not None
    sizes = (heads, kv_heads, rotation.shape[1])
    call = plan(backend.name, qkv.shape, *sizes, eps or 0.0, qkv.dtype, *dtypes, *variant)
    return backend.launch(call, (qkv, rotation, q_norm, k_norm, cache, start))
