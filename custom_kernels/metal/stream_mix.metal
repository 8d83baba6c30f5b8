    // y [rows, H]: the mean over STREAMS of sigmoid(gate) * x, both [..., STREAMS * H] with NDIM axes.
    const uint lane = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint threads = simdgroups_per_threadgroup * SIMD_WIDTH;
    uint rows = 1;
    UNROLL
    for (int i = 0; i + 1 < NDIM; ++i) {
      rows *= x_shape[i];
    }
    const uint count = rows * H;
    for (uint i = threadgroup_position_in_grid.x * threads + lane; i < count; i += threadgroups_per_grid.x * threads) {
      const uint first = i / H * STREAMS * H + i % H;
      float sum = 0.0f;
      UNROLL
      for (uint s = 0; s < STREAMS; ++s) {
        sum += float(x[first + s * H]) / (1.0f + exp(-float(gate[first + s * H])));
      }
      y[i] = T(sum / STREAMS);
    }
