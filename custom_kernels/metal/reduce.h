// The sum of a value over a threadgroup, for every thread. ``scratch`` holds MAX_SIMDGROUPS values and may be used again.
METAL_FUNC float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint simd, uint simds) {
  value = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    scratch[simd] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = 0; i < simds; ++i) {
    sum += scratch[i];
  }
  return sum;
}
