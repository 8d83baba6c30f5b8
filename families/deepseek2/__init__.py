"""DeepSeek-V2, V2-Lite, V2.5, V3 and R1: one decoder with latent attention and routed experts, by switches."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.deepseek2 import config, weights

FAMILY = DeclaredFamily(
    "deepseek2",
    config,
    weights,
    NoGguf(),
    model_types=config.MODEL_TYPES,
    manifest_families=("deepseek2",),
    gguf_architectures=("deepseek2",),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
