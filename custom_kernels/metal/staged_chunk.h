// The values of a chunk that `store_chunk` staged.
METAL_FUNC Eight staged_chunk(threadgroup const Chunk<float>& from) {
  const float4 low = from.low, high = from.high;
  Eight to;
  to.values[0] = low.x;
  to.values[1] = low.y;
  to.values[2] = low.z;
  to.values[3] = low.w;
  to.values[4] = high.x;
  to.values[5] = high.y;
  to.values[6] = high.z;
  to.values[7] = high.w;
  return to;
}
