"""A CRC-32 of every expert, taken when an install is opened, against which each expert is checked as it is read.

The files are read once in full for it and must have the SHA-256 that the manifest declares, so that the sums vouch for
the bytes that were published. What a disk or a cable gets wrong afterwards is found when an expert is read.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from turbospark_mlx.experts.blob import used_bytes
from turbospark_mlx.gturbo import Install
from turbospark_mlx.gturbo.files import damaged

_BLOCK = 4 << 20


class Checksums:
    """The CRC-32 of the used bytes of each expert. Raises InstallError where a file is not what the manifest says."""

    def __init__(self, install: Install, pool: Executor):
        self._sums = list(pool.map(lambda position: _scan(install, position), range(len(install.experts.layers))))

    def check(self, position: int, expert: int, buffer: np.ndarray, label: str) -> None:
        """Raise InstallError unless ``buffer`` holds the bytes that were there at open."""
        found, expected = zlib.crc32(buffer), self._sums[position][expert]
        if found != expected:
            raise damaged(label, f"gave bytes with CRC-32 {found:08x}, where {expected:08x} was found at open")


def _scan(install: Install, position: int) -> list[int]:
    layer, file = install.experts.layers[position], install.expert_file(position)
    digest, used, sums, at = hashlib.sha256(), used_bytes(layer), [0] * len(layer.offsets), 0
    buffer = memoryview(bytearray(_BLOCK))

    def hash_until(end: int, each: Callable[[memoryview], None]) -> None:
        nonlocal at
        while at < end:
            block = buffer[: min(_BLOCK, end - at)]
            file.read_into(at, block)
            digest.update(block)
            each(block)
            at += len(block)

    for expert in sorted(range(len(sums)), key=layer.offsets.__getitem__):

        def add(block: memoryview, expert: int = expert) -> None:
            sums[expert] = zlib.crc32(block, sums[expert])

        hash_until(layer.offsets[expert], lambda block: None)
        hash_until(layer.offsets[expert] + used, add)
    hash_until(file.state.size, lambda block: None)
    declared = install.manifest.files[layer.file].sha256
    if digest.hexdigest() != declared:
        raise damaged(file.label, f"has SHA-256 {digest.hexdigest()}; manifest.json declares {declared}")
    return sums
