"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) between its projections: attention with a state of fixed size.

A value head has a state ``S [Dv, Dk]``, float32. A token makes it forget, then corrects what it answers to the token's
key:

    S <- d S,    S <- S + b (v - S k) k^T,    y = S q

with its decay ``d`` and its strength ``b``, both from 0 to 1. Queries, keys and values come through a short causal
convolution; keys and queries have length 1, and queries are divided by ``sqrt(Dk)``.

Shapes: B sequences, L tokens, G key heads, H value heads (a multiple of G: each key head serves as many neighbours), Dk
and Dv dimensions, T taps, and C = 2 G Dk + H Dv channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel, Launch, float_bits
from turbospark_mlx.custom_kernels.backends.op import Op, spell_arrays
from turbospark_mlx.custom_kernels.norm import ACTIVATIONS, Activation, gated_rms_norm_reference
from turbospark_mlx.errors import OptionError

KERNEL = Kernel(
    "gated_delta",
    inputs=("projected", "tail", "state", "start", "convolution", "a_log", "dt_bias", "weight"),
    outputs=("y", "before", "after"),
    headers=("activation", "softplus"),
    writes=("tail", "state"),
)
GATED_DELTA = Op("gated_delta", (KERNEL,))
GATED_DELTA_STEP = Op("gated_delta_step", (KERNEL,), rows=1, instead=GATED_DELTA.name)
LENGTH_EPS = 1e-6
TOKENS = 16
"""Tokens that a threadgroup takes at a time, as far as its memory holds them."""
STAGED_BYTES = {"metal": 24 << 10, "cuda": 40 << 10, "host": 256 << 10}


@dataclass(frozen=True)
class DeltaWeights:
    """What a layer has learned: ``convolution [C, T, 1]`` or ``[C, 1, T]``, ``a_log``, ``dt_bias [H]``, and ``norm
    [Dv]`` with the ``eps`` of that norm and the ``activation`` of its gate, ``"silu"`` or ``"sigmoid"``."""

    convolution: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: float
    activation: Activation

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise OptionError(f"gated_delta: activation={self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")


def delta_rule(q, k, v, decay, strength, state) -> tuple[mx.array, mx.array]:
    """The rule, token by token: ``q``, ``k [B, L, H, Dk]``, ``v [B, L, H, Dv]``, ``decay``, ``strength [B, L, H]``,
    ``state [B, H, Dv, Dk]``, all float32, to ``y [B, L, H, Dv]`` and the state behind the last token."""
    rows = []
    for t in range(q.shape[1]):
        key, query = k[:, t, :, None], q[:, t, :, None]
        state = decay[:, t, :, None, None] * state
        correction = strength[:, t, :, None] * (v[:, t] - (state * key).sum(axis=-1))
        state = state + correction[..., None] * key
        rows.append((state * query).sum(axis=-1))
    return mx.stack(rows, axis=1), state


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + LENGTH_EPS)


