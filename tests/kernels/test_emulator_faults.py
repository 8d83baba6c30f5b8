"""Kernels with one fault each: the check that is meant for it says what is wrong, in which line and thread."""

import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.custom_kernels import emulator
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import KernelFault, OptionError

pytestmark = [
    pytest.mark.usefixtures("on_the_cpu"),
    pytest.mark.skipif(
        not any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates()), reason="needs clang"
    ),
]


def run(
    source, *, header="", threads=64, group=64, x=None, size=64, dtype=mx.float32, inputs=("x",), more=(), **options
):
    """A kernel ``planted`` of inputs and one output ``y [size]``."""
    if isinstance(threads, int):
        threads, group = (threads, 1, 1), (group, 1, 1)
    x = mx.arange(64, dtype=mx.float32) if x is None else x
    kernel = mx.fast.metal_kernel(
        name="planted", input_names=list(inputs), output_names=["y"], source=source, header=header
    )
    shapes = {"output_shapes": [(size,)], "output_dtypes": [dtype]}
    (y,) = emulator.emulate(
        kernel,
        [x, *more],
        name="planted",
        source=source,
        header=header,
        grid=threads,
        threadgroup=group,
        **shapes,
        **options,
    )
    return np.array(y)


def fault(kind, source, *words, **options):
    with pytest.raises(KernelFault) as caught:
        run(source, **options)
    said = str(caught.value)
    assert caught.value.kind == kind, said
    assert "kernel planted" in said
    for word in words:
        assert re.search(word, said), said
    return said


I = "const uint i = thread_position_in_grid.x;\n"
SUM = """const uint i = thread_position_in_threadgroup.x;
threadgroup float parts[64];
parts[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
float sum = 0.0f;
for (uint k = 0; k < 64; ++k) {
  sum += parts[k];
}
y[i] = sum;
"""


def test_a_right_kernel_passes():
    assert (run(SUM) == 2016).all()
    assert (run(I + "y[i] = 2.0 * x[i];") == 2 * np.arange(64)).all()


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("const float* p = x;\ny[0] = p[thread_position_in_grid.x];", 1, "no address space"),
        ("threadgroup float a[4];\nfloat thread* p = a;\ny[thread_position_in_grid.x] = p[0];", 2, "threadgroup float"),
        (I + "device float* p = x;\ny[i] = p[i];", 2, "device float const"),
        (I + "threadgroup float a[64];\ndevice float* p = a;\ny[i] = p[0];", 3, "threadgroup float"),
    ],
)
def test_pointers_without_or_with_another_address_space(source, line, words):
    with pytest.raises(KernelFault, match=f"kernel planted, planted.metal line {line}: .*{words}"):
        run(source)


def test_a_helper_without_an_address_space():
    header = "\nfloat twice(const float* p, uint i) {\n  return 2.0f * p[i];\n}\n"
    with pytest.raises(KernelFault, match=r"planted.h line 2: the pointer to float has no address space"):
        run(I + "y[i] = twice(x, i);", header=header)


def test_a_missing_barrier():
    said = fault(
        "race",
        SUM.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
        r"planted.metal line 7",
        r"thread \(\d+, 0, 0\) of threadgroup \(0, 0, 0\)",
        r"parts \(byte \d+\)",
        "line 3",
    )
    assert "with no barrier between" in said


def test_a_barrier_for_the_wrong_memory():
    fault("race", SUM.replace("mem_flags::mem_threadgroup", "mem_flags::mem_device"), "orders threadgroup memory")


def test_a_missing_second_barrier():
    source = (
        I
        + """threadgroup float all[64];
for (uint round = 0; round < 2; ++round) {
  all[i] = x[i] + float(round);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = all[63 - i];
}
"""
    )
    fault("race", source, "line 4", "line 6")
    assert run(source.replace("}\n", "  threadgroup_barrier(mem_flags::mem_threadgroup);\n}\n")).sum() == 2016 + 64


def test_two_threadgroups_that_share_memory():
    fault("race", I + "y[i] = x[i];\ny[(i + 32) % 64] += 1.0f;", "nothing orders two threadgroups", group=32)


