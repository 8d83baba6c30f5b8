    // y[m, n] = sum_k W[n, k] * x[m, k] over an affine-quantized W [N, K] for the first rows of x, at most M, with what
    // stands before and after it:
    //   NORM      x[m] is RMS-normalized and multiplied by norm_weight first, which is stored less 1 where CENTERED
    //   BIAS      W x + bias
    //   GATED     the rows of W are gate rows, then as many up rows, to which ACTIVATION is applied
    //   FACTOR    y *= factor;   SOFTCAP  y = cap tanh(y / cap);   ROW_GATE  y[m] *= sigmoid(row_gate[m])
    //   RESIDUAL  y += residual
    //   ARGMAX    instead of y, the largest value of the threadgroup's rows and the first row that has it
    // A simdgroup takes ROWS output rows at a time, as often as the grid makes necessary. Per block of 32 columns with
    // scale s and bias b, sum (s q + b) x = s sum q x + b sum x, so a weight is never dequantized. Weights are loaded
    // AHEAD steps before they are used, the first ones before the activations are staged, so that memory is never idle.
    // The activations, X in memory, are staged as T, TILE blocks at a time; where that is all of them, once for all passes.
    constexpr uint BLOCKS = K / 32, THREADS = SIMDS * SIMD_WIDTH;
    constexpr uint STEPS = (TILE + SIMD_WIDTH - 1) / SIMD_WIDTH, LANES = STEPS * SIMD_WIDTH;
    constexpr uint OUT = GATED ? N / 2 : N, READ = GATED ? 2 * ROWS : ROWS;
    constexpr uint LOADS = (TILE * 4 + THREADS - 1) / THREADS, SLOTS = AHEAD > 0 ? AHEAD : 1;
    constexpr bool WHOLE = TILE == BLOCKS, EVEN = WHOLE && BLOCKS % SIMD_WIDTH == 0, SCALED = staged_as_half<T>();
    constexpr int CENTER = center<BITS, T>();
    // Whether a thread keeps what it reads of x until the norm and the scale are known.
    constexpr bool HELD = WHOLE && M == 1 && LOADS * sizeof(X) <= 16 && (NORM || SCALED);
    constexpr uint BATCH = HELD ? LOADS : 1;
    threadgroup Chunk<T> staged[M * LANES * 4];
    threadgroup float block_sums[M * TILE];
    threadgroup float square_sums[M * SIMDS];
    threadgroup float peaks[M * SIMDS];
    // A lane finishes results RESULT = lane, lane + SIMD_WIDTH, ... of the ROWS * M that a simdgroup has in a pass.
    constexpr uint RESULTS = ROWS * M, OWN = (RESULTS + SIMD_WIDTH - 1) / SIMD_WIDTH;
    threadgroup float group_best[ARGMAX ? SIMDS * RESULTS : 1];
    threadgroup uint group_best_row[ARGMAX ? SIMDS * RESULTS : 1];

    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint self = simd * SIMD_WIDTH + lane;
    const uint present = min(uint(M), uint(x_shape[0]));
    const uint per_pass = threadgroups_per_grid.x * SIMDS * ROWS;
    const uint passes = PASSES > 0 ? PASSES : (OUT + per_pass - 1) / per_pass;
    uint first = (threadgroup_position_in_grid.x * passes * SIMDS + simd) * ROWS;

    Block<BITS, S> blocks[SLOTS][READ];
    uint rows[READ];
    UNROLL
    for (uint r = 0; r < READ; ++r) {
      rows[r] = min(first + r % ROWS, OUT - 1) + (r < ROWS ? 0 : OUT);
      UNROLL
      for (uint slot = 0; slot < AHEAD; ++slot) {
        if (EVEN || slot * SIMD_WIDTH + lane < BLOCKS) {
          load_block<BITS, GROUP, BLOCKS>(w, scales, biases, rows[r], slot * SIMD_WIDTH + lane, blocks[slot][r]);
        }
      }
    }

    #ifdef WAIT_FOR_INPUTS
    WAIT_FOR_INPUTS
    #endif
    // Staged activations are x * norm_weight * factor, and the sums over them miss ``total``.
    float factor[M], total[M];
    Packed<X> values[BATCH * M];
    Packed<G> weights[BATCH];
    UNROLL
    for (uint m = 0; m < M; ++m) {
      factor[m] = total[m] = 1.0f;
    }
    if (NORM || SCALED) {
      Partial squares[M];
      float peak[M];
      UNROLL
      for (uint m = 0; m < M; ++m) {
        squares[m] = empty_partial();
        peak[m] = 0.0f;
      }
      for (uint start = self; start < BLOCKS * 4; start += BATCH * THREADS) {
        UNROLL
        for (uint i = 0; i < BATCH; ++i) {
          const uint chunk = start + i * THREADS;
          if (chunk < BLOCKS * 4) {
            UNROLL
            for (uint m = 0; m < M; ++m) {
              load_eight(x + min(m, present - 1) * K + chunk * 8, values[i * M + m]);
            }
            if (NORM) {
              load_eight(norm_weight + chunk * 8, weights[i]);
            }
          }
        }
        UNROLL
        for (uint i = 0; i < BATCH; ++i) {
          if (start + i * THREADS < BLOCKS * 4) {
            UNROLL
            for (uint m = 0; m < M; ++m) {
              Eight value = unpack_eight(values[i * M + m]);
              if (NORM) {
                squares[m] = add_products(value, value, squares[m]);
                value = value * (CENTERED ? unpack_eight(weights[i]) + 1.0f : unpack_eight(weights[i]));
              }
              peak[m] = max_abs(value, peak[m]);
            }
          }
        }
      }
      UNROLL
      for (uint m = 0; m < M; ++m) {
        const float sum = NORM ? simd_sum(collapse(squares[m])) : 0.0f, most = SCALED ? simd_max(peak[m]) : 0.0f;
        if (lane == 0) {
          square_sums[m * SIMDS + simd] = sum;
          peaks[m * SIMDS + simd] = most;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (uint m = 0; m < M; ++m) {
        if (SCALED) {
          float most = 0.0f;
          UNROLL
          for (uint i = 0; i < SIMDS; ++i) {
            most = max(most, peaks[m * SIMDS + i]);
          }
          // The power of two below it, and one over that.
          const uint power = min(max(as_type<uint>(most) & 0x7f800000u, 0x00800000u), 0x7e800000u);
          total[m] = as_type<float>(power);
          factor[m] = as_type<float>(0x7f000000u - power);
        }
        if (NORM) {
          float squares = 0.0f;
          UNROLL
          for (uint i = 0; i < SIMDS; ++i) {
            squares += square_sums[m * SIMDS + i];
          }
          total[m] *= rsqrt(squares / K + as_type<float>(EPSILON_BITS));
        }
      }
    }

    float best[OWN];
    uint best_row[OWN];
    UNROLL
    for (uint own = 0; own < OWN; ++own) {
      best[own] = -INFINITY;
      best_row[own] = 0;
    }
    for (uint pass = 0; pass < passes; ++pass) {
      Partial products[READ][M];
      float offsets[READ][M];
      UNROLL
      for (uint r = 0; r < READ; ++r) {
        UNROLL
        for (uint m = 0; m < M; ++m) {
          products[r][m] = empty_partial();
          offsets[r][m] = 0.0f;
        }
      }
      for (uint tile = 0; tile < BLOCKS; tile += TILE) {
        if (pass == 0 || !WHOLE) {
          if (!WHOLE) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
          }
          for (uint start = 0; start < TILE * 4; start += BATCH * THREADS) {
            UNROLL
            for (uint i = 0; i < BATCH; ++i) {
              const uint chunk = start + i * THREADS + self;
              const bool there = chunk < min(uint(TILE), BLOCKS - tile) * 4;
              if (!HELD && there) {
                UNROLL
                for (uint m = 0; m < M; ++m) {
                  load_eight(x + min(m, present - 1) * K + tile * 32 + chunk * 8, values[i * M + m]);
                }
                if (NORM) {
                  load_eight(norm_weight + tile * 32 + chunk * 8, weights[i]);
                }
              }
              UNROLL
              for (uint m = 0; m < M; ++m) {
                float sum = 0.0f;
                if (there) {
                  Eight value = unpack_eight(values[i * M + m]);
                  if (NORM) {
                    value = value * (CENTERED ? unpack_eight(weights[i]) + 1.0f : unpack_eight(weights[i]));
                  }
                  if (SCALED) {
                    value = value * factor[m];
                  }
                  threadgroup Chunk<T>& place = staged[m * LANES * 4 + chunk_slot(chunk / 4, chunk % 4)];
                  sum = store_chunk<BITS>(place, value);
                }
                store_block_sum(block_sums + m * TILE, chunk, there, sum);
              }
            }
          }
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL
        for (uint step = 0; step < STEPS; ++step) {
          const uint local = step * SIMD_WIDTH + lane, block = tile + local;
          if (EVEN || block < BLOCKS) {
            float scale[READ], offset[READ];
            UNROLL
            for (uint r = 0; r < READ; ++r) {
              if (AHEAD == 0) {
                load_block<BITS, GROUP, BLOCKS>(w, scales, biases, rows[r], block, blocks[0][r]);
              }
              scale[r] = float(blocks[step % SLOTS][r].scale);
              offset[r] = float(blocks[step % SLOTS][r].offset);
              if (CENTER > 0) {
                offset[r] += CENTER * scale[r];
              }
            }
            UNROLL
            for (uint m = 0; m < M; ++m) {
              const float sum = block_sums[m * TILE + local];
              UNROLL
              for (uint r = 0; r < READ; ++r) {
                Partial dot = empty_partial();
                UNROLL
                for (uint j = 0; j < 4; ++j) {
                  threadgroup const Chunk<T>& chunk = staged[m * LANES * 4 + chunk_slot(local, j)];
                  dot = dot_chunk<BITS>(blocks[step % SLOTS][r].words, j, chunk, dot);
                }
                products[r][m] += scale[r] * dot;
                offsets[r][m] += offset[r] * sum;
              }
            }
          }
          const uint next = block + AHEAD * SIMD_WIDTH;
          if (AHEAD > 0 && (EVEN ? step + AHEAD < STEPS : next < BLOCKS)) {
            UNROLL
            for (uint r = 0; r < READ; ++r) {
              load_block<BITS, GROUP, BLOCKS>(w, scales, biases, rows[r], next, blocks[step % SLOTS][r]);
            }
          }
        }
      }
      const uint done = first;
      first += SIMDS * ROWS;
      UNROLL
      for (uint r = 0; r < READ; ++r) {
        rows[r] = min(first + r % ROWS, OUT - 1) + (r < ROWS ? 0 : OUT);
        UNROLL
        for (uint slot = 0; slot < AHEAD; ++slot) {
          if (pass + 1 < passes && (EVEN || slot * SIMD_WIDTH + lane < BLOCKS)) {
            load_block<BITS, GROUP, BLOCKS>(w, scales, biases, rows[r], slot * SIMD_WIDTH + lane, blocks[slot][r]);
          }
        }
      }
      float sums[READ * M];
      UNROLL
      for (uint r = 0; r < READ; ++r) {
        UNROLL
        for (uint m = 0; m < M; ++m) {
          sums[r * M + m] = simd_sum(collapse(products[r][m]) + offsets[r][m]) * total[m];
        }
      }
      UNROLL
      for (uint own = 0; own < OWN; ++own) {
        const uint result = own * SIMD_WIDTH + lane, n = done + result / M, m = result % M;
        float value = 0.0f, up = 0.0f;
        UNROLL
        for (uint i = 0; i < RESULTS; ++i) {
          if (i == result) {
            value = sums[i];
            up = sums[(READ - ROWS) * M + i];
          }
        }
        if (result < RESULTS && n < OUT && m < present) {
          if (BIAS) {
            value += float(bias[n]);
            up += GATED ? float(bias[OUT + n]) : 0.0f;
          }
          if (GATED) {
            value = gated<ACTIVATION>(value, up, as_type<float>(LIMIT_BITS));
          }
          value *= as_type<float>(FACTOR_BITS);
          if (SOFTCAP) {
            value = as_type<float>(CAP_BITS) * tanh(value / as_type<float>(CAP_BITS));
          }
          if (ROW_GATE) {
            value *= sigmoid(float(row_gate[m]));
          }
          if (RESIDUAL) {
            value += float(residual[m * OUT + n]);
          }
          if (!ARGMAX) {
            y[m * OUT + n] = O(value);
          } else if (value > best[own]) {
            best[own] = value;
            best_row[own] = n;
          }
        }
      }
    }

    if (ARGMAX) {
      UNROLL
      for (uint own = 0; own < OWN; ++own) {
        const uint result = own * SIMD_WIDTH + lane;
        if (result < RESULTS) {
          group_best[simd * RESULTS + result] = best[own];
          group_best_row[simd * RESULTS + result] = best_row[own];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint m = self; m < present; m += THREADS) {
        float most = -INFINITY;
        uint row = 0;
        for (uint i = m; i < SIMDS * RESULTS; i += M) {
          if (group_best[i] > most || (group_best[i] == most && group_best_row[i] < row)) {
            most = group_best[i];
            row = group_best_row[i];
          }
        }
        largest[m * threadgroups_per_grid.x + threadgroup_position_in_grid.x] = most;
        largest_row[m * threadgroups_per_grid.x + threadgroup_position_in_grid.x] = row;
      }
    }
