// Blocks of 32 affine-quantized weights, and the activations that meet them.
//
// 32 columns of one row are exactly BITS words, whatever the width of a value, so a lane takes whole blocks. Activations
// are staged in threadgroup memory as chunks of eight. Those in half precision are staged as half, divided by a power of
// two so that the largest is below 2: for INT4 and INT8 a pair of weights then takes one instruction. They meet the
// weights less CENTER, which keeps sums small. Sums over more than eight columns are taken in float32.

template <typename T>
struct Chunk {
  uint4 pairs;
};

template <>
struct Chunk<float> {
  float4 low, high;
};

template <typename T>
constexpr METAL_FUNC bool staged_as_half() {
  return sizeof(T) == 2;
}

template <int BITS, typename T>
constexpr METAL_FUNC int center() {
  return staged_as_half<T>() && BITS % 4 == 0 ? 1 << (BITS - 1) : 0;
}

// Where chunk ``j`` of a block is staged: chunks that the lanes of a simdgroup read together lie side by side.
METAL_FUNC uint chunk_slot(uint block, uint j) {
  return block / SIMD_WIDTH * SIMD_WIDTH * 4 + j * SIMD_WIDTH + block % SIMD_WIDTH;
}

// A pair of a chunk holds the values that one mask takes from a word.
template <int BITS>
constexpr METAL_FUNC int first_of_pair(int pair) {
  return BITS == 8 ? pair / 2 * 4 + pair % 2 : pair;
}

template <int BITS>
METAL_FUNC uint pack_pair(Eight values, int pair, thread float& sum) {
  const int first = first_of_pair<BITS>(pair), second = first + (BITS == 8 ? 2 : 4);
  const half low = half(values.values[first]), high = half(values.values[second]);
  sum += float(low) + float(high);
  return uint(as_type<ushort>(low)) | (uint(as_type<ushort>(high)) << 16);
}

// Stage a chunk, as a whole vector so that neighbours do not meet in the same memory bank. Returns the sum of what lies
// there.
template <int BITS, typename T>
METAL_FUNC float store_chunk(threadgroup Chunk<T>& to, Eight values) {
  float sum = 0.0f;
  uint4 pairs;
  pairs.x = pack_pair<BITS>(values, 0, sum);
  pairs.y = pack_pair<BITS>(values, 1, sum);
  pairs.z = pack_pair<BITS>(values, 2, sum);
  pairs.w = pack_pair<BITS>(values, 3, sum);
  to.pairs = pairs;
  return sum;
}

template <int BITS>
METAL_FUNC float store_chunk(threadgroup Chunk<float>& to, Eight values) {
  float4 low, high;
  low.x = values.values[0];
  low.y = values.values[1];
  low.z = values.values[2];
  low.w = values.values[3];
  high.x = values.values[4];
  high.y = values.values[5];
  high.z = values.values[6];
  high.w = values.values[7];
  to.low = low;
  to.high = high;
  return ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
}

// The sums of blocks from those of their chunks: neighbouring lanes hold neighbouring chunks, and all lanes come here.
METAL_FUNC void store_block_sum(threadgroup float* sums, uint chunk, bool there, float sum) {
  sum += simd_shuffle_xor(sum, ushort(1));
  sum += simd_shuffle_xor(sum, ushort(2));
  if (there && chunk % 4 == 0) {
    sums[chunk / 4] = sum;
  }
}

// The words of one block. Rows begin at multiples of the block, so wide loads are aligned.
template <int BITS>
METAL_FUNC void load_words(const device uint* from, thread uint* words) {
  if (BITS % 4 == 0) {
    UNROLL
    for (int i = 0; i < BITS / 4; ++i) {
      uint4 four = ((const device uint4*)from)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else {
    UNROLL
    for (int i = 0; i < BITS; ++i) {
      words[i] = from[i];
    }
  }
}

// The eight weights of chunk ``j`` of a block: little-endian bit order. 2^23 has 1 for the unit of its last bit, so that
// no conversion is needed.
template <int BITS>
METAL_FUNC Eight unpack_chunk(thread const uint* words, int j) {
  Eight to;
  UNROLL
  for (int i = 0; i < 8; ++i) {
    int bit = (8 * j + i) * BITS;
    uint value = words[bit / 32] >> (bit % 32);
    if (bit % 32 + BITS > 32) {
      value |= words[bit / 32 + 1] << (32 - bit % 32);
    }
    to.values[i] = as_type<float>((value & ((1u << BITS) - 1u)) | 0x4b000000u) - 8388608.0f;
  }
  return to;
}

template <int BITS>
METAL_FUNC Partial dot_chunk(thread const uint* words, int j, threadgroup const Chunk<float>& x, Partial sum) {
  const Eight weights = unpack_chunk<BITS>(words, j);
  const float4 low = x.low, high = x.high;
  sum += weights.values[0] * low.x + weights.values[1] * low.y + weights.values[2] * low.z + weights.values[3] * low.w;
  return sum + weights.values[4] * high.x + weights.values[5] * high.y + weights.values[6] * high.z +
      weights.values[7] * high.w;
}

// 0x6400 is 1024 in half precision and its unit is the lowest bit, so 0x6408 is 1024 + 8.
METAL_FUNC half2 low_nibbles(uint word) {
  return as_type<half2>((word & 0x000f000fu) | 0x64006400u) - as_type<half2>(0x64086408u);
}

// Four bits further up the unit is 16: times 1 / 16, less 64 + 8.
METAL_FUNC half2 high_nibbles(uint word) {
  return fma(
      as_type<half2>((word & 0x00f000f0u) | 0x64006400u), as_type<half2>(0x2c002c00u), as_type<half2>(0xd480d480u));
}

METAL_FUNC half2 even_bytes(uint word) {
  return as_type<half2>((word & 0x00ff00ffu) | 0x64006400u) - as_type<half2>(0x64806480u);
}

template <int BITS, typename T>
METAL_FUNC Partial dot_chunk(thread const uint* words, int j, threadgroup const Chunk<T>& x, Partial sum) {
  const uint4 pairs = x.pairs;
  const half2 a = as_type<half2>(pairs.x), b = as_type<half2>(pairs.y), c = as_type<half2>(pairs.z),
              d = as_type<half2>(pairs.w);
  if (BITS == 4 || BITS == 8) {
    half2 both;
    if (BITS == 4) {
      const uint word = words[j];
      both = low_nibbles(word) * a;
      both = fma(high_nibbles(word), b, both);
      both = fma(low_nibbles(word >> 8), c, both);
      both = fma(high_nibbles(word >> 8), d, both);
    } else {
      const uint low = words[2 * j % BITS], high = words[(2 * j + 1) % BITS];
      both = even_bytes(low) * a;
      both = fma(even_bytes(low >> 8), b, both);
      both = fma(even_bytes(high), c, both);
      both = fma(even_bytes(high >> 8), d, both);
    }
    return sum + (float(both.x) + float(both.y));
  }
  const Eight weights = unpack_chunk<BITS>(words, j);
  sum += weights.values[0] * float(a.x) + weights.values[4] * float(a.y);
  sum += weights.values[1] * float(b.x) + weights.values[5] * float(b.y);
  sum += weights.values[2] * float(c.x) + weights.values[6] * float(c.y);
  return sum + weights.values[3] * float(d.x) + weights.values[7] * float(d.y);
}
