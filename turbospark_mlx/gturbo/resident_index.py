"""The index at the head of ``model_weights.bin``: where each resident tensor lies and how it is stored.

Header of 24 bytes, then one entry of 72 bytes a tensor, then the names, zero padding, and the payload. Offsets are
absolute in the file. Nothing of it is trusted: every number is checked against the size of the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import formats
from turbospark_mlx.gturbo.files import OpenFile, damaged, fold
from turbospark_mlx.gturbo.formats import PAGE, SUB_ALIGNMENT, TensorSpec
from turbospark_mlx.protocols import AffineFormat

FILE = "model_weights.bin"
MAX_INDEX_BYTES = 16 << 20

_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<IHBBQQ4IQQQQ")
# Writers pad to 16384. Early installs of the Rust engine padded to 4096, and to nothing when empty.
_ELDER_PAGE = 4096

PARTS = ("data", "scales", "biases")


@dataclass(frozen=True)
class TensorEntry:
    """A resident tensor. ``dtype`` is ``"affine"``, ``"bfloat16"``, ``"float16"``, ``"float32"`` or the name of a
    ggml block type. Offsets are absolute in ``model_weights.bin``; companions that do not exist have size 0."""

    name: str
    tag: int
    shape: tuple[int, ...]
    dtype: str
    format: AffineFormat | None
    offset: int
    size: int
    scales_offset: int = 0
    scales_size: int = 0
    biases_offset: int = 0
    biases_size: int = 0

    def part(self, part: str) -> tuple[int, int]:
        """Offset and size of ``"data"``, ``"scales"`` or ``"biases"``."""
        if part == "data":
            return self.offset, self.size
        if part == "scales":
            return self.scales_offset, self.scales_size
        if part == "biases":
            return self.biases_offset, self.biases_size
        raise ValueError(f"part {part!r}; a tensor has {', '.join(PARTS)}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.size + self.scales_size + self.biases_size


def read(file: OpenFile, declared: Mapping[str, AffineFormat]) -> dict[str, TensorEntry]:
    """Read and validate the index. ``declared`` holds the formats that the manifest's extension states for tensors
    of tag 0. Raises InstallError."""
    index_size, resident_size, count = _HEADER.unpack(file.read(0, _HEADER.size))
    if index_size > MAX_INDEX_BYTES:
        raise damaged(file.label, f"indexSize is {index_size}; at most {MAX_INDEX_BYTES} bytes are allowed")
    names_start = _HEADER.size + count * _ENTRY.size
    if names_start > index_size:
        raise damaged(file.label, f"entryCount is {count}, which does not fit indexSize {index_size}")
    if index_size % _ELDER_PAGE and (index_size, count) != (_HEADER.size, 0):
        raise damaged(file.label, f"indexSize is {index_size}; a multiple of {_ELDER_PAGE} is needed")
    if index_size + resident_size != file.state.size:
        raise damaged(
            file.label,
            f"declares indexSize {index_size} and residentSize {resident_size}, but has {file.state.size} bytes",
        )
    index = file.read(0, index_size)
    reader = _Reader(file.label, index, names_start, file.state.size, declared)
    entries: dict[str, TensorEntry] = {}
    folded: dict[str, str] = {}
    for number in range(count):
        entry = reader.entry(number)
        same = folded.setdefault(fold(entry.name), entry.name)
        if same != entry.name or entry.name in entries:
            raise damaged(file.label, f"entry {number}: the tensor name {entry.name!r} occurs twice ({same!r})")
        entries[entry.name] = entry
    _refuse_overlap(file.label, entries.values())
    for name in declared:
        if name not in entries:
            raise damaged(file.label, f"has no tensor {name!r}, for which manifest.json declares a format")
    return entries


@dataclass(frozen=True)
class _Reader:
    label: str
    index: bytes
    names_start: int
    file_size: int
    declared: Mapping[str, AffineFormat]

    def entry(self, number: int) -> TensorEntry:
        fields = _ENTRY.unpack_from(self.index, _HEADER.size + number * _ENTRY.size)
        name_offset, name_length, tag, reserved = fields[:4]
        dims, ranges = fields[6:10], {"data": fields[4:6], "scales": fields[10:12], "biases": fields[12:14]}
        name = self._name(number, name_offset, name_length)
        where = f"tensor {name!r}"
        if reserved:
            raise damaged(self.label, f"{where}: the reserved byte is {reserved}; 0 is needed")
        rank = sum(1 for size in dims if size)
        if not rank or not all(dims[:rank]):
            raise damaged(self.label, f"{where}: shape {list(dims)}; only trailing axes may be 0")
        for part, (offset, size) in ranges.items():
            self._check_range(where, part, offset, size)
        try:
            return self._typed(name, tag, dims[:rank], ranges)
        except ValueError as error:
            raise damaged(self.label, f"{where} (dtype tag {tag}): {error}") from error

    def _name(self, number: int, offset: int, length: int) -> str:
        if not length or offset < self.names_start or offset + length > len(self.index):
            raise damaged(
                self.label,
                f"entry {number}: the name at {offset} of {length} bytes is not between {self.names_start} and"
                f" {len(self.index)}",
            )
        try:
            return self.index[offset : offset + length].decode()
        except UnicodeDecodeError:
            raise damaged(self.label, f"entry {number}: the name is not UTF-8") from None

    def _check_range(self, where: str, part: str, offset: int, size: int) -> None:
        if size == 0:
            if part == "data":
                raise damaged(self.label, f"{where}: data size is 0")
            if offset:
                raise damaged(self.label, f"{where}: {part} size is 0, but {part} offset is {offset}")
        elif offset < len(self.index) or offset + size > self.file_size:
            raise damaged(
                self.label,
                f"{where}: {part} at {offset} of {size} bytes is not between {len(self.index)} and {self.file_size}",
            )

    def _typed(self, name: str, tag: int, shape: tuple[int, ...], ranges: Mapping[str, tuple[int, int]]) -> TensorEntry:
        sizes = {part: size for part, (_, size) in ranges.items()}
        if name in self.declared and tag != formats.TAG_WORDS:
            raise ValueError(f"manifest.json declares a format for it; that needs dtype tag {formats.TAG_WORDS}")
        affine = None
        if tag == formats.TAG_WORDS:
            affine = self.declared.get(name) or _format_by_size(shape, sizes["data"])
        elif tag in formats.AFFINE_TAGS:
            affine = formats.AFFINE_TAGS[tag]
        if affine:
            dtype = "affine"
            data, companion = formats.affine_sizes(shape, affine)
            expected = {"data": data, "scales": companion, "biases": companion}
        elif tag in formats.RAW_TAGS:
            dtype = formats.RAW_TAGS[tag]
            shape = _with_flattened_axes(shape, dtype, sizes["data"])
            expected = {"data": formats.raw_size(shape, dtype), "scales": 0, "biases": 0}
        elif tag in formats.BLOCK_TAGS:
            block = formats.BLOCK_TAGS[tag]
            dtype = block.name
            data = formats.block_size(shape, block) if block.elements else sizes["data"]
            expected = {"data": data, "scales": 0, "biases": 0}
        else:
            raise ValueError("no such dtype tag")
        for part, size in expected.items():
            if sizes[part] != size:
                raise ValueError(f"{part} has {sizes[part]} bytes; shape {list(shape)} needs {size}")
        (offset, size), (scales, scales_size), (biases, biases_size) = ranges.values()
        return TensorEntry(name, tag, shape, dtype, affine, offset, size, scales, scales_size, biases, biases_size)


def _format_by_size(shape: tuple[int, ...], size: int) -> AffineFormat:
    """The format of tag 0 in the Swift engine's installs: 4 or 8 bits, told apart by the size."""
    for affine in (formats.AFFINE_TAGS[4], formats.AFFINE_TAGS[5]):
        if 8 * size == prod(shape) * affine.bits:
            return affine
    raise ValueError(f"data has {size} bytes, which is neither 4 nor 8 bits for each element of {list(shape)}")


