    // For rows x [P, K] that stand in the order of the experts they go to:
    //   GATED     y[p, n] = ACTIVATION(gate_s(x[p])[n], up_s(x[p])[n]) with s the slot of row p
    //   otherwise y[p, n] = first_s(x[p])[n]
    // ends [slots] says where the rows of each slot end, tiles [slots] how many tiles of M rows there are up to its last.
    // Experts lie in blobs [slots, WORDS]; FIRST, SECOND and what follows are where their parts begin, in bytes. A
    // threadgroup takes a tile (y), whose rows share what is read of their expert, and a share of the N outputs (x). A
    // lane has ROWS outputs of every row of the tile, so that nothing is summed over lanes; rows of x are staged, BATCH
    // blocks of 32 columns at a time. What a row gives does not depend on what else is in its tile.
    constexpr uint BLOCKS = K / 32, THREADS = SIMDS * SIMD_WIDTH, MATRICES = GATED ? 2 : 1, READ = MATRICES * ROWS;
    threadgroup Chunk<float> staged[M * BATCH * 4];
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint tile = threadgroup_position_in_grid.y;
    uint slot = 0, last = uint(blobs_shape[0]) - 1;
    const bool there = tile < uint(tiles[last]);
    while (slot < last) {
      const uint middle = (slot + last) / 2;
      if (uint(tiles[middle]) > tile) {
        last = middle;
      } else {
        slot = middle + 1;
      }
    }
    const uint before = slot > 0 ? uint(tiles[slot - 1]) : 0, begin = slot > 0 ? uint(ends[slot - 1]) : 0;
    const uint start = begin + (tile - before) * M;
    const uint count = there ? min(uint(M), uint(ends[slot]) - start) : 0;
    const device uint* blob = blobs + slot * uint(WORDS);
    const uint step = threadgroups_per_grid.x * THREADS * ROWS, passes = there ? (N + step - 1) / step : 0;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint first = (threadgroup_position_in_grid.x * passes + pass) * THREADS * ROWS + self;
      Partial products[M][READ];
      UNROLL
      for (uint m = 0; m < M; ++m) {
        UNROLL
        for (uint r = 0; r < READ; ++r) {
          products[m][r] = empty_partial();
        }
      }
      for (uint batch = 0; batch < BLOCKS; batch += BATCH) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = self; i < count * BATCH * 4; i += THREADS) {
          const uint m = i / (BATCH * 4), chunk = i % (BATCH * 4);
          if (batch * 4 + chunk < BLOCKS * 4) {
            Packed<T> packed;
            load_eight(x + (start + m) * K + (batch * 4 + chunk) * 8, packed);
            store_chunk<BITS>(staged[i], unpack_eight(packed));
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint block = batch; block < min(batch + BATCH, BLOCKS); ++block) {
          PackedBlock<BITS> blocks[READ];
          UNROLL
          for (uint r = 0; r < READ; ++r) {
            const uint row = min(first + r % ROWS * THREADS, uint(N - 1));
            if (r < ROWS) {
              load_packed<BITS, GROUP, BLOCKS>(
                  part_of<uint>(blob, FIRST), part_of<S>(blob, FIRST_SCALES), part_of<S>(blob, FIRST_BIASES), row, block,
                  blocks[r]);
            } else {
              load_packed<BITS, GROUP, BLOCKS>(
                  part_of<uint>(blob, SECOND), part_of<S>(blob, SECOND_SCALES), part_of<S>(blob, SECOND_BIASES), row,
                  block, blocks[r]);
            }
          }
          UNROLL
          for (uint j = 0; j < 4; ++j) {
            Eight weights[READ];
            UNROLL
            for (uint r = 0; r < READ; ++r) {
              weights[r] = weights_of<BITS, S>(blocks[r], j);
            }
            UNROLL
            for (uint m = 0; m < M; ++m) {
              if (m < count) {
                const Eight values = staged_chunk(staged[(m * BATCH + block - batch) * 4 + j]);
                UNROLL
                for (uint r = 0; r < READ; ++r) {
                  products[m][r] = add_products(weights[r], values, products[m][r]);
                }
              }
            }
          }
        }
      }
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        const uint n = first + r * THREADS;
        const float bias = BIAS && n < N ? float(part_of<B>(blob, FIRST_BIAS)[n]) : 0.0f;
        const float up_bias = BIAS && GATED && n < N ? float(part_of<B>(blob, SECOND_BIAS)[n]) : 0.0f;
        UNROLL
        for (uint m = 0; m < M; ++m) {
          if (m < count && n < N) {
            float value = collapse(products[m][r]) + bias;
            if (GATED) {
              const float up = collapse(products[m][READ - ROWS + r]) + up_bias;
              value = gated<ACTIVATION>(value, up, as_type<float>(LIMIT_BITS), as_type<float>(ALPHA_BITS));
            }
            y[(start + m) * N + n] = O(value);
          }
        }
      }
    }
