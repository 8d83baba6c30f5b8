"""Runs a recorded dispatch in a process of its own, more than once, and compares."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.custom_kernels.backends.kernel import read_source
from turbospark_mlx.custom_kernels.emulator import build, faults
from turbospark_mlx.custom_kernels.emulator.text import Prepared, prepare
from turbospark_mlx.custom_kernels.emulator.trace import Recorded
from turbospark_mlx.errors import BackendError, KernelFault, OptionError

HERE = Path(__file__).parent
READ_ONLY, WRITTEN, OUTPUT = 0, 1, 2
MAX_BUFFERS, MAX_THREADS = 31, 1024
MAX_NUMBERED = 2**32 - 2
POISONS = (0xFF, 0x7B)
"""What memory holds before it is written: NaN in every float type, then large numbers."""


@dataclass(frozen=True)
class Buffer:
    """One slot of a dispatch: its bytes, or None where the kernel makes them.

    They begin ``residue`` bytes behind a multiple of 16.
    """

    name: str
    kind: int
    data: np.ndarray | None
    size: int
    granule: int = 1
    residue: int = 0


@dataclass
class Result:
    """What one run left behind: the bytes of each written buffer, and how much of it was never written."""

    outputs: list[np.ndarray]
    unwritten: dict[str, tuple[int, int]] = field(default_factory=dict)
    suspect: list | None = None
    absent: list | None = None


@functools.cache
def runtime() -> Path:
    """The library that runs kernels, compiled once."""
    text = read_source(HERE / "runtime.hpp")
    for part in ("threads.hpp", "memory.hpp", "state.hpp", "thread.h"):
        text = text.replace(f'#include "{part}"', read_source(HERE / part).replace("#pragma once", ""))
    for candidate in compiler.candidates():
        if candidate.name in ("ziglang", "clang++"):
            return compiler.build("emulator", text, candidate)
    raise BackendError("the emulator needs clang: pip install ziglang (or clang++ from your system's packages)")


def memory_of(array: mx.array) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """The bytes that an array reaches, from its first element on, with its shape and its strides in elements."""
    mx.eval(array)
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    view = np.array(plain, copy=False)
    if view.size == 0:
        return np.zeros(0, np.uint8), view.shape, tuple(s // view.itemsize for s in view.strides)
    reach = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize
    if any(s < 0 for s in view.strides):
        raise OptionError("an emulated kernel takes arrays whose strides are not negative")
    flat = np.lib.stride_tricks.as_strided(
        view.reshape(-1)[:1].view(np.uint8) if view.flags.c_contiguous else _first(view), (reach,), (1,)
    )
    return flat, view.shape, tuple(s // view.itemsize for s in view.strides)


def _residue(data: np.ndarray) -> int:
    """How far behind a multiple of 16 an array would begin on a Mac, where memory begins at one: views do not."""
    return (data.ctypes.data - _where_memory_begins()) % 16 if data.size else 0


@functools.cache
def _where_memory_begins() -> int:
    """MLX's allocator on a CPU keeps a size in front of what it gives."""
    fresh = mx.zeros(64) + 1
    mx.eval(fresh)
    return np.array(fresh, copy=False).ctypes.data % 16


def _first(view: np.ndarray) -> np.ndarray:
    """The bytes of a view's first element, as a view."""
    element = view[tuple(slice(0, 1) for _ in view.shape)]
    return np.lib.stride_tricks.as_strided(element, (1,), (view.itemsize,)).view(np.uint8)


