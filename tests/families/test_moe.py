"""Routing and stacked experts, against numbers worked out by hand and against loops in float64 numpy."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.families.layers import Builder, gelu_tanh
from turbospark_mlx.families.moe import SparseMoe, StackedExperts
from turbospark_mlx.protocols import AffineFormat, ExpertSpec


def build(**options):
    return Builder(backends.select("reference"), mx.float32, **options)


def test_gelu_by_hand():
    np.testing.assert_allclose(
        gelu_tanh(mx.array([0.0, 1.0, -1.0, 3.0])), [0, 0.841192, -0.158808, 2.996363], rtol=1e-5
    )
    assert gelu_tanh(mx.array([300.0, -300.0])).tolist() == [300.0, 0.0]
    assert gelu_tanh(mx.array([1.0], dtype=mx.bfloat16)).dtype == mx.bfloat16


ACTIVATIONS = {
    "silu": lambda g, u: g / (1 + np.exp(-g)) * u,
    "gelu_tanh": lambda g, u: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    "clamped_swiglu": lambda g, u: (
        np.minimum(g, 0.5) / (1 + np.exp(-1.702 * np.minimum(g, 0.5))) * (np.clip(u, -0.5, 0.5) + 1)
    ),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("stored", ["float32", "int4"])
def test_stacked_experts(activation, biases, stored):
    spec = ExpertSpec(5, 2, 64, 128, activation, limit=0.5, biases=biases)
    form = AffineFormat(4, 32, "float32")
    names = [f"e.{name}_proj.weight" for name in ("gate", "up", "down")]
    experts = StackedExperts("e", spec, build(formats=dict.fromkeys(names, form) if stored == "int4" else {}))
    rng, w = np.random.default_rng(1), {}
    for name, shape in spec.tensors.items():
        matrix, _, bias = name.partition("_")
        module, values = experts[f"{matrix}_proj"], mx.array(0.3 * rng.standard_normal((5, *shape)).astype(np.float32))
        if bias:
            assert module.bias.shape == values.shape
            module.bias = values
        elif stored == "int4":
            packed = mx.quantize(values, group_size=32, bits=4)
            assert [a.shape for a in packed] == [module[part].shape for part in ("weight", "scales", "biases")]
            module.weight, module.scales, module.biases = packed
            values = mx.dequantize(*packed, group_size=32, bits=4)
        else:
            assert module.weight.shape == values.shape
            module.weight = values
        w[name] = np.array(values, dtype=np.float64)
    x, weights = rng.standard_normal((6, 64)), rng.random((6, 2)).astype(np.float32)
    indices = np.array([[0, 4], [4, 0], [1, 2], [3, 1], [2, 3], [0, 1]])
    expected = np.zeros((6, 64))
    for row in range(6):
        for expert, weight in zip(indices[row], weights[row], strict=True):
            gate, up = (w[n][expert] @ x[row] + (w[f"{n}_bias"][expert] if biases else 0) for n in ("gate", "up"))
            y = w["down"][expert] @ ACTIVATIONS[activation](gate, up) + (w["down_bias"][expert] if biases else 0)
            expected[row] += weight * y
    pending = experts.begin(mx.array(indices))
    y = experts.finish(pending, mx.array(x.astype(np.float32)), mx.array(weights))
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


class Recorded:
    """Experts that live elsewhere: each adds its number to the row."""

    def __init__(self, position, spec):
        self.calls = [(position, spec)]

    def begin(self, indices):
        self.calls.append(indices.tolist())
        return indices

    def finish(self, pending, x, weights, *, meanwhile=(), residual=None):
        return x + (pending * weights).sum(axis=-1, keepdims=True) + residual


def test_a_factory_decides_where_experts_live():
    """The block asks it by position, begins with the router's answer, and has no parameters but the router's."""
    spec = ExpertSpec(4, 1, 64, 128)
    block = SparseMoe("m", 3, spec, normalize=True, build=build(experts=Recorded))
    assert block.parameters().keys() == {"gate"}
    block.gate.weight = mx.zeros((4, 64)) + mx.array([[0.0], [0.0], [1.0], [0.0]])
    x = mx.ones((2, 3, 64))
    np.testing.assert_array_equal(block(x, residual=10 * x), 10 + 1 + 2 + np.zeros((2, 3, 64)))
    assert block.switch_mlp.calls == [(3, spec), [[2]] * 6]
