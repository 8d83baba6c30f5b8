"""Sampling, stopping, detokenizing and the generation loop."""

from turbospark_mlx.generation.sampling import Sampler, SamplingOptions

__all__ = ["Sampler", "SamplingOptions"]
