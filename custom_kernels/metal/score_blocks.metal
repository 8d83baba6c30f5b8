    // scores [B, L, N]: the sum over HEADS of max(0, queries . keys) / sqrt(D), or -inf for a block of BLOCK tokens that the
    // query does not see whole; the first query stands at position start [1]. queries [B, HEADS, L, D] and keys [B, N, D]
    // are any views. A threadgroup takes blocks of one query, y of them; a simdgroup one block at a time.
    constexpr uint COUNT = (D + SIMD_WIDTH - 1) / SIMD_WIDTH;
    const uint lane = thread_index_in_simdgroup, L = queries_shape[2], N = keys_shape[1];
    const uint l = threadgroup_position_in_grid.y % L, b = threadgroup_position_in_grid.y / L;
    const uint whole = uint(start[0] + int(l) + 1) / BLOCK;
    float query[HEADS][COUNT];
    UNROLL
    for (uint h = 0; h < HEADS; ++h) {
      load_lane<D, COUNT>(
          queries + b * queries_strides[0] + h * queries_strides[1] + l * queries_strides[2], queries_strides[3], lane, query[h]);
    }
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint n = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    for (; n < N; n += step) {
      float key[COUNT], score = n < whole ? 0.0f : -INFINITY;
      if (n < whole) {
        load_lane<D, COUNT>(keys + b * keys_strides[0] + n * keys_strides[1], keys_strides[2], lane, key);
        UNROLL
        for (uint h = 0; h < HEADS; ++h) {
          float dot = 0.0f;
          UNROLL
          for (uint c = 0; c < COUNT; ++c) {
            dot += query[h][c] * key[c];
          }
          score += max(simd_sum(dot), 0.0f);
        }
      }
      if (lane == 0) {
        scores[(b * L + l) * N + n] = score * as_type<float>(SCALE_BITS);
      }
    }
