// The gate of element ``e`` of result row ``row``, which is one head of a token: gates [tokens, GATES, E] are the joint
// projection, in which every one of H query heads is followed by its gates.
template <int H, int GATES, int E, typename Gates>
METAL_FUNC float sigmoid_gate(Gates gates, uint row, uint e) {
  const float open = float(gates[(row / H * GATES + 2 * (row % H) + 1) * E + e]);
  return 1.0f / (1.0f + exp(-open));
}
