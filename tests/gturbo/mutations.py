"""Damaged and hostile installs, made one change at a time from hand-packed good ones, each with its judge.

A structural fault must be refused, by a message that names the file and the field. What still opens must be explained
by a rule that is stated here for that very change, and what was read is compared with what the rule allows.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install

from . import handmade
from .handmade import Handmade
from .test_install import KINDS, replace_with
from .test_manifest import BAD_PATHS, TEXTS

WEIGHTS, LAYOUT, MANIFEST = "model_weights.bin", "packed_experts/layout.json", "manifest.json"


def built_once(make: Callable[[], Handmade]) -> Callable[[], Handmade]:
    """A maker whose install is built once and copied for each mutation."""
    original = make()
    return functools.wraps(make)(lambda: original.copy())


rust_dense, swift_moe, rust_moe = map(built_once, handmade.ALL.values())


@dataclass
class Mutation:
    """One changed install. ``make`` returns it; ``place`` may change the directory further once it is written.
    ``judge`` gets what ``Install.open`` without hashing gave: an InstallError, or the open install."""

    what: str
    make: Callable[[], Handmade]
    judge: Callable[[InstallError | Install], None]
    place: Callable[[Path], None] | None = None
    hashes_wrong: bool = False


def refused(*words: str) -> Callable[[InstallError | Install], None]:
    """The judge of a structural fault: refused, with a message that matches each of ``words``."""

    def judge(result):
        assert isinstance(result, InstallError), "opened"
        for word in words:
            assert re.search(word, str(result)), f"{word!r} is not in: {result}"

    return judge


def overwrite(path: Path, data: bytes) -> None:
    """Write without emptying the file first, for which some file systems wait for the disk."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


# --- The resident index ----------------------------------------------------------------------------------------------

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


def _structure_size(data: bytes) -> int:
    """Bytes of header, table and names."""
    last = ENTRY.unpack_from(data, 24 + 72 * (struct.unpack_from("<Q", data, 16)[0] - 1))
    return last[0] + last[1]


def flipped_index_bytes(random) -> list[Mutation]:
    found = []
    for make in (rust_dense, swift_moe):
        data = make().files[WEIGHTS]
        for position in range(_structure_size(data)):
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


# --- JSON ------------------------------------------------------------------------------------------------------------

# Values of every JSON kind; each place in a document understands at most a few of them.
STRANGE = (None, True, -1, 1.5, 2**70, "x", [], {}, [[]], {"a": 1})


def leaves(document, path=()):
    """The path of every value inside a JSON document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def with_value(document, path, value):
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


ARCH_NUMBERS = ("finalLogitSoftcap", "ropeTheta", "fullRopeTheta", "partialRotaryFactor")


def manifest_understands(path: tuple, value: object) -> bool:
    """Whether a manifest may hold ``value`` (one of STRANGE) at ``path``: stated for each place by its kind."""
    where = ".".join(map(str, path))
    if value is None:
        return where in (
            "quant",
            "sourceSnapshotHash",
            "arch.family",
            "arch.trainedContext",
            "arch.routerScoringFunc",
        ) or (where == "bitWidthOverridesHonored")
    if value == {} and path == ("quant",):
        return True
    if where in ("modelID", "sourceSnapshotHash", "arch.family", "arch.hiddenActivation", "arch.routerScoringFunc"):
        return value == "x"
    if path[-1] in ("scheme", "scaleType", "biasType"):
        return value == "x"
    if path[0] == "flags" and len(path) == 2:
        return value is True and path[-1] != "turboQuantKV"
    if path[-1] in ("tieWordEmbeddings", "attentionKEqV"):
        return value is True
    if where == "arch.finalLogitSoftcap":
        return value == -1 or value == 1.5
    if where in ("arch.ropeTheta", "arch.fullRopeTheta"):
        return value == 1.5
    return path == ("flags",) and value == {}


def strange_manifest_values(random) -> list[Mutation]:
    found = []
    for make in (rust_dense, swift_moe):
        good = make().manifest
        for path in leaves(good):
            for value in STRANGE:
                if value == {} and path == ("flags",):
                    continue
                found.append(_manifest_mutation(make, path, value, manifest_understands(path, value)))
    return [found[i] for i in sorted(random.choice(len(found), 500, replace=False))]


def _manifest_mutation(make, path, value, understood) -> Mutation:
    def changed():
        made = make()
        made.manifest = with_value(made.manifest, path, value)
        return made

    def opens(result):
        assert isinstance(result, Install), f"refused, but a manifest may say this: {result}"
        assert result.manifest.document == changed().manifest

    # A path of several components is named by its last that is a key, or by a parent that fell with it.
    keys = [re.escape(key) for key in path if isinstance(key, str)]
    judge = opens if understood else refused(MANIFEST, "|".join(keys))
    return Mutation(f"{make.__name__}: manifest {path} is {value!r}", changed, judge)


def layout_understands(good: dict, path: tuple, value: object) -> bool:
    """Whether a layout may hold ``value`` at ``path``: a layer without a stride has the model's, and the tables of
    experts after the first are compared as numbers with the first one's, which is the one that is read."""
    if path[-1] == "expertStride" and len(path) > 1:
        return value is None
    return "tensors" in path and path[3] > 0 and value == _get(good, path)


