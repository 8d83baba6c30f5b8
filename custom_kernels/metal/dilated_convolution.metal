    // y [B, 1, W] = residual + told + silu(c), where c is a convolution of each channel by itself over the last tokens, of which x
    // [B, 1, W] is the newest, with taps weight [W, TAPS] that are APART tokens apart. tail [SLOTS, B, ROWS, W], ROWS = (TAPS - 1)
    // APART, holds the tokens before, the oldest first: those behind p tokens are in slot p % SLOTS, p = start [1], and the next
    // slot is given those behind one more. A threadgroup takes neighbouring channels of sequence y of the grid.
    constexpr uint ROWS = (TAPS - 1) * APART;
    const uint b = threadgroup_position_in_grid.y, batch = tail_shape[1], slots = tail_shape[0];
    const uint slot = uint(start[0]) % slots, span = (W + threadgroups_per_grid.x - 1) / threadgroups_per_grid.x;
    const uint begin = threadgroup_position_in_grid.x * span, end = min(begin + span, uint(W));
    const uint self = begin + simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint threads = simdgroups_per_threadgroup * SIMD_WIDTH;
    const device T* before = tail + (slot * batch + b) * ROWS * W;
    device T* after = (device T*)tail + ((slot + 1) % slots * batch + b) * ROWS * W;
    for (uint i = self; i < end; i += threads) {
      float sum = float(weight[i * TAPS + TAPS - 1]) * float(x[b * W + i]);
      UNROLL
      for (uint tap = 0; tap + 1 < TAPS; ++tap) {
        sum += float(weight[i * TAPS + tap]) * float(before[tap * APART * W + i]);
      }
      y[b * W + i] = T(float(residual[b * W + i]) + float(told[b * W + i]) + sum / (1.0f + exp(-sum)));
    }
    for (uint row = 0; row < ROWS; ++row) {
      for (uint i = self; i < end; i += threads) {
        after[row * W + i] = row + 1 < ROWS ? before[(row + 1) * W + i] : x[b * W + i];
      }
    }
