"""A GGUF file as a source: float tensors, and the block types whose meaning is exactly an affine format.

Block layouts are ggml's (ggml-common.h): a block holds 32 weights. Q8_0 is a float16 scale d and 32 signed bytes q,
``w = d q``. Q4_0 is d and 16 bytes, ``w = d (q - 8)``; Q4_1 is d, a float16 minimum m and 16 bytes, ``w = d q + m``.
Byte j of a 4-bit block holds weight j in its low nibble and weight j + 16 in its high one.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFReader

from turbospark_mlx.convert.affine import pack_codes
from turbospark_mlx.convert.floats import STORAGE, all_finite
from turbospark_mlx.convert.gguf_tokenizer import tokenizer_files
from turbospark_mlx.convert.source import AffineRows, PositionedFile, Source, SourceTensor, settle_tied_head
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import family_for_gguf
from turbospark_mlx.protocols import AffineFormat, Dropped

_GROUP = 32
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class _BlockType:
    """``bias_factor`` times the block's scale is its bias; None where the block stores the bias."""

    bits: int
    block_bytes: int
    bias_factor: int | None


_BLOCKS = {"Q8_0": _BlockType(8, 34, -128), "Q4_0": _BlockType(4, 18, -8), "Q4_1": _BlockType(4, 20, None)}
_SUPPORTED = ", ".join([*_FLOATS, *_BLOCKS])
_SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class _Entry:
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int


def open_gguf(path: Path, model_id: str | None) -> Source:
    """Open a GGUF file. Raises ConvertError naming the file, the tensor and its type, or the metadata key."""
    with ExitStack() as files:
        file = PositionedFile(path, files)
        metadata, entries = _read_header(path)
        family = family_for_gguf(metadata.get("general.architecture", ""))
        hf_config = family.hf_config_from_gguf(metadata)
        config = family.config_from_hf(hf_config)
        named: dict[str, _Entry] = {}
        dropped: dict[str, str] = {}
        for entry in entries:
            name = family.gguf_name(entry.name, config)
            if isinstance(name, Dropped):
                dropped[entry.name] = name.reason
            else:
                named[name] = entry
        config = settle_tied_head(config, family, named)
        hf_config["tie_word_embeddings"] = config.tie_word_embeddings
        return Source(
            kind="GGUF",
            model_id=model_id or path.stem,
            family=family,
            config=config,
            tensors={name: _tensor(file, entry, family.gguf_rows(name, config)) for name, entry in named.items()},
            side_files={"config.json": json.dumps(hf_config, indent=2).encode(), **tokenizer_files(metadata)},
            dropped=dropped,
            files=files.pop_all(),
        )


class _Reader(GGUFReader):
    """Slices a plain array instead of ``np.memmap``: a header with a large vocabulary is read three times as fast."""

    def _get(self, *args: Any, **options: Any) -> np.ndarray:
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        return super()._get(*args, **options)


def _read_header(path: Path) -> tuple[dict[str, Any], list[_Entry]]:
    try:
        reader = _Reader(path)
        metadata = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise ConvertError(f"{path}: is damaged or not a GGUF file ({error}). Download the file again.") from None
    if reader.endianess != GGUFEndian.LITTLE:
        raise ConvertError(f"{path}: is a big-endian GGUF file. Download the little-endian one.")
    if metadata.get("split.count", 1) > 1:
        raise ConvertError(
            f"{path}: is one of {metadata['split.count']} parts. Merge them first with llama.cpp's"
            " `llama-gguf-split --merge` and give the result."
        )
    entries = [
        _Entry(tensor.name, tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)), tensor.data_offset)
        for tensor in reader.tensors
    ]
    return metadata, entries


def _tensor(file: PositionedFile, entry: _Entry, order: Any) -> SourceTensor:
    """``order`` is the GGUF row of each installed row, or None where the rows are stored in the installed order."""
    where = f"{file.path}: {entry.name}"
    columns = entry.shape[-1] if len(entry.shape) > 1 else 1
    order = None if order is None else np.asarray(order)
    if entry.type in _FLOATS:
        form: str | AffineFormat = _FLOATS[entry.type]
        row_bytes = columns * STORAGE[form].itemsize
    elif entry.type in _BLOCKS and len(entry.shape) > 1:
        row_bytes = columns // _GROUP * _BLOCKS[entry.type].block_bytes
        form = AffineFormat(_BLOCKS[entry.type].bits, _GROUP, _companion_dtype(file, entry, row_bytes))
    else:
        raise ConvertError(
            f"{where}: has type {entry.type}, which cannot be converted without loss. Supported are {_SUPPORTED}:"
            " take a GGUF file of those types, or the original weights."
        )

    def read(start: int, stop: int) -> np.ndarray | AffineRows:
        if order is None:
            raw = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes).reshape(-1, row_bytes)
        else:
            rows = order[start:stop]
            first, last = int(rows.min()), int(rows.max())
            span = file.read(entry.offset + first * row_bytes, (last + 1 - first) * row_bytes)
            raw = span.reshape(-1, row_bytes)[rows - first]
        if isinstance(form, AffineFormat):
            return _affine_rows(raw, _BLOCKS[entry.type], form.companion_dtype)
        return raw.view(STORAGE[form])

    return SourceTensor(entry.shape, form, where, read)


def _blocks(raw: np.ndarray, block: _BlockType) -> np.ndarray:
    return raw.reshape(raw.shape[0], -1, block.block_bytes)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(STORAGE["float16"])[:, :, 0]


def _scaled(scales: np.ndarray, factor: int, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return (scales.astype(np.float32) * np.float32(factor)).astype(STORAGE[dtype])


def _companion_dtype(file: PositionedFile, entry: _Entry, row_bytes: int) -> str:
    """float16, as the file stores the scales, unless a bias that follows from them exceeds its range.

    Multiplying by a power of two upwards is exact in float16 otherwise, also for subnormal scales.
    """
    block = _BLOCKS[entry.type]
    if block.bias_factor is None:
        return "float16"
    rows = int(np.prod(entry.shape[:-1], dtype=object))
    step = max(1, _SCAN_BYTES // row_bytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = file.read(entry.offset + start * row_bytes, count * row_bytes).reshape(count, row_bytes)
        biases = _scaled(_halves(_blocks(raw, block), 0), block.bias_factor, "float16")
        if not all_finite(biases, "float16"):
            return "float32"
    return "float16"


def _affine_rows(raw: np.ndarray, block: _BlockType, companion_dtype: str) -> AffineRows:
    blocks = _blocks(raw, block)
    scales = _halves(blocks, 0)
    if block.bias_factor is None:
        biases, packed = _halves(blocks, 2), blocks[:, :, 4:]
    else:
        biases, packed = _scaled(scales, block.bias_factor, companion_dtype), blocks[:, :, 2:]
    if block.bits == 8:
        codes = packed ^ np.uint8(0x80)
    else:
        codes = np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    words = pack_codes(codes.reshape(raw.shape[0], -1), block.bits)
    return AffineRows(words, scales.astype(STORAGE[companion_dtype]), biases)
