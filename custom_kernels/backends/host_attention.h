// The primitives of metal/attention.h for one core: a lane holds the whole row, whose elements lie side by side.

#define LOWEST_PEAK (-3.0e38f)

template <int WIDTH, int COUNT>
METAL_FUNC void load_lane(const float* row, int64_t, uint, float* values) {
  memcpy(values, row, WIDTH * sizeof(float));
}

template <int WIDTH, int COUNT>
METAL_FUNC void load_lane(const bfloat16_t* row, int64_t, uint, float* values) {
  for (int i = 0; i < WIDTH; ++i) {
    values[i] = float(row[i]);
  }
}

template <int WIDTH, int COUNT>
METAL_FUNC void load_lane(const half* row, int64_t, uint, float* values) {
  int i = 0;
#if CONVERTS_HALF
  for (; i + 8 <= WIDTH; i += 8) {
    const Float8 eight = widen_eight(row + i);
    memcpy(values + i, &eight, sizeof eight);
  }
#endif
  for (; i < WIDTH; ++i) {
    values[i] = float(row[i]);
  }
}

template <int WIDTH, int COUNT, typename T>
METAL_FUNC void load_dense(const T* row, uint lane, float* values) {
  load_lane<WIDTH, COUNT>(row, 1, lane, values);
}

// The gate of element ``e`` of result row ``row``, which is one head of a token: gates [tokens, GATES, E] are the joint
// projection, in which every one of H query heads is followed by its gates.
template <int H, int GATES, int E, typename Gates>
METAL_FUNC float sigmoid_gate(Gates gates, uint row, uint e) {
  const float open = float(gates[(row / H * GATES + 2 * (row % H) + 1) * E + e]);
  return 1.0f / (1.0f + exp(-open));
}
