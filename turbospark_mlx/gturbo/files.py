"""Files of an untrusted directory: opened without following symbolic links, regular files only, reads bounded.

The root itself may be a symbolic link, because the user names it. Everything below is opened one path component at a
time relative to the directory above it, so that nothing outside the root is ever reached, whatever the names say and
whatever is swapped in while the install is being opened.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from turbospark_mlx.errors import InstallError

NEXT_STEP = "Download or convert the model again."

# One read or write call moves at most this much: macOS refuses 2 GiB and more, Linux cuts there.
MAX_TRANSFER = 1 << 30

MAX_PATH = 1024

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO without a writer would block the open; it is refused after fstat.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_LFS_POINTER = b"version https://git-lfs"


MAX_DETAIL = 400


def printable(text: str) -> str:
    """``text`` for a terminal: control characters, and file names that are not UTF-8, come out escaped."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def damaged(label: str, detail: str, step: str = NEXT_STEP) -> InstallError:
    """The error for a fault in the file ``label``: what is wrong, then the next step. Names in it come from the
    install, so they are cut to a bearable length."""
    shown = detail if len(detail) <= MAX_DETAIL else f"{detail[: MAX_DETAIL // 2]} ... {detail[-MAX_DETAIL // 2 :]}"
    return InstallError(f"{printable(label)}: {printable(shown)}. {step}")


@dataclass(frozen=True)
class FileState:
    """What identifies the contents of a file without reading them. Times are in nanoseconds."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> FileState:
        """The state of an open file."""
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def fold(name: str) -> str:
    """The spelling under which two names are the same file on a case-insensitive file system."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).lower())


def split_path(name: str, label: str) -> tuple[str, ...]:
    """The components of a relative path with ``/`` between them. Raises InstallError naming ``label``."""
    if not name:
        raise damaged(label, "names a file with an empty path")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise damaged(label, f"the path {name!r} is not valid Unicode") from None
    if len(name) > MAX_PATH or "\0" in name:
        raise damaged(label, f"the path {name[:80]!r} is longer than {MAX_PATH} characters or holds a NUL")
    parts = tuple(name.split("/"))
    if any(part in ("", ".", "..") for part in parts):
        raise damaged(label, f"the path {name!r} is not a plain path inside the install")
    return parts


class OpenFile:
    """One open regular file. Reads are positioned, so threads may share it."""

    def __init__(self, fd: int, label: str, state: FileState | None = None) -> None:
        self.fd = fd
        self.label = label
        self.state = state or FileState.of(fd)
        self._close = weakref.finalize(self, os.close, fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._close()

    def duplicate(self) -> OpenFile:
        """The same file as one that outlives this; it was opened when this was."""
        return OpenFile(os.dup(self.fd), self.label, self.state)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (bytes, writable) from ``offset``. Raises InstallError when the file ends early."""
        if not self._close.alive:
            raise InstallError(f"{self.label}: read after the install was closed. Open it again.")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done : done + MAX_TRANSFER]], offset + done)
            except OSError as error:
                raise damaged(self.label, f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise damaged(self.label, f"ends at byte {offset + done}, but byte {offset + len(buffer)} is needed")
            done += count

    def check_unchanged(self) -> None:
        """Raise InstallError where the file was cut or written to since it was opened.

        The time of the last status change does not count: renaming or linking the file changes it, and the bytes stay.
        """
        found = FileState.of(self.fd)
        if (found.size, found.mtime_ns) != (self.state.size, self.state.mtime_ns):
            raise damaged(
                self.label,
                f"was changed while it was open: it had {self.state.size} bytes and has {found.size}, and was written"
                f" to {(found.mtime_ns - self.state.mtime_ns) / 1e9:.3f} s after it had been",
            )

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``; refused before anything is allocated when the file is shorter."""
        if offset + size > self.state.size:
            raise damaged(self.label, f"has {self.state.size} bytes, but byte {offset + size} is needed")
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_all(self, cap: int) -> bytes:
        """The whole file, which may have at most ``cap`` bytes."""
        if self.state.size > cap:
            raise damaged(self.label, f"has {self.state.size} bytes; at most {cap} are allowed")
        return self.read(0, self.state.size)

    def expect_size(self, declared: int, by: str = "manifest.json") -> None:
        """Raise InstallError unless the file has exactly the number of bytes that is declared ``by`` another."""
        if self.state.size == declared:
            return
        if self.state.size < 1024 and self.read(0, min(self.state.size, len(_LFS_POINTER))) == _LFS_POINTER:
            raise damaged(self.label, "is a Git LFS pointer, not the file itself", "Run `git lfs pull` there.")
        raise damaged(self.label, f"has {self.state.size} bytes; {by} declares {declared}")


class Directory:
    """The root of an install, held open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = os.path.realpath(path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise InstallError(f"{path}: is not a directory. A .gturbo install is one; name that.") from None
        except FileNotFoundError:
            raise InstallError(f"{path}: no such directory. Check the path, or convert or pull a model.") from None
        except (OSError, ValueError) as error:
            raise InstallError(f"{str(path)!r} cannot be opened: {error}.") from error
        self._close = weakref.finalize(self, os.close, self._fd)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; a second call does nothing."""
        self._close()

    def label(self, name: str) -> str:
        """How messages call the file ``name`` of this install."""
        return f"{self.path}/{name}"

    def open(self, name: str) -> OpenFile:
        """Open a regular file. Raises InstallError for anything else, with FileNotFoundError as its cause when the
        file is absent."""
        label = self.label(name)
        parts = split_path(name, self.path)
        if not self._close.alive:
            raise InstallError(f"{label}: opened after the install was closed. Open the install again.")
        parents: list[int] = []
        try:
            for part in parts[:-1]:
                parents.append(os.open(part, _DIRECTORY_FLAGS, dir_fd=parents[-1] if parents else self._fd))
            fd = os.open(parts[-1], _FILE_FLAGS, dir_fd=parents[-1] if parents else self._fd)
        except OSError as error:
            raise damaged(label, _reason(error)) from error
        finally:
            for parent in parents:
                os.close(parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise damaged(label, "is not a regular file")
        return OpenFile(fd, label)

    def read(self, name: str, cap: int) -> bytes:
        """The contents of a file of at most ``cap`` bytes."""
        with self.open(name) as file:
            return file.read_all(cap)

    def entries(self) -> Iterator[str]:
        """The path of every entry that is not a directory, links unfollowed, in order of name."""
        yield from _walk(self._fd, "", depth=0)


def _walk(fd: int, prefix: str, depth: int) -> Iterator[str]:
    with os.scandir(fd) as scan:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan)
    for name, is_directory in found:
        path = prefix + name
        # No install nests deeper than one level; what does is named as a whole instead of being walked.
        if not is_directory or depth == 3:
            yield path
            continue
        try:
            child = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
        except OSError:
            yield path
            continue
        try:
            yield from _walk(child, path + "/", depth + 1)
        finally:
            os.close(child)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing"
    # With O_DIRECTORY Linux reports a link as ENOTDIR; without it, as ELOOP.
    if error.errno == errno.ELOOP:
        return "is a symbolic link; an install holds real files only"
    if error.errno == errno.ENOTDIR:
        return "lies below something that is not a directory (or is a symbolic link)"
    return f"cannot be opened: {error.strerror}"


def spell_bytes(nbytes: int) -> str:
    """``1.4 GB``, ``270 MB``, ``12.0 KB``: decimal units, as disks and downloads are labelled."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.{1 if nbytes < 100 * size else 0}f} {unit}"
    return f"{nbytes} bytes"
