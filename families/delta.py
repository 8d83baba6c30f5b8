"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): attention replaced by a state of fixed size.

A head has a state ``S [Dv, Dk]``, float32. A token makes it forget, then corrects what it answers to the token's key:

    S <- d S,    S <- S + b (v - S k) k^T,    y = S q

with its decay ``d`` and its strength ``b``, both from 0 to 1. Keys and queries have length 1, and queries are divided
by ``sqrt(Dk)``. One token is done so; several in chunks, by matrix products (`delta_chunks`).

Shapes: B sequences, L tokens, G key heads, R value heads for each of them (neighbours), Dk and Dv dimensions.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark_mlx.cache import RecurrentState
from turbospark_mlx.custom_kernels import gated_rms_norm
from turbospark_mlx.families.layers import Builder, Module, project

CHUNK = 64
"""The most tokens whose corrections of each other are solved for at once."""
_LENGTH_EPS = 1e-6


def unit(x: mx.array) -> mx.array:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + _LENGTH_EPS)


def delta_step(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, strength: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token: ``q``, ``k [B, 1, G, Dk]``, ``v [B, 1, G, R, Dv]``, ``log_decay``, ``strength [B, 1, G, R]``, and
    ``state [B, G, R, Dv, Dk]``, all float32, to ``y [B, 1, G, R, Dv]`` and the state behind it."""
    q, k = (x[:, 0, :, None, None] for x in (q, k))
    state = state * mx.exp(log_decay[:, 0])[..., None, None]
    correction = strength[:, 0, ..., None] * (v[:, 0] - (state * k).sum(axis=-1))
    state = state + correction[..., None] * k
    return (state * q).sum(axis=-1)[:, None], state


def delta_chunks(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, strength: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`delta_step` for L tokens in a row.

    Within a chunk the corrections ``U`` solve ``(I + N) U = b v - b e^g S k``, where ``N[i, j] = b_i e^(g_i - g_j) k_i
    k_j`` for ``j < i`` and ``g`` are the sums of ``log_decay`` since the chunk began (section 3.3 of the paper).
    """
    batch, length = q.shape[:2]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // size)

    def chunks(x: mx.array) -> mx.array:
        """``[B, L, G, R, D]`` -> ``[B, G, R, chunks, size, D]``. Zeros behind the last token change nothing."""
        x = mx.pad(x, [(0, 0), (0, count * size - length), (0, 0), (0, 0), (0, 0)])
        return x.reshape(batch, count, size, *x.shape[2:]).transpose(0, 3, 4, 1, 2, 5)

    q, k, v = chunks(q[..., None, :]), chunks(k[..., None, :]), chunks(v)
    log_decay, b = chunks(log_decay[..., None]), chunks(strength[..., None])
    row, column = mx.arange(size)[:, None], mx.arange(size)
    # Each sum is taken by itself: a difference of two sums from the beginning on would lose digits.
    since = mx.cumsum(mx.where(row > column, log_decay, 0.0), axis=-2)
    decay = mx.where(row >= column, mx.exp(since), 0.0)
    keys = k.swapaxes(-1, -2)
    inverse = _unit_lower_inverse(mx.where(row > column, b * (k @ keys) * decay, 0.0))
    grown = mx.exp(mx.cumsum(log_decay, axis=-2))
    fresh, stale = inverse @ (b * v), inverse @ (b * grown * k)
    near, far = (q @ keys) * decay, q * grown
    kept, whole = k * decay[..., -1, :, None], grown[..., -1:, :]
    rows = []
    for n in range(count):
        before = state.swapaxes(-1, -2)
        corrections = fresh[..., n, :, :] - stale[..., n, :, :] @ before
        rows.append(far[..., n, :, :] @ before + near[..., n, :, :] @ corrections)
        state = whole[..., n, :, :] * state + corrections.swapaxes(-1, -2) @ kept[..., n, :, :]
    y = mx.concatenate(rows, axis=-2)[..., :length, :]
    return mx.moveaxis(y, -2, 1), state


def _unit_lower_inverse(strict: mx.array) -> mx.array:
    """The inverse of ``I + strict``, where ``strict [..., n, n]`` is strictly lower triangular and n a power of 2.

    By blocks of 1, 2, 4, ...: the inverse of ``[[A, 0], [B, C]]`` has ``-C^-1 B A^-1`` below its diagonal. Unlike a
    series of powers this computes nothing that is larger than the inverse.
    """
    size = strict.shape[-1]
    inverse, block = mx.broadcast_to(mx.eye(size), strict.shape), np.arange(size)
    for width in (1 << level for level in range(size.bit_length() - 1)):
        number = block // width
        below = (number[:, None] % 2 == 1) & (number[:, None] == number + 1)
        inverse = inverse - inverse @ mx.where(mx.array(below), strict, 0.0) @ inverse
    return inverse


class Convolution(Module):
    """A causal convolution of each channel by itself, without bias, then SiLU."""

    def __init__(self, path: str, shape: tuple[int, ...], taps: int, build: Builder):
        """``shape`` is that of the weights, in which the ``taps`` of a channel are neighbours."""
        super().__init__()
        self._taps = taps
        self.weight = build.vector(f"{path}.weight", *shape)

    def __call__(self, rows: mx.array) -> mx.array:
        """``rows [B, taps - 1 + L, C]``, oldest first -> float32 ``[B, L, C]``."""
        weight, length = self["weight"].astype(mx.float32).reshape(-1, self._taps), rows.shape[1] - self._taps + 1
        y = sum(rows[:, tap : tap + length].astype(mx.float32) * weight[:, tap] for tap in range(self._taps))
        return y * mx.sigmoid(y)


class GatedDeltaNet(Module):
    """A recurrent layer: projections, a short convolution, the gated delta rule, a gated norm of each head."""

    def __init__(
        self,
        config: Any,
        path: str,
        build: Builder,
        *,
        convolution: tuple[int, ...],
        gate: Literal["silu", "sigmoid"] = "silu",
    ):
        """``config`` has the sizes under the names of ``QwenConfig``. ``convolution`` is the shape of the convolution's
        weights, ``gate`` the activation that the norm of each head is multiplied by."""
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self._groups, self._repeats = config.linear_num_key_heads, heads // config.linear_num_key_heads
        self._key_dim, self._value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._tail, self._channels = config.linear_conv_kernel_dim - 1, config.convolved_width
        self._eps, self._gate, self._backend = config.rms_norm_eps, gate, build.backend
        rows = {
            "in_proj_qkv": config.convolved_width,
            "in_proj_z": config.value_width,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        parts, self._inputs = build.projections(hidden, {f"{path}.{name}": n for name, n in rows.items()})
        for name, part in zip(rows, parts, strict=True):
            self[name] = part
        self._names = tuple(rows)
        self.conv1d = Convolution(f"{path}.conv1d", convolution, config.linear_conv_kernel_dim, build)
        self.A_log = build.vector(f"{path}.A_log", heads)
        self.dt_bias = build.vector(f"{path}.dt_bias", heads)
        self.norm = build.norm(f"{path}.norm", self._value_dim, config.rms_norm_eps)
        self.out_proj = build.linear(f"{path}.out_proj", config.value_width, hidden)

    def __call__(
        self,
        x: mx.array,
        cache: RecurrentState | None = None,
        *,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """``norm`` is applied to ``x [B, L, hidden]`` before, ``residual`` is added after."""
        batch, length, _ = x.shape
        qkv, z, b, a = self._inputs(x, *(self[name] for name in self._names), norm=norm)
        tail, state = (None, None) if cache is None else (cache[0], cache[1])
        if tail is None:
            tail = mx.zeros((batch, self._tail, self._channels), qkv.dtype)
            state = mx.zeros((batch, self._groups * self._repeats, self._value_dim, self._key_dim))
        rows = mx.concatenate([tail, qkv], axis=1)
        y = self._recur(rows, a, b, state, cache).astype(x.dtype)
        y = gated_rms_norm(
            y, z.reshape(y.shape), self.norm["weight"], eps=self._eps, activation=self._gate, backend=self._backend
        )
        return project(self.out_proj, y.reshape(batch, length, -1), residual=residual)

    def _recur(
        self, rows: mx.array, a: mx.array, b: mx.array, state: mx.array, cache: RecurrentState | None
    ) -> mx.array:
        """Float32 ``[B, L, value heads, Dv]``; ``rows [B, taps - 1 + L, C]`` are those of ``Convolution``."""
        (batch, length, heads), groups, width = a.shape, self._groups, self._groups * self._key_dim
        q, k, v = mx.split(self.conv1d(rows), [width, 2 * width], axis=-1)
        q, k = (unit(x.reshape(batch, length, groups, -1)) for x in (q, k))
        v = v.reshape(batch, length, groups, self._repeats, -1)
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        # log(1 + e^x), which is the softplus of x.
        step = mx.logaddexp(a + self["dt_bias"].astype(mx.float32), 0.0)
        log_decay = -mx.exp(self["A_log"].astype(mx.float32)) * step
        gates = (g.reshape(batch, length, groups, -1) for g in (log_decay, mx.sigmoid(b)))
        inputs, done = (q * self._key_dim**-0.5, k, v, *gates), []
        state = state.reshape(batch, groups, self._repeats, *state.shape[2:])
        # The last token by itself, so that its step can be taken back.
        for start, end in [(0, length)] if cache is None or length == 1 else [(0, length - 1), (length - 1, length)]:
            rule = delta_step if end - start == 1 else delta_chunks
            y, state = rule(*(part[:, start:end] for part in inputs), state)
            done.append(y)
            if cache is not None:
                # Taken out: a slice would hold the memory of all rows for as long as it lives.
                cache[0] = mx.take(rows, mx.arange(end, end + self._tail), axis=1)
                cache[1] = state.reshape(batch, heads, *state.shape[3:])
                cache.advance(end - start)
        return mx.concatenate(done, axis=1).reshape(batch, length, heads, -1)
