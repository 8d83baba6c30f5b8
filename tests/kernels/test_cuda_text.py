"""The CUDA translation of our kernels, compiled by nvcc where it is installed; nothing is run."""

import re
import shutil
import subprocess

import mlx.core as mx
import pytest

from tests.kernels.variants import variants
from turbospark_mlx.custom_kernels.backends import Backend, cuda
from turbospark_mlx.custom_kernels.backends.kernel import body

TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.uint8: "uint8_t",
}
INCLUDES = """
#include <cuda/std/array>
#include <cuda/std/cstdint>
#include <cooperative_groups.h>
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
"""


def launches():
    """The launches that the variants make on the CUDA back end."""
    found = {}

    def record(call, inputs):
        found.setdefault((call.kernel.name, call.template, call.input_dtypes), call)
        return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]

    for function, arrays in variants(Backend("cuda", "gpu", "recorded, not run", record)):
        function(*arrays)
    return list(found.values())


def function_text(call, name: str) -> str:
    """What `mx.fast.cuda_kernel` makes of a launch: the signature, the template parameters, the body."""
    kernel, arguments = call.kernel, []
    for argument, dtype in call.present_inputs:
        arguments.append(f"const {TYPES[dtype]}* {argument}")
        arguments += [
            f"const __grid_constant__ {kind} {argument}_{kind.lower()}"
            for kind in ("Shape", "Strides")
            if kernel.reads(argument, kind.lower())
        ]
    arguments += [f"{TYPES[dtype]}* {name}" for name, _, dtype in call.present_outputs]
    parameters = [
        f"using {key} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {int(value)};"
        for key, value in call.template
    ]
    text = "\n".join([*parameters, cuda.ATTRIBUTES, cuda.translate(body(kernel, call.names))])
    return f'extern "C" __global__ void {name}({", ".join(arguments)}) {{\n{text}\n}}'


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
    by_headers = {}
    for i, call in enumerate(launches()):
        by_headers.setdefault(call.kernel.headers, []).append((call, f"kernel_{i}"))
    for calls in by_headers.values():
        text = "\n".join([INCLUDES, cuda.header(calls[0][0].kernel), *(function_text(*each) for each in calls)])
        source = tmp_path / "kernels.cu"
        source.write_text(text)
        command = [
            "nvcc",
            "-arch=sm_90",
            "-std=c++17",
            "-Xptxas",
            "-v",
            "-cubin",
            "-o",
            str(tmp_path / "out"),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
        assert len(frames) == len(calls)
        assert all(frame == ("0", "0") for frame in frames), done.stderr
