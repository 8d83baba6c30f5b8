// Rows of queries, keys and values, spread over the lanes of a simdgroup: lane l holds COUNT elements from l * COUNT on.

// Below every score, and finite, so that differences of peaks are numbers.
#define LOWEST_PEAK (-3.0e38f)

template <int WIDTH, int COUNT, typename T, typename Stride>
METAL_FUNC void load_lane(const device T* row, Stride stride, uint lane, thread float* values) {
  UNROLL
  for (int i = 0; i < COUNT; ++i) {
    const uint element = lane * COUNT + i;
    values[i] = WIDTH % COUNT == 0 && WIDTH == COUNT * SIMD_WIDTH || element < WIDTH ? float(row[element * stride]) : 0.0f;
  }
}

// `load_lane` of a row whose elements lie side by side, as wide as its alignment allows.
template <int WIDTH, int COUNT>
METAL_FUNC void load_dense(const device float* row, uint lane, thread float* values) {
  load_lane<WIDTH, COUNT>(row, 1, lane, values);
}

template <int WIDTH, int COUNT, typename T>
METAL_FUNC void load_dense(const device T* row, uint lane, thread float* values) {
  if (COUNT % 4 == 0 && WIDTH == COUNT * SIMD_WIDTH) {
    UNROLL
    for (int i = 0; i < COUNT; i += 4) {
      const uint2 pairs = *(const device uint2*)(row + lane * COUNT + i);
      values[i] = float(as_type<T>(ushort(pairs.x & 0xffffu)));
      values[i + 1] = float(as_type<T>(ushort(pairs.x >> 16)));
      values[i + 2] = float(as_type<T>(ushort(pairs.y & 0xffffu)));
      values[i + 3] = float(as_type<T>(ushort(pairs.y >> 16)));
    }
  } else {
    load_lane<WIDTH, COUNT>(row, 1, lane, values);
  }
}
