"""Muse Glimmer: a dense decoder with sandwich norms, a gate on attention, and full layers without positions."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.muse import config, weights

FAMILY = DeclaredFamily(
    "muse",
    config,
    weights,
    NoGguf(),
    model_types=config.MODEL_TYPES,
    manifest_families=("museGlimmer",),
    gguf_architectures=(),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
