// Rotary position embedding of pairs of a head's dimensions.

struct Pair {
  float first, second;
};

// Where the members of pair ``i`` lie: at 2 i and 2 i + 1, or at i and i + distance.
METAL_FUNC uint first_of_pair(bool interleaved, uint i) {
  return interleaved ? 2 * i : i;
}

METAL_FUNC uint second_of_pair(bool interleaved, uint distance, uint i) {
  return interleaved ? 2 * i + 1 : i + distance;
}

METAL_FUNC Pair rotate_pair(float first, float second, float cosine, float sine) {
  Pair turned;
  turned.first = first * cosine - second * sine;
  turned.second = second * cosine + first * sine;
  return turned;
}

// Pairs of a row that all turn, by turn [PAIRS, 2], which holds cosines and sines; ``threads`` share them out.
template <bool INTERLEAVED, int PAIRS, typename T, typename Turn>
METAL_FUNC void rotate_row(const device T* from, Turn turn, device T* to, uint self, uint threads) {
  for (uint i = self; i < PAIRS; i += threads) {
    const uint first = first_of_pair(INTERLEAVED, i), second = second_of_pair(INTERLEAVED, PAIRS, i);
    const Pair turned = rotate_pair(float(from[first]), float(from[second]), turn[2 * i], turn[2 * i + 1]);
    to[first] = T(turned.first);
    to[second] = T(turned.second);
  }
}
