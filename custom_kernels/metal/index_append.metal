    // What an indexer makes of one token: rows [B, 1, (HEADS + 1) D] are the rows of its queries and of its key. Queries q [B,
    // HEADS, 1, D] are normalized with q_norm and rotated (rotated_head.h) by rotation [1, PAIRS, 2]. The key is written into keys
    // [1, B, 1, capacity, D] as it is, at position start [1]. Where it is the last of a block of BLOCK tokens, that block's key
    // (pooled_key.h), with k_norm and block_rotation [1, PAIRS, 2], is written into blocks [1, B, 1, capacity, D]. Simdgroups take
    // one head of one sequence at a time.
    const uint lane = thread_index_in_simdgroup;
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint unit = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint units = rows_shape[0] * (HEADS + 1), token = uint(start[0]);
    for (; unit < units; unit += step) {
      const uint head = unit % (HEADS + 1), b = unit / (HEADS + 1);
      const device T* from = rows + unit * D;
      const float epsilon = as_type<float>(EPSILON_BITS);
      if (head < HEADS) {
        rotated_head<T, D, PAIRS, 2, CENTERED>(from, q_norm, epsilon, rotation, q + (b * HEADS + head) * D, lane);
      } else {
        device T* own = (device T*)keys + (b * uint(keys_shape[3]) + token) * D;
        for (uint i = lane; i < D; i += SIMD_WIDTH) {
          own[i] = from[i];
        }
        if ((token + 1) % BLOCK == 0) {
          // The last key is read from where it comes: other lanes need not see yet what was written of it.
          device T* block = (device T*)blocks + (b * uint(blocks_shape[3]) + token / BLOCK) * D;
          pooled_key<T, D, BLOCK, PAIRS, CENTERED>(own - (BLOCK - 1) * D, from, k_norm, epsilon, block_rotation, block, lane);
        }
      }
    }
