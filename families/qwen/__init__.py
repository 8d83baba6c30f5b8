"""Qwen 3.5 and its successors: Gated DeltaNet layers with full attention in between, dense or with routed experts."""

from importlib import import_module

from turbospark_mlx.families.qwen import config, gguf, weights


class _QwenFamily:
    """See ``turbospark_mlx.protocols.Family``."""

    name = "qwen"
    model_types = (*config.WRAPPED_TYPES, *config.TEXT_TYPES)
    manifest_families = (config.DENSE_FAMILY, config.MOE_FAMILY)
    gguf_architectures = ("qwen35", "qwen35moe")

    config_from_hf = staticmethod(config.config_from_hf)
    config_from_manifest = staticmethod(config.config_from_manifest)
    hf_config_from_gguf = staticmethod(gguf.hf_config_from_gguf)
    settle = staticmethod(weights.settle)
    place = staticmethod(weights.place)
    expected = staticmethod(weights.expected)
    experts = staticmethod(weights.experts)
    gguf_name = staticmethod(gguf.gguf_name)
    gguf_rows = staticmethod(gguf.gguf_rows)


FAMILY = _QwenFamily()


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
