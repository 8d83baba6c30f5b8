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
