"""The CUDA translation of our kernels, compiled by nvcc where it is installed; nothing is run."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from tests.kernels.variants import variants
from turbospark_mlx.custom_kernels.backends import Backend, cuda, nvrtc
from turbospark_mlx.custom_kernels.backends.host import thread_count
from turbospark_mlx.custom_kernels.backends.kernel import SIMD_WIDTH

REGISTERS, REGISTERS_AT_ONCE = 65536, 8
"""Of a multiprocessor, for all threads of a threadgroup; and by how many a thread is given them."""


def launches():
    """The launches that the variants make on the CUDA back end."""
    found = {}

    def record(call, inputs):
        found.setdefault((call.kernel.name, call.template, call.input_dtypes), call)
        return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]

    for function, arrays in variants(Backend("cuda", "gpu", "recorded, not run", record)):
        function(*arrays)
    return list(found.values())


def test_translation_leaves_no_address_space():
    assert cuda.translate("threadgroup Chunk<T> a[3 * K];") == "__shared__ Chunk<T> a[3 * K];"
    assert (
        cuda.translate("f(threadgroup const Chunk<T>& x, const device uint* w)")
        == "f(const Chunk<T>& x, const uint* w)"
    )
    assert cuda.translate("((const device uint4*)from)") == "((const uint4*)from)"
    assert cuda.translate("threadgroup_barrier(mem_flags::mem_threadgroup);").startswith("threadgroup_barrier")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_translation_compiles_and_keeps_its_arrays_in_registers(tmp_path):
    """Each text as NVIDIA's run-time compiler is given it. That one says nothing of what it spills."""
    calls = {nvrtc.source_text(call): call for call in launches()}
    # What the run-time compiler has of C's types, a compiler of files has from C's headers.
    typedefs = [line for line in nvrtc.PRELUDE.splitlines() if line.startswith("typedef")]

    def use(number, text):
        source = tmp_path / f"kernel_{number}.cu"
        source.write_text("#include <cstdint>\n" + text.replace("\n".join(typedefs), "", 1), encoding="utf-8")
        command = ["nvcc", "-arch=sm_90", "-std=c++17", "-Xptxas", "-v", "-cubin", "-o", f"{source}.out", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (frame,) = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
        (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
        return frame, -(-int(registers) // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE

    with ThreadPoolExecutor(thread_count()) as pool:
        used = list(pool.map(use, range(len(calls)), calls))
    found = [(call.kernel.name, call.template, *each) for call, each in zip(calls.values(), used, strict=True)]
    assert not [each for each in found if each[2] != ("0", "0")]
    # No compiler is told how many threads there will be, and MLX's cannot be.
    threads = [call.simdgroups * SIMD_WIDTH for call in calls.values()]
    assert not [each for each, count in zip(found, threads, strict=True) if each[3] * count > REGISTERS]
