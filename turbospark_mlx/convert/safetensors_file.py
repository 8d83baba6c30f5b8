"""Safetensors files: the header, checked against the file, and the shards that make up a checkpoint.

A file is an unsigned 64-bit little-endian header length, a JSON header, and the tensors' bytes; offsets in the header
count from the end of the header (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from turbospark_mlx.convert.source import PositionedFile, read_json
from turbospark_mlx.errors import ConvertError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_MAX_HEADER = 100_000_000
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    """One header entry. ``dtype`` is safetensors' spelling, ``offset`` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: SafetensorsFile

    def read_rows(self, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Rows of the matrix ``[prod(shape[:-1]), shape[-1]]``; a vector is read as a column."""
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        row_bytes = columns * dtype.itemsize
        data = self.file.read(self.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.view(dtype).reshape(stop - start, columns)


class SafetensorsFile(PositionedFile):
    """An open safetensors file; ``tensors`` maps names to entries whose bytes are known to be there."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        super().__init__(path, files)
        self.tensors: dict[str, StoredTensor] = {}
        header_bytes = int(self.read(0, 8).view("<u8")[0]) if self.size >= 8 else self.size
        if header_bytes > min(self.size - 8, _MAX_HEADER):
            raise ConvertError(f"{path}: has {self.size} bytes and no safetensors header. Download the file again.")
        header = self._parse_header(self.read(8, header_bytes).tobytes())
        start = 8 + header_bytes
        ranges = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensor, end = self._entry(name, entry, start)
            self.tensors[name] = tensor
            ranges.append((tensor.offset, end, name))
        at = start
        for begin, end, name in sorted(ranges):
            if begin != at:
                raise ConvertError(f"{path}: tensor {name} starts at byte {begin}, not at {at}; the header is damaged.")
            at = end
        if at != self.size:
            raise ConvertError(f"{path}: the header declares {at} bytes, the file has {self.size}. Download it again.")

    def _parse_header(self, data: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            if len(dict(pairs)) != len(pairs):
                raise ValueError("a name occurs twice")
            return dict(pairs)

        try:
            header = json.loads(data, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise ConvertError(f"{self.path}: the header is not valid JSON ({error}). Download it again.") from None
        if not isinstance(header, dict):
            raise ConvertError(f"{self.path}: the header is not a JSON object. Download the file again.")
        return header

    def _entry(self, name: str, entry: Any, start: int) -> tuple[StoredTensor, int]:
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            integers = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
            size = _ITEM_BYTES[dtype] * prod(shape)
        except (TypeError, KeyError, ValueError):
            raise ConvertError(f"{self.path}: the header entry of {name} is not understood: {entry!r:.200}.") from None
        if not integers or end - begin != size:
            raise ConvertError(
                f"{self.path}: tensor {name} ({dtype} {list(shape)}) has data_offsets {[begin, end]}, which do not fit."
            )
        return StoredTensor(dtype, shape, start + begin, self), start + end


def open_shards(directory: Path, files: ExitStack) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """All tensors of a checkpoint directory, and the weight files that are not part of it with the reason.

    The index decides which files belong; without one it is model.safetensors, or a complete numbered set, or the only
    file there is. Raises ConvertError naming the file that is missing, short, or in contradiction with the index.
    """
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    weight_map = _weight_map(directory) if (directory / INDEX).exists() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else _without_index(directory, present)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        if name not in present:
            hint = f" If {SINGLE} is the whole checkpoint, delete the index." if SINGLE in present else ""
            raise ConvertError(f"{directory / name}: is missing. Complete the download: the index names it.{hint}")
        shard = SafetensorsFile(directory / name, files)
        for tensor_name, tensor in shard.tensors.items():
            if tensor_name in tensors:
                raise ConvertError(f"{shard.path}: tensor {tensor_name} is also in {tensors[tensor_name].file.path}.")
            if weight_map is not None and weight_map.get(tensor_name) != name:
                raise ConvertError(
                    f"{shard.path}: holds {tensor_name}, which {INDEX} does not place there. The index belongs to"
                    " other weights: download both again."
                )
            tensors[tensor_name] = tensor
    for tensor_name, name in (weight_map or {}).items():
        if tensor_name not in tensors:
            raise ConvertError(
                f"{directory / name}: does not hold {tensor_name}, which {INDEX} places there. Download both again."
            )
    reason = f"not named by {INDEX}" if weight_map is not None else "its name is not the checkpoint's"
    return tensors, {name: reason for name in present if name not in names}


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(f"{path}: has no weight_map. Download the file again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConvertError(f"{path}: places {tensor} in {name!r}, which is not a safetensors file beside it.")
    return weight_map


def _without_index(directory: Path, present: list[str]) -> list[str]:
    if SINGLE in present:
        return [SINGLE]
    shards = [match for name in present if (match := _SHARD.fullmatch(name))]
    if shards:
        sets = {(shard["stem"], shard["count"]) for shard in shards}
        if len(sets) > 1:
            raise ConvertError(f"{directory}: holds several sets of shards and no {INDEX}: {', '.join(present)}.")
        stem, count = sets.pop()
        return [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    if len(present) == 1:
        return present
    if present:
        raise ConvertError(
            f"{directory}: holds {', '.join(present)} and no {INDEX}, so that it is not clear which are the model."
            " Leave only the ones that are."
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in directory.glob(pattern))
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    if ggufs:
        raise ConvertError(f"{directory}: holds no safetensors. Give the GGUF file itself: {directory / ggufs[0]}.")
    if pickles:
        raise ConvertError(f"{directory}: holds only PyTorch pickles ({pickles[0]}). Save the model as safetensors.")
    raise ConvertError(f"{directory}: holds no safetensors file. Give the directory of a checkpoint.")
