    // y[m, n] = sum_k W[n, k] * x[m, k] over an affine-quantized W [N, K] for the first rows of x, at most M, with what
    // stands before and after it:
    //   NORM      x[m] is RMS-normalized and multiplied by norm_weight first
    //   GATED     the rows of W are gate rows, then as many up rows; y = silu(gate) * up
    //   BIAS      y += bias;   RESIDUAL  y += residual
    // A simdgroup takes ROWS output rows at a time, as often as the grid makes necessary. Per block of 32 columns with
    // scale s and bias b, sum (s q + b) x = s sum q x + b sum x, so a weight is never dequantized. The activations are
    // staged TILE blocks at a time; where that is all of them, once for all passes.
    constexpr uint BLOCKS = K / 32;
    constexpr uint LANES = (TILE + SIMD_WIDTH - 1) / SIMD_WIDTH * SIMD_WIDTH;
    constexpr uint OUT = GATED ? N / 2 : N;
    constexpr uint READ = GATED ? 2 * ROWS : ROWS;
    threadgroup Chunk<T> staged[M * LANES * 4];
    threadgroup float block_sums[M * TILE];
    threadgroup float square_sums[M * MAX_SIMDGROUPS];

    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup;
    const uint self = simd * SIMD_WIDTH + lane;
    const uint threads = simds * SIMD_WIDTH;
    const uint present = min(uint(M), uint(x_shape[0]));

    float inverse_rms[M];
    if (NORM) {
      UNROLL
      for (uint m = 0; m < M; ++m) {
        float squares = 0.0f;
        const uint from = min(m, present - 1) * K;
        for (uint k = self; k < K; k += threads) {
          squares += float(x[from + k]) * float(x[from + k]);
        }
        squares = simd_sum(squares);
        if (lane == 0) {
          square_sums[m * MAX_SIMDGROUPS + simd] = squares;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (uint m = 0; m < M; ++m) {
        float squares = 0.0f;
        for (uint i = 0; i < simds; ++i) {
          squares += square_sums[m * MAX_SIMDGROUPS + i];
        }
        inverse_rms[m] = rsqrt(squares / K + as_type<float>(EPSILON_BITS));
      }
    }

    const uint step = threadgroups_per_grid.x * simds * ROWS, passes = (OUT + step - 1) / step;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint first = ((threadgroup_position_in_grid.x * passes + pass) * simds + simd) * ROWS;
      uint rows[READ];
      Partial products[READ][M];
      float offsets[READ][M];
      UNROLL
      for (uint r = 0; r < READ; ++r) {
        uint row = min(first + r % ROWS, OUT - 1);
        rows[r] = r < ROWS ? row : OUT + row;
        UNROLL
        for (uint m = 0; m < M; ++m) {
          products[r][m] = empty_partial();
          offsets[r][m] = 0.0f;
        }
      }
      for (uint start = 0; start < BLOCKS; start += TILE) {
        const uint blocks = min(uint(TILE), BLOCKS - start);
        if (pass == 0 || TILE < BLOCKS) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          UNROLL
          for (uint m = 0; m < M; ++m) {
            const uint from = min(m, present - 1) * K + start * 32;
            for (uint chunk = self; chunk < blocks * 4; chunk += threads) {
              float values[8];
              UNROLL
              for (uint e = 0; e < 8; ++e) {
                values[e] = float(x[from + chunk * 8 + e]);
                if (NORM) {
                  values[e] *= inverse_rms[m] * float(norm_weight[start * 32 + chunk * 8 + e]);
                }
              }
              store_chunk(staged[m * LANES * 4 + chunk_slot(chunk / 4, chunk % 4)], values);
            }
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (uint i = self; i < M * blocks; i += threads) {
            const uint m = i / blocks, block = i % blocks;
            float sum = 0.0f;
            UNROLL
            for (uint j = 0; j < 4; ++j) {
              sum += sum_chunk(staged[m * LANES * 4 + chunk_slot(block, j)]);
            }
            block_sums[m * TILE + block] = sum;
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint block = lane; block < blocks; block += SIMD_WIDTH) {
          uint words[READ][BITS];
          float scale[READ], offset[READ];
          UNROLL
          for (uint r = 0; r < READ; ++r) {
            load_words<BITS>(w + (rows[r] * BLOCKS + start + block) * BITS, words[r]);
            const uint companion = rows[r] * (K / GROUP) + (start + block) * 32 / GROUP;
            scale[r] = float(scales[companion]);
            offset[r] = float(biases[companion]);
          }
          UNROLL
          for (uint m = 0; m < M; ++m) {
            const float sum = block_sums[m * TILE + block];
            UNROLL
            for (uint r = 0; r < READ; ++r) {
              Partial dot = empty_partial();
              UNROLL
              for (uint j = 0; j < 4; ++j) {
                dot = dot_chunk<BITS>(words[r], j, staged[m * LANES * 4 + chunk_slot(block, j)], dot);
              }
              products[r][m] += scale[r] * dot;
              offsets[r][m] += offset[r] * sum;
            }
          }
        }
      }
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        const uint n = first + r;
        UNROLL
        for (uint m = 0; m < M; ++m) {
          float value = simd_sum(collapse(products[r][m]) + offsets[r][m]);
          if (GATED) {
            const float up = simd_sum(collapse(products[READ - ROWS + r][m]) + offsets[READ - ROWS + r][m]);
            value = value / (1.0f + exp(-value)) * up;
          }
          if (lane == 0 && n < OUT && m < present) {
            if (BIAS) {
              value += float(bias[n]);
            }
            if (RESIDUAL) {
              value += float(residual[m * OUT + n]);
            }
            y[m * OUT + n] = T(value);
          }
        }
      }
    }