def _with_flattened_axes(shape: tuple[int, ...], dtype: str, size: int) -> tuple[int, ...]:
    """The shape of a raw tensor. An entry holds four axes; what a tensor has beyond them shows in its size only."""
    four = formats.raw_size(shape, dtype)
    if len(shape) == 4 and size > four and size % four == 0:
        return (*shape, size // four)
    return shape


def _refuse_overlap(label: str, entries: Iterable[TensorEntry]) -> None:
    ranges = sorted((*entry.part(part), entry.name, part) for entry in entries for part in PARTS if entry.part(part)[1])
    for (start, size, name, part), (after, _, other, other_part) in pairwise(ranges):
        if start + size > after:
            raise damaged(label, f"{part} of tensor {name!r} overlaps {other_part} of tensor {other!r} at {after}")


def build(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, TensorEntry], int]:
    """Lay out tensors in order: the index bytes, the entries, and the size of the whole file. Raises InstallError."""
    names = [spec.name.encode() for spec in specs]
    names_start = _HEADER.size + len(specs) * _ENTRY.size
    index_size = align(names_start + sum(map(len, names)), PAGE)
    if index_size > MAX_INDEX_BYTES:
        raise InstallError(f"{FILE}: {len(specs)} tensors need an index of {index_size} bytes; {MAX_INDEX_BYTES} fit.")
    table, entries = bytearray(), {}
    folded: dict[str, str] = {}
    end, name_offset = index_size, names_start
    for spec, name in zip(specs, names, strict=True):
        if fold(spec.name) in folded:
            raise InstallError(f"Tensor {spec.name!r} is given twice (as {folded[fold(spec.name)]!r}).")
        folded[fold(spec.name)] = spec.name
        places = {}
        for part, size in spec.parts.items():
            places[part] = (align(end, SUB_ALIGNMENT), size)
            end = sum(places[part])
        (offset, size), scales, biases = (places.get(part, (0, 0)) for part in PARTS)
        table += _ENTRY.pack(
            name_offset, len(name), spec.tag, 0, offset, size, *(*spec.shape, 0, 0, 0)[:4], *scales, *biases
        )
        name_offset += len(name)
        affine = spec.dtype if isinstance(spec.dtype, AffineFormat) else None
        dtype = "affine" if affine else spec.dtype
        entries[spec.name] = TensorEntry(spec.name, spec.tag, spec.shape, dtype, affine, offset, size, *scales, *biases)
    index = _HEADER.pack(index_size, end - index_size, len(specs)) + table + b"".join(names)
    return index.ljust(index_size, b"\0"), entries, end


def align(offset: int, alignment: int) -> int:
    """The next multiple of ``alignment`` at or after ``offset``."""
    return -(-offset // alignment) * alignment
