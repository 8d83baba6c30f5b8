"""ggml blocks of 32 weights, which GGUF files and elder installs hold, as MLX's packed formats: without any loss.

Block layouts are ggml's (ggml-common.h). Q8_0 is a float16 scale d and 32 signed bytes q, ``w = d q``. Q4_0 is d and
16 bytes, ``w = d (q - 8)``; Q4_1 is d, a float16 minimum m and 16 bytes, ``w = d q + m``. MXFP4 is an exponent and 16
bytes, ``w = FP4[q] * 2 ** (exponent - 127)``. Byte j of a block of 4 bits holds weight j in its low nibble and weight
j + 16 in its high one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turbospark_mlx.convert.affine import pack_codes
from turbospark_mlx.convert.floats import STORAGE, all_finite
from turbospark_mlx.convert.source import AffineRows, Mxfp4Rows
from turbospark_mlx.protocols import AffineFormat

GROUP = 32
MXFP4_BYTES = 17
_SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class AffineBlock:
    """A block type whose meaning is an affine format. ``bias_factor`` times the block's scale is its bias; None where
    the block stores the bias."""

    bits: int
    block_bytes: int
    bias_factor: int | None


AFFINE_BLOCKS = {"Q8_0": AffineBlock(8, 34, -128), "Q4_0": AffineBlock(4, 18, -8), "Q4_1": AffineBlock(4, 20, None)}


def affine_format(block: AffineBlock, rows: int, columns: int, read: Callable[[int, int], np.ndarray]) -> AffineFormat:
    """The affine format of a tensor, of which ``read(start, stop)`` gives the bytes of rows ``[stop - start, bytes]``.

    Companions are float16, as blocks store scales, unless a bias that follows from them exceeds its range. Multiplying
    by a power of two upwards is exact in float16 otherwise, also for subnormal scales.
    """
    if block.bias_factor is not None:
        step = max(1, _SCAN_BYTES // (columns // GROUP * block.block_bytes))
        for start in range(0, rows, step):
            raw = read(start, min(start + step, rows))
            biases = _scaled(_halves(_blocks(raw, block.block_bytes), 0), block.bias_factor, "float16")
            if not all_finite(biases, "float16"):
                return AffineFormat(block.bits, GROUP, "float32")
    return AffineFormat(block.bits, GROUP, "float16")


def affine_rows(raw: np.ndarray, block: AffineBlock, companion_dtype: str) -> AffineRows:
    """Rows of blocks ``[rows, bytes]`` as packed words and companions."""
    blocks = _blocks(raw, block.block_bytes)
    scales = _halves(blocks, 0)
    if block.bias_factor is None:
        biases, packed = _halves(blocks, 2), blocks[:, :, 4:]
    else:
        biases, packed = _scaled(scales, block.bias_factor, companion_dtype), blocks[:, :, 2:]
    codes = packed ^ np.uint8(0x80) if block.bits == 8 else _nibbles(packed)
    words = pack_codes(codes.reshape(raw.shape[0], -1), block.bits)
    return AffineRows(words, scales.astype(STORAGE[companion_dtype]), biases)


def mxfp4_rows(raw: np.ndarray) -> Mxfp4Rows:
    """Rows of MXFP4 blocks ``[rows, bytes]`` with codes in order of their elements, and the exponents apart."""
    blocks = _blocks(raw, MXFP4_BYTES)
    words = pack_codes(_nibbles(blocks[:, :, 1:]).reshape(raw.shape[0], -1), 4)
    return Mxfp4Rows(words, np.ascontiguousarray(blocks[:, :, 0]))


def _blocks(raw: np.ndarray, block_bytes: int) -> np.ndarray:
    return raw.reshape(raw.shape[0], -1, block_bytes)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(STORAGE["float16"])[:, :, 0]


def _scaled(scales: np.ndarray, factor: int, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return (scales.astype(np.float32) * np.float32(factor)).astype(STORAGE[dtype])
