"""Checkpoints of other formats into `.gturbo` installs."""
