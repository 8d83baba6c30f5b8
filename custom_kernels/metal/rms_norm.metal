    // y = x / sqrt(mean(x^2) + eps) over the last axis of x, which has NDIM, and what follows:
    //   WEIGHTS   0: none; otherwise times weight [WEIGHTS, D], whose rows follow those of x in turn
    //   CENTERED  weight is stored less 1
    //   GATE      1: times silu(gate); 2: times sigmoid(gate), with gate like x
    //   RESIDUAL  y += residual;   SCALED  1: y *= scale[0] at last; 2: y *= FACTOR at last
    //   JOINED    instead of x, the sum of x and other, each normalized in the same way with a weight of its own
    // With SHARED a threadgroup takes one row at a time, otherwise each of its simdgroups does.
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
      float x_rms = 1.0f, other_rms = 0.0f;
      if (JOINED) {
        float x_squares = 0.0f, other_squares = 0.0f;
        for (uint i = self; i < D; i += threads) {
          x_squares += float(x[row * D + i]) * float(x[row * D + i]);
          other_squares += float(other[row * D + i]) * float(other[row * D + i]);
        }
        x_squares = SHARED ? threadgroup_sum(x_squares, square_sums, lane, simd, simds) : simd_sum(x_squares);
        other_squares = SHARED ? threadgroup_sum(other_squares, square_sums, lane, simd, simds) : simd_sum(other_squares);
        x_rms = rsqrt(x_squares / D + as_type<float>(EPSILON_BITS));
        other_rms = rsqrt(other_squares / D + as_type<float>(EPSILON_BITS));
      }
      float squares = 0.0f;
      for (uint i = self; i < D; i += threads) {
        float value = float(x[row * D + i]);
        if (JOINED) {
          value *= x_rms * (one + float(x_weight[i]));
          value += float(other[row * D + i]) * other_rms * (one + float(other_weight[i]));
        }
        squares += value * value;
      }
      squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
      const float inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
      for (uint i = self; i < D; i += threads) {
        float value = float(x[row * D + i]);
        if (JOINED) {
          value *= x_rms * (one + float(x_weight[i]));
          value += float(other[row * D + i]) * other_rms * (one + float(other_weight[i]));
        }
        value *= inverse_rms;
        if (WEIGHTS > 0) {
          value *= one + float(weight[row % (WEIGHTS + (WEIGHTS == 0)) * D + i]);
        }
        if (GATE > 0) {
          const float open = float(gate[row * D + i]);
          value *= (GATE == 1 ? open : 1.0f) / (1.0f + exp(-open));
        }
        if (RESIDUAL) {
          value += float(residual[row * D + i]);
        }
        if (SCALED > 0) {
          value *= SCALED == 1 ? float(scale[0]) : as_type<float>(FACTOR_BITS);
        }
        y[row * D + i] = O(value);
      }
    }
