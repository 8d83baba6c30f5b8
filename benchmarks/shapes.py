"""Models of a published shape with random INT4 weights, made in memory: for speeds that depend on the shape only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx import shaped as published
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.families import family_for_model_type, package
from turbospark_mlx.families.layers import DTYPES
from turbospark_mlx.loader import resolve_dtype
from turbospark_mlx.protocols import AffineFormat

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "muse-30b": {
        "model_type": "muse_glimmer",
        "num_hidden_layers": 52,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 202048,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87,
        "output_multiplier": 26**-0.5,
        "final_logit_softcapping": 20.0,
        "sliding_window": 2048,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 13,
        "layer_rope_theta": [*[500000.0] * 3, 0] * 13,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "spark-4b": published.SHAPES["spark-4b"],
}
STORED = AffineFormat(bits=4, group_size=64, companion_dtype="bfloat16")
CHUNK = 64 << 20


def make_model(config: dict[str, Any], backend: Backend) -> nn.Module:
    """Our model of a config.json dictionary; matrices in ``STORED``, what is never packed in its companions' dtype."""
    family = family_for_model_type(config["model_type"])
    parsed = family.config_from_hf(config)
    places = [family.place(name, parsed) for name in family.expected(parsed)]
    formats = {place.checkpoint_name: STORED.companion_dtype if place.role == "vector" else STORED for place in places}
    model = package(family.name).Model(parsed, formats=formats, backend=backend, dtype=resolve_dtype(None, backend))
    mx.eval(model.parameters())
    # Quantized values are uniform and weights have a mean of 0 and a spread that keeps activations near 1.
    scale = parsed.hidden_size**-0.5 / 4.6
    constants = {"scales": scale, "biases": -7.5 * scale}
    noise = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)
    for name, array in tree_flatten(model.parameters()):
        memory = np.frombuffer(memoryview(array).cast("B"), np.uint8)
        if array.dtype == mx.uint32:
            for start in range(0, memory.size, CHUNK):
                part = memory[start : start + CHUNK]
                part[:] = noise[: part.size]
        else:
            value = mx.full((1,), constants.get(name.rpartition(".")[2], 1.0), DTYPES[STORED.companion_dtype])
            memory.view(np.uint16)[:] = np.array(value.view(mx.uint16))
    return model


def bytes_a_token(model: nn.Module, context: int) -> int:
    """What a decoded token reads at least: every weight but the rows of an embedding that is no head, and the cache."""
    config = model.args
    weights = sum(
        array.nbytes
        for name, array in tree_flatten(model.parameters())
        if config.tie_word_embeddings or "embed_tokens" not in name
    )
    return weights + config.kv_bytes(context, model.dtype.size)
