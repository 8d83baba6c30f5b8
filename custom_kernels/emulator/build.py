"""From a generated text to a library: clang with real address spaces, a check before every access, a cache on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx

from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.emulator.instrument import Place, instrument
from turbospark_mlx.custom_kernels.emulator.text import Prepared
from turbospark_mlx.errors import BackendError, KernelFault

HERE = Path(__file__).parent
MSL = HERE / "msl"
UTILITIES = "mlx/backend/metal/kernels/utils.h"
MACHINE = ("-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",)
FLAGS = (
    "-std=c++17",
    # Checks are put in before anything is optimized, so that none is lost or moved to another line.
    "-O0",
    "-Xclang",
    "-disable-O0-optnone",
    "-fPIC",
    "-nostdinc",
    "-fsigned-char",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    # An endless loop is a fault to be found, not a promise that it ends.
    "-fno-finite-loops",
    "-ffp-contract=off",
    "-gline-tables-only",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,return",
    "-fno-sanitize-recover=all",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    *MACHINE,
)
# Unused names, precedence and signs are left to the author; attributes are Metal's own.
WARNINGS = (
    "-Wall",
    "-Werror",
    "-Wuninitialized",
    "-Wsometimes-uninitialized",
    "-Wno-unused",
    "-Wno-unknown-attributes",
    "-Wno-parentheses",
    "-Wno-sign-compare",
    "-Wno-pass-failed",
    "-Wno-unknown-pragmas",
    "-Wno-uninitialized-const-reference",
    "-Wno-undefined-internal",
    "-Wno-undefined-inline",
    "-fno-caret-diagnostics",
)


@dataclass(frozen=True)
class Built:
    """A library with a function ``emu_kernel``, and the places that its checks name by number."""

    library: Path
    places: list[tuple[Place, ...]]


@functools.cache
def clang() -> compiler.Compiler:
    """The first clang of this machine. Raises BackendError."""
    for candidate in compiler.candidates():
        if candidate.name == "ziglang":
            return compiler.Compiler("ziglang", (*compiler.ziglang(), "clang"), candidate.identity)
        if candidate.name == "clang++":
            return candidate
    raise BackendError("the emulator needs clang: pip install ziglang (or clang++ from your system's packages)")


def _run(arguments: list[str], what: str, folder: str | None = None) -> str:
    """Run the compiler; what it says where it fails, else an empty text."""
    directory = compiler.cache_directory()
    environment = os.environ | {f"ZIG_{kind}_CACHE_DIR": str(directory / "zig") for kind in ("GLOBAL", "LOCAL")}
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{what} could not be compiled: {error}") from error
    return (done.stderr or done.stdout or "no output") if done.returncode else ""


@functools.cache
def _prelude_text() -> str:
    """What stands before every kernel: our standard library, and what MLX prepends on a Mac."""
    include = Path(next(iter(mlx.__path__))) / "include"
    utilities = include / UTILITIES
    if not utilities.exists():
        raise BackendError(f"{utilities} is missing: the emulator reads what MLX prepends from the mlx package")
    text = utilities.read_text(encoding="utf-8")
    # A parameter that is an array cannot name an address space in C++; it is a pointer anyway.
    text = re.sub(r"(constant const int64_t) (strides)\[\d\]", r"\1* \2", text)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "prelude.h"
        source.write_text(f"#include <metal_stdlib>\n{text}\nusing namespace metal;\n", encoding="utf-8")
        places = [f"-I{path}" for path in (MSL, HERE, include)]
        command = [*clang().command, "-x", "c++", "-E", "-dD", *FLAGS, *places, "prelude.h", "-o", "prelude.i"]
        # The names stand in what is made, so they have to be the same each time.
        if failed := _run(command, "the emulator's prelude", folder):
            raise BackendError(f"the emulator's prelude does not compile:\n{failed[:2000]}")
        return (Path(folder) / "prelude.i").read_text(encoding="utf-8")


def compile_kernel(name: str, prepared: Prepared) -> Built:
    """The library of one variant, from the cache or made new. Raises KernelFault for what clang refuses."""
    directory = compiler.cache_directory()
    key = "\0".join([_identity(), prepared.text])
    library = directory / f"emulated-{name[:60]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    places = library.with_suffix(".json")
    if not (library.exists() and places.exists()):
        _make(name, prepared, library, places)
    chains = json.loads(places.read_text(encoding="utf-8"))
    return Built(library, [tuple((file, line) for file, line in chain) for chain in chains])


@functools.cache
def _identity() -> str:
    """Everything but the kernel's own text that decides about the code."""
    rules = (HERE / "instrument.py").read_text(encoding="utf-8")
    return "\0".join([_prelude_text(), rules, *FLAGS, *WARNINGS, clang().identity, compiler.cpu_features()])


