"""Llama 2/3.x, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE: one decoder with switches."""

from importlib import import_module

from turbospark_mlx.families.llama import config, gguf, weights


class _LlamaFamily:
    """See ``turbospark_mlx.protocols.Family``."""

    name = "llama"
    model_types = tuple(config.MODEL_TYPES)
    manifest_families = ("llama", "qwen2", "qwen3", "qwen3moe")
    gguf_architectures = ("llama", "qwen2", "qwen3")

    config_from_hf = staticmethod(config.config_from_hf)
    config_from_manifest = staticmethod(config.config_from_manifest)
    hf_config_from_gguf = staticmethod(gguf.hf_config_from_gguf)
    place = staticmethod(weights.place)
    expected = staticmethod(weights.expected)
    experts = staticmethod(weights.experts)
    gguf_name = staticmethod(gguf.gguf_name)
    gguf_rows = staticmethod(gguf.gguf_rows)


FAMILY = _LlamaFamily()


def __getattr__(name: str):
    # Reading a configuration or placing a tensor needs no mlx; only the model does.
    if name == "Model":
        return import_module(f"{__name__}.model").Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
