// Blocks of 32 affine-quantized weights, and the activations that meet them.
//
// 32 columns of one row are exactly BITS words, whatever the width of a value, so a lane takes whole blocks. Activations
// are staged in threadgroup memory as chunks of eight, in their own dtype; sums are taken in float32.

template <typename T>
struct Chunk {
  uint4 pairs;
};

template <>
struct Chunk<float> {
  float4 low, high;
};

// Where chunk ``j`` of a block is staged: chunks that the lanes of a simdgroup read together lie side by side.
METAL_FUNC uint chunk_slot(uint block, uint j) {
  return block / SIMD_WIDTH * SIMD_WIDTH * 4 + j * SIMD_WIDTH + block % SIMD_WIDTH;
}

// A sum that one lane holds.
typedef float Partial;

METAL_FUNC Partial empty_partial() {
  return 0.0f;
}

METAL_FUNC float collapse(Partial sum) {
  return sum;
}

template <typename T>
METAL_FUNC uint pack_pair(T first, T second) {
  return uint(as_type<ushort>(first)) | (uint(as_type<ushort>(second)) << 16);
}

template <typename T>
METAL_FUNC void unpack_pair(uint pair, thread float* values) {
  values[0] = float(as_type<T>(ushort(pair & 0xffffu)));
  values[1] = float(as_type<T>(ushort(pair >> 16)));
}

// Chunks move as whole vectors: with one access a lane, neighbours do not meet in the same memory bank.
template <typename T>
METAL_FUNC void store_chunk(threadgroup Chunk<T>& to, thread const float* values) {
  uint4 pairs;
  pairs.x = pack_pair(T(values[0]), T(values[1]));
  pairs.y = pack_pair(T(values[2]), T(values[3]));
  pairs.z = pack_pair(T(values[4]), T(values[5]));
  pairs.w = pack_pair(T(values[6]), T(values[7]));
  to.pairs = pairs;
}

METAL_FUNC void store_chunk(threadgroup Chunk<float>& to, thread const float* values) {
  float4 low, high;
  low.x = values[0];
  low.y = values[1];
  low.z = values[2];
  low.w = values[3];
  high.x = values[4];
  high.y = values[5];
  high.z = values[6];
  high.w = values[7];
  to.low = low;
  to.high = high;
}

template <typename T>
METAL_FUNC void load_chunk(threadgroup const Chunk<T>& from, thread float* values) {
  const uint4 pairs = from.pairs;
  unpack_pair<T>(pairs.x, values);
  unpack_pair<T>(pairs.y, values + 2);
  unpack_pair<T>(pairs.z, values + 4);
  unpack_pair<T>(pairs.w, values + 6);
}

METAL_FUNC void load_chunk(threadgroup const Chunk<float>& from, thread float* values) {
  const float4 low = from.low, high = from.high;
  values[0] = low.x;
  values[1] = low.y;
  values[2] = low.z;
  values[3] = low.w;
  values[4] = high.x;
  values[5] = high.y;
  values[6] = high.z;
  values[7] = high.w;
}

template <typename T>
METAL_FUNC float sum_chunk(threadgroup const Chunk<T>& from) {
  float values[8];
  load_chunk(from, values);
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < 8; ++i) {
    sum += values[i];
  }
  return sum;
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

// The eight weights of chunk ``j`` of a block: little-endian bit order.
template <int BITS>
METAL_FUNC void unpack_chunk(thread const uint* words, int j, thread float* values) {
  if (BITS == 4) {
    // 0x6400 is 1024 in half precision and its unit is the lowest bit: two exact conversions an instruction.
    const half2 thousand = as_type<half2>(0x64006400u);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const half2 pair = as_type<half2>(((words[j] >> (4 * i)) & 0x000f000fu) | 0x64006400u) - thousand;
      values[i] = float(pair.x);
      values[i + 4] = float(pair.y);
    }
  } else {
    UNROLL
    for (int i = 0; i < 8; ++i) {
      int bit = (8 * j + i) * BITS;
      uint value = words[bit / 32] >> (bit % 32);
      if (bit % 32 + BITS > 32) {
        value |= words[bit / 32 + 1] << (32 - bit % 32);
      }
      values[i] = float(value & ((1u << BITS) - 1u));
    }
  }
}

template <int BITS, typename T>
METAL_FUNC Partial dot_chunk(thread const uint* words, int j, threadgroup const Chunk<T>& x, Partial sum) {
  float weights[8], values[8];
  unpack_chunk<BITS>(words, j, weights);
  load_chunk(x, values);
  UNROLL
  for (int i = 0; i < 8; ++i) {
    sum += weights[i] * values[i];
  }
  return sum;
}
