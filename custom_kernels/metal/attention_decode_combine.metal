    // The chunks of attention_decode_partial as one result: parts [rows, chunks, E], peaks and totals [rows, chunks]
    // -> y [rows, E]. A sink is a logit that joins the peak and the total and has no value. With GATES > 0 the result is
    // multiplied by the sigmoids of gates (attention.h). One threadgroup a row.
    const uint row = threadgroup_position_in_grid.x, chunks = peaks_shape[1];
    float highest = SINKS ? float(sinks[row % H]) : LOWEST_PEAK;
    for (uint c = 0; c < chunks; ++c) {
      highest = max(highest, peaks[row * chunks + c]);
    }
    float all = SINKS ? exp(float(sinks[row % H]) - highest) : 0.0f;
    for (uint c = 0; c < chunks; ++c) {
      all += exp(peaks[row * chunks + c] - highest) * totals[row * chunks + c];
    }
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    for (uint e = self; e < E; e += simdgroups_per_threadgroup * SIMD_WIDTH) {
      float merged = 0.0f;
      for (uint c = 0; c < chunks; ++c) {
        merged += exp(peaks[row * chunks + c] - highest) * parts[(row * chunks + c) * E + e];
      }
      const float open = GATES > 0 ? sigmoid_gate<H, GATES, E>(gates, row, e) : 1.0f;
      y[row * E + e] = T(all == 0.0f ? 0.0f : merged / all * open);
    }
