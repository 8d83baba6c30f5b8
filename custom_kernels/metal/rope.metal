    // y [B, H, L, D] = x with pairs of each head's dimensions turned by rotation [L, PAIRS, 2], which holds cosines and
    // sines. Pair i is (START + 2 i, START + 2 i + 1) where INTERLEAVED, else (START + i, START + i + DISTANCE); the other
    // dimensions are copied. Simdgroups take one head of one token at a time.
    const uint lane = thread_index_in_simdgroup;
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint unit = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint heads = x_shape[1], length = x_shape[2], D = x_shape[3], units = x_shape[0] * heads * length;
    constexpr uint GAP = INTERLEAVED ? 0 : DISTANCE - PAIRS;
    for (; unit < units; unit += step) {
      const uint l = unit % length, head = unit / length % heads, b = unit / length / heads;
      const int64_t from = b * x_strides[0] + head * x_strides[1] + l * x_strides[2];
      const int64_t table = l * rotation_strides[0];
      for (uint i = lane; i < PAIRS; i += SIMD_WIDTH) {
        const uint first = START + first_of_pair(INTERLEAVED, i), second = START + second_of_pair(INTERLEAVED, DISTANCE, i);
        const float cosine = rotation[table + i * rotation_strides[1]];
        const float sine = rotation[table + i * rotation_strides[1] + rotation_strides[2]];
        const Pair turned =
            rotate_pair(float(x[from + first * x_strides[3]]), float(x[from + second * x_strides[3]]), cosine, sine);
        y[unit * D + first] = T(turned.first);
        y[unit * D + second] = T(turned.second);
      }
      for (uint i = lane; i < D - 2 * PAIRS; i += SIMD_WIDTH) {
        const uint kept = i + (i < START ? 0 : PAIRS) + (i < START + GAP ? 0 : PAIRS);
        y[unit * D + kept] = x[from + kept * x_strides[3]];
      }
    }
