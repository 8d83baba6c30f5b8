    // Attention of one token from its joint projection on: qkv [B, 1, (H + 2 KV) * D] -> out [B, 1, H * D], with its key and
    // value written into cache [2, B, KV, capacity, D]. It is fused_qkv_epilogue with APPEND and then
    // attention_decode_partial in one launch, where a threadgroup can read all keys of its query head. Each makes the new
    // key for itself, so nobody waits for the row that the first of a group writes, and nobody reads it.
    constexpr uint COUNT = (D + SIMD_WIDTH - 1) / SIMD_WIDTH;
    threadgroup T query_row[D];
    threadgroup T key_row[D];
    threadgroup float simd_peaks[MAX_SIMDGROUPS];
    threadgroup float simd_totals[MAX_SIMDGROUPS];
    threadgroup float simd_sums[SIMDGROUPS * D];

    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint self = simd * SIMD_WIDTH + lane;
    const uint head = threadgroup_position_in_grid.x % H, b = threadgroup_position_in_grid.x / H, kv_head = head / (H / KV);
    const uint capacity = cache_shape[3], position = uint(start[0]), slot = position % capacity;
    const uint others = min(position + 1, capacity) - 1;
    const device T* projected = qkv + b * (H + 2 * KV) * D;
    const device T* value_row = projected + (H + KV + kv_head) * D;
    device T* keys = (device T*)cache + (b * KV + kv_head) * capacity * D;
    device T* values = keys + cache_shape[1] * KV * capacity * D;

    if (simd == 0) {
      rotated_head<T, D, PAIRS, NORM>(projected + head * D, q_norm, as_type<float>(EPSILON_BITS), rotation, query_row, lane);
    }
    if (simd == 1 % SIMDGROUPS) {
      rotated_head<T, D, PAIRS, NORM>(projected + (H + kv_head) * D, k_norm, as_type<float>(EPSILON_BITS), rotation, key_row, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (head % (H / KV) == 0) {
      for (uint i = self; i < D; i += SIMDGROUPS * SIMD_WIDTH) {
        keys[slot * D + i] = key_row[i];
        values[slot * D + i] = value_row[i];
      }
    }

    float query[COUNT], sum[COUNT];
    float peak = LOWEST_PEAK, total = 0.0f, dot = 0.0f;
    UNROLL
    for (uint e = 0; e < COUNT; ++e) {
      const uint i = lane * COUNT + e;
      query[e] = i < D ? float(query_row[i]) * as_type<float>(SCALE_BITS) : 0.0f;
      dot += i < D ? query[e] * float(key_row[i]) : 0.0f;
      sum[e] = simd == 0 && i < D ? float(value_row[i]) : 0.0f;
    }
    dot = simd_sum(dot);
    if (simd == 0) {
      peak = dot;
      total = 1.0f;
    }
    for (uint first = simd * KEYS; first < others; first += SIMDGROUPS * KEYS) {
      float score[KEYS], value[KEYS][COUNT];
      UNROLL
      for (uint j = 0; j < KEYS; ++j) {
        float key[COUNT];
        const uint other = min(first + j, others - 1), row = other < slot ? other : other + 1;
        load_dense<D, COUNT>(keys + row * D, lane, key);
        load_dense<D, COUNT>(values + row * D, lane, value[j]);
        score[j] = 0.0f;
        UNROLL
        for (uint e = 0; e < COUNT; ++e) {
          score[j] += query[e] * key[e];
        }
      }
      float highest = peak;
      UNROLL
      for (uint j = 0; j < KEYS; ++j) {
        score[j] = simd_sum(score[j]);
        score[j] = first + j < others ? score[j] : -INFINITY;
        highest = max(highest, score[j]);
      }
      const float shrink = exp(peak - highest);
      peak = highest;
      total *= shrink;
      UNROLL
      for (uint e = 0; e < COUNT; ++e) {
        sum[e] *= shrink;
      }
      UNROLL
      for (uint j = 0; j < KEYS; ++j) {
        const float weight = exp(score[j] - highest);
        total += weight;
        UNROLL
        for (uint e = 0; e < COUNT; ++e) {
          sum[e] += weight * value[j][e];
        }
      }
    }

    if (lane == 0) {
      simd_peaks[simd] = peak;
      simd_totals[simd] = total;
    }
    UNROLL
    for (uint e = 0; e < COUNT; ++e) {
      if (lane * COUNT + e < D) {
        simd_sums[simd * D + lane * COUNT + e] = sum[e];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float sink = SINKS ? float(sinks[head]) : LOWEST_PEAK;
    float highest = sink;
    for (uint s = 0; s < SIMDGROUPS; ++s) {
      highest = max(highest, simd_peaks[s]);
    }
    float all = SINKS ? exp(sink - highest) : 0.0f;
    for (uint s = 0; s < SIMDGROUPS; ++s) {
      all += exp(simd_peaks[s] - highest) * simd_totals[s];
    }
    for (uint e = self; e < D; e += SIMDGROUPS * SIMD_WIDTH) {
      float merged = 0.0f;
      for (uint s = 0; s < SIMDGROUPS; ++s) {
        merged += exp(simd_peaks[s] - highest) * simd_sums[s * D + e];
      }
      out[(b * H + head) * D + e] = T(merged / all);
    }
