"""Writing beside the destination and putting the result in place in one step.

A conversion to ``DEST`` holds a lock on ``DEST.lock``, writes to ``DEST.partial-<pid>``, and ends with one rename, or
one exchange where an install is replaced. Killed at any point it leaves the destination as it was, or complete; what
else it leaves is removed by the next conversion to the same destination.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import sys
from pathlib import Path

from turbospark_mlx.errors import ConvertError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux RENAME_EXCHANGE and Darwin RENAME_SWAP have the same value.


def exchange(first: Path, second: Path) -> None:
    """Swap two directories atomically. Raises OSError where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        failed = libc.renamex_np(*names, _RENAME_EXCHANGE)
    else:
        failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Staging:
    """A context that owns the destination: write into ``directory``, then ``commit()``.

    ``cleared`` says how many unfinished conversions to this destination were removed first. Without ``commit`` the
    destination stays as it was. Raises ConvertError for a destination that is taken, or being written by another
    conversion.
    """

    def __init__(self, destination: Path, *, overwrite: bool) -> None:
        # Not resolved: a symbolic link is refused rather than followed.
        self.destination = Path(os.path.abspath(destination))
        self.directory = self._beside(f".partial-{os.getpid()}")
        self.cleared = 0
        self._lock_path = self._beside(".lock")
        self._overwrite = overwrite
        self._lock = -1

    def _beside(self, suffix: str) -> Path:
        return self.destination.with_name(self.destination.name + suffix)

    def __enter__(self) -> Staging:
        check_destination(self.destination, overwrite=self._overwrite)
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            # Whoever held the lock before may have finished: look again under the lock.
            check_destination(self.destination, overwrite=self._overwrite)
            self._clear_leftovers()
            self.directory.mkdir()
            if self.destination.exists():
                self._probe_exchange()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def commit(self) -> None:
        """Put the directory in place of the destination and make the change durable."""
        if self.destination.exists():
            exchange(self.directory, self.destination)
        else:
            os.rename(self.directory, self.destination)
        sync_directory(self.destination.parent)

    def _take_lock(self) -> int:
        while True:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise ConvertError(
                    f"{self.destination}: another conversion to it is running (it holds {self._lock_path.name})."
                    " Wait for it, or choose another destination."
                ) from None
            # The previous holder removes the file before it lets go of the lock, so that a lock on a file that is
            # gone excludes nobody.
            try:
                if os.path.samestat(os.fstat(descriptor), os.stat(self._lock_path)):
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _clear_leftovers(self) -> None:
        pattern = re.compile(re.escape(self.destination.name) + r"\.partial-\d+")
        with os.scandir(self.destination.parent) as entries:
            leftovers = [e.path for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for path in leftovers:
            shutil.rmtree(path)
        self.cleared = len(leftovers)

    def _probe_exchange(self) -> None:
        pair = self.directory / "first", self.directory / "second"
        for path in pair:
            path.mkdir()
        try:
            exchange(*pair)
        except (OSError, AttributeError) as error:
            raise ConvertError(
                f"{self.destination}: cannot be replaced in one step on this file system ({error})."
                " Move it away and convert again."
            ) from None
        for path in pair:
            path.rmdir()


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that is taken: only an install or an empty directory is replaced, and only on demand."""
    if destination.is_symlink():
        raise ConvertError(f"{destination}: is a symbolic link. Give the directory itself, or another destination.")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ConvertError(f"{destination}: exists and is not a directory. Choose another destination.")
    if not overwrite:
        raise ConvertError(f"{destination}: exists. Replace it with --overwrite, or choose another destination.")
    if not (destination / "manifest.json").exists() and any(destination.iterdir()):
        raise ConvertError(f"{destination}: is not a .gturbo install, so that --overwrite does not replace it.")


def check_free_space(directory: Path, parts: dict[str, int]) -> None:
    """Refuse to start where the file system of ``directory`` lacks the bytes that ``parts`` add up to."""
    needed, free = sum(parts.values()), shutil.disk_usage(directory).free
    if needed > free:
        arithmetic = " + ".join(f"{name} {size:,}" for name, size in parts.items())
        raise ConvertError(
            f"{directory}: needs {needed:,} bytes ({arithmetic}) and has {free:,} free, {needed - free:,} too few."
            " Make room, or choose a destination on another disk."
        )
