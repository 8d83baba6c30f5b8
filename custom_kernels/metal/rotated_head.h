// One head of a joint projection: RMS-normalized where NORM is 1, and multiplied by weight where it is 2; then pairs (i, i + PAIRS)
// turned by rotation [PAIRS, 2], which holds cosines and sines. One simdgroup writes ``to`` in T; pointers may be of any address space.
template <typename T, int D, int PAIRS, int NORM, typename From, typename Weight, typename Rotation, typename To>
METAL_FUNC void rotated_head(From from, Weight weight, float epsilon, Rotation rotation, To to, uint lane) {
  float inverse_rms = 1.0f;
  if (NORM > 0) {
    float squares = 0.0f;
    for (uint i = lane; i < D; i += SIMD_WIDTH) {
      squares += float(from[i]) * float(from[i]);
    }
    inverse_rms = rsqrt(simd_sum(squares) / D + epsilon);
  }
  for (uint i = lane; i < PAIRS; i += SIMD_WIDTH) {
    float first = float(from[i]), second = float(from[i + PAIRS]);
    if (NORM > 0) {
      first *= inverse_rms * (NORM == 2 ? float(weight[i]) : 1.0f);
      second *= inverse_rms * (NORM == 2 ? float(weight[i + PAIRS]) : 1.0f);
    }
    const float cosine = rotation[2 * i], sine = rotation[2 * i + 1];
    to[i] = T(first * cosine - second * sine);
    to[i + PAIRS] = T(second * cosine + first * sine);
  }
  for (uint i = 2 * PAIRS + lane; i < D; i += SIMD_WIDTH) {
    float kept = float(from[i]);
    if (NORM > 0) {
      kept *= inverse_rms * (NORM == 2 ? float(weight[i]) : 1.0f);
    }
    to[i] = T(kept);
  }
}
