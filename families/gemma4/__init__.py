"""Gemma 4: the Mixture-of-Experts 26B-A4B, the dense sizes, and E2B and E4B, one decoder with switches."""

from importlib import import_module

from turbospark_mlx.families.gemma4 import config, gguf, weights


class _Gemma4Family:
    """See ``turbospark_mlx.protocols.Family``."""

    name = "gemma4"
    model_types = (*config.WRAPPED_TYPES, *config.TEXT_TYPES)
    manifest_families = ("gemma4",)
    gguf_architectures = ("gemma4",)

    config_from_hf = staticmethod(config.config_from_hf)
    config_from_manifest = staticmethod(config.config_from_manifest)
    hf_config_from_gguf = staticmethod(gguf.hf_config_from_gguf)
    place = staticmethod(weights.place)
    expected = staticmethod(weights.expected)
    experts = staticmethod(weights.experts)
    gguf_name = staticmethod(gguf.gguf_name)
    gguf_rows = staticmethod(gguf.gguf_rows)


FAMILY = _Gemma4Family()


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
