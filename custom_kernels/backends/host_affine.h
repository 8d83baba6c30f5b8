// The primitives of metal/affine.h for one core.

template <typename T>
struct Chunk {
  Eight values;
};

template <typename T>
constexpr METAL_FUNC bool staged_as_half() {
  return false;
}

template <int BITS, typename T>
constexpr METAL_FUNC int center() {
  return 0;
}

METAL_FUNC uint chunk_slot(uint block, uint j) {
  return block * 4 + j;
}

template <int BITS, typename T>
METAL_FUNC float store_chunk(Chunk<T>& to, Eight values) {
  to.values = values;
  return collapse(values);
}

METAL_FUNC void store_block_sum(float* sums, uint chunk, bool, float sum) {
  sums[chunk / 4] = chunk % 4 == 0 ? sum : sums[chunk / 4] + sum;
}

// Words are read where they are used.
template <int BITS>
METAL_FUNC void load_words(const uint* from, uint* words) {
  memcpy(words, from, BITS * sizeof(uint));
}

// The eight weights of chunk ``j`` of a block: little-endian bit order.
template <int BITS>
METAL_FUNC Eight unpack_chunk(const uint* words, int j) {
  Uint8 weights;
  if (BITS == 8) {
    uint8_t bytes __attribute__((vector_size(8)));
    memcpy(&bytes, words + 2 * j, sizeof bytes);
    weights = __builtin_convertvector(bytes, Uint8);
  } else if (BITS == 4) {
    weights = (words[j] - Uint8{}) >> Uint8{0, 4, 8, 12, 16, 20, 24, 28} & 15;
  } else {
    for (int i = 0; i < 8; ++i) {
      const int bit = (8 * j + i) * BITS;
      uint value = words[bit / 32] >> (bit % 32);
      if (bit % 32 + BITS > 32) {
        value |= words[bit / 32 + 1] << (32 - bit % 32);
      }
      weights[i] = value & ((1u << BITS) - 1u);
    }
  }
  return __builtin_convertvector((Int8)weights, Float8);
}

template <int BITS, typename T>
METAL_FUNC Partial dot_chunk(const uint* words, int j, const Chunk<T>& x, Partial sum) {
  return sum + unpack_chunk<BITS>(words, j) * x.values;
}
