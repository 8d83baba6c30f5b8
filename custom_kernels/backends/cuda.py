"""Kernels on an NVIDIA GPU: the Metal text after a mechanical translation, through `mx.fast.cuda_kernel`."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.backends.kernel import METAL, Kernel, Launch, bind, body, given, read_source
from turbospark_mlx.errors import BackendError

# Metal's thread attributes arrive as arguments; CUDA's are built in.
ATTRIBUTES = """
const uint3 threadgroup_position_in_grid = {blockIdx.x, blockIdx.y, blockIdx.z};
const uint3 threadgroups_per_grid = {gridDim.x, gridDim.y, gridDim.z};
const uint thread_index_in_simdgroup = threadIdx.x % 32, simdgroup_index_in_threadgroup = threadIdx.x / 32;
const uint simdgroups_per_threadgroup = blockDim.x / 32;
"""


def translate(text: str) -> str:
    """CUDA text of a Metal text: arrays in threadgroup memory get CUDA's word for it, other address spaces have none.

    Macros could not do this, because CUDA's own ``__device__`` is a macro that contains ``device``.
    """
    text = re.sub(r"\bthreadgroup ([\w<>]+ \w+\[)", r"__shared__ \1", text)
    return re.sub(r"\b(device|constant|threadgroup|thread) (?=const\b|[\w<>]+ ?[*&])", "", text)


def header(kernel: Kernel) -> str:
    shims = read_source(Path(__file__).parent / "cuda.cuh")
    return "\n".join([shims, *(translate(read_source(METAL / f"{name}.h")) for name in kernel.headers)])


def included(name: str, text: str) -> str:
    """A line that includes ``text`` from a file of the kernel cache, or the text where there can be none.

    MLX hashes a kernel's whole text each time that the kernel runs, which costs as much as everything else it does.
    """
    try:
        directory = compiler.cache_directory()
        path = directory / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cuh"
        if '"' in str(path) or "\n" in str(path):
            return text
        if not path.exists():
            compiler.keep(path, text.encode())
    except (BackendError, OSError):
        return text
    return f'#include "{path}"\n'


@cache
def _function(kernel: Kernel, names: tuple[tuple[str, ...], tuple[str, ...]]):
    # MLX passes the shapes and strides whose names it finds in the text that it is given.
    facts = [f"{name}_{fact}" for name in names[0] for fact in ("shape", "strides") if kernel.reads(name, fact)]
    return mx.fast.cuda_kernel(
        name=kernel.name,
        input_names=list(names[0]),
        output_names=list(names[1]),
        source=f"// {' '.join(facts)}\n" + included(kernel.name, ATTRIBUTES + translate(body(kernel, names))),
        header=included(f"{kernel.name}-header", header(kernel)),
        ensure_row_contiguous=not kernel.strided,
    )


@cache
def _bound(call: Launch):
    return bind(_function(call.kernel, call.names), call)


Observer = Callable[[Launch, tuple[mx.array | None, ...]], list[mx.array]]


class _Watch(threading.local):
    observer: Observer | None = None


_watch = _Watch()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside, ``observer`` takes this thread's launches instead of the GPU, and gives arrays like their outputs."""
    _watch.observer = observer
    try:
        yield
    finally:
        _watch.observer = None


def zeros(call: Launch, inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
    """An observer for who wants to know what is launched, not what comes of it."""
    return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]


def launch(call: Launch, inputs: tuple[mx.array | None, ...]) -> list[mx.array]:
    """Add one kernel to the graph."""
    if _watch.observer is not None:
        return _watch.observer(call, inputs)
    return _bound(call)(inputs=given(inputs))