def test_the_order_of_threads_decides():
    source = (
        I
        + """atomic_store_explicit(&y[0], i, memory_order_relaxed);
"""
    )
    kernel = mx.fast.metal_kernel(
        name="last", input_names=["x"], output_names=["y"], source=source, atomic_outputs=True
    )
    shapes = {"output_shapes": [(1,)], "output_dtypes": [mx.uint32]}
    with pytest.raises(KernelFault, match=r"kernel last: element 0 of y changes with the order"):
        emulator.emulate(
            kernel, [mx.zeros(8)], grid=(64, 1, 1), threadgroup=(64, 1, 1), **shapes, orders=3, name="last"
        )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("y[i] = x[i + 1];", r"touches 4 bytes at byte 256 of x, which has 256 bytes"),
        ("y[i] = x[int(i) - 1];", r"touches 4 bytes 4 bytes before x"),
        ("y[i + 1] = x[i];", r"at byte 256 of y"),
        ("y[i] = ((const device float4*)x)[(i + 1) / 4].x;", r"touches 16 bytes at byte 256 of x"),
    ],
)
def test_outside_a_buffer(source, words):
    said = fault("bounds", I + source, words, "line 2")
    assert re.search(r"thread \((0|60|61|62|63), 0, 0\) of threadgroup \(0, 0, 0\)", said), said


def test_outside_a_buffer_of_odd_size():
    x = mx.arange(13).astype(mx.float16)
    fault("bounds", I + "y[i] = x[i];", "touches 2 bytes at byte 26 of x", x=x)
    assert run(I + "y[i] = x[min(i, 12u)];", x=x)[13] == 12


def test_outside_threadgroup_memory_through_a_pointer():
    source = I + "threadgroup float a[64];\na[i] = x[i];\nthreadgroup float* p = a + i;\ny[i] = i < 63 ? p[0] : p[1];"
    fault("bounds", source, r"of a, which has 256 bytes", "line 5")


def test_outside_an_array():
    fault(
        "index",
        I + "float a[4];\nfor (uint k = 0; k < 4; ++k) a[k] = x[i];\ny[i] = a[i];",
        "element 4 of 'float *\\[4\\]'",
    )


def test_writing_to_an_input():
    source = I + "((device float*)x)[i] = 1.0f;\ny[i] = x[i];"
    fault("input", source, "writes to the input x", "line 2")
    x = mx.zeros(64)
    assert run(source, x=x, written=("x",)).sum() == 64
    assert x.sum().item() == 64


def test_a_misaligned_vector():
    fault("alignment", I + "y[i] = ((const device float2*)(x + 1))[i / 4].x;", "aligned to 8")


def test_a_vector_over_a_view_that_begins_between_vectors():
    source = I + "y[i] = ((const device float4*)x)[i / 4].x;"
    whole = mx.arange(68, dtype=mx.float32)
    mx.eval(whole)
    assert run(source, x=whole[4:])[0] == 4
    fault("alignment", source, "aligned to 16", x=whole[1:65])


def test_an_unwritten_output():
    fault(
        "unwritten",
        "if (thread_position_in_grid.x != 5) y[thread_position_in_grid.x] = 0;",
        "1 of 64",
        "first of them 5",
    )
    fault("unwritten", I + "y[i] = x[i];", "16 of 80", "64", size=80)
    assert run(I + "y[i] = x[i];", size=80, init_value=7.0)[-1] == 7
    assert run(I + "if (i < 32) y[i] = x[i];", optional_outputs=("y",))[0] == 0


def test_an_output_of_integers_may_hold_any_bits():
    assert (run(I + "y[i] = 0xffffffff;", dtype=mx.uint32) == 2**32 - 1).all()


