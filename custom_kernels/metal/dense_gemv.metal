    // y[m, n] = sum_k W[n, k] * x[m, k] + bias[n] + residual[m, n] over a W [N, K] of numbers, for the first rows of x, at most M. A
    // simdgroup takes ROWS rows of W at a time, as often as the grid makes necessary, and its lanes eight columns each, BATCH times at
    // once.
    constexpr uint EIGHTS = K / 8;
    const uint lane = thread_index_in_simdgroup, simds = simdgroups_per_threadgroup;
    const uint present = min(uint(M), uint(x_shape[0]));
    const uint step = threadgroups_per_grid.x * simds * ROWS, passes = (N + step - 1) / step;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint group = threadgroup_position_in_grid.x * passes + pass;
      const uint first = (group * simds + simdgroup_index_in_threadgroup) * ROWS;
      Partial products[ROWS][M];
      float rest[ROWS][M];
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        UNROLL
        for (uint m = 0; m < M; ++m) {
          products[r][m] = empty_partial();
          rest[r][m] = 0.0f;
        }
      }
      for (uint start = lane; start < EIGHTS; start += BATCH * SIMD_WIDTH) {
        Packed<W> weights[BATCH][ROWS];
        Packed<T> values[BATCH][M];
        UNROLL
        for (uint b = 0; b < BATCH; ++b) {
          const uint eight = min(start + b * SIMD_WIDTH, EIGHTS - 1);
          UNROLL
          for (uint r = 0; r < ROWS; ++r) {
            load_eight(w + min(first + r, uint(N - 1)) * K + eight * 8, weights[b][r]);
          }
          UNROLL
          for (uint m = 0; m < M; ++m) {
            load_eight(x + min(m, present - 1) * K + eight * 8, values[b][m]);
          }
        }
        UNROLL
        for (uint b = 0; b < BATCH; ++b) {
          if (BATCH == 1 || start + b * SIMD_WIDTH < EIGHTS) {
            UNROLL
            for (uint r = 0; r < ROWS; ++r) {
              UNROLL
              for (uint m = 0; m < M; ++m) {
                products[r][m] = add_products(unpack_eight(weights[b][r]), unpack_eight(values[b][m]), products[r][m]);
              }
            }
          }
        }
      }
      for (uint k = EIGHTS * 8 + lane; k < K; k += SIMD_WIDTH) {
        UNROLL
        for (uint r = 0; r < ROWS; ++r) {
          UNROLL
          for (uint m = 0; m < M; ++m) {
            rest[r][m] += float(w[min(first + r, uint(N - 1)) * K + k]) * float(x[min(m, present - 1) * K + k]);
          }
        }
      }
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        UNROLL
        for (uint m = 0; m < M; ++m) {
          float value = simd_sum(collapse(products[r][m]) + rest[r][m]);
          if (lane == 0 && first + r < N && m < present) {
            if (BIAS) {
              value += float(bias[first + r]);
            }
            if (RESIDUAL) {
              value += float(residual[m * N + first + r]);
            }
            y[m * N + first + r] = Y(value);
          }
        }
      }
    }
