    // y[m, n] = sum_k weights[m, k] * down_s(inner[m, k])[n] + residual[m, n], with s = slots[m, k], or MAPPED
    // s = slot_of[slots[m, k]], added in float32 in the order of k. Experts lie in blobs [slots, WORDS]; DOWN and what follows are where parts begin, in bytes.
    // Threadgroups share out the rows m (y) and the N columns of y (x), ROWS at a time; the simdgroups of one share out
    // the experts, and the lanes of a simdgroup blocks of 32 columns of their matrix.
    constexpr uint BLOCKS = K / 32;
    threadgroup float products[MOST * ROWS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup, self = simd * SIMD_WIDTH + lane;
    const uint m = threadgroup_position_in_grid.y, top = slots_shape[1];
    const uint step = threadgroups_per_grid.x * ROWS, passes = (N + step - 1) / step;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint first = (threadgroup_position_in_grid.x * passes + pass) * ROWS;
      for (uint k = simd; k < top && first < N; k += simds) {
        const uint pair = m * top + k;
        const uint slot = MAPPED ? slot_of[min(uint(slots[pair]), uint(slot_of_shape[0] - 1))] : slots[pair];
        const device uint* blob = blobs + min(slot, uint(blobs_shape[0] - 1)) * uint(WORDS);
        Partial sums[ROWS];
        UNROLL
        for (uint r = 0; r < ROWS; ++r) {
          sums[r] = empty_partial();
        }
        for (uint block = lane; block < BLOCKS; block += SIMD_WIDTH) {
          Eight values[4];
          const Partial sum = load_values(inner + pair * K, block, values);
          add_rows<BITS, GROUP, BLOCKS, ROWS>(
              part_of<uint>(blob, DOWN), part_of<S>(blob, DOWN_SCALES), part_of<S>(blob, DOWN_BIASES), first, N, block,
              values, sum, sums);
        }
        UNROLL
        for (uint r = 0; r < ROWS; ++r) {
          float product = simd_sum(collapse(sums[r]));
          if (lane == 0) {
            if (BIAS) {
              product += float(part_of<B>(blob, DOWN_BIAS)[min(first + r, uint(N - 1))]);
            }
            products[k * ROWS + r] = product;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint r = self; r < ROWS && first + r < N; r += simds * SIMD_WIDTH) {
        float total = 0.0f;
        for (uint k = 0; k < top; ++k) {
          total += weights[m * top + k] * products[k * ROWS + r];
        }
        if (RESIDUAL) {
          total += float(residual[m * N + first + r]);
        }
        y[m * N + first + r] = T(total);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
