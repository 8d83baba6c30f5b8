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
    texts = {nvrtc.source_text(call): (call.kernel.name, call.template) for call in launches()}
    # What the run-time compiler has of C's types, a compiler of files has from C's headers.
    typedefs = [line for line in nvrtc.PRELUDE.splitlines() if line.startswith("typedef")]

    def frame(number, text):
        source = tmp_path / f"kernel_{number}.cu"
        source.write_text("#include <cstdint>\n" + text.replace("\n".join(typedefs), "", 1), encoding="utf-8")
        command = ["nvcc", "-arch=sm_90", "-std=c++17", "-Xptxas", "-v", "-cubin", "-o", f"{source}.out", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)

    with ThreadPoolExecutor(thread_count()) as pool:
        frames = pool.map(frame, range(len(texts)), texts)
        spilled = [(*what, found) for what, found in zip(texts.values(), frames, strict=True) if found != [("0", "0")]]
    assert not spilled
