"""Kernels by somebody who knew the documentation only: each is wrong in a way that Metal programmers know."""

import os
import re
import signal
import subprocess

import mlx.core as mx
import pytest

from tests.kernels.test_emulator_faults import fault, pytestmark, run  # noqa: F401
from turbospark_mlx.custom_kernels.emulator import launch
from turbospark_mlx.errors import BackendError, OptionError

I = "const uint i = thread_position_in_grid.x;\n"

AN_INDEX_OF_16_BITS = "ushort i = thread_position_in_grid.x;\ny[i] = 2.0f * float(i);"

A_BARRIER_OF_ONE_SIMDGROUP = """threadgroup float parts[4];
float s = simd_sum(x[thread_position_in_grid.x]);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = s;
simdgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) y[0] = parts[0] + parts[1] + parts[2] + parts[3];
"""

LOCKSTEP_AS_IN_CUDA = """threadgroup float s[64];
const uint t = thread_index_in_threadgroup;
s[t] = x[t];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (t < 32) {
  s[t] += s[t + 32];
  s[t] += s[t + 16];
}
if (t == 0) y[0] = s[0];
"""

BINS_NOT_SET_TO_ZERO = """threadgroup atomic_uint bins[64];
const uint t = thread_index_in_threadgroup;
atomic_fetch_add_explicit(&bins[uint(x[t]) / 2], 1u, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
y[t] = atomic_load_explicit(&bins[t], memory_order_relaxed);
"""

BINS_WITHOUT_ATOMICS = """threadgroup uint bins[64];
const uint t = thread_index_in_threadgroup;
bins[t] = 0;
threadgroup_barrier(mem_flags::mem_threadgroup);
bins[uint(x[t]) / 2]++;
threadgroup_barrier(mem_flags::mem_threadgroup);
y[t] = bins[t];
"""

SHUFFLES_IN_HALF_A_SIMDGROUP = """const uint lane = thread_index_in_simdgroup;
float sum = x[thread_position_in_grid.x];
if (lane < 16) {
  for (ushort n = 16; n > 0; n /= 2) sum += simd_shuffle_xor(sum, n);
}
if (lane == 0) y[simdgroup_index_in_threadgroup] = sum;
"""

THREADGROUP_MEMORY_IN_A_HELPER = """float block_sum(float v, uint lane, uint group) {
  threadgroup float parts[32];
  if (lane == 0) parts[group] = simd_sum(v);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return parts[0] + parts[1];
}
"""

A_TILE_THAT_GUARDS_COLUMNS_ONLY = """threadgroup float tile[16][17];
const uint2 t = thread_position_in_threadgroup.xy, g = thread_position_in_grid.xy;
if (g.x < 11) tile[t.y][t.x] = x[g.y * 11 + g.x];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (t.x < 13 && t.y < 11) y[t.y * 13 + t.x] = tile[t.x][t.y];
"""

THE_LEFT_NEIGHBOUR_OF_THE_FIRST = "uint i = thread_position_in_grid.x;\ny[i] = x[max(i - 1, 0u)] + x[i];"

TWO_TILES_OF_THE_TEMPLATE = """threadgroup float a[BM * BK];
threadgroup float b[BK * BN];
const uint t = thread_index_in_threadgroup;
a[t] = x[t];
b[t] = a[t];
y[t] = b[t];
"""

ROWS_OF_ODD_LENGTH_BY_FOUR = """const uint row = thread_position_in_grid.x;
const device half4* four = (const device half4*)(x + row * 9);
y[row] = float(four[0].x + four[1].x) + float(x[row * 9 + 8]);
"""

A_LENGTH_KNOWN_AT_RUN_TIME = "const uint i = thread_position_in_grid.x, n = x_shape[0];\nfloat tmp[n];\ny[i] = tmp[0];"

THE_RIGHT_NEIGHBOUR_FROM_ANOTHER_THREADGROUP = """const uint i = thread_position_in_grid.x;
y[i] = x[i];
threadgroup_barrier(mem_flags::mem_device);
y[(i + 63) % 64] = y[i] + y[(i + 1) % 64];
"""


