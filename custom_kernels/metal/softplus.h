// log(1 + e^x). With u = e^-|x| at most 1, log(1 + u) is 2 artanh(u / (2 + u)), whose series keeps the digits of a small u.
METAL_FUNC float softplus(float x) {
  const float u = exp(x < 0.0f ? x : -x), s = u / (2.0f + u), z = s * s;
  const float series = 1.0f +
      z * (0.333333333f + z * (0.2f + z * (0.142857143f + z * (0.111111111f + z * (0.0909090909f + z * 0.0769230769f)))));
  return (x < 0.0f ? 0.0f : x) + 2.0f * s * series;
}
