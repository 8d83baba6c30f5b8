// What rows of one expert share: a block of 32 of its weights, unpacked a chunk of eight at a time.
template <int BITS>
struct PackedBlock {
  uint words[BITS];
  float scale, offset;
};

// Block ``block`` of row ``row`` of an affine-quantized matrix.
template <int BITS, int GROUP, int BLOCKS, typename S>
METAL_FUNC void load_packed(
    const device uint* words,
    const device S* scales,
    const device S* biases,
    uint row,
    uint block,
    thread PackedBlock<BITS>& to) {
  load_words<BITS>(words + (row * BLOCKS + block) * BITS, to.words);
  const uint companion = row * (BLOCKS * 32 / GROUP) + block * 32 / GROUP;
  to.scale = float(scales[companion]);
  to.offset = float(biases[companion]);
}

// The same of MXFP4.
template <int BITS, int GROUP, int BLOCKS>
METAL_FUNC void load_packed(
    const device uint* words,
    const device uint8_t* scales,
    const device uint8_t*,
    uint row,
    uint block,
    thread PackedBlock<BITS>& to) {
  load_words<BITS>(words + (row * BLOCKS + block) * BITS, to.words);
  to.scale = FP4_UNIT * fp4_scale(scales[row * BLOCKS + block]);
  to.offset = 0.0f;
}

// Chunk ``j`` of a block as numbers; scales of one byte are those of MXFP4.
template <int BITS, typename S>
METAL_FUNC Eight weights_of(thread const PackedBlock<BITS>& block, int j) {
  const Eight weights = sizeof(S) == 1 ? unpack_fp4(block.words[j]) : unpack_chunk<BITS>(block.words, j);
  return weights * block.scale + block.offset;
}