def test_memory_that_nobody_wrote():
    said = fault(
        "uninitialized", SUM.replace("parts[i] = x[i];", "if (i != 7) parts[i] = x[i];"), "reads parts", "line 7"
    )
    assert re.search(r"thread \(\d+, 0, 0\)", said)
    source = I + "float sum;\nif (x[i] > 3.0f) sum = 0.0f;\ny[i] = sum + x[i];"
    with pytest.raises(KernelFault, match=r"planted.metal line 3: .*uninitialized"):
        run(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("if (i < 40) threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = 0;", r"has finished"),
        (
            "if (i == 3) return;\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = 0;",
            r"thread \(3, 0, 0\).* has finished",
        ),
        (
            "if (i < 32) {\n threadgroup_barrier(mem_flags::mem_none);\n} else {\n"
            " threadgroup_barrier(mem_flags::mem_none);\n}\ny[i] = 0;",
            r"at planted.metal line 5",
        ),
        (
            "float s = 0;\nif (i % 2 == 0) s = simd_sum(x[i]);\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = s;",
            "simdgroup",
        ),
    ],
)
def test_divergence(source, words):
    said = fault("divergence", I + source, words, r"line [234]")
    assert re.search(r"thread \(\d+, 0, 0\) of threadgroup \(0, 0, 0\): waits", said), said


BROKEN_SUM = """const uint i = thread_index_in_threadgroup;
float v = x[i];
for (ushort step = 16; step > 0; step /= 2) {
  v += simd_shuffle_xor(v, step);
}
if (i == 0) y[0] = v;
"""


def test_a_reduction_that_assumes_full_simdgroups():
    assert run(BROKEN_SUM, threads=32, group=32, size=1) == 496
    fault(
        "uninitialized", BROKEN_SUM, r"line \d+, thread .* lane \d+, which takes no part", threads=20, group=20, size=1
    )
    source = "const uint i = thread_index_in_threadgroup;\nfloat v = simd_sum(x[i]);\nif (i == 0) y[0] = v;"
    assert run(source, threads=20, group=20, size=1) == 190


def test_a_reduction_that_assumes_full_threadgroups():
    source = """const uint i = thread_index_in_threadgroup;
threadgroup float parts[8];
float v = simd_sum(x[thread_position_in_grid.x % 64]);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = v;
threadgroup_barrier(mem_flags::mem_threadgroup);
float sum = 0;
for (uint k = 0; k < 8; ++k) sum += parts[k];
if (i == 0) y[threadgroup_position_in_grid.x] = sum;
"""
    assert run(source, threads=256, group=256, size=1) == 8064
    said = fault("uninitialized", source, "reads parts before anything is written", threads=320, group=256, size=2)
    assert "line 7" in said
    assert "threadgroup (1, 0, 0)" in said


def test_limits():
    fault(
        "threadgroup_memory",
        I + "threadgroup float a[8000];\nthreadgroup half b[400];\na[i] = b[i] = 0;\ny[i] = a[i];",
        "32,800 bytes; Metal has 32,768",
        "line 3",
    )
    assert run(I + "threadgroup float a[8192];\na[i] = x[i];\ny[i] = a[i];")[5] == 5
    fault("threads", I + "y[i] = 0;", "1040 threads; Metal has 1024", threads=(2080, 1, 1), group=(1040, 1, 1))
    names = tuple(f"x{k}" for k in range(31))
    more = [mx.zeros(8)] * 30
    fault("buffers", I + "y[i] = x0[0];", "32 buffers; Metal has 31", inputs=names, more=more)
    assert run(I + "y[i] = x0[0];", inputs=names[:30], more=more[:29])[0] == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("double z = x[i];\ny[i] = z;", "Metal has no double"),
        ("long long z = 1;\ny[i] = z;", "Metal has no long long"),
        ("y[i] = erf(x[i]);", "undeclared identifier 'erf'"),
        ("y[i] = expm1(x[i]);", "undeclared identifier 'expm1'"),
        ("y[i] = max(x[i], 0);", "call to 'max' is ambiguous"),
        ("y[i] = min(i, 3);", "call to 'min' is ambiguous"),
        ("y[i] = simd_sum(long(i));", "call to deleted function 'simd_sum'"),
        ("y[i] = sqrtf(x[i]);", "undeclared identifier 'sqrtf'|'sqrtf'"),
        ('printf("%f", x[i]);\ny[i] = 0;', "printf"),
        ("y[i] = std::exp(x[i]);", "Metal has no C\\+\\+ standard library"),
        ("goto end;\nend: y[i] = 0;", "Metal has no goto"),
        ("y[i] = __shfl_xor(x[i], 1);", "__shfl_xor"),
        ("y[i] = undefined_name;", "undeclared identifier 'undefined_name'"),
    ],
)
def test_words_that_metal_does_not_have(source, words):
    with pytest.raises(KernelFault, match=rf"kernel planted, planted.metal line 2: .*({words})"):
        run(I + source)


