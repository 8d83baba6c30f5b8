    // y [B, N, D]: the means of keys [B, N, BLOCK, D], in their dtype, normalised with weight [D] (CENTERED: less 1), their
    // first 2 PAIRS dimensions turned in halves by rotation [N, PAIRS, 2]. A simdgroup takes one block at a time.
    const uint lane = thread_index_in_simdgroup;
    const uint N = keys_shape[1], blocks = keys_shape[0] * N;
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint unit = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    for (; unit < blocks; unit += step) {
      constexpr uint COUNT = (D + SIMD_WIDTH - 1) / SIMD_WIDTH;
      float mean[COUNT], partner[COUNT], squares = 0.0f;
      UNROLL
      for (uint c = 0; c < COUNT; ++c) {
        const uint d = c * SIMD_WIDTH + lane, other = d < PAIRS ? d + PAIRS : d - PAIRS;
        float sum = 0.0f, far = 0.0f;
        UNROLL
        for (uint t = 0; t < BLOCK; ++t) {
          sum += d < D ? float(keys[(unit * BLOCK + t) * D + d]) : 0.0f;
          far += d < 2 * PAIRS ? float(keys[(unit * BLOCK + t) * D + other]) : 0.0f;
        }
        mean[c] = float(T(sum / BLOCK));
        partner[c] = float(T(far / BLOCK));
        squares += mean[c] * mean[c];
      }
      const float inverse_rms = rsqrt(simd_sum(squares) / D + as_type<float>(EPSILON_BITS));
      UNROLL
      for (uint c = 0; c < COUNT; ++c) {
        const uint d = c * SIMD_WIDTH + lane, other = d < PAIRS ? d + PAIRS : d - PAIRS;
        if (d < D) {
          float value = float(T(mean[c] * inverse_rms * (float(weight[d]) + (CENTERED ? 1.0f : 0.0f))));
          if (d < 2 * PAIRS) {
            const float far = float(T(partner[c] * inverse_rms * (float(weight[other]) + (CENTERED ? 1.0f : 0.0f))));
            const uint pair = (unit % N * PAIRS + d % PAIRS) * 2;
            value = value * rotation[pair] + (d < PAIRS ? -far : far) * rotation[pair + 1];
          }
          y[unit * D + d] = T(value);
        }
      }
    }
