    // qkv [B, L, (H + 2 KV) * D], the rows of a joint projection -> q [B, H, L, D] and keys and values. Queries and keys are
    // normalized and rotated (rotated_head.h) by rotation [L, PAIRS, 2]. Without a cache, keys and values are kv [2, B, KV,
    // L, D]; with APPEND they are written into cache [2, B, KV, capacity, D], position p into row p % capacity, and start
    // [1] is the first position. VALUE_NORM normalizes values, without a weight. With SHARED_VALUES the rows of keys are
    // those of values too, and qkv is [B, L, (H + KV) * D]. Without keys and values, KV is 0. Simdgroups take one head of
    // one token at a time.
    constexpr uint HEADS = H + 2 * KV, STORED_HEADS = SHARED_VALUES ? H + KV : HEADS;
    const uint lane = thread_index_in_simdgroup;
    const uint step = threadgroups_per_grid.x * simdgroups_per_threadgroup;
    uint unit = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const uint batch = qkv_shape[0], length = qkv_shape[1], units = batch * length * HEADS;
    for (; unit < units; unit += step) {
      const uint head = unit % HEADS, token = unit / HEADS, l = token % length, b = token / length;
      const uint part = head < H ? 0 : head < H + KV ? 1 : 2;
      const device T* from = qkv + (token * STORED_HEADS + head - (SHARED_VALUES && part == 2 ? KV : 0)) * D;
      device T* to = q + ((b * H + head) * length + l) * D;
      if (part > 0) {
        const uint kv_head = ((part - 1) * batch + b) * KV + head - (part == 1 ? H : H + KV);
        if (APPEND) {
          const uint capacity = cache_shape[3];
          to = (device T*)cache + (kv_head * capacity + (uint(start[0]) + l) % capacity) * D;
        } else {
          to = (device T*)kv + (kv_head * length + l) * D;
        }
      }
      if (part == 0) {
        rotated_head<T, D, PAIRS, NORM>(from, q_norm, as_type<float>(EPSILON_BITS), rotation + l * 2 * PAIRS, to, lane);
      } else if (part == 1) {
        rotated_head<T, D, PAIRS, NORM>(from, k_norm, as_type<float>(EPSILON_BITS), rotation + l * 2 * PAIRS, to, lane);
      } else {
        float inverse_rms = 1.0f;
        if (VALUE_NORM) {
          float squares = 0.0f;
          for (uint i = lane; i < D; i += SIMD_WIDTH) {
            squares += float(from[i]) * float(from[i]);
          }
          inverse_rms = rsqrt(simd_sum(squares) / D + as_type<float>(EPSILON_BITS));
        }
        for (uint i = lane; i < D; i += SIMD_WIDTH) {
          to[i] = VALUE_NORM ? T(float(from[i]) * inverse_rms) : from[i];
        }
      }
    }
