"""What stands between a joint q, k, v projection and attention: split, head norms, positions (Su et al., 2021)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels import decode_attention
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.custom_kernels.norm import rms_norm_reference
from turbospark_mlx.custom_kernels.rotation import rotate_reference, rotations
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


def stored_heads(heads: int, kv_heads: int, shared_values: bool = False, gated: bool = False) -> int:
    """The heads of a joint projection."""
    return heads * (2 if gated else 1) + kv_heads * (1 if shared_values else 2)


class Form(NamedTuple):
    """What a joint projection holds, and what is done with it, as far as it decides about the kernels' text."""

    heads: int
    kv_heads: int
    eps: float | None
    head_norm: bool = False
    value_norm: bool = False
    shared_values: bool = False
    centered: bool = False
    gated: bool = False

    @property
    def stored(self) -> int:
        return stored_heads(self.heads, self.kv_heads, self.shared_values, self.gated)


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
    centered: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
    gated: bool = False,
):
    """Definition of `qkv_epilogue`."""
    batch, length, width = qkv.shape
    head_dim = width // stored_heads(heads, kv_heads, shared_values, gated)
    split = qkv.astype(mx.float32).reshape(batch, length, -1, head_dim).transpose(0, 2, 1, 3)
    if gated:
        split = mx.concatenate([split[:, : 2 * heads : 2], split[:, 2 * heads :]], axis=1)
    q, k = split[:, :heads], split[:, heads : heads + kv_heads]
    v = k if shared_values else split[:, heads + kv_heads :]
    if q_norm is not None or head_norm:
        q = rms_norm_reference(q, q_norm, eps=eps, centered=centered)
    if (k_norm is not None or head_norm) and kv_heads:
        k = rms_norm_reference(k, k_norm, eps=eps, centered=centered)
    if value_norm:
        v = rms_norm_reference(v, None, eps=eps)
    q = rotate_reference(q, rotation).astype(qkv.dtype)
    return q, mx.stack([rotate_reference(k, rotation), v]).astype(qkv.dtype) if kv_heads else None


@lru_cache(maxsize=4096)
def plan(
    backend: str,
    shape: tuple[int, ...],
    pairs: int,
    form: Form,
    dtype: mx.Dtype,
    q_norm_dtype: mx.Dtype | None,
    k_norm_dtype: mx.Dtype | None,
    append: bool,
) -> Launch:
    """The launch for ``qkv`` of ``shape``; ``append`` writes keys and values into a cache."""
    (batch, length, width), heads, kv_heads = shape, form.heads, form.kv_heads
    head_dim = width // form.stored
    units = batch * length * (heads + 2 * kv_heads)
    host = backend == "host"
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            *constants(form, head_dim, pairs, q_norm_dtype is not None),
            ("VALUE_NORM", form.value_norm),
            ("SHARED_VALUES", form.shared_values),
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


