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
#if defined(__F16C__)
  for (; i + 8 <= WIDTH; i += 8) {
    const Float8 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(row + i)));
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
