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
