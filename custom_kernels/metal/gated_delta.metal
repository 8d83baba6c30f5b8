    // A layer of Gated DeltaNet (Yang et al., 2024) between its projections. projected [B, L, C + HV DV + 2 HV] has, side by
    // side, the C = 2 HK DK + HV DV channels of queries, keys and values, the gates z of the answers, and the logits of each
    // value head's strength and decay. Channels go through a causal convolution of TAPS taps, for which tail holds the TAPS -
    // 1 rows before the first, and SiLU; queries and keys are brought to length 1. Each value head then has a state S [DV, DK]:
    //   S <- decay S,   S <- S + strength (v - S k) k^T,   y = S q / sqrt(DK),   out = norm(y) weight ACTIVATION(z)
    // A threadgroup takes one value head and TOKENS tokens at a time. With PLACED there is one token, and tail [SLOTS, B, TAPS
    // - 1, C] and state [SLOTS, B, HV, DV, DK] hold several states: what is after p tokens is read from slot p % SLOTS, p =
    // start [1], and what is after one more is written into the next. Otherwise they have no slots, and the state is given
    // back: before is the one ahead of the last token, after that behind it.
    constexpr uint HV = HK * R, KEYS = HK * DK, C = 2 * KEYS + HV * DV, WIDTH = C + HV * DV + 2 * HV;
    constexpr uint COUNT = (DK + SIMD_WIDTH - 1) / SIMD_WIDTH, THREADS = SIMDGROUPS * SIMD_WIDTH;
    threadgroup float queries[TOKENS * DK];
    threadgroup float keys[TOKENS * DK];
    threadgroup float values[TOKENS * DV];
    threadgroup float answers[TOKENS * DV];
    threadgroup float decays[TOKENS];
    threadgroup float strengths[TOKENS];
    threadgroup float likenesses[TOKENS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup, self = simd * SIMD_WIDTH + lane;
    const uint head = threadgroup_position_in_grid.x % HV, b = threadgroup_position_in_grid.x / HV, key_head = head / R;
    const uint batch = projected_shape[0], length = PLACED ? 1 : projected_shape[1];
    const uint slots = PLACED ? state_shape[0] : 1, slot = PLACED ? uint(start[0]) % slots : 0;
    const uint from = slot * batch + b, to = (slot + 1) % slots * batch + b;
    const device float* own_state = state + (from * HV + head) * DV * DK;
    device float* own_after = (PLACED ? (device float*)state : after) + (to * HV + head) * DV * DK;

    float kept[ROWS][COUNT];
    UNROLL
    for (uint r = 0; r < ROWS; ++r) {
      const uint row = simd * ROWS + r;
      UNROLL
      for (uint e = 0; e < COUNT; ++e) {
        const uint i = e * SIMD_WIDTH + lane;
        kept[r][e] = row < DV && i < DK ? own_state[row * DK + i] : 0.0f;
      }
    }
    for (uint first = 0; first < length; first += TOKENS) {
      const uint count = min(uint(TOKENS), length - first);
      for (uint t = 0; t < count; ++t) {
        UNROLL
        for (uint part = 0; part < 3; ++part) {
          const uint channels = part < 2 ? DK : DV;
          const uint channel = part < 2 ? part * KEYS + key_head * DK : 2 * KEYS + head * DV;
          threadgroup float* mixed = part == 0 ? queries + t * DK : part == 1 ? keys + t * DK : values + t * DV;
          for (uint c = self; c < channels; c += THREADS) {
            float sum = 0.0f;
            UNROLL
            for (uint tap = 0; tap < TAPS; ++tap) {
              const uint row = first + t + tap;
              const T value = row < TAPS - 1 ? tail[(from * (TAPS - 1) + row) * C + channel + c]
                                             : projected[(b * length + row - (TAPS - 1)) * WIDTH + channel + c];
              sum += float(convolution[(channel + c) * TAPS + tap]) * float(value);
              // Value heads that share a key head are given the same rows, of which one keeps them.
              if (PLACED && tap > 0 && (part == 2 || head % R == 0)) {
                ((device T*)tail)[(to * (TAPS - 1) + tap - 1) * C + channel + c] = value;
              }
            }
            mixed[c] = sum * sigmoid(sum);
          }
        }
      }
      for (uint t = self; t < count; t += THREADS) {
        const uint gates = (b * length + first + t) * WIDTH + C + HV * DV + head;
        strengths[t] = sigmoid(float(projected[gates]));
        decays[t] = exp(-exp(float(a_log[head])) * softplus(float(projected[gates + HV]) + float(dt_bias[head])));
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint t = simd; t < count; t += SIMDGROUPS) {
        float query_squares = 0.0f, key_squares = 0.0f, products = 0.0f;
        for (uint i = lane; i < DK; i += SIMD_WIDTH) {
          const float query = queries[t * DK + i], key = keys[t * DK + i];
          query_squares += query * query;
          key_squares += key * key;
          products += query * key;
        }
        const float query_scale = rsqrt(simd_sum(query_squares) + 1e-6f) * rsqrt(float(DK));
        const float key_scale = rsqrt(simd_sum(key_squares) + 1e-6f);
        products = simd_sum(products);
        for (uint i = lane; i < DK; i += SIMD_WIDTH) {
          queries[t * DK + i] *= query_scale;
          keys[t * DK + i] *= key_scale;
        }
        if (lane == 0) {
          likenesses[t] = products * query_scale * key_scale;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (uint block = 0; block < ROWS; block += BLOCK) {
        for (uint t = 0; t < count; ++t) {
          const float decay = decays[t], strength = strengths[t], likeness = likenesses[t];
          float query[COUNT], key[COUNT];
          UNROLL
          for (uint e = 0; e < COUNT; ++e) {
            const uint i = e * SIMD_WIDTH + lane;
            query[e] = i < DK ? queries[t * DK + i] : 0.0f;
            key[e] = i < DK ? keys[t * DK + i] : 0.0f;
          }
          UNROLL
          for (uint r = block; r < block + BLOCK; ++r) {
            const uint row = simd * ROWS + r;
            float known = 0.0f, answer = 0.0f;
            UNROLL
            for (uint e = 0; e < COUNT; ++e) {
              known += kept[r][e] * key[e];
              answer += kept[r][e] * query[e];
            }
            known = simd_sum(known);
            answer = simd_sum(answer);
            const float correction = row < DV ? strength * (values[t * DV + row] - decay * known) : 0.0f;
            UNROLL
            for (uint e = 0; e < COUNT; ++e) {
              kept[r][e] = decay * kept[r][e] + correction * key[e];
            }
            // S q of the new state.
            if (lane == 0 && row < DV) {
              answers[t * DV + row] = decay * answer + correction * likeness;
            }
          }
          if (BEFORE && first + t + 2 == length) {
            UNROLL
            for (uint r = block; r < block + BLOCK; ++r) {
              UNROLL
              for (uint e = 0; e < COUNT; ++e) {
                const uint row = simd * ROWS + r, i = e * SIMD_WIDTH + lane;
                if (row < DV && i < DK) {
                  before[((b * HV + head) * DV + row) * DK + i] = kept[r][e];
                }
              }
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint t = simd; t < count; t += SIMDGROUPS) {
        float squares = 0.0f;
        for (uint i = lane; i < DV; i += SIMD_WIDTH) {
          squares += answers[t * DV + i] * answers[t * DV + i];
        }
        const float inverse_rms = rsqrt(simd_sum(squares) / DV + as_type<float>(EPSILON_BITS));
        const uint token = b * length + first + t;
        for (uint i = lane; i < DV; i += SIMD_WIDTH) {
          const float open = float(projected[token * WIDTH + C + head * DV + i]);
          const float gate = (ACTIVATION == 1 ? open : 1.0f) * sigmoid(open);
          y[(token * HV + head) * DV + i] = T(answers[t * DV + i] * inverse_rms * float(weight[i]) * gate);
        }
      }
    }
    UNROLL
    for (uint r = 0; r < ROWS; ++r) {
      UNROLL
      for (uint e = 0; e < COUNT; ++e) {
        const uint row = simd * ROWS + r, i = e * SIMD_WIDTH + lane;
        if (row < DV && i < DK) {
          own_after[row * DK + i] = kept[r][e];
        }
      }
    }
