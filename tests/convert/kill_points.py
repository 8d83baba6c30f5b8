"""Die at every change of the disk that a conversion makes, and look at what is left.

Run as a program: ``kill_points.py DIRECTORY SOURCE fresh|overwrite``. Each attempt runs in a forked child with the
functions that change the disk replaced by ones that count, and end the process at the n-th call: before it, or in the
middle of it where it is a write. Prints the number of deaths as JSON, or fails with what was wrong.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from turbospark_mlx.convert import convert, staging
from turbospark_mlx.gturbo import Install, integrity

CHANGES = ("mkdir", "open", "ftruncate", "pwrite", "write", "fsync", "rename", "replace", "unlink", "rmdir")
NOTHING_TO_TEAR = 3


class Killer:
    """Ends the process at the ``at``-th change; ``torn`` lets half of a write through first."""

    def __init__(self, at: int, torn: bool) -> None:
        self.at, self.torn, self.count = at, torn, 0
        for name in CHANGES:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        staging.exchange = self._wrap("exchange", staging.exchange)

    def _wrap(self, name, function):
        def change(*args, **options):
            if name == "open" and not args[1] & os.O_CREAT:
                return function(*args, **options)
            if self.count == self.at:
                if self.torn:
                    if name not in ("pwrite", "write"):
                        os._exit(NOTHING_TO_TEAR)
                    data = memoryview(args[1]).cast("B")
                    function(args[0], data[: len(data) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return function(*args, **options)

        return change


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def attempt(at: int, torn: bool, source: Path, dest: Path, overwrite: bool) -> int:
    """Run one conversion in a child and return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        Killer(at, torn)
        status = 1
        try:
            convert(source, dest, progress=False, overwrite=overwrite)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    # The death of a process does not undo what the kernel has, and nobody rivals for the files: no need to wait.
    os.fsync = lambda descriptor: None
    integrity.settle = lambda states: None
    directory, source, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    overwrite = mode == "overwrite"
    expected, old, dest = (directory / f"{name}.gturbo" for name in ("expected", "old", "dest"))
    convert(source, expected, progress=False)
    new_contents = contents(expected)
    if overwrite:
        convert(source, old, bits=8, progress=False)
    old_contents = contents(old) if overwrite else None
    shutil.rmtree(expected)
    deaths = seen_new = 0
    for at, torn in ((n // 2, bool(n % 2)) for n in itertools.count()):
        if overwrite:
            shutil.copytree(old, dest)
        status = attempt(at, torn, source, dest, overwrite)
        if status == 0 and not torn:
            break
        if status == NOTHING_TO_TEAR or (torn and status == 0):
            for path in directory.glob("dest.gturbo*"):
                path.unlink() if path.is_file() else shutil.rmtree(path)
            continue
        assert status == -signal.SIGKILL, f"change {at}: the conversion failed instead of dying"
        deaths += 1
        found = contents(dest) if dest.exists() else None
        assert found in (old_contents, new_contents), f"change {at}: the destination is neither old nor new"
        if found is not None:
            Install.open(dest, verify="full").close()
            seen_new += found == new_contents
        report = convert(source, dest, progress=False, overwrite=found is not None)
        assert contents(dest) == new_contents, f"change {at}: the next conversion is not right"
        left = sorted(path.name for path in directory.iterdir() if path.name.startswith("dest.gturbo"))
        assert left == ["dest.gturbo"], f"change {at}: the next conversion leaves {left}"
        assert report.cleared in (0, 1)
        shutil.rmtree(dest)
    print(json.dumps({"deaths": deaths, "seen_new": seen_new}))


if __name__ == "__main__":
    main()
