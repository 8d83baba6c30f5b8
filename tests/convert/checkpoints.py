"""Tiny random checkpoints of every kind, and a reader of installs that shares no code with the package.

Weights are float32 arrays under published names. bfloat16 is stored as uint16 everywhere.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from turbospark_mlx.convert import convert
from turbospark_mlx.errors import ConvertError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode()
_SAFETENSORS_DTYPES = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2")}
PREFIX = "language_model."


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    result = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        result |= {
            f"{base}.self_attn.q_proj.weight": (queries, hidden),
            f"{base}.self_attn.k_proj.weight": (keys, hidden),
            f"{base}.self_attn.v_proj.weight": (keys, hidden),
            f"{base}.self_attn.o_proj.weight": (hidden, queries),
            f"{base}.mlp.gate_proj.weight": (wide, hidden),
            f"{base}.mlp.up_proj.weight": (wide, hidden),
            f"{base}.mlp.down_proj.weight": (hidden, wide),
            f"{base}.input_layernorm.weight": (hidden,),
            f"{base}.post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen2":
            biased = {"q": queries, "k": keys, "v": keys}
            result |= {f"{base}.self_attn.{name}_proj.bias": (rows,) for name, rows in biased.items()}
    result["model.norm.weight"] = (hidden,)
    if config.get("tie_word_embeddings") is False:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.15 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes(config).items()
    }


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Nearest even, by the textbook route: float64 mantissa arithmetic instead of bit tricks."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    rounded = np.ldexp(np.rint(fraction * 256), exponent - 8).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16(values) if dtype == "bfloat16" else values.astype(_SAFETENSORS_DTYPES[dtype][1])


def safetensors_bytes(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """The file of ``{name: (safetensors dtype, stored array)}``."""
    header, payload = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def plain(tensors: dict[str, np.ndarray], dtype: str = "bfloat16") -> dict[str, tuple[str, np.ndarray]]:
    return {name: (_SAFETENSORS_DTYPES[dtype][0], store(values, dtype)) for name, values in tensors.items()}


def write_checkpoint(
    directory: Path, config: dict, tensors: dict[str, tuple[str, np.ndarray]], *, shards: int = 1
) -> Path:
    """A Hugging Face directory of stored tensors, in one file or in numbered shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        (directory / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def mlx_quantized(
    tensors: dict[str, np.ndarray], formats: dict[str, tuple[int, int]], dtype: str = "bfloat16"
) -> dict[str, tuple[str, np.ndarray]]:
    """What mlx-lm saves: ``formats`` gives (bits, group size) of the matrices that are packed, by tensor name."""
    import mlx.core as mx

    result = {}
    for name, values in tensors.items():
        if name not in formats:
            result |= plain({name: values}, dtype)
            continue
        bits, group_size = formats[name]
        with mx.stream(mx.cpu):
            packed = mx.quantize(mx.array(values).astype(getattr(mx, dtype)), group_size=group_size, bits=bits)
            words, scales, biases = (
                np.array(part.view(mx.uint16 if i and dtype != "float32" else mx.uint32))
                for i, part in enumerate(packed)
            )
        stem = name.removesuffix(".weight")
        result[name] = ("U32", words)
        result[f"{stem}.scales"] = (_SAFETENSORS_DTYPES[dtype][0], scales)
        result[f"{stem}.biases"] = (_SAFETENSORS_DTYPES[dtype][0], biases)
    return result


def read_install(directory: Path) -> dict[str, dict]:
    """Every resident tensor of an install by name: tag, shape, and the bytes of data, scales and biases."""
    raw = (directory / "model_weights.bin").read_bytes()
    count = struct.unpack_from("<QQQ", raw)[2]
    tensors = {}
    for number in range(count):
        entry = struct.unpack_from("<IHBBQQ4IQQQQ", raw, 24 + 72 * number)
        name_at, name_bytes, tag, _, at, size, *shape = entry[:10]
        scales_at, scales_size, biases_at, biases_size = entry[10:]
        tensors[raw[name_at : name_at + name_bytes].decode()] = {
            "tag": tag,
            "shape": tuple(n for n in shape if n),
            "data": raw[at : at + size],
            "scales": raw[scales_at : scales_at + scales_size],
            "biases": raw[biases_at : biases_at + biases_size],
        }
    return tensors


def read_formats(directory: Path) -> dict[str, tuple[int, int, str]]:
    """(bits, group size, companion dtype) of the tensors whose tag does not say."""
    manifest = json.loads((directory / "manifest.json").read_text())
    tensors = manifest.get("turbosparkMlx", {}).get("tensors", {})
    return {name: (t["bits"], t["groupSize"], t["companionDtype"]) for name, t in tensors.items()}


def run(source, dest, **options):
    return convert(source, dest, progress=False, **options)


def refused(source, tmp_path, *words, **options):
    """The conversion is refused with an error that has these words, and leaves nothing behind."""
    with pytest.raises(ConvertError) as caught:
        run(source, tmp_path / "out.gturbo", **options)
    for word in words:
        assert word in str(caught.value)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out.gturbo")]
