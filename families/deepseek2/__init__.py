"""DeepSeek-V2, V2-Lite, V2.5, V3 and R1: one decoder with latent attention and routed experts, by switches."""

from importlib import import_module

from turbospark_mlx.families.deepseek2 import config, gguf, weights


class _Deepseek2Family:
    """See ``turbospark_mlx.protocols.Family``."""

    name = "deepseek2"
    model_types = config.MODEL_TYPES
    manifest_families = ("deepseek2",)
    gguf_architectures = ("deepseek2",)

    config_from_hf = staticmethod(config.config_from_hf)
    config_from_manifest = staticmethod(config.config_from_manifest)
    hf_config_from_gguf = staticmethod(gguf.hf_config_from_gguf)
    settle = staticmethod(weights.settle)
    place = staticmethod(weights.place)
    expected = staticmethod(weights.expected)
    experts = staticmethod(weights.experts)
    gguf_name = staticmethod(gguf.gguf_name)
    gguf_rows = staticmethod(gguf.gguf_rows)


FAMILY = _Deepseek2Family()


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
