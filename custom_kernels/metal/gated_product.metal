    // y = ACTIVATION(SCALE * gate) * SCALE * up over COUNT values of up; each of gate is for SHARE of them.
    const float scale = as_type<float>(SCALE_BITS);
    const uint threads = threadgroups_per_grid.x * simdgroups_per_threadgroup * SIMD_WIDTH;
    const uint group = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    for (uint i = group * SIMD_WIDTH + thread_index_in_simdgroup; i < COUNT; i += threads) {
      y[i] = T(gated<ACTIVATION>(scale * float(gate[i / SHARE]), scale * float(up[i]), as_type<float>(LIMIT_BITS)));
    }
