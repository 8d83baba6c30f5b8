    // The row of the largest value among what the threadgroups of dequant_gemv_simd found for each of M rows of x: the
    // lower row where values are equal. NaN was passed over there; where nothing is above -infinity, the answer is 0.
    constexpr uint THREADS = SIMDS * SIMD_WIDTH;
    threadgroup float best[THREADS];
    threadgroup uint best_row[THREADS];
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint m = threadgroup_position_in_grid.x;
    float most = -INFINITY;
    uint row = 0;
    for (uint i = self; i < FOUND; i += THREADS) {
      const float value = largest[m * FOUND + i];
      const uint found = largest_row[m * FOUND + i];
      if (value > most || (value == most && found < row)) {
        most = value;
        row = found;
      }
    }
    best[self] = most;
    best_row[self] = row;
    for (uint half_of = THREADS / 2; half_of > 0; half_of /= 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (self < half_of) {
        const uint other = self + half_of;
        if (best[other] > best[self] || (best[other] == best[self] && best_row[other] < best_row[self])) {
          best[self] = best[other];
          best_row[self] = best_row[other];
        }
      }
    }
    if (self == 0) {
      ids[m] = best_row[0];
    }