@pytest.mark.parametrize(
    ("kind", "source", "words", "options"),
    [
        ("race", AN_INDEX_OF_16_BITS, "line 2, thread .* nothing orders two", {"threads": 70000, "size": 70000}),
        ("race", A_BARRIER_OF_ONE_SIMDGROUP, "line 3, thread .* parts", {"threads": 128, "group": 128, "size": 1}),
        ("race", LOCKSTEP_AS_IN_CUDA, "line 6, thread .* line 7", {"size": 1}),
        ("uninitialized", BINS_NOT_SET_TO_ZERO, "line 3, thread .*reads bins before", {}),
        ("race", BINS_WITHOUT_ATOMICS, "line 5, thread .* reads bins", {}),
        ("uninitialized", SHUFFLES_IN_HALF_A_SIMDGROUP, "line 4, thread .* the value of lane 16, which", {"size": 2}),
        ("bounds", A_TILE_THAT_GUARDS_COLUMNS_ONLY, "line 3, thread .* of x", "tile"),
        ("stray", THE_LEFT_NEIGHBOUR_OF_THE_FIRST, "line 2, thread .0, 0, 0. of threadgroup .0, 0, 0.", {}),
        ("threadgroup_memory", TWO_TILES_OF_THE_TEMPLATE, "with b, .* 40,960 bytes", "template"),
        ("alignment", ROWS_OF_ODD_LENGTH_BY_FOUR, "line 3, thread .1, 0, 0.", "half"),
        ("compile", A_LENGTH_KNOWN_AT_RUN_TIME, "line 2: variable length arrays", {}),
        ("race", THE_RIGHT_NEIGHBOUR_FROM_ANOTHER_THREADGROUP, "line [24], thread", {"group": 32}),
        ("compile", I + "y[i] = rsqrtf(x[i]);", "line 2: .*'rsqrtf'", {}),
        ("unwritten", I + "y[i] = x[i];", "60 of 64 elements", {"threads": 4, "group": 4}),
    ],
)
def test_found(kind, source, words, options):
    given = {
        "tile": {"threads": (16, 16, 1), "group": (16, 16, 1), "size": 143, "x": mx.zeros(143)},
        "template": {"template": [("BM", 64), ("BN", 96), ("BK", 64)]},
        "half": {"threads": 4, "group": 4, "size": 4, "x": mx.zeros((4, 9), mx.float16)},
    }
    fault(kind, source, words, **(given[options] if isinstance(options, str) else options))


def test_threadgroup_memory_in_a_helper():
    call = "y[0] = block_sum(x[0], thread_index_in_simdgroup, simdgroup_index_in_threadgroup);"
    fault("compile", call, r"planted.h line 2: .* address space", header=THREADGROUP_MEMORY_IN_A_HELPER)


def test_lanes_that_no_result_depends_on_are_let_pass():
    source = I + "const float up = simd_shuffle_and_fill_up(x[i], 7.0f, 3);\ny[i] = up;"
    assert (run(source)[[0, 2, 3, 35]] == [7, 7, 0, 32]).all()


def test_a_sum_over_the_lanes_that_are_still_there():
    source = "float sum = 0;\nfor (uint k = thread_index_in_simdgroup; k < 40; k += 32) sum += simd_sum(x[k]);\n"
    assert run(source + "if (thread_index_in_simdgroup == 0) y[0] = sum;", threads=32, group=32, size=1) == 780


def test_an_endless_loop_over_private_memory_has_a_line():
    source = I + "uint low = 0, high = i + 2;\nwhile (high - low > 0) {\n  low = (low + high) / 2;\n}\ny[i] = low;"
    fault("timeout", source, r"planted.metal line [34], thread .* has not finished", seconds=1)


def test_an_initial_value_takes_the_type_of_the_output():
    source = "atomic_fetch_add_explicit((device atomic_uint*)&y[0], 1u, memory_order_relaxed);"
    assert run(source, size=1, dtype=mx.uint32, init_value=5.0) == 69


def test_a_grid_with_more_threads_than_can_be_numbered():
    with pytest.raises(OptionError, match=r"kernel planted: grid \(2000000000, 4, 1\) has more threads"):
        run(I + "y[i] = 0;", threads=(2_000_000_000, 4, 1), group=(32, 1, 1))


def test_a_process_that_is_killed_says_so(monkeypatch):
    def killed(command, **options):
        if "worker.py" not in " ".join(command):
            return original(command, **options)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            os.kill(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, "", "")

    original = subprocess.run
    monkeypatch.setattr(launch.subprocess, "run", killed)
    with pytest.raises(BackendError, match=re.escape("kernel planted was killed (SIGKILL, often for lack of memory)")):
        run(I + "y[i] = x[i];")
