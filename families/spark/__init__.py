"""Spark 2.5 (Spark-X2.5 4B and 1.7B): one matrix for q, k and v, a gate on each head, sliding and full layers."""

from importlib import import_module

from turbospark_mlx.families.declared import DeclaredFamily, NoGguf
from turbospark_mlx.families.spark import config, weights

FAMILY = DeclaredFamily(
    "spark",
    config,
    weights,
    NoGguf(),
    model_types=("spark2_5",),
    manifest_families=("spark2_5",),
    gguf_architectures=("spark2_5",),
)


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
