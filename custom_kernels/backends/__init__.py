"""Where kernels run, and the one place that chooses."""
