"""The quantizer and the packing, against hand-worked numbers and against MLX."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.convert.affine import dequantize_affine, pack_codes, quantize_affine, unpack_codes
from turbospark_mlx.convert.floats import all_finite, from_float32, to_float32

from .checkpoints import bfloat16, from_bfloat16


def _data(kind: str, rows: int = 24, columns: int = 384) -> np.ndarray:
    rng = np.random.default_rng(7)
    if kind == "normal":
        return rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "heavy-tailed":
        return (0.02 * rng.standard_t(2, (rows, columns))).astype(np.float32)
    return np.abs(rng.standard_normal((rows, columns))).astype(np.float32)


def test_bfloat16_rounds_to_nearest_even():
    # 1 + 2^-8 lies halfway between 1 and 1 + 2^-7, whose mantissas end in 0 and 1; 1 + 3 * 2^-8 rounds up.
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0.0, -0.0, 1e-40], np.float32)
    assert from_float32(values, "bfloat16").tolist()[:7] == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80, 0, 0x8000]
    random = _data("heavy-tailed").ravel()
    np.testing.assert_array_equal(from_float32(random, "bfloat16"), bfloat16(random))
    np.testing.assert_array_equal(to_float32(bfloat16(random), "bfloat16"), from_bfloat16(bfloat16(random)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_finite_values_pass_as_finite(dtype):
    # 65504 is the largest float16, and its neighbour in bfloat16 has an exponent field that is not all ones.
    assert all_finite(from_float32(np.array([65504, -1, 0], np.float32), dtype), dtype)
    bad = {"float32": [0x7F800000, 0xFF800000, 0x7FC00000], "float16": [0x7C00, 0xFC00, 0x7E00]}
    bad["bfloat16"] = [0x7F80, 0xFF80, 0x7FC0]
    for bits in bad[dtype]:
        stored = np.array([bits], np.uint32 if dtype == "float32" else np.uint16)
        assert not all_finite(stored if dtype == "bfloat16" else stored.view(dtype), dtype)


def test_packing_by_hand():
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    assert pack_codes(codes, 4).tolist() == [[0x76543210, 0xFEDCBA98] * 2]
    assert pack_codes(codes, 8)[0, :2].tolist() == [0x03020100, 0x07060504]
    twos = np.array([[3, 0, 1, 2] + [0] * 28], np.uint8)
    assert pack_codes(twos, 2).view(np.uint8)[0, 0] == 0x93


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_width_is_packed_as_mlx_packs_it(bits, group_size):
    with mx.stream(mx.cpu):
        packed = mx.quantize(mx.array(_data("normal")), group_size=group_size, bits=bits)
        expected = np.array(mx.dequantize(*packed, group_size=group_size, bits=bits))
    words, scales, biases = (np.array(part) for part in packed)
    values = dequantize_affine(words, scales, biases, bits=bits, group_size=group_size, companion_dtype="float32")
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(pack_codes(unpack_codes(words, bits), bits), words)


def test_a_group_by_hand():
    # From -2 to 1: the larger magnitude is -2, so the grid starts there with step 3 / 15 = 0.2. -2 is 10 steps below
    # zero exactly, so the step stays 0.2, which bfloat16 stores as 0.2001953125. (w + 2) / step, rounded, follows.
    group = np.zeros((1, 32), np.float32)
    group[0, :5] = [-2, 1, 0, -1.05, 0.55]
    words, scales, biases = quantize_affine(group, bits=4, group_size=32, companion_dtype="bfloat16")
    assert from_bfloat16(scales).tolist() == [[0.2001953125]]
    assert from_bfloat16(biases).tolist() == [[-2.0]]
    assert unpack_codes(words, 4)[0, :5].tolist() == [0, 15, 10, 5, 13]


def test_codes_answer_to_the_stored_companions():
    # The grid starts at 1 + 2^-8, which bfloat16 stores as 1, half a step lower; it stores the step with an error that
    # adds up over 255 steps as well. Codes computed from what was not stored would be up to a whole step off; computed
    # from what is stored, every weight but the two extremes is within half a step.
    group = np.linspace(1 + 2**-8, -1, 64, dtype=np.float32)[None]
    words, scales, biases = quantize_affine(group, bits=8, group_size=64, companion_dtype="bfloat16")
    step = from_bfloat16(scales)[0, 0]
    assert from_bfloat16(biases)[0, 0] == 1.0
    assert step < 0
    values = dequantize_affine(words, scales, biases, bits=8, group_size=64, companion_dtype="bfloat16")
    assert np.abs(values - group)[0, 1:-1].max() <= -step / 2 * 1.001


@pytest.mark.parametrize("companion", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_constant_groups(bits, companion):
    groups = np.repeat(np.array([[0.0], [0.5], [-3.0], [1e-9]], np.float32), 32, axis=1)
    parts = quantize_affine(groups, bits=bits, group_size=32, companion_dtype=companion)
    values = dequantize_affine(*parts, bits=bits, group_size=32, companion_dtype=companion)
    np.testing.assert_array_equal(values[:3], groups[:3])
    # Below MLX's smallest step: the group has no grid of its own and becomes zero.
    np.testing.assert_array_equal(values[3], 0)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "positive"])
@pytest.mark.parametrize("companion", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_not_worse_than_mlx(kind, companion, bits, group_size):
    weights = from_bfloat16(bfloat16(_data(kind)))
    ours = quantize_affine(weights, bits=bits, group_size=group_size, companion_dtype=companion)
    with mx.stream(mx.cpu):
        theirs = mx.quantize(mx.array(weights).astype(getattr(mx, companion)), group_size=group_size, bits=bits)
        words, scales, biases = (np.array(p if i == 0 else p.astype(mx.float32)) for i, p in enumerate(theirs))

    def error(parts, dtype):
        values = dequantize_affine(*parts, bits=bits, group_size=group_size, companion_dtype=dtype)
        return np.mean((values.astype(np.float64) - weights) ** 2)

    assert error(ours, companion) <= error((words, scales, biases), "float32")


def test_rows_are_independent_of_how_many_are_quantized_at_once(monkeypatch):
    weights = _data("normal", rows=37)
    whole = quantize_affine(weights, bits=4, group_size=64, companion_dtype="float16")
    monkeypatch.setattr("turbospark_mlx.convert.affine._STEP_ELEMENTS", 1000)
    for got, expected in zip(
        quantize_affine(weights, bits=4, group_size=64, companion_dtype="float16"), whole, strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("largest", [1e5, 3e38])
def test_what_the_companions_cannot_hold_is_an_error(largest):
    weights = _data("normal", rows=2, columns=64)
    weights[1, 3], weights[1, 4] = largest, -largest
    with pytest.raises(OverflowError, match="float16"):
        quantize_affine(weights, bits=4, group_size=32, companion_dtype="float16")
