"""Changes of the resident index, judged by the rules of the format written a second time."""

from __future__ import annotations

import re
import struct
from itertools import pairwise

import numpy as np

from turbospark_mlx.errors import InstallError

from .mutation import WEIGHTS, Mutation, rust_dense, swift_moe

ENTRY = struct.Struct("<IHBBQQ4IQQQQ")
FIELDS = {"name offset": (0, 4), "name length": (4, 2), "tag": (6, 1), "reserved": (7, 1), "data offset": (8, 8)}
FIELDS |= {"data size": (16, 8), "shape": (24, 16), "scales offset": (40, 8), "scales size": (48, 8)}
FIELDS |= {"biases offset": (56, 8), "biases size": (64, 8)}
INDEX_WORDS = r"indexSize|residentSize|entryCount|entry \d+|tensor '|no tensor"

# Bits and group of the affine tags; bytes an element of the raw ones.
AFFINE = {0: (None, 64), 4: (4, 64), 5: (8, 64), 15: (1, 128), 16: (2, 128)}
RAW = {1: 2, 2: 2, 3: 4}


def field_at(position: int) -> str:
    return next(name for name, (start, size) in FIELDS.items() if start <= position < start + size)


def consistent(tag: int, shape: list[int], sizes: list[int]) -> bool:
    """Whether a tag, a shape and the three sizes belong together: the sheet's formulas, written a second time."""
    elements = int(np.prod([axis for axis in shape if axis], dtype=object))
    if tag in RAW:
        return sizes == [elements * RAW[tag], 0, 0]
    if tag not in AFFINE or len([axis for axis in shape if axis]) != 2:
        return False
    bits, group = AFFINE[tag]
    bits = bits or 8 * sizes[0] / elements
    companion = shape[0] * shape[1] // group * 2
    return shape[1] % group == 0 and bits in (1, 2, 4, 8) and sizes == [elements * bits / 8, companion, companion]


def judge_index(after: bytes):
    """The judge of a changed index whose hash was made to match: where the change leaves every range inside the
    payload, disjoint, and of the size that tag and shape need, with one UTF-8 name each, the install says something
    else but says it consistently, and opening it is right. Everything else must be refused."""
    count = struct.unpack_from("<Q", after, 16)[0]

    def judge(result):
        acceptable = is_consistent_index(after)
        if isinstance(result, InstallError):
            assert not acceptable, f"refused, but nothing is wrong with it: {result}"
            assert WEIGHTS in str(result)
            assert re.search(INDEX_WORDS, str(result)), str(result)
            return
        assert acceptable, "opened, but its index is not consistent"
        assert len(result.tensors) == count
        for number, entry in enumerate(result.tensors.values()):
            fields = ENTRY.unpack_from(after, 24 + ENTRY.size * number)
            assert entry.name.encode() == after[fields[0] : fields[0] + fields[1]]
            assert entry.tag == fields[2]
            assert (entry.part("data"), entry.part("scales"), entry.part("biases")) == (
                fields[4:6],
                fields[10:12],
                fields[12:14],
            )
            assert list(entry.shape) == [axis for axis in fields[6:10] if axis]

    return judge


def is_consistent_index(data: bytes) -> bool:
    index_size, resident_size, count = struct.unpack_from("<QQQ", data)
    if index_size + resident_size != len(data) or index_size % 4096 or 24 + 72 * count > index_size:
        return False
    names, ranges = [], []
    for number in range(count):
        fields = ENTRY.unpack_from(data, 24 + 72 * number)
        offset, length, tag, reserved, shape = *fields[:4], list(fields[6:10])
        if reserved or not length or offset < 24 + 72 * count or offset + length > index_size:
            return False
        try:
            names.append(data[offset : offset + length].decode().lower())
        except UnicodeDecodeError:
            return False
        parts = [fields[4:6], fields[10:12], fields[12:14]]
        if not shape[0] or shape != sorted(shape, key=lambda axis: axis == 0):
            return False
        if not consistent(tag, shape, [size for _, size in parts]):
            return False
        for start, size in parts:
            if (size and (start < index_size or start + size > len(data))) or (start and not size):
                return False
            ranges += [(start, start + size)] if size else []
    ranges.sort()
    return len(set(names)) == count and all(end <= start for (_, end), (start, _) in pairwise(ranges))


def _index_mutation(make, what: str, position: int, new: bytes) -> Mutation:
    good = make().files[WEIGHTS]
    bad = good[:position] + new + good[position + len(new) :]

    def changed():
        made = make()
        made.files[WEIGHTS] = bad
        return made.seal()

    return Mutation(f"{make.__name__}: {what}", changed, judge_index(bad))


def structure_size(data: bytes) -> int:
    """Bytes of header, table and names."""
    last = ENTRY.unpack_from(data, 24 + 72 * (struct.unpack_from("<Q", data, 16)[0] - 1))
    return last[0] + last[1]


def flipped_index_bytes(random) -> list[Mutation]:
    found = []
    for make in (rust_dense, swift_moe):
        data = make().files[WEIGHTS]
        for position in range(structure_size(data)):
            new = data[position] ^ (1 << int(random.integers(8)))
            found.append(_index_mutation(make, f"byte {position} is {new}", position, bytes([new])))
    return found


def extreme_index_numbers(random) -> list[Mutation]:
    """Every number of the index replaced by values at the borders of its type, and by near and page-off ones."""
    found = []
    make = rust_dense
    data = make().files[WEIGHTS]
    places = [(0, 8), (8, 8), (16, 8)]
    for entry in range(struct.unpack_from("<Q", data, 16)[0]):
        starts = [
            (0, 4),
            (8, 8),
            (16, 8),
            *((24 + 4 * axis, 4) for axis in range(4)),
            *((40 + 8 * i, 8) for i in range(4)),
        ]
        places += [(24 + 72 * entry + start, size) for start, size in starts]
    for position, size in places:
        old = int.from_bytes(data[position : position + size], "little")
        limit = 1 << 8 * size
        for value in {0, 1, limit - 1, limit >> 1, old + 1, old - 1, old + 16384, old * 2} - {old}:
            if 0 <= value < limit:
                new = value.to_bytes(size, "little")
                found.append(_index_mutation(make, f"number at {position} is {value}", position, new))
    return found