def test_a_variable_outside_functions_that_is_not_constant():
    header = "// numbers\nconstexpr int FACTOR = 2;\n"
    with pytest.raises(KernelFault, match=r"planted.h line 2: .*constant memory only"):
        run(I + "y[i] = FACTOR * x[i];", header=header)
    assert run(I + "y[i] = FACTOR * x[i];", header=header.replace("constexpr", "constant constexpr"))[3] == 6


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("shift", "y[i] = float(1u << (i + 1));"),
        ("overflow", "y[i] = float(int(i + 40000) * 60000);"),
        ("division", "y[i] = float(i / (i % 2));"),
        ("conversion", "y[i] = float(int(x[i] * 1e9f));"),
    ],
)
def test_arithmetic_without_a_defined_result(kind, source):
    fault(kind, I + source, r"planted.metal line 2, thread \(\d+, 0, 0\)")


def test_a_loop_without_an_end():
    fault("timeout", I + "while (x[i] < 100.0f) {\n}\ny[i] = 0;", "has not finished after 1 seconds", seconds=1)


def test_small_inputs_lie_in_constant_memory():
    source = I + "const device float* p = x;\ny[i] = p[0];"
    assert run(source, x=mx.ones(8))[0] == 1
    with pytest.raises(KernelFault, match=r"planted.metal line 2: .*constant float const"):
        run(source, x=mx.ones(7))


def test_grids_are_clamped_as_mlx_clamps_them():
    source = "if (thread_index_in_threadgroup == 0) y[threadgroup_position_in_grid.x] = threads_per_threadgroup.x;"
    assert run(source, threads=80, group=32, size=3).tolist() == [32, 32, 16]
    assert run(source, threads=20, group=256, size=1).tolist() == [20]


def test_a_signature_that_mlx_closes_too_early():
    kernel = mx.fast.metal_kernel(
        name="two", input_names=["x"], output_names=["y", "z"], source="y[0] = z[0] = x_shape[0];"
    )
    shapes = {"output_shapes": [(1,)] * 2, "output_dtypes": [mx.float32] * 2}
    with pytest.raises(KernelFault, match="must name a thread attribute"):
        emulator.emulate(kernel, [mx.zeros(8)], grid=(1, 1, 1), threadgroup=(1, 1, 1), **shapes)


def test_a_kernel_keeps_its_name():
    source = "y[thread_position_in_grid.x] = x[20] + a + b[0];"
    for template in (None, [("T", mx.float16), ("N", 4)]):
        kernel = mx.fast.metal_kernel(name="my_own", input_names=["x", "a", "b"], output_names=["y"], source=source)
        options = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float16]}
        with pytest.raises(KernelFault, match=r"kernel my_own, my_own.metal line 1, thread"):
            emulator.emulate(kernel, [mx.zeros(20), 2.5, mx.zeros(3, mx.bfloat16)], template=template, **options)


def test_what_is_not_one_kernel_is_refused():
    with pytest.raises(OptionError, match="calls 0"):
        emulator.emulate(lambda inputs, **options: [inputs[0] + 1], [mx.zeros(8)])


def test_constants_of_the_program():
    header = "constant float TABLE[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"
    assert run(I + "y[i] = TABLE[i % 4];", header=header)[6] == 3
    fault("index", I + "y[i] = TABLE[i];", "element", header=header)


def test_compiled_kernels_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    code = (
        "import mlx.core as mx; mx.set_default_device(mx.cpu)\n"
        "from tests.kernels.test_emulator_faults import I, run\n"
        "assert run(I + 'y[i] = x[i] + 1;')[5] == 6"
    )
    made = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
        made.append(
            {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "kernels").iterdir() if path.is_file()}
        )
    assert made[0] == made[1]
    assert {path.suffix for path in made[0]} == {".so", ".json", ".pch", ".h"}
