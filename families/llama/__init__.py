"""Llama 2/3.x, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE: one decoder with switches."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily
from turbospark_mlx.families.llama import config, gguf, weights

FAMILY = DeclaredFamily(
    "llama",
    config,
    weights,
    gguf,
    model_types=tuple(config.MODEL_TYPES),
    manifest_families=("llama", "qwen2", "qwen3", "qwen3moe"),
    gguf_architectures=("llama", "qwen2", "qwen3"),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
