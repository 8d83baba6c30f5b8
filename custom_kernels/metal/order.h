// An integer that grows with the float: NaN first, then from -inf to inf.
METAL_FUNC uint ordered_key(float value) {
  const uint bits = as_type<uint>(value), magnitude = bits & 0x7fffffffu;
  const uint key = bits == magnitude ? bits | 0x80000000u : 0x80000000u - magnitude;
  return magnitude > 0x7f800000u ? 0 : key;
}
