    // What multi-head latent attention of few tokens reads: queries [B, H, L, LATENT + TURNED], brought to the latents, and
    // the row of each token, written into cache [1, B, 1, capacity, LATENT + TURNED], position p into row p % capacity.
    // A head of q [B, L, H * (NOPE + TURNED)] has NOPE dimensions, which meet its rows of the affine-quantized W, and TURNED
    // ones, whose pairs rotation [L, TURNED / 2, 2] turns. Head h has rows of W from h * STRIDE + FIRST on: NOPE rows of
    // LATENT columns, or with TRANSPOSED LATENT rows of NOPE columns. A row of latent [B, L, LATENT + TURNED] is
    // RMS-normalized in its first part and turned in the second. start [1] is the first token's position.
    // A threadgroup takes one of SPLITS parts of a head's latent, or the row of a token. Without TRANSPOSED, PARTS threads
    // share out the rows of each block of 32 columns.
    constexpr uint WIDTH = LATENT + TURNED, PAIRS = TURNED / 2, HEAD = NOPE + TURNED;
    constexpr uint SPAN = LATENT / 32 / SPLITS, COLUMNS = SPAN * 32, SHARES = H * SPLITS + 1;
    threadgroup float sums[TRANSPOSED ? 1 : PARTS * COLUMNS];
    threadgroup float scratch[MAX_SIMDGROUPS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup, threads = simds * SIMD_WIDTH, self = simd * SIMD_WIDTH + lane;
    const uint share = threadgroup_position_in_grid.x % SHARES, token = threadgroup_position_in_grid.x / SHARES;
    const uint length = q_shape[1], l = token % length, b = token / length;
    const uint head = share / SPLITS, split = share % SPLITS;
    const device float* turn = rotation + l * PAIRS * 2;

    if (share == H * SPLITS) {
      const device T* from = latent + b * latent_strides[0] + l * latent_strides[1];
      const uint capacity = cache_shape[3];
      device T* to = (device T*)cache + (b * capacity + (uint(start[0]) + l) % capacity) * WIDTH;
      float squares = 0.0f;
      for (uint i = self; i < LATENT; i += threads) {
        squares += float(from[i]) * float(from[i]);
      }
      squares = threadgroup_sum(squares, scratch, lane, simd, simds);
      const float inverse_rms = rsqrt(squares / LATENT + as_type<float>(EPSILON_BITS));
      for (uint i = self; i < LATENT; i += threads) {
        to[i] = T(float(from[i]) * inverse_rms * float(norm_weight[i]));
      }
      rotate_row<INTERLEAVED, PAIRS>(from + LATENT, turn, to + LATENT, self, threads);
      return;
    }

    const device T* from = q + b * q_strides[0] + l * q_strides[1] + head * HEAD;
    device T* to = queries + ((b * H + head) * length + l) * WIDTH;
    if (split == 0) {
      rotate_row<INTERLEAVED, PAIRS>(from + NOPE, turn, to + LATENT, self, threads);
    }
    if (TRANSPOSED) {
      for (uint r = split * COLUMNS + self; r < (split + 1) * COLUMNS; r += threads) {
        Partial product[1] = {empty_partial()};
        for (uint block = 0; block < NOPE / 32; ++block) {
          Eight values[4];
          const Partial sum = load_values(from, block, values);
          add_rows<BITS, GROUP, NOPE / 32, 1>(
              w, scales, biases, head * STRIDE + FIRST + r, uint(H * STRIDE), block, values, sum, product);
        }
        to[r] = T(collapse(product[0]));
      }
      return;
    }
    for (uint unit = self; unit < SPAN * PARTS; unit += threads) {
      const uint local = unit % SPAN, part = unit / SPAN;
      Eight sum[4];
      float shift = 0.0f;
      UNROLL
      for (int j = 0; j < 4; ++j) {
        sum[j] = zero_eight();
      }
      for (uint i = part; i < NOPE; i += PARTS) {
        Block<BITS, S> loaded;
        load_block<BITS, GROUP, LATENT / 32>(
            w, scales, biases, head * STRIDE + FIRST + i, split * SPAN + local, loaded);
        const float value = float(from[i]), factor = value * float(loaded.scale);
        shift += value * float(loaded.offset);
        UNROLL
        for (int j = 0; j < 4; ++j) {
          sum[j] = sum[j] + unpack_chunk<BITS>(loaded.words, j) * factor;
        }
      }
      UNROLL
      for (int j = 0; j < 4; ++j) {
        store_eight(sums + part * COLUMNS + local * 32 + j * 8, sum[j], 1.0f, shift);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint column = self; column < COLUMNS; column += threads) {
      float total = 0.0f;
      for (uint part = 0; part < PARTS; ++part) {
        total += sums[part * COLUMNS + column];
      }
      to[split * COLUMNS + column] = T(total);
    }
