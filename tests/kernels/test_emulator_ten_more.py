"""Ten kernels that are wrong in ways for which no check was written. Nine are found; the tenth needs an answer."""

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.test_emulator_faults import pytestmark, run  # noqa: F401
from turbospark_mlx.errors import KernelFault

WIDE = mx.arange(4 * 96, dtype=mx.float32).reshape(4, 96)

ROWS_OF_ONE_SIMDGROUP_EACH = """
const uint row = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
float sum = 0;
for (uint k = thread_index_in_simdgroup; k < 96; k += 32) sum += x[row * 96 + k];
sum = simd_sum(sum);
if (thread_index_in_threadgroup == 0) y[row] = sum;
"""

THE_GUARD_IS_LOST = """
const uint row = threadgroup_position_in_grid.x;
float sum = 0;
for (uint k = thread_index_in_simdgroup; k < 96; k += 32) sum += x[row * 96 + k];
y[row] = simd_sum(sum) + float(thread_index_in_simdgroup);
"""

ACCUMULATORS_THAT_START_AS_THEY_ARE = """
const uint i = thread_position_in_grid.x;
float sums[4];
for (uint k = 0; k < 96; ++k) sums[k % 4] += x[i * 96 + k];
y[i] = sums[0] + sums[1] + sums[2] + sums[3];
"""

COUNTING_DOWN_TO_ZERO = """
const uint i = thread_position_in_grid.x;
float last = 0;
for (uint k = 95; k >= 0; --k) {
  last = x[i * 96 + k];
}
y[i] = last;
"""

STRIDES_IN_BYTES = """
const uint i = thread_position_in_grid.x;
y[i] = x[i * x_strides[0] * sizeof(float) + 5];
"""

A_SHAPE_OF_THREE_SIZES = """
const uint i = thread_position_in_grid.x;
y[i] = x[i * x_shape[2]];
"""

A_SCRATCH_THAT_SERVES_TWICE = """
const uint i = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
threadgroup float parts[3];
float sum = simd_sum(x[row * 96 + i]);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
const float mean = (parts[0] + parts[1] + parts[2]) / 96;
const float away = x[row * 96 + i] - mean;
sum = simd_sum(away * away);
if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == 0) y[row] = (parts[0] + parts[1] + parts[2]) / 96;
"""

A_BARRIER_IN_A_LOOP_OF_DIFFERENT_LENGTHS = """
const uint i = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
threadgroup float all[96];
float found = 0;
for (uint k = i; k < 96; k += 64) {
  all[k] = x[row * 96 + k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  found += all[k];
}
if (i == 0) y[row] = found;
"""

THREADGROUP_MEMORY_OF_A_SIZE_FROM_THE_HOST = """
const uint i = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x, width = x_shape[1];
threadgroup float all[width];
all[i] = x[row * 96 + i];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == 0) y[row] = all[1];
"""

THE_PEAK_OF_ONE_SIMDGROUP_ONLY = """
const uint i = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
const float peak = simd_max(x[row * 96 + i]);
if (i == 0) y[row] = peak;
"""


@pytest.mark.parametrize(
    ("kind", "source", "threads", "group"),
    [
        ("unwritten", ROWS_OF_ONE_SIMDGROUP_EACH, 128, 128),
        ("race", THE_GUARD_IS_LOST, 128, 32),
        ("uninitialized", ACCUMULATORS_THAT_START_AS_THEY_ARE, 4, 4),
        ("stray", COUNTING_DOWN_TO_ZERO, 4, 4),
        ("bounds", STRIDES_IN_BYTES, 4, 4),
        ("bounds", A_SHAPE_OF_THREE_SIZES, 4, 4),
        ("race", A_SCRATCH_THAT_SERVES_TWICE, 4 * 96, 96),
        ("divergence", A_BARRIER_IN_A_LOOP_OF_DIFFERENT_LENGTHS, 4 * 64, 64),
        ("compile", THREADGROUP_MEMORY_OF_A_SIZE_FROM_THE_HOST, 4 * 96, 96),
    ],
)
def test_nine_are_found(kind, source, threads, group):
    with pytest.raises(KernelFault) as caught:
        run(source, x=WIDE, size=4, threads=threads, group=group)
    assert caught.value.kind == kind, caught.value
    assert "planted" in str(caught.value)


def test_a_wrong_equation_needs_a_right_answer_to_compare_with():
    found = run(THE_PEAK_OF_ONE_SIMDGROUP_ONLY, x=WIDE, size=4, threads=4 * 96, group=96)
    assert not np.array_equal(found, np.array(WIDE).max(-1))
