"""Thousands of damaged and hostile installs: every change is judged (see ``mutation``).

Meanwhile nothing outside the directory may be opened, no error but InstallError may come out, and memory and time stay
bounded whatever a header claims.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install, integrity

from . import handmade
from .file_mutations import cut_files, damaged_payloads, wrong_kinds_of_file
from .handmade import path_of
from .index_mutations import extreme_index_numbers, flipped_index_bytes, is_consistent_index
from .json_mutations import (
    damaged_manifest_text,
    hostile_paths,
    hostile_texts,
    strange_layout_values,
    strange_manifest_values,
)
from .mutation import MANIFEST, WEIGHTS, Mutation, overwrite, rust_dense, rust_moe, swift_moe

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
# Traced allocations beyond a small multiple of the largest file that is really there.
TRACED_LIMIT = 1 << 20
ADDRESS_SPACE = 128 << 20
SECONDS = 10


def mutations(category) -> list[Mutation]:
    return category(np.random.default_rng(CATEGORIES.index(category)))


class Workshop:
    """A directory in which one install after another is made; only what changed is written again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: dict[str, bytes] = {}
        self.largest = 0

    def put(self, mutation: Mutation) -> Path:
        made = mutation.make()
        directory = self.root / "i.gturbo"
        wanted = {**made.files, **made.unlisted, MANIFEST: handmade.dump(made.manifest)}
        if set(wanted) != set(self.written):
            self.clear()
            made.write(directory)
        else:
            for name, data in wanted.items():
                if self.written[name] != data:
                    overwrite(directory / name, data)
        self.written = wanted
        if mutation.place:
            mutation.place(directory)
            self.written = {}
        self.largest = max(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return directory

    def clear(self) -> None:
        for path in sorted(self.root.rglob("*"), key=lambda p: -len(p.parts)):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


@contextlib.contextmanager
def guarded(root: Path, largest: int, what: str):
    """Fail where the block opens a file outside ``root``, takes too long, or, while allocations are traced, more
    memory than the ``largest`` of the files explains."""
    outside, real = [], os.open

    def watching(*arguments, **options):
        fd = real(*arguments, **options)
        if not (path_of(fd) + "/").startswith(f"{root}/"):
            outside.append(path_of(fd))
        return fd

    def late(*_):
        raise TimeoutError(what)

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    before = tracemalloc.get_traced_memory()[0]
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    os.open = watching
    try:
        yield
    finally:
        os.open = real
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not outside, f"{what}: opened {outside}"
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken < TRACED_LIMIT + 8 * largest, f"{what}: took {taken} bytes"


@contextlib.contextmanager
def limited_address_space():
    """Make allocations that a lie in a header would cause fail with MemoryError, on Linux."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def open_or_error(directory: Path, verify: str) -> InstallError | Install:
    try:
        return Install.open(directory, verify=verify)
    except InstallError as error:
        return error


# Tracing every allocation makes everything four times as slow, so it is done where numbers and texts lie the most.
TRACED = (extreme_index_numbers, hostile_texts)


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category.__name__)
def test_mutated_installs(category, tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "_SETTLE_NS", 0)
    workshop = Workshop(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(limited_address_space())
        if category in TRACED:
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
        for mutation in mutations(category):
            check(mutation, workshop)
    assert not list(Path(os.environ["TURBOSPARK_HOME"]).rglob("*.json")), "a receipt was left"


def check(mutation: Mutation, workshop: Workshop) -> None:
    directory = workshop.put(mutation)
    with guarded(directory, workshop.largest, mutation.what):
        result = open_or_error(directory, "off")
    try:
        mutation.judge(result)
    except AssertionError as error:
        raise AssertionError(f"{mutation.what}: {error}") from error
    finally:
        if isinstance(result, Install):
            result.close()
    for mode in ("full", "auto") if mutation.hashes_wrong else ():
        with guarded(directory, workshop.largest, mutation.what):
            found = open_or_error(directory, mode)
        assert isinstance(found, InstallError), f"{mutation.what}: hashing did not find it"
        assert "SHA-256" in str(found)


def test_an_index_whose_hash_no_longer_fits_is_refused_whatever_it_says(tmp_path, monkeypatch):
    """The same flips under the original hash: refused one way or the other."""
    monkeypatch.setattr(integrity, "_SETTLE_NS", 0)
    directory = rust_dense().write(tmp_path / "i.gturbo")
    for mutation in mutations(flipped_index_bytes)[::5]:
        if mutation.what.startswith("rust_dense"):
            (directory / WEIGHTS).write_bytes(mutation.make().files[WEIGHTS])
            assert isinstance(open_or_error(directory, "auto"), InstallError), mutation.what


def test_there_are_thousands_of_mutations_and_each_differs():
    found = [mutation.what for category in CATEGORIES for mutation in mutations(category)]
    assert len(found) >= 2000
    assert len(set(found)) >= 0.99 * len(found)


def test_the_judge_itself_tells_good_from_bad():
    """The independent rule of ``judge_index`` accepts every original and refuses plain faults."""
    for make in (rust_dense, swift_moe, rust_moe):
        data = make().files[WEIGHTS]
        assert is_consistent_index(data)
        assert not is_consistent_index(data + b"\0")
        assert not is_consistent_index(data[:31] + b"\1" + data[32:])
