"""SHA-256 of an install's files, and receipts that save hashing them again.

A receipt says: these files, with these sizes, times and inodes, had the hashes that the manifest states. It lies in
``$TURBOSPARK_HOME/receipts`` (default ``~/.turbospark``), outside the directory that it vouches for, and only its owner
can write it. Whatever is wrong with a receipt makes it void, never an error: the files are hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from turbospark_mlx.errors import InstallError, StoreError
from turbospark_mlx.gturbo import manifest
from turbospark_mlx.gturbo.files import Directory, FileState, OpenFile, damaged
from turbospark_mlx.gturbo.manifest import Manifest
from turbospark_mlx.gturbo.strict_json import parse

Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and the bytes to hash in all."""

RECEIPT_VERSION = 1
_MAX_RECEIPT_BYTES = 8 << 20
_BLOCK = 4 << 20
# File times advance in steps of the kernel's timer, at most 10 ms. A file that changed this long before it is hashed
# cannot change again without getting another time.
_SETTLE_NS = 20_000_000


def sha256_of(file: OpenFile, advance: Callable[[int], None]) -> str:
    """The SHA-256 of a whole file in lower-case hex. ``advance`` is told the size of each block."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_BLOCK, file.state.size)))
    for offset in range(0, file.state.size, _BLOCK):
        block = buffer[: file.state.size - offset]
        file.read_into(offset, block)
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()


def settle(states: Mapping[str, FileState]) -> None:
    """Wait until a later change of any of these files is sure to show in its times."""
    newest = max((state.ctime_ns for state in states.values()), default=0)
    wait = newest + _SETTLE_NS - time.time_ns()
    if 0 < wait <= _SETTLE_NS:
        time.sleep(wait / 1e9)


def sha256_files(root: Directory, states: Mapping[str, FileState], progress: Progress | None = None) -> dict[str, str]:
    """The SHA-256 of each file. Raises InstallError when one is not, or does not stay, what ``states`` describes,
    which means that somebody is writing to the install."""
    total, done = sum(state.size for state in states.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    digests = {}
    for name, state in states.items():
        with root.open(name) as file:
            if file.state == state:
                digests[name] = sha256_of(file, advance)
            if FileState.of(file.fd) != state:
                raise damaged(file.label, "changed while it was being hashed", "Let its writer finish; try again.")
    return digests


def home() -> Path:
    """``$TURBOSPARK_HOME``, or ``~/.turbospark``. Raises StoreError for a user without a home directory."""
    path = os.environ.get("TURBOSPARK_HOME") or "~/.turbospark"
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise StoreError(f"{path}: there is no such home directory. Set TURBOSPARK_HOME to a directory.") from error


def receipt_path(install: str) -> Path:
    """Where the receipt of the install at the resolved path ``install`` lies."""
    return home() / "receipts" / f"{hashlib.sha256(os.fsencode(install)).hexdigest()}.json"


def receipt_is_valid(install: str, checked: Manifest, data: bytes, states: Mapping[str, FileState]) -> bool:
    """Whether a receipt vouches for these files. ``data`` is the manifest's bytes."""
    try:
        path = receipt_path(install)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, StoreError):
        return False
    with OpenFile(fd, str(path)) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        with contextlib.suppress(InstallError):
            return parse(file.read_all(_MAX_RECEIPT_BYTES), file.label) == _receipt(install, checked, data, states)
    return False


def write_receipt(install: str, checked: Manifest, data: bytes, states: Mapping[str, FileState]) -> bool:
    """Leave a receipt for files whose hashes have just been compared. Returns False where it cannot be written; the
    only price is that the next open hashes again."""
    text = json.dumps(_receipt(install, checked, data, states), ensure_ascii=True).encode()
    try:
        path = receipt_path(install)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp creates exclusively and with mode 0600.
        fd, partial = tempfile.mkstemp(prefix=".receipt-", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except (OSError, StoreError):
        return False
    return True


def remove_receipt(install: str) -> None:
    """Make the next open hash everything, whatever an earlier receipt said."""
    with contextlib.suppress(OSError, StoreError):
        receipt_path(install).unlink()


def _receipt(install: str, checked: Manifest, data: bytes, states: Mapping[str, FileState]) -> dict[str, object]:
    hashes = {name: record.sha256 for name, record in checked.files.items()}
    hashes[manifest.FILE] = hashlib.sha256(data).hexdigest()
    return {
        "version": RECEIPT_VERSION,
        "path": install.encode("utf-8", "backslashreplace").decode(),
        "files": {
            name: {
                "sha256": digest,
                "size": states[name].size,
                "mtimeNs": states[name].mtime_ns,
                "ctimeNs": states[name].ctime_ns,
                "inode": states[name].inode,
            }
            for name, digest in hashes.items()
        },
    }
