"""What every kind of checkpoint looks like to the rest of the conversion.

A source lists its tensors under checkpoint names, says how each is stored, and reads any range of rows. It reads by
position, never maps or loads a whole file, and holds its files open until it is closed, so that a checkpoint that is
replaced while it is being converted cannot be mixed with its successor.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turbospark_mlx.convert.affine import dequantize_affine
from turbospark_mlx.convert.floats import to_float32
from turbospark_mlx.errors import ConvertError, counted
from turbospark_mlx.protocols import (
    AffineFormat,
    Dropped,
    Family,
    ModelConfig,
    PackedFormat,
    Placement,
)

TILE_ELEMENTS = 1 << 21
"""Elements of a tensor that are worked on at a time: 8 MiB as float32."""


class AffineRows(NamedTuple):
    """Rows of a packed matrix: uint32 words, and scales and biases in their stored form."""

    words: np.ndarray
    scales: np.ndarray
    biases: np.ndarray


class Mxfp4Rows(NamedTuple):
    """Rows of an MXFP4 matrix: uint32 words of eight codes, and the exponents of its blocks as uint8."""

    words: np.ndarray
    scales: np.ndarray


Rows = np.ndarray | AffineRows | Mxfp4Rows
"""Rows of a tensor as they are stored."""


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a checkpoint.

    ``shape`` is logical. ``format`` is a dtype name of ``floats.STORAGE``, a packed format, or the source's own name
    for something that cannot be converted. ``read(start, stop)`` gives stored rows ``[stop - start, columns]``.
    """

    shape: tuple[int, ...]
    format: str | PackedFormat
    where: str
    read: Callable[[int, int], Rows]

    @property
    def rows(self) -> int:
        """Rows that ``read`` counts: all dimensions but the last, or the elements of a vector."""
        return prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    def read_float32(self, start: int, stop: int) -> np.ndarray:
        """The values of a range of rows as float32 ``[stop - start, columns]``."""
        return values(self.read(start, stop), self.format)


@dataclass
class Source:
    """An opened checkpoint. ``dropped`` and ``ignored`` map tensors and files that are left out to the reason."""

    kind: str
    model_id: str
    family: Family
    config: ModelConfig
    tensors: dict[str, SourceTensor]
    side_files: dict[str, bytes]
    dropped: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.close()


def values(stored: np.ndarray | AffineRows, form: str | AffineFormat) -> np.ndarray:
    """Stored rows as float32 values; MXFP4 is only ever copied."""
    if isinstance(form, AffineFormat):
        return dequantize_affine(
            *stored, bits=form.bits, group_size=form.group_size, companion_dtype=form.companion_dtype
        )
    return to_float32(stored, form)


def tiles(tensor: SourceTensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover a tensor, each small enough to be worked on in memory."""
    step = max(1, TILE_ELEMENTS // tensor.columns)
    for start in range(0, tensor.rows, step):
        yield start, min(start + step, tensor.rows)


class PositionedFile:
    """A regular file that is read at given offsets. Refuses empty files and Git LFS pointers by name."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path = path
        check_downloaded(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> np.ndarray:
        """``count`` bytes from ``offset`` as a uint8 array."""
        data = np.empty(count, np.uint8)
        done = 0
        while done < count:
            got = os.preadv(self._descriptor, [memoryview(data)[done:]], offset + done)
            if got == 0:
                raise ConvertError(f"{self.path}: ends {counted(count - done, 'byte')} early. Download the file again.")
            done += got
        return data


def check_downloaded(path: Path) -> None:
    """Refuse a file that is absent, special, empty or a Git LFS pointer, naming it and what to do."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConvertError(f"{path}: is missing. Download the file, or complete the download.") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConvertError(f"{path}: is not a regular file. Put the checkpoint's own file there.")
    if status.st_size == 0:
        raise ConvertError(f"{path}: is empty. Download the file again.")
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
            raise ConvertError(f"{path}: is a Git LFS pointer, not the file itself. Run `git lfs pull` there.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint. Raises ConvertError naming the file."""
    check_downloaded(path)
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ConvertError(f"{where}: is not valid JSON ({error}). Download the file again.") from None
    except RecursionError:
        raise ConvertError(f"{where}: is nested too deeply to be read.") from None
    if not isinstance(parsed, dict):
        raise ConvertError(f"{where}: holds a {type(parsed).__name__}, not a JSON object.")
    return parsed


def settle_tied_head(config: ModelConfig, family: Family, names: Iterable[str]) -> ModelConfig:
    """The configuration with ``tie_word_embeddings`` decided: where config.json is silent, the tensors are asked."""
    if config.tie_word_embeddings is not None:
        return config
    untied = replace(config, tie_word_embeddings=False)
    return replace(config, tie_word_embeddings=not any(is_head(family.place(name, untied)) for name in names))


def is_head(place: Placement | Dropped) -> bool:
    """Whether a place is the output head's."""
    return isinstance(place, Placement) and place.role == "head"
