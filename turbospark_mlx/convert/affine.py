"""Affine quantization in numpy: the definition of what a converted INT4 or INT8 matrix holds.

``w = scale * q + bias`` over groups of ``group_size`` input columns, with unsigned codes q. Element c of a row sits at
bit ``c * bits`` of the row, least significant bit first, which is MLX's packing for every width.
"""

from __future__ import annotations

import numpy as np

from turbospark_mlx.convert.floats import STORAGE, all_finite, from_float32, to_float32

# Bounds the temporaries of one step to a few tens of MB and keeps them near the cache.
_STEP_ELEMENTS = 1 << 20


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes ``[rows, columns]`` as uint32 words ``[rows, columns * bits / 32]``; columns is a multiple of 32."""
    rows, columns = codes.shape
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    eights = codes.reshape(rows, columns // 8, 8)
    lanes = np.zeros((rows, columns // 8), np.uint64)
    for lane in range(8):
        lanes |= eights[:, :, lane].astype(np.uint64) << np.uint64(lane * bits)
    octets = lanes.view(np.uint8).reshape(rows, columns // 8, 8)[:, :, :bits]
    return np.ascontiguousarray(octets).reshape(rows, -1).view(np.uint32)


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of ``pack_codes``: uint32 words ``[rows, n]`` as uint8 codes ``[rows, n * 32 / bits]``."""
    rows = words.shape[0]
    octets = np.ascontiguousarray(words).view(np.uint8)
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        codes = np.empty((*octets.shape, 8 // bits), np.uint8)
        for lane in range(8 // bits):
            codes[:, :, lane] = (octets >> np.uint8(lane * bits)) & np.uint8(mask)
        return codes.reshape(rows, -1)
    octets = octets.reshape(rows, -1, bits)
    lanes = np.zeros(octets.shape[:2], np.uint64)
    for position in range(bits):
        lanes |= octets[:, :, position].astype(np.uint64) << np.uint64(8 * position)
    codes = np.empty((*lanes.shape, 8), np.uint8)
    for lane in range(8):
        codes[:, :, lane] = (lanes >> np.uint64(lane * bits)) & np.uint64(mask)
    return codes.reshape(rows, -1)


def dequantize_affine(
    words: np.ndarray, scales: np.ndarray, biases: np.ndarray, *, bits: int, group_size: int, companion_dtype: str
) -> np.ndarray:
    """float32 values ``[rows, columns]`` of packed words and stored companions ``[rows, columns / group_size]``."""
    rows, groups = scales.shape
    codes = unpack_codes(words, bits).reshape(rows, groups, group_size)
    scale = to_float32(scales, companion_dtype)[:, :, None]
    bias = to_float32(biases, companion_dtype)[:, :, None]
    values = codes * scale
    values += bias
    return values.reshape(rows, groups * group_size)


def quantize_affine(
    weights: np.ndarray, *, bits: int, group_size: int, companion_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize finite float32 weights ``[rows, columns]``, rounding each code against the scale and bias as stored.

    A group's grid starts at its extreme of larger magnitude, and its step is adjusted so that zero is on the grid,
    which is MLX's rule (``affine_quantize``); the step then runs from that extreme towards the other. Scale and bias
    are rounded to ``companion_dtype`` first and the codes are computed from the rounded values, so that the codes make
    up for what the rounding did.

    Returns words uint32 ``[rows, columns * bits / 32]``, and scales and biases ``[rows, columns / group_size]`` in
    their stored form. Raises OverflowError where a scale or bias exceeds the range of ``companion_dtype``.
    """
    rows, columns = weights.shape
    groups = columns // group_size
    words = np.empty((rows, columns * bits // 32), np.uint32)
    scales = np.empty((rows, groups), STORAGE[companion_dtype])
    biases = np.empty((rows, groups), STORAGE[companion_dtype])
    step = max(1, _STEP_ELEMENTS // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        grouped = np.ascontiguousarray(weights[part], dtype=np.float32).reshape(-1, groups, group_size)
        scale, bias = _companions(grouped, bits)
        scales[part] = from_float32(scale, companion_dtype)
        biases[part] = from_float32(bias, companion_dtype)
        if not (all_finite(scales[part], companion_dtype) and all_finite(biases[part], companion_dtype)):
            raise OverflowError(f"a scale or bias exceeds the range of {companion_dtype}")
        codes = _codes(
            grouped, to_float32(scales[part], companion_dtype), to_float32(biases[part], companion_dtype), bits
        )
        words[part] = pack_codes(codes.reshape(-1, columns), bits)
    return words, scales, biases


def _companions(grouped: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    levels = np.float32((1 << bits) - 1)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    from_low = np.abs(low) > np.abs(high)
    edge = np.where(from_low, low, high)
    with np.errstate(over="ignore"):
        scale = np.maximum((high - low) / levels, np.float32(1e-7))
    scale = np.where(from_low, scale, -scale)
    steps = np.rint(edge / scale)
    on_grid = steps != 0
    scale = np.where(on_grid, edge / np.where(on_grid, steps, np.float32(1)), scale)
    return scale, np.where(on_grid, edge, np.float32(0))


def _codes(grouped: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> np.ndarray:
    codes = grouped - bias[:, :, None]
    codes /= scale[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, 0, (1 << bits) - 1, out=codes)
    return codes.astype(np.uint8)