def _mixed(projected: mx.array, tail: mx.array, weights: DeltaWeights, sizes: tuple[int, int, int, int]):
    """The rule's inputs but the state, with queries and keys of all H heads, and the gates: float32."""
    groups, heads, key_dim, value_dim = sizes
    (batch, length, _), taps = projected.shape, tail.shape[1] + 1
    keys, channels = groups * key_dim, tail.shape[2]
    borders = [channels, channels + heads * value_dim, channels + heads * (value_dim + 1)]
    qkv, z, b, a = mx.split(projected.astype(mx.float32), borders, axis=-1)
    rows = mx.concatenate([tail.astype(mx.float32), qkv], axis=1)
    learned = weights.convolution.astype(mx.float32).reshape(-1, taps)
    mixed = sum(rows[:, tap : tap + length] * learned[:, tap] for tap in range(taps))
    q, k, v = mx.split(mixed * mx.sigmoid(mixed), [keys, 2 * keys], axis=-1)
    q, k = (mx.repeat(_unit(x.reshape(batch, length, groups, key_dim)), heads // groups, axis=2) for x in (q, k))
    # log(1 + e^x), which is the softplus of x.
    step = mx.logaddexp(a + weights.dt_bias.astype(mx.float32), 0.0)
    decay = mx.exp(-mx.exp(weights.a_log.astype(mx.float32)) * step)
    heads_of = (batch, length, heads, value_dim)
    return (q * key_dim**-0.5, k, v.reshape(heads_of), decay, mx.sigmoid(b)), z.reshape(heads_of)


def _answer(y: mx.array, z: mx.array, weights: DeltaWeights, dtype: mx.Dtype) -> mx.array:
    y = gated_rms_norm_reference(y, z, weights.norm, eps=weights.eps, activation=weights.activation)
    return y.reshape(*y.shape[:2], -1).astype(dtype)


def gated_delta_reference(projected, tail, state, weights: DeltaWeights, *, rule=delta_rule):
    """Definition of `gated_delta`."""
    inputs, z = _mixed(projected, tail, weights, _sizes(GATED_DELTA.name, projected, tail, state, weights))
    length, rows, before = projected.shape[1], [], None
    for start, end in ((0, length - 1), (length - 1, length)):
        if end > start:
            y, state = rule(*(part[:, start:end] for part in inputs), state)
            rows.append(y)
            before = state if end < length else before
    return _answer(mx.concatenate(rows, axis=1), z, weights, projected.dtype), before, state


def gated_delta_step_reference(projected, tail, state, start, weights: DeltaWeights):
    """Definition of `gated_delta_step`: the result, and ``tail`` and ``state`` with the slot that was written."""
    slots = state.shape[0]
    old, new = start.item() % slots, (start.item() + 1) % slots
    y, _, after = gated_delta_reference(projected, tail[old], state[old], weights)
    tail, state, channels = mx.array(tail), mx.array(state), tail.shape[-1]
    tail[new] = mx.concatenate([tail[old][:, 1:], projected[..., :channels]], axis=1)
    state[new] = after
    return y, tail, state


def _sizes(
    op: str, projected: mx.array, tail: mx.array, state: mx.array, weights: DeltaWeights, *, slots: bool = False
) -> tuple[int, int, int, int]:
    """``(G, H, Dk, Dv)`` of parts that belong together; with ``slots``, ``tail`` and ``state`` have one more axis in
    front. Raises OptionError."""
    kept, held = tail.shape[slots:], state.shape[slots:]
    if len(kept) == 3 and len(held) == 4 and projected.ndim == 3 and projected.shape[1] > 0:
        (batch, _, width), (_, heads, value_dim, key_dim), channels = projected.shape, held, kept[2]
        groups, rest = divmod(channels - heads * value_dim, 2 * key_dim)
        learned = weights.convolution.shape[0], weights.convolution.size, weights.norm.shape
        if (
            not rest
            and groups > 0
            and heads % groups == 0
            and kept[0] == held[0] == batch
            and (not slots or tail.shape[0] == state.shape[0] > 1)
            and width == channels + heads * (value_dim + 2)
            and learned == (channels, channels * (kept[1] + 1), (value_dim,))
            and weights.a_log.shape == weights.dt_bias.shape == (heads,)
            and (tail.dtype, state.dtype) == (projected.dtype, mx.float32)
        ):
            return groups, heads, key_dim, value_dim
    given = {"projected": projected, "tail": tail, "state": state, "convolution": weights.convolution}
    given |= {"a_log": weights.a_log, "dt_bias": weights.dt_bias, "norm": weights.norm}
    front = "S, " if slots else ""
    raise OptionError(
        f"{op}: {spell_arrays(given)} do not fit projected [B, L, C + H (Dv + 2)], tail [{front}B, T - 1, C] of its"
        f" dtype, state float32 [{front}B, H, Dv, Dk], convolution [C, T, 1], a_log [H], dt_bias [H], norm [Dv]"
    )


@lru_cache(maxsize=1024)
def plan(
    backend: str,
    shape: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    taps: int,
    placed: bool,
    eps: float,
    activation: Activation,
    dtype: mx.Dtype,
    dtypes: tuple[mx.Dtype, ...],
) -> Launch:
    """The launch for ``projected`` of ``shape``; ``dtypes`` are those of what was learned."""
    (batch, length, _), (groups, heads, key_dim, value_dim) = shape, sizes
    host = backend == "host"
    # More threads would have too few registers for their rows of the state.
    simdgroups = 1 if host else min(8, -(-value_dim // 4))
    rows = -(-value_dim // simdgroups)
    held = 4 * (2 * key_dim + 2 * value_dim + 3)
    state = (batch, heads, value_dim, key_dim)
    return Launch(
        KERNEL,
        template=(
            ("T", dtype),
            ("HK", groups),
            ("R", heads // groups),
            ("DK", key_dim),
            ("DV", value_dim),
            ("TAPS", taps),
            ("TOKENS", 1 if length == 1 else max(1, min(TOKENS, STAGED_BYTES[backend] // held))),
            ("SIMDGROUPS", simdgroups),
            ("ROWS", rows),
            # A CPU's registers hold the rows of few dimensions, which its compiler chooses.
            ("BLOCK", next(n for n in (4, 3, 2, 1) if rows % n == 0) if host else rows),
            ("PLACED", placed),
            ("BEFORE", length > 1),
            ("EPSILON_BITS", float_bits(eps)),
            ("ACTIVATION", 1 + ACTIVATIONS.index(activation)),
        ),
        groups=(batch * heads, 1),
        simdgroups=simdgroups,
        input_dtypes=(dtype, dtype, mx.float32, mx.int32 if placed else None, *dtypes),
        output_shapes=(
            (batch, length, heads * value_dim),
            state if length > 1 else None,
            None if placed else state,
        ),
        output_dtypes=(dtype, mx.float32, mx.float32),
    )


def _run(op: Op, projected, tail, state, start, weights: DeltaWeights, sizes, backend: Backend) -> list[mx.array]:
    backend.count(op.name, "kernel")
    learned = (weights.convolution, weights.a_log, weights.dt_bias, weights.norm)
    options = (weights.eps, weights.activation, projected.dtype, tuple(array.dtype for array in learned))
    call = plan(backend.name, projected.shape, sizes, tail.shape[-2] + 1, start is not None, *options)
    return backend.launch(call, (projected, tail, state, start, *learned))


def gated_delta(
    projected: mx.array, tail: mx.array, state: mx.array, weights: DeltaWeights, *, backend: Backend
) -> tuple[mx.array, mx.array | None, mx.array]:
    """The layer for L tokens: what its output projection takes, the state ahead of the last token, and behind it.

    ``projected [B, L, C + H (Dv + 2)]`` are the rows of queries, keys and values, of the gates, and of the logits of
    each head's strength and decay, side by side; ``tail [B, T - 1, C]`` are the rows before them that the convolution
    needs, zeros where a sequence begins, and ``state [B, H, Dv, Dk]`` is float32. Gives ``[B, L, H Dv]`` in the dtype
    of ``projected``, and two states; the first is None for a single token, which begins with it. Runs in our kernel,
    otherwise through `mx.fast.gated_delta_update`. Raises OptionError for parts that do not fit.
    """
    sizes = _sizes(GATED_DELTA.name, projected, tail, state, weights)
    # Metal gives arrays under eight elements another address space.
    if GATED_DELTA.serves(backend, projected.dtype) and min(tail.size, state.size, projected.size) >= 8:
        y, *states = _run(GATED_DELTA, projected, tail, state, None, weights, sizes, backend)
        return y, states[0] if len(states) > 1 else None, states[-1]
    backend.count(GATED_DELTA.name, "mlx")
    return gated_delta_reference(projected, tail, state, weights, rule=mx.fast.gated_delta_update)


def steps(projected: mx.array, backend: Backend) -> bool:
    """Whether `gated_delta_step` takes these rows: one a sequence, in a dtype that the back end computes in."""
    return projected.size >= 8 and GATED_DELTA_STEP.serves(backend, projected.dtype, rows=projected.shape[1])


def gated_delta_step(
    projected: mx.array, tail: mx.array, state: mx.array, start: mx.array, weights: DeltaWeights, *, backend: Backend
) -> mx.array:
    """`gated_delta` of one token that writes the new state itself, for what `steps` accepts.

    ``tail [S, B, T - 1, C]`` and ``state [S, B, H, Dv, Dk]``, S at least 2, evaluated or not, are changed: what is
    after p tokens lies in slot ``p % S``, ``start``, an int32 array ``[1]``, is their number, and the slot after it is
    written. MLX does not know of it: wait for the result, or for what is computed from it, before they are read by
    anything else. Raises OptionError for parts that do not fit.
    """
    sizes = _sizes(GATED_DELTA_STEP.name, projected, tail, state, weights, slots=True)
    return _run(GATED_DELTA_STEP, projected, tail, state, start, weights, sizes, backend)[0]
