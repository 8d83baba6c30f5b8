    // y = x / sqrt(mean(x^2) + eps) over the last axis of x, which has NDIM, and what follows:
    //   WEIGHTS   0: none; otherwise times weight [WEIGHTS, D], whose rows follow those of x in turn
    //   CENTERED  weight is stored less 1
    //   GATE      1: times silu(gate); 2: times sigmoid(gate), with gate like x
    //   RESIDUAL  y += residual;   SCALED  1: y *= scale[0] at last; 2: y *= FACTOR at last
    //   JOINED    instead of x, the sum of x and other, each normalized in the same way with a weight of its own
    // With SHARED a threadgroup takes one row at a time, otherwise each of its simdgroups does. A thread reads HELD values
    // of a row all at once, and keeps them; with 0 it reads them one by one, and again for each thing that it does with them.
    constexpr int SLOTS = HELD > 0 ? HELD : 1;
    float values[SLOTS], others[SLOTS], x_weights[SLOTS], other_weights[SLOTS], factors[SLOTS], gates[SLOTS], residuals[SLOTS];
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
      const uint place = row * D, weights = row % (WEIGHTS + (WEIGHTS == 0)) * D;
      float x_rms = 1.0f, other_rms = 0.0f;
      if (HELD > 0) {
        load_some<SLOTS>(x + place, self, threads, D, values);
        if (JOINED) {
          load_some<SLOTS>(other + place, self, threads, D, others);
          load_some<SLOTS>(x_weight, self, threads, D, x_weights);
          load_some<SLOTS>(other_weight, self, threads, D, other_weights);
        }
        if (WEIGHTS > 0) {
          load_some<SLOTS>(weight + weights, self, threads, D, factors);
        }
        if (GATE > 0) {
          load_some<SLOTS>(gate + place, self, threads, D, gates);
        }
        if (RESIDUAL) {
          load_some<SLOTS>(residual + place, self, threads, D, residuals);
        }
      }
      if (JOINED) {
        float x_squares = 0.0f, other_squares = 0.0f;
        for (uint first = self; first < D; first += SLOTS * threads) {
          if (HELD == 0) {
            load_some<SLOTS>(x + place, first, threads, D, values);
            load_some<SLOTS>(other + place, first, threads, D, others);
          }
          UNROLL
          for (int s = 0; s < SLOTS; ++s) {
            x_squares += values[s] * values[s];
            other_squares += others[s] * others[s];
          }
        }
        x_squares = SHARED ? threadgroup_sum(x_squares, square_sums, lane, simd, simds) : simd_sum(x_squares);
        other_squares = SHARED ? threadgroup_sum(other_squares, square_sums, lane, simd, simds) : simd_sum(other_squares);
        x_rms = rsqrt(x_squares / D + as_type<float>(EPSILON_BITS));
        other_rms = rsqrt(other_squares / D + as_type<float>(EPSILON_BITS));
      }
      // What is normalized: for the squares and, unless it is held, once more for the result.
      float squares = 0.0f, inverse_rms = 1.0f;
      UNROLL
      for (int turn = 0; turn < 2; ++turn) {
        for (uint first = self; first < D; first += SLOTS * threads) {
          if (HELD == 0) {
            load_some<SLOTS>(x + place, first, threads, D, values);
          }
          if (JOINED && (HELD == 0 || turn == 0)) {
            if (HELD == 0) {
              load_some<SLOTS>(other + place, first, threads, D, others);
              load_some<SLOTS>(x_weight, first, threads, D, x_weights);
              load_some<SLOTS>(other_weight, first, threads, D, other_weights);
            }
            UNROLL
            for (int s = 0; s < SLOTS; ++s) {
              values[s] *= x_rms * (one + x_weights[s]);
              values[s] += others[s] * other_rms * (one + other_weights[s]);
            }
          }
          if (turn == 0) {
            UNROLL
            for (int s = 0; s < SLOTS; ++s) {
              squares += values[s] * values[s];
            }
            continue;
          }
          if (HELD == 0) {
            if (WEIGHTS > 0) {
              load_some<SLOTS>(weight + weights, first, threads, D, factors);
            }
            if (GATE > 0) {
              load_some<SLOTS>(gate + place, first, threads, D, gates);
            }
            if (RESIDUAL) {
              load_some<SLOTS>(residual + place, first, threads, D, residuals);
            }
          }
          UNROLL
          for (int s = 0; s < SLOTS; ++s) {
            float value = values[s] * inverse_rms;
            if (WEIGHTS > 0) {
              value *= one + factors[s];
            }
            if (GATE > 0) {
              value *= (GATE == 1 ? gates[s] : 1.0f) / (1.0f + exp(-gates[s]));
            }
            if (RESIDUAL) {
              value += residuals[s];
            }
            if (SCALED > 0) {
              value *= SCALED == 1 ? float(scale[0]) : as_type<float>(FACTOR_BITS);
            }
            if (first + s * threads < D) {
              y[place + first + s * threads] = O(value);
            }
          }
        }
        if (turn == 0) {
          squares = SHARED ? threadgroup_sum(squares, square_sums, lane, simd, simds) : simd_sum(squares);
          inverse_rms = rsqrt(squares / D + as_type<float>(EPSILON_BITS));
        }
      }
    }
