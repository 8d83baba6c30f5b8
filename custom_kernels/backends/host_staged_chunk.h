// The primitive of metal/staged_chunk.h for one core.

METAL_FUNC Eight staged_chunk(const Chunk<float>& from) {
  return from.values;
}
