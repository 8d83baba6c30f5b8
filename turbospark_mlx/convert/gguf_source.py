"""A GGUF file as a source: float tensors, and the block types whose meaning is exactly an affine format."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFReader

from turbospark_mlx.convert.blocks import AFFINE_BLOCKS, GROUP, affine_format, affine_rows
from turbospark_mlx.convert.floats import STORAGE
from turbospark_mlx.convert.gguf_tokenizer import tokenizer_files
from turbospark_mlx.convert.source import AffineRows, PositionedFile, Source, SourceTensor, settle_tied_head
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import family_for_gguf
from turbospark_mlx.protocols import AffineFormat, Dropped

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


_SUPPORTED = ", ".join([*_FLOATS, *AFFINE_BLOCKS])


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

    def read_raw(start: int, stop: int) -> np.ndarray:
        return file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes).reshape(-1, row_bytes)

    if entry.type in _FLOATS:
        form: str | AffineFormat = _FLOATS[entry.type]
        row_bytes = columns * STORAGE[form].itemsize
    elif entry.type in AFFINE_BLOCKS and len(entry.shape) > 1:
        block = AFFINE_BLOCKS[entry.type]
        row_bytes = columns // GROUP * block.block_bytes
        form = affine_format(block, int(np.prod(entry.shape[:-1], dtype=object)), columns, read_raw)
    else:
        raise ConvertError(
            f"{where}: has type {entry.type}, which cannot be converted without loss. Supported are {_SUPPORTED}:"
            " take a GGUF file of those types, or the original weights."
        )

    def read(start: int, stop: int) -> np.ndarray | AffineRows:
        if order is None:
            raw = read_raw(start, stop)
        else:
            rows = order[start:stop]
            first, last = int(rows.min()), int(rows.max())
            raw = read_raw(first, last + 1)[rows - first]
        if isinstance(form, AffineFormat):
            return affine_rows(raw, block, form.companion_dtype)
        return raw.view(STORAGE[form])

    return SourceTensor(entry.shape, form, where, read)
