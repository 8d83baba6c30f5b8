"""Performance-critical operations: public functions, each beside its reference in plain mlx."""
