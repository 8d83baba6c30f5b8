"""Tiny models with known weights, on the reference back end."""

from functools import cache

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx import families
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.testing import tiny_config, tiny_weights


def build(hf: dict, weights: dict[str, np.ndarray] | None = None, **options):
    """A model of config.json ``hf`` with ``weights`` by checkpoint name, or with `tiny_weights`, loaded the way the
    loader does it: into the memory of evaluated parameters, so that joint matrices stay joint."""
    family = family_for_model_type(hf["model_type"])
    config = family.config_from_hf(hf)
    model = families.package(family.name).Model(config, backend=backends.select("reference"), **options)
    mx.eval(model.parameters())
    weights = weights or tiny_weights(hf)
    for name, array in tree_flatten(model.parameters()):
        np.array(array, copy=False)[...] = weights[name]
    return model


def config_of(family: str, variant: str):
    hf = tiny_config(family, variant)
    return family_for_model_type(hf["model_type"]).config_from_hf(hf)


@cache
def weights_of(family: str, variant: str) -> dict[str, np.ndarray]:
    return tiny_weights(tiny_config(family, variant))


@cache
def model_of(family: str, variant: str, fused: bool = True):
    """One model a variant for all tests; none of them changes it."""
    return build(tiny_config(family, variant), fused=fused)