def bind(
    name: str, recorded: Recorded, prepared: Prepared, written: tuple[str, ...], init_value: float | None
) -> list[Buffer]:
    """The buffers of a dispatch in the order of their slots. Raises KernelFault, OptionError."""
    slots = [parameter for parameter in prepared.parameters if parameter.slot is not None]
    if len(slots) > MAX_BUFFERS:
        raise KernelFault("buffers", f"kernel {name}: uses {len(slots)} buffers; Metal has {MAX_BUFFERS}")
    buffers: list[Buffer] = []
    pending = list(recorded.inputs)
    outputs = list(zip(recorded.output_shapes, recorded.output_dtypes, strict=True))
    facts: dict[str, tuple[int, ...] | int] = {}
    first_output = len(slots) - len(outputs)
    for i, parameter in enumerate(slots):
        if i >= first_output:
            shape, dtype = outputs[i - first_output]
            size = math.prod(shape) * dtype.size
            data = None
            if init_value is not None:
                # Of a plain float, mx.full makes floats, whatever type is asked for.
                filled = mx.full(shape, mx.array(init_value, dtype))
                data = memory_of(filled)[0]
            buffers.append(Buffer(parameter.name, OUTPUT if data is None else WRITTEN, data, size, dtype.size))
        elif parameter.name in facts:
            value = facts[parameter.name]
            kind = np.int64 if parameter.name.endswith("_strides") else np.int32
            data = np.array(value, kind).reshape(-1).view(np.uint8)
            buffers.append(Buffer(parameter.name, READ_ONLY, data, data.nbytes))
        else:
            array = pending.pop(0)
            if recorded.contiguous:
                array = mx.contiguous(array)
            data, shape, strides = memory_of(array)
            facts |= {f"{parameter.name}_shape": shape, f"{parameter.name}_strides": strides}
            facts[f"{parameter.name}_ndim"] = len(shape)
            kind = WRITTEN if parameter.name in written else READ_ONLY
            residue = _residue(data)
            buffers.append(Buffer(parameter.name, kind, data, data.nbytes, array.dtype.size, residue))
    if pending:
        raise OptionError(f"kernel {name}: MLX bound {len(slots)} buffers, which leaves {len(pending)} inputs over")
    return buffers