@functools.cache
def _header() -> Path:
    """The prelude, compiled once: reading it takes longer than a kernel."""
    directory = compiler.cache_directory()
    name = f"prelude-{hashlib.sha256(_identity().encode()).hexdigest()[:32]}"
    made, source = directory / f"{name}.pch", directory / f"{name}.h"
    if made.exists() and source.exists():
        return made
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        scratch = Path(folder) / "made.pch"
        if not source.exists():
            written = Path(folder) / "prelude.h"
            written.write_text(_prelude_text(), encoding="utf-8")
            os.replace(written, source)
        command = [*clang().command, "-x", "c++-header", *FLAGS, "-Wno-everything", str(source), "-o", str(scratch)]
        if failed := _run(command, "the emulator's prelude"):
            raise BackendError(f"the emulator's prelude does not compile:\n{failed[:2000]}")
        os.replace(scratch, made)
    return made


def _make(name: str, prepared: Prepared, library: Path, places: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, ir, checked, unit, made, chains = (
            Path(folder) / f"kernel.{suffix}" for suffix in ("cpp", "ll", "checked.ll", "o", "so", "json")
        )
        source.write_text(prepared.text, encoding="utf-8")
        front = ["-x", "c++", *FLAGS, *WARNINGS, "-include-pch", str(_header()), "-S", "-emit-llvm"]
        if failed := _run([*clang().command, *front, str(source), "-o", str(ir)], f"the kernel {name}"):
            raise KernelFault("compile", _explained(name, prepared, failed))
        text, found = instrument(ir.read_text(encoding="utf-8"), prepared.files)
        checked.write_text(text, encoding="utf-8")
        back = ["-x", "ir", "-O1", "-fPIC", "-Wno-everything", *MACHINE, "-c"]
        if failed := _run([*clang().command, *back, str(checked), "-o", str(unit)], f"the kernel {name}"):
            raise BackendError(f"the emulator's checks do not compile in the kernel {name}:\n{failed[:2000]}")
        if failed := _run([*_linker(), str(unit), "-o", str(made)], f"the kernel {name}"):
            raise BackendError(f"the kernel {name} could not be linked:\n{failed[:2000]}")
        chains.write_text(json.dumps(found), encoding="utf-8")
        os.replace(chains, places)
        os.replace(made, library)


def _linker() -> list[str]:
    if sys.platform == "darwin":
        driver = "c++" if clang().name == "ziglang" else None
        command = [*clang().command[:-1], driver] if driver else list(clang().command)
        return [*command, "-shared", "-undefined", "dynamic_lookup"]
    if clang().name == "ziglang":
        return [*clang().command[:-1], "ld.lld", "-shared"]
    return [*clang().command, "-shared", "-nostdlib"]


def _explained(name: str, prepared: Prepared, said: str) -> str:
    """Clang's first error, placed in the author's own lines."""
    complaints = re.findall(r"^(\S+?):(\d+):\d+: (?:fatal )?(error|note|warning): (.*)$", said, re.MULTILINE)
    errors = [(file, line, words) for file, line, kind, words in complaints if kind == "error"]
    if not errors:
        return f"kernel {name}: clang failed: {said.strip()[:1000]}"
    own = [(Path(file).name, line, words) for file, line, words in errors if Path(file).name in prepared.files]
    file, line, words = own[0] if own else (Path(errors[0][0]).name, *errors[0][1:])
    notes = [
        f"{Path(noted).name} line {at}"
        for noted, at, kind, text in complaints
        if kind == "note" and "in instantiation" in text and Path(noted).name in prepared.files
    ]
    used = f" (used at {notes[-1]})" if notes and not own else ""
    return f"kernel {name}, {file} line {line}: {_plain(words)}{used}"


def _plain(words: str) -> str:
    """Clang's words with Metal's names for address spaces."""
    for number, space in ((1, "device"), (2, "constant"), (3, "threadgroup")):
        words = words.replace(f"__attribute__((address_space({number})))", space)
    return re.sub(r" ?\[-W[\w,=+-]*\]", "", words)
