"""Files that are cut, replaced by something else, or damaged where only hashing looks."""

from __future__ import annotations

import os
import re
import struct

from turbospark_mlx.gturbo import Install

from .index_mutations import structure_size
from .mutation import LAYOUT, MANIFEST, WEIGHTS, Mutation, overwrite, refused, rust_dense, rust_moe, swift_moe
from .test_install import KINDS, replace_with


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
            start = structure_size(data) if name == WEIGHTS else 0
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