def strange_layout_values(random) -> list[Mutation]:
    found = []
    for make in (swift_moe, rust_moe):
        good = json.loads(make().files[LAYOUT])
        for path in leaves(good):
            for value in STRANGE:
                found.append(_layout_mutation(make, path, value, layout_understands(good, path, value)))
    return [found[i] for i in sorted(random.choice(len(found), 300, replace=False))]


def _layout_mutation(make, path, value, understood) -> Mutation:
    def changed():
        made = make()
        made.files[LAYOUT] = handmade.dump(with_value(json.loads(made.files[LAYOUT]), path, value))
        return made.seal()

    def opens(result):
        assert isinstance(result, Install), f"refused, but a layout may say this: {result}"
        if path[-1] == "expertStride":
            assert result.experts.layers[path[1]].stride == result.experts.stride

    judge = opens if understood else refused(r"layout\.json: |layer_0\d\.bin", "layers|expert|numLayers")
    return Mutation(f"{make.__name__}: layout {path} is {value!r}", changed, judge)


# What only the manifest says, and nothing else in the install can contradict.
STATEMENTS = re.compile(
    r"arch\.(?!numLayers|numExperts|numDense)|modelID|quant\.|sourceSnapshotHash|versionMinor|bitWidth|flags\.(stream|ane)"
)


def damaged_manifest_text(random) -> list[Mutation]:
    """Cut texts and changed characters. A changed text that still opens differs only in statements, in the names of
    keys that readers do not know, or in digits of hashes, which hashing finds."""
    found = []
    for make in (rust_dense, swift_moe):
        text = handmade.dump(make().manifest)
        for end in random.choice(len(text), 30, replace=False):
            found.append(_text_mutation(make, f"manifest cut at {end}", text[:end], refused(MANIFEST, "JSON|magic")))
        for position in random.choice(len(text), 120, replace=False):
            new = bytes([text[position] ^ (1 << int(random.integers(8)))])
            bad = text[:position] + new + text[position + 1 :]
            found.append(_text_mutation(make, f"manifest byte {position} is {new!r}", bad, judge_text(make, bad)))
    return found


def _text_mutation(make, what, data, judge) -> Mutation:
    def place(directory):
        overwrite(directory / MANIFEST, data)

    return Mutation(f"{make.__name__}: {what}", make, judge, place)


def judge_text(make, bad: bytes):
    def judge(result):
        if isinstance(result, InstallError):
            assert re.search(rf"{MANIFEST}|is missing|bytes; manifest", str(result)), str(result)
            return
        good, now = make().manifest, json.loads(bad)
        known = {key for path in leaves(good) for key in path}
        differing = {path for path in {*leaves(good), *leaves(now)} if _get(good, path) != _get(now, path)}
        for path in differing:
            where = ".".join(map(str, path))
            parent = any(other[: len(path)] == path and other != path for other in differing)
            unknown = any(key not in known for key in path)
            assert (
                parent
                or unknown
                or STATEMENTS.match(where)
                or where.endswith(".sha256")
                or path[0] == "sourceSnapshotHash"
            ), where
        hashes = [path for path in differing if path[-1] == "sha256"]
        if any(_get(good, path).lower() != _get(now, path).lower() for path in hashes):
            with pytest.raises(InstallError, match="SHA-256"):
                Install.open(result.path, verify="full")

    return judge


def _get(document, path):
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return "absent"
    return document


def hostile_texts(random) -> list[Mutation]:
    found = []
    for kind, (raw, _) in TEXTS.items():
        found.append(_text_mutation(rust_dense, f"manifest: {kind}", raw, refused(MANIFEST)))

        def changed(raw=raw):
            made = rust_moe()
            made.files[LAYOUT] = raw
            return made.seal()

        found.append(Mutation(f"layout: {kind}", changed, refused(r"layout\.json")))
    return found


