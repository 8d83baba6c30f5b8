    // y [B, N, D]: the keys of blocks (pooled_key.h) of keys [B, N, BLOCK, D], with weight [D] (CENTERED: less 1) and rotation [N,
    // PAIRS, 2]. A simdgroup takes one block at a time.
    const uint lane = thread_index_in_simdgroup;
    const uint N = keys_shape[1], blocks = keys_shape[0] * N;
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint unit = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    for (; unit < blocks; unit += step) {
      const device T* first = keys + unit * BLOCK * D;
      pooled_key<T, D, BLOCK, PAIRS, CENTERED>(
          first, first + (BLOCK - 1) * D, weight, as_type<float>(EPSILON_BITS), rotation + unit % N * PAIRS * 2, y + unit * D, lane);
    }
