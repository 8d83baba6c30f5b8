    // sum = residual + x and y = sum / sqrt(mean(sum^2) + eps) * weight over the last axis of x, which has NDIM. The
    // mean and y are of the sum as it is stored. With SHARED a threadgroup takes one row at a time, otherwise each of its
    // simdgroups does.
    //   BEFORE    x is normalized in the same way first, with the weight ``before``
    //   SECOND    z is what y is, with the weight ``second``
    //   CENTERED  weights are stored less 1
    threadgroup float square_sums[MAX_SIMDGROUPS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup;
    const uint self = SHARED ? simd * SIMD_WIDTH + lane : lane, threads = SHARED ? simds * SIMD_WIDTH : SIMD_WIDTH;
    const uint D = x_shape[NDIM - 1];
    const float one = CENTERED ? 1.0f : 0.0f;
    uint rows = 1;
    UNROLL
    for (int i = 0; i + 1 < NDIM; ++i) {
      rows *= x_shape[i];
    }
    const uint step = SHARED ? threadgroups_per_grid.x : threadgroups_per_grid.x * simds;
    uint row = SHARED ? threadgroup_position_in_grid.x : threadgroup_position_in_grid.x * simds + simd;
    for (; row < rows; row += step) {
      float inverse_rms = 1.0f;
      if (BEFORE) {
        float squares = 0.0f;
        for (uint i = self; i < D; i += threads) {
          squares += float(x[row * D + i]) * float(x[row * D + i]);
        }
        squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
        inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
      }
      float squares = 0.0f;
      for (uint i = self; i < D; i += threads) {
        const float value = float(x[row * D + i]) * inverse_rms * (BEFORE ? one + float(before[i]) : 1.0f);
        const S added = S(float(residual[row * D + i]) + value);
        sum[row * D + i] = added;
        squares += float(added) * float(added);
      }
      squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
      inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
      for (uint i = self; i < D; i += threads) {
        const float value = float(sum[row * D + i]) * inverse_rms;
        y[row * D + i] = O(value * (one + float(weight[i])));
        if (SECOND) {
          z[row * D + i] = Z(value * (one + float(second[i])));
        }
      }
    }
