"""Qwen4-Exp: hyper-connected streams, Gated DeltaNet and sparse attention, routed experts, a table of n-grams."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.qwen4 import config, weights

FAMILY = DeclaredFamily(
    "qwen4",
    config,
    weights,
    NoGguf(),
    model_types=(config.WRAPPED_TYPE, config.TEXT_TYPE),
    manifest_families=(config.MANIFEST_FAMILY,),
    gguf_architectures=("qwen4exp",),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
