"""Sampling, stopping, detokenizing and the generation loop."""