def geometry(name: str, recorded: Recorded) -> tuple[int, int, int]:
    """The threadgroup that MLX launches: never larger than the grid. Raises KernelFault."""
    if min(*recorded.grid, *recorded.threadgroup) < 1:
        raise KernelFault(
            "grid", f"kernel {name}: grid {recorded.grid} of {recorded.threadgroup}: every size is 1 or more"
        )
    clamped = tuple(min(size, whole) for size, whole in zip(recorded.threadgroup, recorded.grid, strict=True))
    if math.prod(clamped) > MAX_THREADS:
        raise KernelFault(
            "threads",
            f"kernel {name}: a threadgroup of {clamped} has {math.prod(clamped)} threads; Metal has {MAX_THREADS}",
        )
    threads = math.prod(-(-whole // size) * size for size, whole in zip(clamped, recorded.grid, strict=True))
    if threads > MAX_NUMBERED:
        raise OptionError(
            f"kernel {name}: grid {recorded.grid} has more threads than the emulator can number, {MAX_NUMBERED:,}: "
            "check a smaller one"
        )
    return clamped


def run_once(
    name: str,
    library: build.Built,
    recorded: Recorded,
    buffers: list[Buffer],
    prepared: Prepared,
    *,
    seed: int,
    poison: int,
    seconds: int,
) -> Result:
    """Run a dispatch in a new process. Seed 0 takes threads in order. Raises KernelFault."""
    job = {
        "buffers": [(b.name, b.kind, b.size, b.granule, b.residue, b.data is not None) for b in buffers],
        "grid": recorded.grid, "threadgroup": geometry(name, recorded), "seed": seed, "poison": poison,
        "seconds": seconds, "fibers": int(prepared.blocking),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        file = Path(folder) / "job"
        with file.open("wb") as written:
            written.write(json.dumps(job).encode() + b"\n")
            for buffer in buffers:
                if buffer.data is not None:
                    written.write(buffer.data.data)
        command = [sys.executable, "-I", "-S", str(HERE / "worker.py"), str(runtime()), str(library.library), str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
        except subprocess.TimeoutExpired as error:
            raise KernelFault("timeout", f"kernel {name}: has not finished after {seconds} seconds") from error
        try:
            report = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError) as error:
            how = f"{faults.ended(done.returncode)}\n{done.stderr[-1000:]}".strip()
            raise BackendError(f"the process that emulates the kernel {name} {how}") from error
        if "fault" in report:
            raise faults.fault(name, report, library.places)
        data = np.fromfile(f"{file}.out", np.uint8)
    sizes = [buffer.size for buffer in buffers if buffer.kind]
    outputs = np.split(data, np.cumsum(sizes)[:-1])
    return Result(outputs, {k: tuple(v) for k, v in report["unwritten"].items()}, report["suspect"], report["absent"])


def emulate_recorded(
    name: str,
    recorded: Recorded,
    pieces: tuple[tuple[str, str], ...],
    *,
    written: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    init_value: float | None = None,
    orders: int = 1,
    seconds: int = 60,
) -> list[mx.array]:
    """Compile and run a dispatch with all checks, and return its outputs. Raises KernelFault.

    The inputs that it may write to, ``written``, are changed in place. It runs once in thread order, and ``orders``
    times in shuffled orders with other rubbish in unwritten memory.
    """
    prepared = prepare(name, recorded.text, pieces)
    geometry(name, recorded)
    buffers = bind(name, recorded, prepared, written, init_value)
    library = build.compile_kernel(name, prepared)
    run = functools.partial(run_once, name, library, recorded, buffers, prepared, seconds=seconds)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, seed=seed, poison=POISONS[bool(seed)]) for seed in range(orders + 1)]
        first, *others = [each.result() for each in runs]
    names = [buffer.name for buffer in buffers if buffer.kind]
    for buffer in (b for b in buffers if b.kind == OUTPUT):
        if buffer.name in first.unwritten and buffer.name not in optional:
            count, at = first.unwritten[buffer.name]
            raise KernelFault(
                "unwritten",
                f"kernel {name}: {count} of {buffer.size // buffer.granule} elements of the output {buffer.name} are "
                f"never written, the first of them {at // buffer.granule}",
            )
    for seed, again in enumerate(others, 1):
        for i, (one, other) in enumerate(zip(first.outputs, again.outputs, strict=True)):
            if names[i] in optional and names[i] in first.unwritten:
                continue
            if not np.array_equal(one, other):
                _raise_difference(name, library, names[i], buffers, one, other, first, run, seed, i)
    arrays = dict(zip(names, first.outputs, strict=True))
    outputs = [
        _array(arrays[b.name], shape, dtype)
        for b, shape, dtype in zip(
            buffers[len(buffers) - len(recorded.output_shapes) :],
            recorded.output_shapes,
            recorded.output_dtypes,
            strict=True,
        )
    ]
    for buffer in buffers:
        if buffer.name in written:
            np.copyto(buffer.data, arrays[buffer.name])
    return outputs


def _raise_difference(name, library, output, buffers, one, other, first, run, seed, i) -> None:
    size = next(b.granule for b in buffers if b.name == output)
    element = int(np.flatnonzero(one != other)[0]) // size
    ordered = run(seed=0, poison=POISONS[1])
    if np.array_equal(ordered.outputs[i], other) and first.suspect:
        what, site, who = first.suspect
        raise KernelFault(
            "uninitialized",
            f"kernel {name}, {faults.place(library.places[site])}, {faults.thread(who)}: reads {what} before anything "
            f"is written there, and element {element} of {output} depends on it",
        )
    if np.array_equal(ordered.outputs[i], other) and first.absent:
        lane, site, who = first.absent
        raise KernelFault(
            "uninitialized",
            f"kernel {name}, {faults.place(library.places[site])}, {faults.thread(who)}: takes the value of lane "
            f"{lane}, which takes no part; element {element} of {output} depends on it, or on a variable "
            "that nothing was written to",
        )
    if np.array_equal(ordered.outputs[i], other):
        raise KernelFault(
            "uninitialized",
            f"kernel {name}: element {element} of {output} depends on a variable that nothing was written to",
        )
    raise KernelFault(
        "order",
        f"kernel {name}: element {element} of {output} changes with the order in which threads run (seed {seed}): the "
        "order of atomic operations decides, or a barrier is missing",
    )


def _array(data: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(data.reshape(shape)) != 0
    return mx.array(data).view(dtype).reshape(shape)
