    // sum = residual + x and y = sum / sqrt(mean(sum^2) + eps) * weight over the last axis of x, which has NDIM. The
    // mean and y are of the sum as it is stored. With SHARED a threadgroup takes one row at a time, otherwise each of its
    // simdgroups does.
    //   BEFORE    x is normalized in the same way first, with the weight ``before``
    //   SECOND    z is what y is, with the weight ``second``
    //   CENTERED  weights are stored less 1
    // A thread reads HELD values of a row all at once, and keeps them; with 0 it reads them one by one, whenever it needs them.
    constexpr int SLOTS = HELD > 0 ? HELD : 1;
    float values[SLOTS], residuals[SLOTS], befores[SLOTS], factors[SLOTS], seconds[SLOTS];
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
      const uint place = row * D;
      float inverse_rms = 1.0f, squares = 0.0f;
      if (HELD > 0) {
        load_some<SLOTS>(x + place, self, threads, D, values);
        load_some<SLOTS>(residual + place, self, threads, D, residuals);
        load_some<SLOTS>(weight, self, threads, D, factors);
        if (BEFORE) {
          load_some<SLOTS>(before, self, threads, D, befores);
        }
        if (SECOND) {
          load_some<SLOTS>(second, self, threads, D, seconds);
        }
      }
      if (BEFORE) {
        for (uint first = self; first < D; first += SLOTS * threads) {
          if (HELD == 0) {
            load_some<SLOTS>(x + place, first, threads, D, values);
          }
          UNROLL
          for (int s = 0; s < SLOTS; ++s) {
            squares += values[s] * values[s];
          }
        }
        squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
        inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
        squares = 0.0f;
      }
      for (uint first = self; first < D; first += SLOTS * threads) {
        if (HELD == 0) {
          load_some<SLOTS>(x + place, first, threads, D, values);
          load_some<SLOTS>(residual + place, first, threads, D, residuals);
          if (BEFORE) {
            load_some<SLOTS>(before, first, threads, D, befores);
          }
        }
        UNROLL
        for (int s = 0; s < SLOTS; ++s) {
          const S added = S(residuals[s] + values[s] * inverse_rms * (BEFORE ? one + befores[s] : 1.0f));
          values[s] = float(added);
          squares += values[s] * values[s];
          if (first + s * threads < D) {
            sum[place + first + s * threads] = added;
          }
        }
      }
      squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
      inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
      for (uint first = self; first < D; first += SLOTS * threads) {
        if (HELD == 0) {
          load_some<SLOTS>(sum + place, first, threads, D, values);
          load_some<SLOTS>(weight, first, threads, D, factors);
          if (SECOND) {
            load_some<SLOTS>(second, first, threads, D, seconds);
          }
        }
        UNROLL
        for (int s = 0; s < SLOTS; ++s) {
          const uint i = first + s * threads;
          if (i < D) {
            const float value = values[s] * inverse_rms;
            y[place + i] = O(value * (one + factors[s]));
            if (SECOND) {
              z[place + i] = Z(value * (one + seconds[s]));
            }
          }
        }
      }
    }
