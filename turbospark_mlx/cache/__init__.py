"""Per-layer state that can be marked and rolled back."""
