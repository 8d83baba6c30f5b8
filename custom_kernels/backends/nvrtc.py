"""CUDA text to machine code: NVIDIA's run-time compiler, which comes with MLX's CUDA package, and a cache on disk."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from turbospark_mlx.custom_kernels.backends import compiler, cuda
from turbospark_mlx.custom_kernels.backends.kernel import TYPES, Launch, body, constants
from turbospark_mlx.errors import BackendError

logger = logging.getLogger(__name__)

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
DIMENSIONS = 8
"""Numbers in a shape or in strides, as kernels are passed them."""
WAIT = "WAIT_FOR_INPUTS"
OVERLAPS = (9, 0)
"""The compute capability from which on kernels can be started before the one in front of them has ended."""

# The run-time compiler brings no headers of C.
PRELUDE = f"""
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
template <typename T>
struct Numbers {{
  T values[{DIMENSIONS}];
  __device__ T operator[](int i) const {{ return values[i]; }}
}};
"""

# A kernel of a graph is started while the one before it still runs, and waits until that has ended: here or, in kernels
# that say where, after they have read their weights. From then on the next one may be started.
OVERLAP = """
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_INPUTS asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#else
#define WAIT_FOR_INPUTS
#endif
"""


def source_text(call: Launch) -> str:
    """The CUDA text of one variant of a kernel: the shims, the headers, the parameters, and the body in a function."""
    kernel, arguments = call.kernel, []
    for name, dtype in call.present_inputs:
        arguments.append(f"const {TYPES[dtype]}* {name}")
        if kernel.reads(name, "shape"):
            arguments.append(f"const __grid_constant__ Numbers<int32_t> {name}_shape")
        if kernel.reads(name, "strides"):
            arguments.append(f"const __grid_constant__ Numbers<int64_t> {name}_strides")
    arguments += [f"{TYPES[dtype]}* {name}" for name, _, dtype in call.present_outputs]
    parts = [PRELUDE, OVERLAP, cuda.header(kernel), *constants(call)]
    parts.append(f'extern "C" __global__ void {kernel.name}({", ".join(arguments)}) {{')
    parts += ["" if WAIT in kernel.source else WAIT, cuda.ATTRIBUTES, cuda.translate(body(kernel, call.names)), "}"]
    return "\n".join(parts)


@cache
def _library() -> tuple[ctypes.CDLL, str]:
    """The compiler, which MLX has loaded already where it is the CUDA one, and its version."""
    places = [Path(name) for name in LIBRARIES]
    if spec := importlib.util.find_spec("nvidia"):
        packages = map(Path, spec.submodule_search_locations or ())
        places += [found for root in packages for name in LIBRARIES for found in sorted(root.glob(f"*/lib/{name}"))]
    for place in places:
        try:
            library = ctypes.CDLL(str(place))
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        numbers = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(*map(ctypes.byref, numbers))
        return library, ".".join(str(number.value) for number in numbers)
    raise BackendError(f"none of {', '.join(LIBRARIES)} was found; install it with: pip install mlx[cuda13]")


@cache
def include_directories() -> tuple[str, ...]:
    """Where the headers of half-precision numbers, and what they include, may lie."""
    found = []
    if spec := importlib.util.find_spec("nvidia"):
        for root in map(Path, spec.submodule_search_locations or ()):
            found += [path.parent for path in sorted(root.glob("*/include/cuda_fp16.h"))]
    found.append(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include")
    return tuple(str(path) for path in found if path.is_dir())


def _options(architecture: str) -> list[str]:
    includes = [f"--include-path={path}" for path in include_directories()]
    return [f"--gpu-architecture={architecture}", "--std=c++17", *includes]


def machine_code(name: str, text: str, architecture: str) -> bytes:
    """The code of a kernel's text for GPUs of ``architecture`` (``"sm_90"``), from the cache or made new. Raises
    BackendError."""
    library, version = _library()
    options = _options(architecture)
    key = hashlib.sha256("\0".join([text, version, *options]).encode()).hexdigest()[:32]
    try:
        path = compiler.cache_directory() / f"{name}-{key}.cubin"
        return path.read_bytes()
    except FileNotFoundError:
        made = _compile(library, name, text, options)
        with suppress(OSError):
            compiler.keep(path, made)
        return made
    except (BackendError, OSError):
        return _compile(library, name, text, options)


def compile_all(texts: Mapping[str, str], architecture: str) -> dict[str, bytes]:
    """`machine_code` of every text; ``texts`` maps them to names. Each record of the log has ``kernels``, how many are
    done and how many there are. Raises BackendError."""
    made = {}
    for text, name in texts.items():
        made[text] = machine_code(name, text, architecture)
        counts = (len(made), len(texts))
        logger.info("%d of %d kernels are compiled", *counts, extra={"kernels": counts})
    return made


def _compile(library: ctypes.CDLL, name: str, text: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), name
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            words = _read(library, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program, name)
            raise BackendError(f"the kernel {name} could not be compiled:\n{words.decode(errors='replace')[:2000]}")
        return _read(library, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program, name)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, size_of, get, program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, size_of(program, ctypes.byref(size)), name)
    memory = ctypes.create_string_buffer(size.value)
    _check(library, get(program, memory), name)
    return memory.raw


def _check(library: ctypes.CDLL, status: int, name: str) -> None:
    if status:
        words = library.nvrtcGetErrorString(status).decode()
        raise BackendError(f"the kernel {name} could not be compiled: {words}")