def hostile_paths(random) -> list[Mutation]:
    found = []
    for kind, name in BAD_PATHS.items():
        for original in (WEIGHTS, "tokenizer/tokenizer.json", "packed_experts/layer_00.bin"):

            def changed(original=original, name=name):
                made = swift_moe()
                made.manifest["files"][name] = made.manifest["files"].pop(original)
                return made

            found.append(Mutation(f"{original} is listed as {kind}", changed, refused(MANIFEST + "|is missing")))
        found.append(_layout_mutation(swift_moe, ("layers", 0, "file"), name, understood=False))
    return found


# --- Files -----------------------------------------------------------------------------------------------------------


def wrong_kinds_of_file(random) -> list[Mutation]:
    found = []
    for make in (swift_moe, rust_moe):
        for name in [MANIFEST, *make().files]:
            for kind in KINDS:

                def place(directory, kind=kind, name=name):
                    replace_with(kind, directory / name, directory.parent / "outside")

                found.append(Mutation(f"{make.__name__}: {name} is a {kind}", make, refused(re.escape(name)), place))
        for folder in sorted({name.split("/")[0] for name in make().files if "/" in name}):
            found += [_folder_mutation(make, folder, kind) for kind in ("link outside", "link inside", "file", "gone")]
    return found


def _folder_mutation(make, folder, kind) -> Mutation:
    def place(directory):
        hidden = directory / "hidden" if kind == "link inside" else directory.parent / "outside"
        (directory / folder).rename(hidden)
        if kind.startswith("link"):
            (directory / folder).symlink_to(hidden)
        elif kind == "file":
            (directory / folder).write_text("")

    return Mutation(f"{make.__name__}: {folder} is a {kind}", make, refused(folder), place)


def cut_files(random) -> list[Mutation]:
    found = []
    for make in (rust_dense, swift_moe, rust_moe):
        for name, data in make().files.items():
            sizes = {0, 1, 23, 24, len(data) // 2, len(data) - 1, len(data) + 1, len(data) + 16384} - {len(data)}
            for size in sizes:

                def place(directory, name=name, size=size):
                    os.truncate(directory / name, size)

                judge = refused(re.escape(name) + f": has {size} bytes; {MANIFEST} declares")
                found.append(Mutation(f"{make.__name__}: {name} has {size} bytes", make, judge, place))
    return found


def _opens_like_the_original(make):
    def judge(result):
        assert isinstance(result, Install), str(result)
        data = make().files[WEIGHTS]
        names = [
            data[offset : offset + length].decode()
            for offset, length in (
                struct.unpack_from("<IH", data, 24 + 72 * number)
                for number in range(struct.unpack_from("<Q", data, 16)[0])
            )
        ]
        assert list(result.tensors) == names

    return judge


def damaged_payloads(random) -> list[Mutation]:
    """Bytes that no reader of the structure looks at: found by hashing alone."""
    found = []
    for make in (rust_dense, swift_moe, rust_moe):
        made = make()
        index_size = struct.unpack_from("<Q", made.files[WEIGHTS])[0]
        for name, data in made.files.items():
            start = _structure_size(data) if name == WEIGHTS else 0
            if name == LAYOUT:
                continue
            positions = [int(p) for p in random.integers(start, len(data), 12)]
            positions += [start, len(data) - 1, *([index_size - 1, index_size] if name == WEIGHTS else [])]
            for position in positions:

                def place(directory, name=name, position=position):
                    content = bytearray((directory / name).read_bytes())
                    content[position] ^= 0x10
                    overwrite(directory / name, content)

                what = f"{make.__name__}: byte {position} of {name}"
                found.append(Mutation(what, make, _opens_like_the_original(make), place, hashes_wrong=True))
            for digit in (0, 31, 63):

                def changed(make=make, name=name, digit=digit):
                    made = make()
                    record = made.manifest["files"][name]
                    other = "0" if record["sha256"][digit] != "0" else "1"
                    record["sha256"] = record["sha256"][:digit] + other + record["sha256"][digit + 1 :]
                    return made

                what = f"{make.__name__}: digit {digit} of the hash of {name}"
                found.append(Mutation(what, changed, _opens_like_the_original(make), hashes_wrong=True))
    return found


CATEGORIES = (
    flipped_index_bytes,
    extreme_index_numbers,
    strange_manifest_values,
    strange_layout_values,
    damaged_manifest_text,
    hostile_texts,
    hostile_paths,
    wrong_kinds_of_file,
    cut_files,
    damaged_payloads,
)


def mutations(category) -> list[Mutation]:
    return category(np.random.default_rng(CATEGORIES.index(category)))
