"""The `.gturbo` install format: reader, validator and writer."""
