    // The largest of N values: which it is, the first of those that are equal, and how large. NaN anywhere is the answer.
    // Each threadgroup finds it among SLICE of them. With PLACES the values stand for others, which lie at places[i].
    constexpr uint THREADS = SIMDS * SIMD_WIDTH;
    threadgroup float best[THREADS];
    threadgroup int best_place[THREADS];
    const uint self = simdgroup_index_in_threadgroup * SIMD_WIDTH + thread_index_in_simdgroup;
    const uint group = threadgroup_position_in_grid.x;
    const uint begin = group * SLICE, end = min(begin + SLICE, uint(N)), whole = begin + (end - begin) / 8 * 8;
    float most = -INFINITY;
    int place = N;
    // Fewer than eight values lie in another address space on Metal.
    if constexpr (N >= 8) {
      for (uint first = begin + 8 * self; first < whole; first += 8 * THREADS) {
        Packed<T> packed;
        load_eight(x + first, packed);
        // A vector on a CPU, a structure on a GPU.
        const Eight eight = unpack_eight(packed);
        const thread float* values = (const thread float*)&eight;
        UNROLL
        for (int i = 0; i < 8; ++i) {
          const float value = values[i];
          if (value > most || value != value || (place == N && value == most)) {
            most = value;
            place = first + i;
          }
        }
      }
    }
    for (uint i = whole + self; i < end; i += THREADS) {
      const float value = float(x[i]);
      if (value > most || value != value || (place == N && value == most)) {
        most = value;
        place = i;
      }
    }
    best[self] = most;
    best_place[self] = place;
    for (uint half_of = THREADS / 2; half_of > 0; half_of /= 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (self < half_of) {
        const float other = best[self + half_of];
        const int other_place = best_place[self + half_of];
        if (other > best[self] || other != other || (other == best[self] && other_place < best_place[self])) {
          best[self] = other;
          best_place[self] = other_place;
        }
      }
    }
    if (self == 0) {
      index[group] = PLACES ? places[best_place[0]] : best_place[0];
      peak[group] = best[0];
    }
