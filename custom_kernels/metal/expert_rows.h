// Rows of experts that lie in blobs: one pointer for all of a blob's parts, whatever they hold.

template <typename S>
METAL_FUNC const device S* part_of(const device uint* blob, uint offset) {
  return (const device S*)blob + offset / sizeof(S);
}

// Adds block ``block`` of x, in ``values``, times that of ROWS rows of an affine-quantized matrix from ``first`` on;
// rows past the last of N are read as the last. ``sum`` is that of the values. Loads come first, so that they overlap.
template <int BITS, int GROUP, int BLOCKS, int ROWS, typename S>
METAL_FUNC void add_rows(
    const device uint* words,
    const device S* scales,
    const device S* biases,
    uint first,
    uint N,
    uint block,
    thread const Eight* values,
    Partial sum,
    thread Partial* products) {
  Block<BITS, S> blocks[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    load_block<BITS, GROUP, BLOCKS>(words, scales, biases, min(first + r, N - 1), block, blocks[r]);
  }
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    Partial dot = empty_partial();
    UNROLL
    for (int j = 0; j < 4; ++j) {
      dot = add_products(unpack_chunk<BITS>(blocks[r].words, j), values[j], dot);
    }
    products[r] += float(blocks[r].scale) * dot + float(blocks[r].offset) * sum;
  }
}

// 2^(exponent - 127), without a conversion; 255 is no number.
METAL_FUNC float fp4_scale(uint8_t exponent) {
  return as_type<float>(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : uint(exponent) << 23);
}

// `add_rows` for MXFP4: blocks of 32 weights share a power of two, whose exponent is a byte.
template <int BITS, int GROUP, int BLOCKS, int ROWS>
METAL_FUNC void add_rows(
    const device uint* words,
    const device uint8_t* scales,
    const device uint8_t*,
    uint first,
    uint N,
    uint block,
    thread const Eight* values,
    Partial,
    thread Partial* products) {
  uint loaded[ROWS][BITS];
  float scale[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const uint at = min(first + r, N - 1) * BLOCKS + block;
    load_words<BITS>(words + at * BITS, loaded[r]);
    scale[r] = fp4_scale(scales[at]);
  }
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    Partial dot = empty_partial();
    UNROLL
    for (int j = 0; j < 4; ++j) {
      dot = add_products(unpack_fp4(loaded[r][j]), values[j], dot);
    }
    products[r] += scale[r] * (FP4_UNIT * dot);
  }
}

// The block ``block`` of a row of x as float32, and its sum.
template <typename T>
METAL_FUNC Partial load_values(const device T* x, uint block, thread Eight* values) {
  Partial sum = empty_partial();
  UNROLL
  for (int j = 0; j < 4; ++j) {
    Packed<T> packed;
    load_eight(x + block * 32 + j * 8, packed);
    values[j] = unpack_eight(packed);
    sum = add_eight(values[j], sum);
  }
  return sum;
}
