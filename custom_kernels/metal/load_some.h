// to[s] = from[first + s * step] for N of them, and 0 from ``end`` on.
template <int N, typename T>
METAL_FUNC void load_some(const device T* from, uint first, uint step, uint end, thread float* to) {
  UNROLL
  for (int s = 0; s < N; ++s) {
    const uint i = first + s * step;
    to[s] = i < end ? float(from[i]) : 0.0f;
  }
}
