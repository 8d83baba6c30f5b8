    // y[m, h * V + i] = sum_k W[h * STRIDE + FIRST + i, k] * x[m, h, k]: the rows that each head has in an affine-quantized
    // W [H * STRIDE, K], of its own part of x [M, H, K]. Threadgroups share out the rows of x (y) and of W (x), ROWS at a
    // time, which are one head's; the lanes of a simdgroup share out blocks of 32 columns.
    constexpr uint BLOCKS = K / 32;
    const uint lane = thread_index_in_simdgroup, simds = simdgroups_per_threadgroup;
    const uint m = threadgroup_position_in_grid.y;
    const uint step = threadgroups_per_grid.x * simds * ROWS, passes = (H * V + step - 1) / step;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint group = threadgroup_position_in_grid.x * passes + pass;
      const uint first = (group * simds + simdgroup_index_in_threadgroup) * ROWS, head = min(first / V, uint(H - 1));
      Partial products[ROWS];
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        products[r] = empty_partial();
      }
      for (uint block = lane; block < BLOCKS && first < H * V; block += SIMD_WIDTH) {
        Eight values[4];
        const Partial sum = load_values(x + (m * H + head) * K, block, values);
        add_rows<BITS, GROUP, BLOCKS, ROWS>(
            w, scales, biases, head * STRIDE + FIRST + first % V, uint(H * STRIDE), block, values, sum, products);
      }
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        const float product = simd_sum(collapse(products[r]));
        if (lane == 0 && first < H * V) {
          y[m * H * V + first + r] = T(product);
        }
      }
    }
