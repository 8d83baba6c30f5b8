    // The chunks of attention_decode_partial as one result: parts [rows, CHUNKS, E], peaks and totals [rows, CHUNKS]
    // -> y [rows, E]. A sink is a logit that joins the peak and the total and has no value. One threadgroup a row.
    const uint row = threadgroup_position_in_grid.x;
    float highest = SINKS ? float(sinks[row / L % H]) : LOWEST_PEAK;
    for (uint c = 0; c < CHUNKS; ++c) {
      highest = max(highest, peaks[row * CHUNKS + c]);
    }
    float all = SINKS ? exp(float(sinks[row / L % H]) - highest) : 0.0f;
    for (uint c = 0; c < CHUNKS; ++c) {
      all += exp(peaks[row * CHUNKS + c] - highest) * totals[row * CHUNKS + c];
    }
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    for (uint e = self; e < E; e += simdgroups_per_threadgroup * SIMD_WIDTH) {
      float merged = 0.0f;
      for (uint c = 0; c < CHUNKS; ++c) {
        merged += exp(peaks[row * CHUNKS + c] - highest) * parts[(row * CHUNKS + c) * E + e];
      }
      y[row * E + e] = T(all == 0.0f ? 0.0f : merged / all);
    }
