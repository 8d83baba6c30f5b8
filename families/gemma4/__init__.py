"""Gemma 4: the Mixture-of-Experts 26B-A4B, the dense sizes, and E2B and E4B, one decoder with switches."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.gemma4 import config, weights

FAMILY = DeclaredFamily(
    "gemma4",
    config,
    weights,
    NoGguf(),
    model_types=(*config.WRAPPED_TYPES, *config.TEXT_TYPES),
    manifest_families=("gemma4",),
    gguf_architectures=("gemma4",),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
