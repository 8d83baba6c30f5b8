"""Qwen 3.5 and its successors: Gated DeltaNet layers with full attention in between, dense or with routed experts."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.qwen import config, weights

FAMILY = DeclaredFamily(
    "qwen",
    config,
    weights,
    NoGguf(),
    model_types=(*config.WRAPPED_TYPES, *config.TEXT_TYPES),
    manifest_families=(config.DENSE_FAMILY, config.MOE_FAMILY),
    gguf_architectures=("qwen35", "qwen35moe"),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
