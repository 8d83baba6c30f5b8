"""Compiled code for the CPU: finds a C++ compiler, and keeps what it makes on disk."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from turbospark_mlx.errors import BackendError

Library = TypeVar("Library")

logger = logging.getLogger(__name__)

FLAGS = (
    "-std=c++17",
    "-O3",
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
    "-shared",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=fast",
    # Sums may be reordered, which vector code needs; NaN and infinity keep their meaning, which -ffast-math takes away.
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-w",
)
if sys.platform == "darwin":
    # Python's own functions are found when the library is loaded into it.
    FLAGS += ("-undefined", "dynamic_lookup")


COMPILE_SECONDS = 600
"""Longest time that one kernel may take to compile."""


@dataclass(frozen=True)
class Compiler:
    """A command that takes FLAGS, and a text that changes when the compiler does."""

    name: str
    command: tuple[str, ...]
    identity: str


def ziglang() -> tuple[str, ...] | None:
    """The command of the ziglang package, without the Python process that ``python -m ziglang`` begins with."""
    spec = importlib.util.find_spec("ziglang")
    return spec and (str(Path(spec.submodule_search_locations[0]) / "zig"),)


def candidates() -> list[Compiler]:
    """The compilers of this machine, best first. Nothing is run."""
    found = []
    if zig := ziglang():
        found.append(Compiler("ziglang", (*zig, "c++", "-nostdlib++"), importlib.metadata.version("ziglang")))
    for name in ("clang++", "g++"):
        if path := shutil.which(name):
            real = os.path.realpath(path)
            status = os.stat(real)
            found.append(Compiler(name, (path,), f"{real} {status.st_size} {status.st_mtime_ns}"))
    return found


@cache
def cpu_features() -> str:
    """A text that differs between CPUs for which -march=native makes different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kept = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(kept)])


def cache_directory() -> Path:
    """``cache/kernels`` in ``$TURBOSPARK_HOME``, private to the user. Raises BackendError where it cannot be."""
    path = Path(os.path.expanduser(os.environ.get("TURBOSPARK_HOME") or "~/.turbospark")) / "cache" / "kernels"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise BackendError(
            f"{path}: compiled kernels cannot be kept there ({error.strerror}); set TURBOSPARK_HOME to a directory "
            "that you can write"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise BackendError(
            f"{path}: holds code that will be run, so it must belong to you with mode 0700; found owner "
            f"{status.st_uid} and mode {status.st_mode & 0o777:04o}. Remove it or run: chmod 700 {path}"
        )
    return path


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache so that it is there complete or not at all. Raises OSError."""
    _sweep(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


@cache
def _sweep(directory: Path) -> None:
    """Remove what killed builds left, once a process. A build that is alive is younger than two compilations."""
    oldest = time.time() - 2 * COMPILE_SECONDS
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(tempfile.gettempprefix()):
                # A concurrent sweep may take it first.
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                        remove(entry.path)


def load(name: str, text: str, compiler: Compiler, loader: Callable[[str], Library]) -> Library:
    """The library that ``text`` compiles to, loaded by ``loader`` (``ctypes.CDLL``). Raises BackendError.

    A library of the cache that does not load, cut short by a crash of the machine or a full disk, is made again.
    """
    try:
        library = build(name, text, compiler)
        try:
            return loader(str(library))
        except OSError:
            library.unlink()
            return loader(str(build(name, text, compiler)))
    except OSError as error:
        raise BackendError(f"the kernel {name} could not be compiled or loaded: {error}") from error


def build_all(texts: Mapping[str, str], compiler: Compiler, workers: int) -> None:
    """`build` of every text that is not in the cache, ``workers`` at once; ``texts`` maps them to names.

    Each record of the log has ``kernels``, how many are done and how many there are. Raises as `build` does.
    """
    missing = {text: name for text, name in texts.items() if not library_path(name, text, compiler).exists()}
    with ThreadPoolExecutor(workers) as pool:
        builds = [pool.submit(build, name, text, compiler) for text, name in missing.items()]
        try:
            for done, finished in enumerate(as_completed(builds), 1):
                finished.result()
                counts = (done, len(missing))
                logger.info("%d of %d kernels are compiled", *counts, extra={"kernels": counts})
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def library_path(name: str, text: str, compiler: Compiler) -> Path:
    """Where the library of a text lies, or will lie. Raises BackendError where the cache cannot be."""
    key = "\0".join([text, *FLAGS, compiler.identity, *compiler.command, cpu_features()])
    return cache_directory() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"


def build(name: str, text: str, compiler: Compiler) -> Path:
    """The shared library that ``text`` compiles to, from the cache or made new. Raises BackendError, and OSError where
    it cannot be written.

    The key is everything that decides about the code: text, flags, compiler and CPU. A library is renamed into place
    when it is complete, so an interrupted or concurrent build leaves nothing half made.
    """
    library = library_path(name, text, compiler)
    if library.exists():
        return library
    directory = library.parent
    _sweep(directory)
    logger.info("compiling the kernel %s with %s", name, compiler.name)
    # zig keeps its own cache of compiled runtime parts; beside ours it needs no writable home.
    environment = os.environ | {f"ZIG_{kind}_CACHE_DIR": str(directory / "zig") for kind in ("GLOBAL", "LOCAL")}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source, made = Path(scratch) / f"{name}.cpp", Path(scratch) / "made.so"
        source.write_text(text, encoding="utf-8")
        command = [*compiler.command, *FLAGS, str(source), "-o", str(made)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(f"{compiler.name} could not compile the kernel {name}: {error}") from error
        if done.returncode:
            words = (done.stderr or done.stdout).strip()[:2000]
            raise BackendError(f"{compiler.name} could not compile the kernel {name}:\n{words}")
        with made.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(made, library)
    return library
