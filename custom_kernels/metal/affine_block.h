// A block of affine-quantized weights in registers, with its scale and offset as they are stored.
template <int BITS, typename S>
struct Block {
  uint words[BITS];
  S scale, offset;
};

// Block ``block`` of a row, of which a row has BLOCKS. Small companions lie in another address space, hence P.
template <int BITS, int GROUP, int BLOCKS, typename P, typename B>
METAL_FUNC void load_block(const device uint* w, P scales, P biases, uint row, uint block, thread B& to) {
  load_words<BITS>(w + (row * BLOCKS + block) * BITS, to.words);
  const uint companion = row * (BLOCKS * 32 / GROUP) + block * 32 / GROUP;
  to.scale = scales[companion];
  to.offset = biases[companion];
}
