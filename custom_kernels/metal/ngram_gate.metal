    // y [..., STREAMS * H]: value [rows, H] for each stream, times sigmoid(sign(t) sqrt(max(|t|, 1e-6))), where t = key .
    // query / sqrt(H) of that stream; key has NDIM axes and the shape of y. A threadgroup takes one stream of one row.
    threadgroup float sums[MAX_SIMDGROUPS];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const uint simds = simdgroups_per_threadgroup, threads = simds * SIMD_WIDTH, self = simd * SIMD_WIDTH + lane;
    uint units = STREAMS;
    UNROLL
    for (int i = 0; i + 1 < NDIM; ++i) {
      units *= key_shape[i];
    }
    for (uint unit = threadgroup_position_in_grid.x; unit < units; unit += threadgroups_per_grid.x) {
      const uint first = unit * H, row = unit / STREAMS;
      float dot = 0.0f;
      for (uint i = self; i < H; i += threads) {
        dot += float(key[first + i]) * float(query[first + i]);
      }
      dot = threadgroup_sum(dot, sums, lane, simd, simds) * as_type<float>(SCALE_BITS);
      const float size = max(dot < 0.0f ? -dot : dot, 1e-6f), root = size * rsqrt(size);
      const float open = 1.0f / (1.0f + exp(dot < 0.0f ? root : -root));
      for (uint i = self; i < H; i += threads) {
        y[first + i] = T((dot == 0.0f ? 0.5f : open) * float(value[row * H + i]));
      }
    }
