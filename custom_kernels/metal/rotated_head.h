// One head of a joint projection: RMS-normalized where NORM is 1, and multiplied by weight where it is 2; then pairs (i, i + D / 2)
// turned by rotation [D / 2, 2], which holds cosines and sines. One simdgroup writes ``to`` in T; pointers may be of any address space.
template <typename T, int D, int NORM, typename From, typename Weight, typename Rotation, typename To>
METAL_FUNC void rotated_head(From from, Weight weight, float epsilon, Rotation rotation, To to, uint lane) {
  float inverse_rms = 1.0f;
  if (NORM > 0) {
    float squares = 0.0f;
    for (uint i = lane; i < D; i += SIMD_WIDTH) {
      squares += float(from[i]) * float(from[i]);
    }
    inverse_rms = rsqrt(simd_sum(squares) / D + epsilon);
  }
  for (uint i = lane; i < D / 2; i += SIMD_WIDTH) {
    float first = float(from[i]), second = float(from[i + D / 2]);
    if (NORM > 0) {
      first *= inverse_rms * (NORM == 2 ? float(weight[i]) : 1.0f);
      second *= inverse_rms * (NORM == 2 ? float(weight[i + D / 2]) : 1.0f);
    }
    const float cosine = rotation[2 * i], sine = rotation[2 * i + 1];
    to[i] = T(first * cosine - second * sine);
    to[i + D / 2] = T(second * cosine + first * sine);
  }
}
