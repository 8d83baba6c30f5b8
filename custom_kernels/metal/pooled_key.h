// The key of a block of BLOCK tokens: the mean of their keys [BLOCK, D], of which the last stands apart, in T, RMS-normalized and
// multiplied by weight, which is stored less 1 where CENTERED; then pairs (i, i + PAIRS) turned by rotation [PAIRS, 2], which
// holds cosines and sines. One simdgroup writes ``to``; pointers may be of any address space.
template <typename T, int D, int BLOCK, int PAIRS, bool CENTERED, typename Keys, typename Last, typename Weight, typename Rotation, typename To>
METAL_FUNC void pooled_key(Keys keys, Last last, Weight weight, float epsilon, Rotation rotation, To to, uint lane) {
  constexpr uint COUNT = (D + SIMD_WIDTH - 1) / SIMD_WIDTH;
  float mean[COUNT], partner[COUNT], squares = 0.0f;
  UNROLL
  for (uint c = 0; c < COUNT; ++c) {
    const uint d = c * SIMD_WIDTH + lane, other = d < PAIRS ? d + PAIRS : d - PAIRS;
    float sum = 0.0f, far = 0.0f;
    UNROLL
    for (uint t = 0; t + 1 < BLOCK; ++t) {
      sum += d < D ? float(keys[t * D + d]) : 0.0f;
      far += d < 2 * PAIRS ? float(keys[t * D + other]) : 0.0f;
    }
    sum += d < D ? float(last[d]) : 0.0f;
    far += d < 2 * PAIRS ? float(last[other]) : 0.0f;
    mean[c] = float(T(sum / BLOCK));
    partner[c] = float(T(far / BLOCK));
    squares += mean[c] * mean[c];
  }
  const float inverse_rms = rsqrt(simd_sum(squares) / D + epsilon);
  UNROLL
  for (uint c = 0; c < COUNT; ++c) {
    const uint d = c * SIMD_WIDTH + lane, other = d < PAIRS ? d + PAIRS : d - PAIRS;
    if (d < D) {
      float value = float(T(mean[c] * inverse_rms * (float(weight[d]) + (CENTERED ? 1.0f : 0.0f))));
      if (d < 2 * PAIRS) {
        const float far = float(T(partner[c] * inverse_rms * (float(weight[other]) + (CENTERED ? 1.0f : 0.0f))));
        const uint pair = d % PAIRS * 2;
        value = value * rotation[pair] + (d < PAIRS ? -far : far) * rotation[pair + 1];
      }
      to[d] = T(value);
    }
  }
}
