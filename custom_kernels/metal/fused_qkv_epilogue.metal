    // qkv [B, L, (H + 2 KV) * D], the rows of a joint projection -> q [B, H, L, D] and keys and values. Queries and keys are
    // rotated: pairs (i, i + D / 2) by rotation [L, D / 2, 2], which holds cosines and sines. With NORM each of their heads
    // is RMS-normalized before. Without a cache, keys and values are kv [2, B, KV, L, D]; with APPEND they are written into
    // cache [2, B, KV, capacity, D], position p into row p % capacity, and start [1] is the first position.
    // VALUE_NORM normalizes values as well, without a weight. With SHARED_VALUES the rows of keys are those of values too,
    // and qkv is [B, L, (H + KV) * D]. Without keys and values, KV is 0.
    // Simdgroups take one head of one token at a time.
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
      float inverse_rms = 1.0f;
      if (part < 2 ? NORM : VALUE_NORM) {
        float squares = 0.0f;
        for (uint i = lane; i < D; i += SIMD_WIDTH) {
          squares += float(from[i]) * float(from[i]);
        }
        inverse_rms = rsqrt(simd_sum(squares) / D + as_type<float>(EPSILON_BITS));
      }
      for (uint i = lane; i < D / 2; i += SIMD_WIDTH) {
        float first = float(from[i]), second = float(from[i + D / 2]);
        if (part < 2) {
          if (NORM) {
            first *= inverse_rms * float(part == 0 ? q_norm[i] : k_norm[i]);
            second *= inverse_rms * float(part == 0 ? q_norm[i + D / 2] : k_norm[i + D / 2]);
          }
          const float cosine = rotation[(l * (D / 2) + i) * 2], sine = rotation[(l * (D / 2) + i) * 2 + 1];
          const float turned = first * cosine - second * sine;
          second = second * cosine + first * sine;
          first = turned;
        } else if (VALUE_NORM) {
          first *= inverse_rms;
          second *= inverse_rms;
        }
        to[i] = T(first);
        to[i + D / 2] = T(second);
      }
    }
