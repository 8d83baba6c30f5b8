"""Tiny GGUF files, written by the gguf package."""

from pathlib import Path

import gguf
import numpy as np

from .checkpoints import shapes, weights

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection as llama GGUF files have them: the two halves of each head, zipped."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(array.shape)


def published(array: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of ``interleaved``."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(array.shape)


def quantize(array: np.ndarray, type: str) -> np.ndarray:
    """The stored bytes of a matrix in a GGUF type."""
    return gguf.quants.quantize(array, gguf.GGMLQuantizationType[type])


def write_gguf(
    path: Path,
    config: dict,
    types: dict[str, str],
    *,
    default: str = "F32",
    values: dict[str, np.ndarray] | None = None,
    stored: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    extra=lambda writer: None,
    dequantize: bool = True,
) -> dict[str, np.ndarray]:
    """Write a GGUF file; ``types`` gives the type of tensors by published name, ``stored`` their bytes outright.

    Returns the float32 values by published name and in published row order, as gguf dequantizes what was written.
    """
    values = weights(config) if values is None else values
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"<{n}>" for n in range(3, config["vocab_size"]))])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    extra(writer)
    exact = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, shape in shapes(config).items():
        array = values[name]
        projection = name.split(".")[-2]
        permuted = architecture == "llama" and projection in heads
        if permuted:
            array = interleaved(array, heads[projection])
        type = "F32" if len(shape) == 1 else types.get(name, default)
        kind = gguf.GGMLQuantizationType[type]
        data = (stored or {}).get(name)
        if data is None:
            data = array if type == "F32" else quantize(array, type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        if not dequantize:
            continue
        with np.errstate(invalid="ignore"):
            dequantized = gguf.quants.dequantize(np.asarray(data), kind).reshape(shape)
        if permuted:
            dequantized = published(dequantized, heads[projection])
        exact[name] = dequantized
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact
