"""gpt-oss (20b and 120b): sliding and full attention in turns, attention sinks, routed experts with biases."""

from importlib import import_module

from turbospark_mlx.families.gpt_oss import config, gguf, weights


class _GptOssFamily:
    """See ``turbospark_mlx.protocols.Family``."""

    name = "gpt_oss"
    model_types = ("gpt_oss",)
    manifest_families = ("gptOss",)
    gguf_architectures = ("gpt-oss",)

    config_from_hf = staticmethod(config.config_from_hf)
    config_from_manifest = staticmethod(config.config_from_manifest)
    hf_config_from_gguf = staticmethod(gguf.hf_config_from_gguf)
    place = staticmethod(weights.place)
    expected = staticmethod(weights.expected)
    experts = staticmethod(weights.experts)
    gguf_name = staticmethod(gguf.gguf_name)
    gguf_rows = staticmethod(gguf.gguf_rows)


FAMILY = _GptOssFamily()


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
