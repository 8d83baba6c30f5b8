"""What an MXFP4 matrix stands for, in numpy; see ``protocols.Mxfp4Format``."""

from __future__ import annotations

import numpy as np

from turbospark_mlx.convert.affine import unpack_codes

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)


def dequantize_mxfp4(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 values ``[rows, columns]`` of uint32 words and uint8 exponents ``[rows, columns / 32]``; exact."""
    rows, blocks = scales.shape
    codes = unpack_codes(words, 4).reshape(rows, blocks, BLOCK)
    return np.ldexp(_FP4[codes], scales[:, :, None].astype(np.int32) - 127).reshape(rows, blocks * BLOCK)
