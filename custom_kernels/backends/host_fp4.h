// The primitives of metal/fp4.h for one core.

#define FP4_UNIT 0.5f

METAL_FUNC Eight unpack_fp4(uint word) {
  const Uint8 codes = (word - Uint8{}) >> Uint8{0, 4, 8, 12, 16, 20, 24, 28};
#if defined(__AVX2__)
  // Of each index three bits are taken.
  const Uint8 twice = (Uint8)__builtin_ia32_permvarsf256(Float8{0, 1, 2, 3, 4, 6, 8, 12}, (Int8)codes);
#else
  const Uint8 exponent = codes >> 1 & 3, mantissa = codes & 1, normal = (Uint8)(exponent != 0);
  const Uint8 twice = (Uint8)__builtin_convertvector((Int8)((normal & 2 | mantissa) << (exponent + normal)), Float8);
#endif
  return (Eight)(twice | (codes & 8) << 28);
}
