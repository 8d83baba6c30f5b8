    // Attention of few query rows over one chunk of the keys: q [B, H, L, D], k [B, KV, S, D] and v [B, KV, S, E] are any
    // views; with CACHE, k is [2, B, KV, S, D] and holds both, or with SHARED_VALUES too [1, B, KV, S, D], where the first E
    // elements of a key are its value. The first query stands at position start [1], and the keys
    // are those up to the last query's, as far as S reaches: S is the length of a ring that has overwritten the others.
    // H / KV * L query rows read one KV head; a threadgroup takes QUERIES of them and chunk y of the keys. Simdgroups
    // take KEYS keys at a time and keep a running peak, total and sum (Milakov and Gimelshein, 2018), which are merged in
    // threadgroup memory.
    // With INDEXED there is one query, and the keys are those at the first start + 1 of positions [B, P], in that order.
    // A row of the result is one head of one token, [B, L, H, E]. Where there is one chunk, out [rows, E] is that result,
    // sinks included, and times the sigmoids of gates where GATES > 0 (sigmoid_gate.h). Otherwise out [rows, chunks, E], peaks
    // and totals [rows, chunks] go to attention_decode_combine.
    // A lane holds E_COUNT elements of a value and D_COUNT of a key, of which the first are the value's where it is shared.
    constexpr uint E_COUNT = (E + SIMD_WIDTH - 1) / SIMD_WIDTH;
    constexpr uint TAIL = SHARED_VALUES ? D - E : SIMD_WIDTH, TAIL_COUNT = (TAIL + SIMD_WIDTH - 1) / SIMD_WIDTH;
    constexpr uint D_COUNT = SHARED_VALUES ? E_COUNT + TAIL_COUNT : (D + SIMD_WIDTH - 1) / SIMD_WIDTH;
    threadgroup float simd_peaks[MAX_SIMDGROUPS];
    threadgroup float simd_totals[MAX_SIMDGROUPS];
    threadgroup float simd_sums[SIMDGROUPS * E];

    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const int rows_a_head = q_shape[2];
    const uint share_count = H / KV * rows_a_head, sets = (share_count + QUERIES - 1) / QUERIES;
    const uint set = threadgroup_position_in_grid.x % sets;
    const uint kv_row = threadgroup_position_in_grid.x / sets;
    const uint chunk = threadgroup_position_in_grid.y, chunks = threadgroups_per_grid.y;
    const bool single = chunks == 1;
    const int64_t key_step = k_strides[CACHE + 2], value_step = CACHE ? key_step : v_strides[2];
    const device KV_T* keys = k + kv_row / KV * k_strides[CACHE] + kv_row % KV * k_strides[CACHE + 1];
    const device KV_T* values = CACHE ? keys + (SHARED_VALUES ? 0 : k_strides[0])
                                      : (const device KV_T*)v + kv_row / KV * v_strides[0] + kv_row % KV * v_strides[1];

    const int last_row = int(k_shape[CACHE + 2]) - 1;
    const int length = min(int(start[0]) + rows_a_head, INDEXED ? int(positions_shape[1]) : last_row + 1);
    const int oldest = WINDOW > 0 ? max(0, length - rows_a_head - WINDOW + 1) : 0;
    const int span = (length - oldest + int(chunks) - 1) / int(chunks);
    const int begin = oldest + int(chunk) * span;
    const int end = min(length, begin + span);

    const int64_t list = INDEXED ? kv_row / KV * positions_strides[0] : 0, list_step = INDEXED ? positions_strides[1] : 0;

    float query[QUERIES][D_COUNT], sum[QUERIES][E_COUNT], peak[QUERIES], total[QUERIES];
    int position[QUERIES];
    UNROLL
    for (uint i = 0; i < QUERIES; ++i) {
      const uint share = min(set * QUERIES + i, share_count - 1);
      const uint head = kv_row % KV * (H / KV) + share / rows_a_head;
      const device T* row = q + kv_row / KV * q_strides[0] + head * q_strides[1] + share % rows_a_head * q_strides[2];
      if (SHARED_VALUES) {
        load_lane<E, E_COUNT>(row, q_strides[3], lane, query[i]);
        load_lane<TAIL, TAIL_COUNT>(row + E * q_strides[3], q_strides[3], lane, query[i] + E_COUNT);
      } else {
        load_lane<D, D_COUNT>(row, q_strides[3], lane, query[i]);
      }
      UNROLL
      for (uint e = 0; e < D_COUNT; ++e) {
        query[i][e] *= as_type<float>(SCALE_BITS);
      }
      UNROLL
      for (uint e = 0; e < E_COUNT; ++e) {
        sum[i][e] = 0.0f;
      }
      position[i] = length - rows_a_head + int(share % rows_a_head);
      peak[i] = LOWEST_PEAK;
      total[i] = 0.0f;
    }

    for (int first = begin + int(simd) * KEYS; first < end; first += SIMDGROUPS * KEYS) {
      float score[QUERIES][KEYS], kept[SHARED_VALUES ? KEYS : 1][D_COUNT];
      int at[KEYS];
      UNROLL
      for (int j = 0; j < KEYS; ++j) {
        const int slot = SHARED_VALUES ? j : 0, t = min(first + j, end - 1);
        at[j] = INDEXED ? min(int(positions[list + t * list_step]), last_row) : t;
        const device KV_T* row = keys + at[j] * key_step;
        if (SHARED_VALUES) {
          load_dense<E, E_COUNT>(row, lane, kept[slot]);
          load_dense<TAIL, TAIL_COUNT>(row + E, lane, kept[slot] + E_COUNT);
        } else if (CACHE) {
          load_dense<D, D_COUNT>(row, lane, kept[slot]);
        } else {
          load_lane<D, D_COUNT>(row, k_strides[3], lane, kept[slot]);
        }
        UNROLL
        for (uint i = 0; i < QUERIES; ++i) {
          float dot = 0.0f;
          UNROLL
          for (uint e = 0; e < D_COUNT; ++e) {
            dot += query[i][e] * kept[slot][e];
          }
          score[i][j] = simd_sum(dot);
        }
      }
      UNROLL
      for (uint i = 0; i < QUERIES; ++i) {
        float highest = peak[i];
        UNROLL
        for (int j = 0; j < KEYS; ++j) {
          const int t = first + j;
          if (t >= end || (CAUSAL && t > position[i]) || (WINDOW > 0 && t + WINDOW <= position[i])) {
            score[i][j] = -INFINITY;
          }
          highest = max(highest, score[i][j]);
        }
        const float shrink = exp(peak[i] - highest);
        peak[i] = highest;
        total[i] *= shrink;
        UNROLL
        for (uint e = 0; e < E_COUNT; ++e) {
          sum[i][e] *= shrink;
        }
        UNROLL
        for (int j = 0; j < KEYS; ++j) {
          score[i][j] = exp(score[i][j] - highest);
          total[i] += score[i][j];
        }
      }
      UNROLL
      for (int j = 0; j < KEYS; ++j) {
        const int slot = SHARED_VALUES ? j : 0;
        float value[E_COUNT];
        if (CACHE && !SHARED_VALUES) {
          load_dense<E, E_COUNT>(values + at[j] * value_step, lane, value);
        } else if (!CACHE) {
          load_lane<E, E_COUNT>(values + at[j] * value_step, v_strides[3], lane, value);
        }
        UNROLL
        for (uint i = 0; i < QUERIES; ++i) {
          UNROLL
          for (uint e = 0; e < E_COUNT; ++e) {
            sum[i][e] += score[i][j] * (SHARED_VALUES ? kept[slot][e] : value[e]);
          }
        }
      }
    }

    UNROLL
    for (uint i = 0; i < QUERIES; ++i) {
      const uint share = set * QUERIES + i, token = kv_row / KV * rows_a_head + share % rows_a_head;
      const uint row = token * H + kv_row % KV * (H / KV) + share / rows_a_head;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (lane == 0) {
        simd_peaks[simd] = peak[i];
        simd_totals[simd] = total[i];
      }
      UNROLL
      for (uint e = 0; e < E_COUNT; ++e) {
        if (lane * E_COUNT + e < E) {
          simd_sums[simd * E + lane * E_COUNT + e] = sum[i][e];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float highest = LOWEST_PEAK;
      for (uint s = 0; s < SIMDGROUPS; ++s) {
        highest = max(highest, simd_peaks[s]);
      }
      const float sink = SINKS && single ? float(sinks[row % H * sinks_strides[0]]) : LOWEST_PEAK;
      highest = max(highest, sink);
      float all = SINKS && single ? exp(sink - highest) : 0.0f;
      for (uint s = 0; s < SIMDGROUPS; ++s) {
        all += exp(simd_peaks[s] - highest) * simd_totals[s];
      }
      if (share < share_count) {
        for (uint e = simd * SIMD_WIDTH + lane; e < E; e += SIMDGROUPS * SIMD_WIDTH) {
          float merged = 0.0f;
          for (uint s = 0; s < SIMDGROUPS; ++s) {
            merged += exp(simd_peaks[s] - highest) * simd_sums[s * E + e];
          }
          if (single) {
            // A row that sees no key has a total of 0.
            const float open = GATES > 0 ? sigmoid_gate<H, GATES, E>(gates, row, e) : 1.0f;
            out[row * E + e] = O(all == 0.0f ? 0.0f : merged / all * open);
          } else {
            out[(row * chunks + chunk) * E + e] = O(merged);
          }
        }
        if (!single && simd == 0 && lane == 0) {
          peaks[row * chunks + chunk] = highest;
          totals[row * chunks + chunk] = all;
        }
      }
    }
