// One head of a joint projection: RMS-normalized where NORM, by a weight that is stored less 1 where CENTERED, then pairs
// (i, i + TURNED / 2) of its first TURNED dimensions turned by rotation [TURNED / 2, 2], which holds cosines and sines. One
// simdgroup writes ``to`` in T; pointers may be of any address space.
template <typename T, int D, int TURNED, bool NORM, bool CENTERED, typename From, typename Weight, typename Rotation, typename To>
METAL_FUNC void rotated_head(From from, Weight weight, float epsilon, Rotation rotation, To to, uint lane) {
  float inverse_rms = 1.0f;
  if (NORM) {
    float squares = 0.0f;
    for (uint i = lane; i < D; i += SIMD_WIDTH) {
      squares += float(from[i]) * float(from[i]);
    }
    inverse_rms = rsqrt(simd_sum(squares) / D + epsilon);
  }
  for (uint i = lane; i < TURNED / 2; i += SIMD_WIDTH) {
    float first = float(from[i]), second = float(from[i + TURNED / 2]);
    if (NORM) {
      first *= inverse_rms * (float(weight[i]) + (CENTERED ? 1.0f : 0.0f));
      second *= inverse_rms * (float(weight[i + TURNED / 2]) + (CENTERED ? 1.0f : 0.0f));
    }
    const float cosine = rotation[2 * i], sine = rotation[2 * i + 1];
    to[i] = T(first * cosine - second * sine);
    to[i + TURNED / 2] = T(second * cosine + first * sine);
  }
  for (uint i = TURNED + lane; i < D; i += SIMD_WIDTH) {
    to[i] = NORM ? T(float(from[i]) * inverse_rms * (float(weight[i]) + (CENTERED ? 1.0f : 0.0f))) : T(from[i]);
  }
}
