// Weights of MXFP4 (OCP Microscaling Formats 1.0): one sign, two exponent and one mantissa bit. They are unpacked over
// FP4_UNIT.
#define FP4_UNIT 16384.0f

// The weights in the lowest nibbles of both halves of a word: half precision has the same fields, with a greater bias.
METAL_FUNC half2 fp4_pair(uint word) {
  return as_type<half2>((word & 0x00080008u) << 12 | (word & 0x00070007u) << 9);
}

// The eight weights of a word, lowest nibble first.
METAL_FUNC Eight unpack_fp4(uint word) {
  Eight to;
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const half2 pair = fp4_pair(word >> (4 * i));
    to.values[i] = float(pair.x);
    to.values[i + 4] = float(pair.y);
  }
  return to;
}
