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
