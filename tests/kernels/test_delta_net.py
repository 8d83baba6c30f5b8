"""Gated DeltaNet on every back end of a CPU, against numpy float64 written from the equations."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.families.reference_qwen import delta_rule, rms, sigmoid, silu
from tests.kernels import oracle
from tests.kernels.oracle import normal
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import delta_net
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import OptionError

EPS = 1e-3
HOST = pytest.param("host", marks=pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler"))
# batch, key heads, value heads, Dk, Dv, taps
SIZES = [(1, 2, 4, 16, 32, 4), (2, 1, 3, 9, 7, 2), (1, 3, 3, 48, 5, 3)]

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(params=[HOST, "reference"])
def backend(request):
    return ck.backends.select(request.param)


def case(sizes, length, activation="silu", dtype=mx.float32):
    """Random ``(projected, tail, state, weights)``."""
    batch, groups, heads, key_dim, value_dim, taps = sizes
    rng, channels = np.random.default_rng(length), 2 * groups * key_dim + heads * value_dim
    weights = ck.DeltaWeights(
        normal(rng, channels, taps, 1, dtype=mx.bfloat16),
        normal(rng, heads),
        normal(rng, heads, dtype=mx.float16) * 4,
        normal(rng, value_dim),
        EPS,
        activation,
    )
    projected = normal(rng, batch, length, channels + heads * (value_dim + 2), dtype=dtype)
    return (
        projected,
        normal(rng, batch, taps - 1, channels, dtype=dtype),
        normal(rng, batch, heads, value_dim, key_dim),
        weights,
    )


def expected(projected, tail, state, weights):
    """What the equations give: ``(y, states)``, one state behind each token."""
    x, tail, start = map(oracle.float64, (projected, tail, state))
    learned = oracle.float64(weights.convolution)[..., 0]
    (channels, taps), (batch, heads, value_dim, key_dim) = learned.shape, start.shape
    (_, length, _), keys = x.shape, (channels - heads * value_dim) // 2
    groups = keys // key_dim
    y, states = np.zeros((batch, length, heads * value_dim)), np.zeros((length, *start.shape))
    for b in range(batch):
        rows = np.concatenate([tail[b], x[b, :, :channels]])
        mixed = silu(np.array([(rows[t : t + taps].T * learned).sum(1) for t in range(length)]))
        for h in range(heads):
            own = h // (heads // groups)
            q, k = (mixed[:, at + own * key_dim :][:, :key_dim] for at in (0, keys))
            q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
            v, z = (
                mixed[:, 2 * keys + h * value_dim :][:, :value_dim],
                x[b, :, channels + h * value_dim :][:, :value_dim],
            )
            logits = x[b, :, channels + heads * value_dim :]
            step = np.log1p(np.exp(logits[:, heads + h] + oracle.float64(weights.dt_bias)[h]))
            decay = np.exp(-np.exp(oracle.float64(weights.a_log)[h]) * step)
            rule = q / np.sqrt(key_dim), k, v, decay, sigmoid(logits[:, h])
            out = delta_rule(*rule, start[b, h])[0]
            for t in range(length):
                states[t, b, h] = delta_rule(*(a[: t + 1] for a in rule), start[b, h])[1]
            gate = silu(z) if weights.activation == "silu" else sigmoid(z)
            y[b, :, h * value_dim :][:, :value_dim] = rms(out, oracle.float64(weights.norm), weights.eps) * gate
    return y, states


def near(found, wanted, most=3e-6):
    assert oracle.relative_error(found, wanted) < most


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 70])
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_in_a_row(backend, sizes, length, activation):
    given = case(sizes, length, activation)
    y, states = expected(*given)
    for answers, before, after in (
        ck.gated_delta(*given, backend=backend),
        delta_net.gated_delta_reference(*given),
    ):
        near(answers, y)
        near(after, states[-1])
        assert before is None if length == 1 else oracle.relative_error(before, states[-2]) < 3e-6
    assert set(backend.counters) == {("gated_delta", "kernel" if backend.name == "host" else "mlx")}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_a_step_reads_one_slot_and_writes_the_next(sizes, at):
    backend = ck.backends.select("reference" if not compiler.candidates() else "host")
    projected, tail, state, weights = case(sizes, 1)
    y, states = expected(projected, tail, state, weights)
    rng = np.random.default_rng(at)
    tails, slots = normal(rng, 3, *tail.shape), normal(rng, 3, *state.shape)
    tails[at % 3], slots[at % 3] = tail, state
    start, kept = mx.array([at], mx.int32), (np.array(tails), np.array(slots))
    rows = np.concatenate([oracle.float64(tail)[:, 1:], oracle.float64(projected)[..., : tail.shape[2]]], axis=1)
    found = [delta_net.gated_delta_step_reference(projected, tails, slots, start, weights)]
    if delta_net.steps(projected, backend):
        found.append((ck.gated_delta_step(projected, tails, slots, start, weights, backend=backend), tails, slots))
    for answers, new_tails, new_slots in found:
        near(answers, y)
        near(new_slots[(at + 1) % 3], states[0])
        np.testing.assert_array_equal(np.array(new_tails[(at + 1) % 3]), rows.astype(np.float32))
        for slot in (at % 3, (at + 2) % 3):
            np.testing.assert_array_equal(np.array(new_tails[slot]), kept[0][slot])
            np.testing.assert_array_equal(np.array(new_slots[slot]), kept[1][slot])


def test_gates_at_their_ends(backend):
    """Decays that round to 0 and to 1 in float32, and a small softplus, of which 1 + e^x keeps no digits."""
    projected, tail, state, weights = case(SIZES[0], 6)
    heads = state.shape[1]
    logits = np.tile([[-60.0], [-17.0], [-9.0], [0.0], [40.0], [200.0]], (1, 1, heads)).astype(np.float32)
    projected[..., -heads:] = mx.array(logits)
    weights = replace(weights, dt_bias=mx.zeros(heads), a_log=mx.full((heads,), 2.5))
    y, states = expected(projected, tail, state, weights)
    for length in range(1, 7):
        answers, _, after = ck.gated_delta(projected[:, :length], tail, state, weights, backend=backend)
        near(answers, y[:, :length])
        near(after, states[length - 1])


def test_tokens_that_are_nearly_alike(backend):
    """Strong corrections of nearly the same key, over and over: what cancels must not be what is left."""
    projected, tail, state, weights = case(SIZES[0], 1)
    channels, heads = tail.shape[-1], state.shape[1]
    projected = mx.repeat(projected, 128, axis=1) + 0.01 * normal(np.random.default_rng(1), 1, 128, projected.shape[2])
    projected[..., channels + heads * state.shape[2] :] = mx.array([6.0] * heads + [-30.0] * heads)
    y, states = expected(projected, tail, state, weights)
    answers, _, after = ck.gated_delta(projected, tail, state, weights, backend=backend)
    near(answers, y, 2e-5)
    near(after, states[-1], 2e-5)


def test_half_precision_and_gradients():
    """By MLX on a CPU, in float32 within."""
    backend = ck.backends.select("reference" if not compiler.candidates() else "host")
    projected, tail, state, weights = case(SIZES[0], 5, dtype=mx.bfloat16)
    y, states = expected(projected, tail, state, weights)
    answers, before, after = ck.gated_delta(projected, tail, state, weights, backend=backend)
    assert answers.dtype == mx.bfloat16
    near(answers, y, 1e-2)
    near(after, states[-1])
    near(before, states[-2])
    assert backend.counters == {("gated_delta", "mlx"): 1}
    assert not delta_net.steps(projected[:, :1], backend)

    plain, given = ck.backends.select("reference"), (projected.astype(mx.float32), tail.astype(mx.float32), state)

    def loss(projected, state, by=delta_net.gated_delta_reference, **more):
        return (by(projected, given[1], state, weights, **more)[0] ** 2).sum()

    for one, other in zip(
        mx.grad(lambda *a: loss(*a, ck.gated_delta, backend=plain), (0, 1))(given[0], state),
        mx.grad(loss, (0, 1))(given[0], state),
        strict=True,
    ):
        near(one, oracle.float64(other), 1e-5)


def test_parts_that_do_not_fit_are_named(backend):
    projected, tail, state, weights = case(SIZES[0], 2)
    for wrong in (
        (projected[..., 1:], tail, state, weights),
        (projected, tail[:, 1:], state, weights),
        (projected, tail.astype(mx.float16), state, weights),
        (projected, tail, state[..., 1:], weights),
        (projected, tail, state.astype(mx.float16), weights),
        (projected, tail, state, replace(weights, a_log=weights.a_log[1:])),
        (projected, tail, state, replace(weights, norm=weights.norm[1:])),
        (projected[:, :0], tail, state, weights),
    ):
        with pytest.raises(OptionError, match=r"gated_delta: projected mlx.core.float32 \[1, .* do not fit"):
            ck.gated_delta(*wrong, backend=backend)
    with pytest.raises(OptionError, match=r"activation='tanh'; choose one of silu, sigmoid"):
        replace(weights, activation="tanh")
    slots = tail[None], state[None]
    with pytest.raises(OptionError, match=r"gated_delta_step: .* do not fit .* tail \[S, B"):
        ck.gated_delta_step(projected[:, :1], *slots, mx.zeros(1, mx.int32), weights, backend=backend)
