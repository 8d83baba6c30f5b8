// What gated products do with their halves. The numbers are those of gemv.ACTIVATIONS.
enum { SILU, GELU_TANH, GELU_ERF, CLAMPED_SWIGLU, SIGMOID };

METAL_FUNC float sigmoid(float x) {
  return 1.0f / (1.0f + exp(-x));
}

// x Phi(x): the tail of the normal distribution by Abramowitz and Stegun, 7.1.26, to 1.5e-7.
METAL_FUNC float gelu_erf(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  const float tail = 0.5f * exp(-z * z) * t *
      (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return x < 0.0f ? x * tail : x - x * tail;
}

template <int ACTIVATION>
METAL_FUNC float gated(float gate, float up, float limit, float alpha = 1.702f) {
  if (ACTIVATION == GELU_TANH) {
    // (1 + tanh(y)) / 2 is sigmoid(2 y).
    return gate * sigmoid(1.59576912f * gate * (1.0f + 0.044715f * gate * gate)) * up;
  }
  if (ACTIVATION == GELU_ERF) {
    return gelu_erf(gate) * up;
  }
  if (ACTIVATION == CLAMPED_SWIGLU) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid(alpha * gate) * (up + 1.0f);
  }
  return (ACTIVATION == SIGMOID ? 1.0f : gate) * sigmoid(gate) * up;
}
