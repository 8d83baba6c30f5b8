"""Damaged and hostile installs, made one change at a time from hand-packed good ones, each with its judge.

A structural fault must be refused, by a message that names the file and the field. What still opens must be explained
by a rule that is stated here for that very change, and what was read is compared with what the rule allows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install

from . import handmade
from .handmade import Handmade

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
