    // positions [B, TOP * BLOCK + BLOCK - 1]: the tokens of the TOP blocks whose scores [B, N] are largest, of equals the lower
    // ones, ascending; then those behind the last whole one, up to the one at start [1]. Scores of blocks that are not whole are
    // not read, and while there are no more than TOP every token is there. last [1] is the place of the last token in that list,
    // behind which are zeros. A threadgroup takes a row.
    // Compared are integers, because compilers may take it that there is no NaN: NaN comes last.
    threadgroup float sums[MAX_SIMDGROUPS];
    threadgroup uint larger_of[MAX_SIMDGROUPS * SIMD_WIDTH];
    threadgroup uint equal_of[MAX_SIMDGROUPS * SIMD_WIDTH];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup, threads = simds * SIMD_WIDTH, self = simd * SIMD_WIDTH + lane;
    const uint N = scores_shape[1], row = threadgroup_position_in_grid.x, keys = uint(start[0]) + 1;
    const uint whole = min(keys / BLOCK, N), tail = keys % BLOCK, width = TOP * BLOCK + BLOCK - 1;
    const uint listed = min(whole, uint(TOP)) * BLOCK;
    device int* list = positions + row * width;
    if (whole <= TOP) {
      for (uint i = self; i < listed; i += threads) {
        list[i] = int(i);
      }
    } else {
      // The key of the last block that is kept, from its highest bit on: as large as leaves TOP blocks at or above it.
      uint least = 0;
      for (int bit = 31; bit >= 0; --bit) {
        const uint candidate = least | (1u << bit);
        float count = 0.0f;
        for (uint n = self; n < whole; n += threads) {
          count += ordered_key(scores[row * N + n]) >= candidate ? 1.0f : 0.0f;
        }
        if (threadgroup_sum(count, sums, lane, simd, simds) >= float(TOP)) {
          least = candidate;
        }
      }
      // Each thread has neighbouring blocks, so that it can write them in their order behind those of the threads before it.
      const uint each = (whole + threads - 1) / threads, begin = min(self * each, whole), end = min(begin + each, whole);
      uint larger = 0, equal = 0;
      for (uint n = begin; n < end; ++n) {
        const uint key = ordered_key(scores[row * N + n]);
        larger += key > least ? 1 : 0;
        equal += key == least ? 1 : 0;
      }
      larger_of[self] = larger;
      equal_of[self] = equal;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint before_larger = 0, before_equal = 0, all_larger = 0;
      for (uint t = 0; t < threads; ++t) {
        before_larger += t < self ? larger_of[t] : 0;
        before_equal += t < self ? equal_of[t] : 0;
        all_larger += larger_of[t];
      }
      const uint room = TOP - all_larger;
      uint slot = before_larger + min(before_equal, room);
      for (uint n = begin; n < end; ++n) {
        const uint key = ordered_key(scores[row * N + n]);
        const bool kept = key > least || (key == least && before_equal < room);
        before_equal += key == least ? 1 : 0;
        if (kept) {
          for (uint i = 0; i < BLOCK; ++i) {
            list[slot * BLOCK + i] = int(n * BLOCK + i);
          }
          ++slot;
        }
      }
    }
    for (uint i = listed + self; i < width; i += threads) {
      list[i] = i < listed + tail ? int(keys - tail + i - listed) : 0;
    }
    if (row == 0 && self == 0) {
      last[0] = int(listed + tail) - 1;
    }
