// Blocks of 32 affine-quantized weights, and the activations that meet them.
//
// 32 columns of one row are exactly BITS words, whatever the width of a value, so a lane takes whole blocks. Activations
// are staged in threadgroup memory as chunks of eight, in their own dtype; sums are taken in float32.

template <typename T>
struct Chunk {
  uint pairs[4];
};

template <>
struct Chunk<float> {
  float values[8];
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
METAL_FUNC void store_chunk(threadgroup Chunk<T>& to, thread const float* values) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    to.pairs[i] = uint(as_type<ushort>(T(values[2 * i]))) | (uint(as_type<ushort>(T(values[2 * i + 1]))) << 16);
  }
}

METAL_FUNC void store_chunk(threadgroup Chunk<float>& to, thread const float* values) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    to.values[i] = values[i];
  }
}

template <typename T>
METAL_FUNC void load_chunk(threadgroup const Chunk<T>& from, thread float* values) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    uint pair = from.pairs[i];
    values[2 * i] = float(as_type<T>(ushort(pair & 0xffffu)));
    values[2 * i + 1] = float(as_type<T>(ushort(pair >> 16)));
  }
}

METAL_FUNC void load_chunk(threadgroup const Chunk<float>& from, thread float* values) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    values[i] = from.values[i];
  }
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
    UNROLL
    for (int i = 0; i < 4; ++i) {
      half2 pair = as_type<half2>(((words[j] >> (4 * i)) & 0x000f000fu) | 0x64006400u);
      values[i] = float(pair.x) - 1024.0f;
      values[i + 4] = float(pair.y) - 1024.0f;
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
