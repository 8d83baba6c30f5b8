"""gpt-oss (20b and 120b): sliding and full attention in turns, attention sinks, routed experts with biases."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.gpt_oss import config, weights

FAMILY = DeclaredFamily(
    "gpt_oss",
    config,
    weights,
    NoGguf("the published safetensors checkpoint, whose experts are MXFP4 as well"),
    model_types=("gpt_oss",),
    manifest_families=("gptOss",),
    gguf_architectures=("gpt-oss",),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