def constants(form: Form, head_dim: int, pairs: int, learned: bool) -> tuple[tuple[str, int | bool], ...]:
    """Template parameters of the kernels that split a joint projection."""
    return (
        ("H", form.heads),
        ("KV", form.kv_heads),
        ("D", head_dim),
        ("PAIRS", pairs),
        ("GATED", form.gated),
        ("NORM", 1 if form.head_norm else 2 if learned else 0),
        ("CENTERED", form.centered),
        ("EPSILON_BITS", float_bits(form.eps or 0.0)),
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
    centered: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
    gated: bool = False,
    backend: Backend,
) -> tuple[mx.array, mx.array | None]:
    """Split ``qkv [B, L, (H + 2 KV) * D]`` into heads, normalize and rotate queries and keys.

    Returns ``q [B, H, L, D]`` and ``kv [2, B, KV, L, D]``, keys first, in the dtype of ``qkv``. Pairs ``(i, i + P)`` of
    the first ``2 P`` dimensions turn by ``rotation [L, P, 2]`` (see `rotation_table`). ``q_norm [D]``, ``k_norm [D]``
    with ``eps`` stand for `norm.rms_norm` of each head before, stored less 1 where ``centered``, ``head_norm`` for that
    without weights, ``value_norm`` for that of values.

    With ``shared_values`` the rows of keys, before norm and rotation, are the values too, and ``qkv`` is ``[B, L, (H +
    KV) * D]``. With ``gated`` every query head is followed by one of gates, which are left alone: ``qkv`` is ``[B, L,
    (2 H + 2 KV) * D]``. With ``kv_heads`` 0 there are queries alone, and None for ``kv``. Raises OptionError for shapes
    that do not fit.
    """
    form = Form(heads, kv_heads, eps, head_norm, value_norm, shared_values, centered, gated)
    _check("qkv_epilogue", qkv.shape, rotation, form, q_norm, k_norm)
    if qkv.size == 0 or not QKV_EPILOGUE.serves(backend, qkv.dtype):
        backend.count(QKV_EPILOGUE.name, "mlx")
        return qkv_epilogue_reference(qkv, rotation, q_norm=q_norm, k_norm=k_norm, **form._asdict())
    q, *kv = _launch(qkv, rotation, form, q_norm, k_norm, None, None, backend)
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
    centered: bool = False,
    value_norm: bool = False,
    shared_values: bool = False,
    gated: bool = False,
    backend: Backend,
) -> mx.array:
    """`qkv_epilogue` that writes keys and values into ``cache`` itself, for what `appends` accepts; returns ``q``.

    ``cache [2, B, KV, capacity, D]``, evaluated or not, is changed: the row of position ``p`` is ``p % capacity``, from
    ``start``, an int32 array ``[1]``, on. MLX does not know of it: wait for ``q``, or for what is computed from it,
    before the cache is read by anything but `cache_attention` of this ``q``. Raises OptionError as `qkv_epilogue` does.
    """
    form = Form(heads, kv_heads, eps, head_norm, value_norm, shared_values, centered, gated)
    check_append("qkv_append", qkv, rotation, cache, form, q_norm, k_norm)
    return _launch(qkv, rotation, form, q_norm, k_norm, cache, start, backend)[0]


def check_append(op: str, qkv, rotation, cache, form: Form, q_norm, k_norm) -> int:
    """Check that rows fit a cache; returns D. Raises OptionError."""
    head_dim = _check(op, qkv.shape, rotation, form, q_norm, k_norm)
    (batch, length, _), kv_heads = qkv.shape, form.kv_heads
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


def _check(op: str, shape, rotation, form: Form, q_norm, k_norm) -> int:
    """Check that the parts belong together; returns D. Raises OptionError."""
    (_, length, width), heads, kv_heads = shape, form.heads, form.kv_heads
    head_dim, rest = divmod(width, form.stored)
    pairs = rotation.shape[1] if rotation.ndim == 3 else 0
    if rest or not 0 < 2 * pairs <= head_dim or rotation.shape != (length, pairs, 2):
        queries = f"2 * {heads}" if form.gated else heads
        raise OptionError(
            f"{op}: qkv {list(shape)} of {queries} + {1 if form.shared_values else 2} * {kv_heads} heads, rotation "
            f"{list(rotation.shape)} do not fit [B, L, heads * D] and [L, P, 2] with P at most D / 2"
        )
    learned = q_norm is not None
    normed = learned or form.head_norm or form.value_norm
    if (k_norm is not None) != (learned and kv_heads > 0) or (form.eps is not None) != normed:
        raise OptionError(f"{op}: q_norm, k_norm and eps belong together")
    if learned and form.head_norm:
        raise OptionError(f"{op}: head_norm is a norm without weights; q_norm is one")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_dim,):
            raise OptionError(f"{op}: {name} is {list(weight.shape)}, but heads have {head_dim} dimensions")
    return head_dim


def _launch(qkv, rotation, form: Form, q_norm, k_norm, cache, start, backend) -> list[mx.array]:
    backend.count((QKV_EPILOGUE if cache is None else QKV_APPEND).name, "kernel")
    dtypes = (None if weight is None else weight.dtype for weight in (q_norm, k_norm))
    call = plan(backend.name, qkv.shape, rotation.shape[1], form, qkv.dtype, *dtypes, cache is not None)
    return backend.launch(call, (qkv, rotation, q_norm, k_norm, cache, start))
