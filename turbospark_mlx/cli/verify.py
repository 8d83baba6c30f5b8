"""``turbospark-mlx verify``: hash every file of an install."""

from __future__ import annotations

import argparse
import json
import os

HELP = "hash every file of an install and compare with its manifest"

EPILOG = """\
Every file that manifest.json lists is read in full, whatever an earlier receipt says. Where all match, a receipt is
left in $TURBOSPARK_HOME/receipts, and opening the same files later does not hash them again. Entries that the manifest
does not list are reported and ignored. Exit code 0: all match; 1: damaged or incomplete.

examples:
  turbospark-mlx verify ./qwen3-0.6b.gturbo
  turbospark-mlx verify smollm2-135m --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_install_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_install_argument(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The positional argument of commands about one install."""
    text = "an install directory, or the alias of a pulled model"
    parser.add_argument("install", metavar="MODEL", nargs=None if required else "?", help=text)


def install_path(argument: str) -> str | os.PathLike[str]:
    """The directory that ``argument`` names, itself or as an alias. Raises StoreError."""
    if os.path.lexists(argument):
        return argument
    from turbospark_mlx.store import resolve_installed

    return resolve_installed(argument)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from turbospark_mlx.errors import InstallError
    from turbospark_mlx.gturbo import Install
    from turbospark_mlx.gturbo.files import printable

    path = install_path(args.install)
    bar = tqdm(unit="B", unit_scale=True, desc="verify", leave=False, disable=True if args.quiet else None)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        with bar, Install.open(path, verify="off", allow_unrunnable=True) as install:
            found = install.verify(progress)
    except InstallError as error:
        if not args.json:
            raise
        print(json.dumps({"path": os.path.realpath(path), "ok": False, "faults": [str(error)]}, indent=2))
        return 1
    if args.json:
        document = {
            "path": install.path,
            "ok": not found.faults,
            "files": found.files,
            "bytes": found.nbytes,
            "faults": [str(fault) for fault in found.faults],
            "unhashed": list(found.unhashed),
            "unexpected": list(found.unexpected),
        }
        print(json.dumps(document, indent=2))
        return int(bool(found.faults))
    for fault in found.faults:
        print(f"damaged: {fault}")
    for name in found.unhashed:
        print(f"not hashed (the manifest does not list it): {printable(name)}")
    for name in found.unexpected:
        print(f"unexpected, ignored: {printable(name)}")
    if found.faults:
        print(f"{install.path}: {len(found.faults)} of {found.files} files are damaged")
        return 1
    print(f"{install.path}: all {found.files} files match ({found.nbytes:,} bytes)")
    return 0
