"""Kernels on the CPU: the Metal text compiled by a C++ compiler, with simdgroups of one lane, on all cores.

A launch reads MLX arrays through views of their memory, so it evaluates its inputs and cannot be traced.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.backends.kernel import METAL, TYPES, Launch, body, constants, given, read_source
from turbospark_mlx.errors import BackendError

HERE = Path(__file__).parent
NUMPY_TYPES = {mx.float32: np.float32, mx.int32: np.int32, mx.uint32: np.uint32}
SHAPE, STRIDES = 1, 2


def thread_count() -> int:
    """The cores that this process may use: its affinity, and the quota of its control group."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return available
    return available if quota == "max" else max(1, min(available, int(quota) // int(period)))


@cache
def _chosen() -> tuple[compiler.Compiler, ctypes.PyDLL]:
    """The first compiler that works, and the library that runs compiled kernels."""
    failures = []
    for candidate in compiler.candidates():
        try:
            # PyDLL keeps the interpreter lock, which reading the arrays needs; it is released while kernels run.
            library = compiler.load("runtime", read_source(HERE / "host_runtime.hpp"), candidate, ctypes.PyDLL)
        except BackendError as error:
            failures.append(str(error))
            continue
        pointer, array, number = ctypes.c_void_p, ctypes.py_object, ctypes.c_uint32
        library.launch.argtypes = [pointer, array, ctypes.c_char_p, array, number, number, ctypes.c_int]
        return candidate, library
    found = "\n".join(failures) or "there is none"
    raise BackendError(
        f"kernels='host' needs a C++ compiler: {found}. Install one with: pip install ziglang (or clang++ or g++ from "
        "your system's packages)"
    )


def describe() -> str:
    """What runs the kernels, in one sentence. Raises BackendError where nothing can."""
    return f"compiled by {_chosen()[0].name}, {thread_count()} threads"


@cache
def runtime() -> tuple[ctypes.PyDLL, int]:
    """The library of host_runtime.hpp, and the number of threads to run with."""
    return _chosen()[1], thread_count()


def source_text(call: Launch) -> str:
    """The C++ text of one variant of a kernel: the shims, the headers, the parameters, and the body in a function."""
    kernel = call.kernel
    parts = [read_source(HERE / "host.h")]
    for header in kernel.headers:
        own = HERE / f"host_{header}.h"
        parts.append(read_source(own if own.exists() else METAL / f"{header}.h"))
    parts += constants(call)
    arguments = []
    for name, dtype in call.present_inputs:
        arguments.append((f"const {TYPES[dtype]}*", name))
        if kernel.reads(name, "shape"):
            arguments.append(("const int*", f"{name}_shape"))
        if kernel.reads(name, "strides"):
            arguments.append(("const int64_t*", f"{name}_strides"))
    for name, _, dtype in call.present_outputs:
        arguments.append((f"{TYPES[dtype]}*", name))
    declared = ", ".join(" ".join(argument) for argument in arguments)
    passed = ", ".join(f"({kind})buffers[{i}]" for i, (kind, _) in enumerate(arguments))
    parts.append(f"""
static void threadgroup_body({declared}, const uint3 threadgroup_position_in_grid, const uint3 threadgroups_per_grid) {{
constexpr uint thread_index_in_simdgroup = 0, simdgroup_index_in_threadgroup = 0, simdgroups_per_threadgroup = 1;
{body(kernel, call.names)}
}}

extern "C" void run(const void* const* buffers, const uint32_t* groups, uint32_t begin, uint32_t end) {{
  for (uint32_t i = begin; i < end; ++i) {{
    threadgroup_body({passed}, uint3{{i % groups[0], i / groups[0], 0}}, uint3{{groups[0], groups[1], 1}});
  }}
}}
""")
    return "\n".join(parts)


@cache
def _compiled(text: str, name: str) -> ctypes.CDLL:
    return compiler.load(name, text, _chosen()[0], ctypes.CDLL)


@cache
def prepared(call: Launch) -> tuple[int, bytes, tuple]:
    """The address of the compiled kernel, how it reads each input, and the types of its outputs for numpy."""
    library = _compiled(source_text(call), call.kernel.name)
    address = ctypes.cast(library.run, ctypes.c_void_p).value
    outputs = tuple((shape, NUMPY_TYPES[dtype]) for _, shape, dtype in call.present_outputs)
    reads = [
        SHAPE * call.kernel.reads(name, "shape") | STRIDES * call.kernel.reads(name, "strides")
        for name, _ in call.present_inputs
    ]
    return address, bytes(reads), outputs


class _Watch(threading.local):
    """Who watches the launches of this thread: a list that they are noted in instead of being run, or a function that
    is told of each, with its inputs and its outputs as numpy and as MLX arrays."""

    calls: list[Launch] | None = None
    observer: Callable[..., None] | None = None


watch = _Watch()


def rehearsing() -> bool:
    """Whether kernels give zeros at the moment, so that nothing needs to be computed from them."""
    return watch.calls is not None


def rehearse(passes: Iterable[Callable[[], object]]) -> None:
    """Compile and load what ``passes`` will launch, on all cores at once. While they are called here, kernels and
    the BLAS give zeros, which takes next to no time. Raises BackendError."""
    watch.calls = calls = []
    try:
        for each in passes:
            each()
    finally:
        watch.calls = None
    different = dict.fromkeys(calls)
    texts = {source_text(call): call.kernel.name for call in different}
    compiler.build_all(texts, _chosen()[0], thread_count())
    for call in different:
        prepared(call)


def run(
    call: Launch, inputs: tuple[mx.array | None, ...], into: tuple[np.ndarray, ...] | None = None
) -> tuple[np.ndarray, ...]:
    """Run one kernel, wait for it, and return its outputs, which are new unless there is memory to write them
    ``into``."""
    if watch.calls is not None:
        watch.calls.append(call)
        return tuple(np.zeros(shape, NUMPY_TYPES[dtype]) for _, shape, dtype in call.present_outputs)
    address, reads, made = prepared(call)
    outputs = into or tuple(np.empty(shape, dtype) for shape, dtype in made)
    library, threads = runtime()
    inputs = tuple(given(inputs))
    while status := library.launch(address, inputs, reads, outputs, *call.groups, threads):
        index = status - 1
        inputs = (*inputs[:index], mx.contiguous(inputs[index]), *inputs[index + 1 :])
    return outputs


def prepare(call: Launch) -> None:
    """Compile a kernel, or load it from the cache, so that its first launch is as fast as the others."""
    if watch.calls is not None:
        watch.calls.append(call)
    else:
        prepared(call)


def launch(call: Launch, inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
    """`run` with its outputs as MLX arrays."""
    outputs = run(call, inputs)
    arrays = [mx.array(output) for output in outputs]
    if watch.observer is not None:
        watch.observer(call, inputs, outputs, arrays)
    return arrays
