"""What GGUF files of the llama family say, in the terms of a published checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families.fields import Fields
from turbospark_mlx.families.llama.config import LlamaConfig
from turbospark_mlx.families.rope import DEFAULT_THETA
from turbospark_mlx.protocols import Dropped

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.scale": (),
    "attention.clamp_kqv": (),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "embedding_scale": (1,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (),
    "rope.dimension_sections": (),
}


def gguf_name(name: str, config: LlamaConfig) -> str | Dropped:
    """The checkpoint name of a GGUF tensor. Raises ConvertError for a name that the family does not know."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if name == "rope_freqs.weight":
        raise ConvertError(
            "GGUF: tensor rope_freqs.weight holds Llama 3's rotary scaling as bare numbers, which an install cannot"
            " state. Convert the published safetensors checkpoint instead."
        )
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{kind}"
    if found and found[2] == "attn_rot_embd":
        return Dropped("rotary frequencies, which follow from the configuration")
    raise ConvertError(f"GGUF: tensor {name!r} is not one of the {config.model_type} family.")


def gguf_rows(checkpoint_name: str, config: LlamaConfig) -> Sequence[int] | None:
    """The GGUF row of each installed row of q_proj and k_proj, weights and biases alike.

    Files of architecture ``llama`` interleave the two halves of each head, for a rotary embedding that pairs
    neighbours; installs keep the published order, which pairs halves. Files of the Qwen architectures keep it too.
    """
    projection = checkpoint_name.rsplit(".", 2)[-2]
    if config.model_type != "llama" or projection not in ("q_proj", "k_proj"):
        return None
    heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
    stored = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def hf_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json dictionary with the meaning of GGUF metadata. Raises ConvertError.

    Biases are not stated in GGUF metadata, so a llama file that has them is refused by tensor name.
    """
    architecture = Fields(metadata, "GGUF", ConvertError).text("general.architecture")
    prefix = f"{architecture}."
    fields = Fields(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
        f"GGUF: {architecture}",
        ConvertError,
    )
    for key, harmless in _HARMLESS_VALUES.items():
        fields.allow_only(key, harmless, "this family does not implement it.")
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.allow_only(key, (head_dim,), f"this family has heads of one size, {head_dim}, and rotates all of it.")
    config = {
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": _as_written(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(fields.number("rope.freq_base", DEFAULT_THETA)),
        "rope_scaling": _rope_scaling(fields),
    }
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = fields.size("vocab_size", len(tokens) if tokens is not None else None)
    return config


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none" and not fields.has("rope.scale_linear"):
        return None
    if kind in ("none", "linear"):
        factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", None))
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.refuse("rope.scaling.type", "GGUF files of this family may have none, linear or yarn.")
    return {
        "rope_type": "yarn",
        "factor": _as_written(fields.number("rope.scaling.factor")),
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _as_written(value: float) -> float:
    """The short decimal behind a number that GGUF keeps in 32 bits: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
