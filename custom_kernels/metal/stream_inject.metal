    // y [..., STREAMS * H], with the NDIM axes of x: x + 2 sigmoid(logits / STREAMS) * added, where added [rows, H] is
    // the same for each stream and logits [rows, STREAMS] have one each.
    const uint lane = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint threads = simdgroups_per_threadgroup * SIMD_WIDTH;
    uint rows = 1;
    UNROLL
    for (int i = 0; i + 1 < NDIM; ++i) {
      rows *= x_shape[i];
    }
    const uint count = rows * H;
    for (uint i = threadgroup_position_in_grid.x * threads + lane; i < count; i += threadgroups_per_grid.x * threads) {
      const uint row = i / H, first = row * STREAMS * H + i % H;
      const float more = float(added[i]);
      UNROLL
      for (uint s = 0; s < STREAMS; ++s) {
        const float share = 2.0f / (1.0f + exp(-float(logits[row * STREAMS + s]) / STREAMS));
        y[first + s * H] = T(float(x[first + s * H]) + share * more);
      }
    }
