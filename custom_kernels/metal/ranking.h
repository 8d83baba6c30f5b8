// A number as an integer that is the larger the larger the number is, and least for what is no number.
METAL_FUNC uint ranking_key(float value) {
  const uint bits = as_type<uint>(value), magnitude = bits & 0x7fffffffu;
  const uint key = bits == magnitude ? bits | 0x80000000u : 0x80000000u - magnitude;
  return magnitude > 0x7f800000u ? 0 : key;
}
