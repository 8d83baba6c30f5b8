    // Rows ids [COUNT] of an affine-quantized table [V, K]: out [COUNT, COPIES, K] = (scale * q + bias) * SCALE, the same for each
    // copy. Threadgroups share the rows out among themselves and their threads the blocks of a row. An id outside the table reads
    // its nearest row.
    constexpr uint BLOCKS = K / 32;
    const float scale = as_type<float>(SCALE_BITS);
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint threads = simdgroups_per_threadgroup * SIMD_WIDTH;
    const uint count = ids_shape[0];
    for (uint row = threadgroup_position_in_grid.x; row < count; row += threadgroups_per_grid.x) {
      const uint id = uint(min(max(ids[row], 0), V - 1));
      for (uint block = self; block < BLOCKS; block += threads) {
        Block<BITS, S> from;
        load_block<BITS, GROUP, BLOCKS>(w, scales, biases, id, block, from);
        UNROLL
        for (uint j = 0; j < 4; ++j) {
          const Eight weights = unpack_chunk<BITS>(from.words, j);
          UNROLL
          for (uint copy = 0; copy < COPIES; ++copy) {
            device T* to = out + (row * COPIES + copy) * K + block * 32 + j * 8;
            store_eight(to, weights, float(from.scale) * scale, float(from.offset) * scale);
          }
        }
      }
    }
