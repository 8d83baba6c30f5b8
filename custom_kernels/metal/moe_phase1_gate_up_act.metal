    // inner[p, f] = ACTIVATION(gate_s(x)[f], up_s(x)[f]) for each pair p of a row of x and an expert, s = slots[p], with
    // slots [rows, TOP] and x [rows, K], or MAPPED s = slot_of[slots[p]]. Experts lie in blobs [slots, WORDS]; GATE, UP and what follows are where their
    // parts begin, in bytes. Threadgroups share out the pairs (y) and the F rows of a pair (x); a simdgroup takes ROWS
    // rows of both matrices at a time, so that they share what is read of x, and its lanes a block of 32 columns each.
    constexpr uint BLOCKS = K / 32;
    const uint lane = thread_index_in_simdgroup, simds = simdgroups_per_threadgroup;
    const uint pair = threadgroup_position_in_grid.y, top = slots_shape[1];
    const device T* row = x + pair / top * K;
    const uint slot = MAPPED ? slot_of[min(uint(slots[pair]), uint(slot_of_shape[0] - 1))] : slots[pair];
    const device uint* blob = blobs + min(slot, uint(blobs_shape[0] - 1)) * uint(WORDS);
    const uint step = threadgroups_per_grid.x * simds * ROWS, passes = (F + step - 1) / step;
    for (uint pass = 0; pass < passes; ++pass) {
      const uint group = threadgroup_position_in_grid.x * passes + pass;
      const uint first = (group * simds + simdgroup_index_in_threadgroup) * ROWS;
      Partial gates[ROWS], ups[ROWS];
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        gates[r] = ups[r] = empty_partial();
      }
      for (uint block = lane; block < BLOCKS && first < F; block += SIMD_WIDTH) {
        Eight values[4];
        const Partial sum = load_values(row, block, values);
        add_rows<BITS, GROUP, BLOCKS, ROWS>(
            part_of<uint>(blob, GATE), part_of<S>(blob, GATE_SCALES), part_of<S>(blob, GATE_BIASES), first, F, block,
            values, sum, gates);
        add_rows<BITS, GROUP, BLOCKS, ROWS>(
            part_of<uint>(blob, UP), part_of<S>(blob, UP_SCALES), part_of<S>(blob, UP_BIASES), first, F, block, values,
            sum, ups);
      }
      UNROLL
      for (uint r = 0; r < ROWS; ++r) {
        float gate = simd_sum(collapse(gates[r])), up = simd_sum(collapse(ups[r]));
        if (lane == 0 && first + r < F) {
          if (BIAS) {
            gate += float(part_of<B>(blob, GATE_BIAS)[first + r]);
            up += float(part_of<B>(blob, UP_BIAS)[first + r]);
          }
          inner[pair * F + first + r] = T(gated<ACTIVATION>(gate, up, as_type<float>(LIMIT_BITS), as_type<float>(ALPHA_BITS)));
        }
      }
    }
