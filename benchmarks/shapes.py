"""Models of a published shape with random INT4 weights, made in memory: for speeds that depend on the shape only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx import shaped as published
from turbospark_mlx.custom_kernels import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.experts.in_place import InPlace
from turbospark_mlx.families import family_for_model_type, package
from turbospark_mlx.families.layers import DTYPES
from turbospark_mlx.loader import resolve_dtype
from turbospark_mlx.protocols import AffineFormat, ExpertSpec


def _qwen(layers: int, **fields: Any) -> dict[str, Any]:
    """Qwen 3.5: three recurrent layers for each one with attention."""
    kind = "qwen3_5_moe" if "num_experts" in fields else "qwen3_5"
    return {
        "model_type": kind,
        "text_config": {
            "model_type": f"{kind}_text",
            "num_hidden_layers": layers,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
            "full_attention_interval": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248320,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "max_position_embeddings": 262144,
            **fields,
        },
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": _qwen(
        40,
        hidden_size=2048,
        num_attention_heads=16,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
    ),
    "qwen3.5-0.8b": _qwen(
        24,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=8,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
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


class MadeExperts:
    """Routed experts in memory, without an install: what a model and its runner ask of ``experts.ExpertStore``."""

    on_host, most_rows, resolved, counters = False, 1 << 30, None, ()

    def __init__(self, backend: Backend):
        self._backend, self.layers = backend, []

    def __call__(self, position: int, spec: ExpertSpec) -> InPlace:
        end, matrices = 0, []
        for rows, columns in spec.tensors.values():
            words = rows * columns * STORED.bits // 8
            group = rows * columns // STORED.group_size * 2
            places = {"offset": end, "scales": end + words, "biases": end + words + group}
            form = {"bits": STORED.bits, "group_size": STORED.group_size, "dtype": DTYPES[STORED.companion_dtype]}
            matrices.append(BlobMatrix(rows, columns, **places, **form))
            end += words + 2 * group
        blob = ExpertBlob(*matrices, spec.activation, spec.alpha, spec.limit)
        arena = ExpertArena.allocate(blob, spec.num_experts, -(-end // 64) * 64)
        noise = np.random.default_rng(position).integers(0, 256, CHUNK, dtype=np.uint8)
        for slot in range(spec.num_experts):
            for number, (matrix, parts) in enumerate(zip(blob.matrices, arena.views(slot), strict=True)):
                words, start = parts[0].view(np.uint8), 4096 * (3 * slot + number) + position
                words[...] = noise[start : start + words.size].reshape(words.shape)
                for part, value in zip(parts[1:], _companions(matrix.columns), strict=True):
                    part[...] = value
        self.layers.append(InPlace(arena, self._backend))
        return self.layers[-1]

    @property
    def arrays(self) -> list[mx.array]:
        return [layer.arena.array for layer in self.layers]

    def settle(self) -> None:
        """Nothing is read on the way."""

    close = settle


def _companions(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The bits of scale and bias in bfloat16: quantized values are uniform, and weights have a mean of 0 and a spread
    that keeps activations near 1."""
    scale = columns**-0.5 / 4.6
    return tuple(np.array(mx.array([value], mx.bfloat16).view(mx.uint16)) for value in (scale, -7.5 * scale))


def make_model(config: dict[str, Any], backend: Backend) -> nn.Module:
    """Our model of a config.json dictionary; matrices in ``STORED``, what is never packed in its companions' dtype, as
    mlx-lm saves it."""
    family = family_for_model_type(config["model_type"])
    parsed = family.config_from_hf(config)
    if config["model_type"].startswith("qwen3_5"):
        parsed = replace(parsed, centered_norms=False)
    places = [family.place(name, parsed) for name in family.expected(parsed)]
    formats = {place.checkpoint_name: STORED.companion_dtype if place.role == "vector" else STORED for place in places}
    experts = MadeExperts(backend) if family.experts(parsed) else None
    options = {"formats": formats, "backend": backend, "dtype": resolve_dtype(None, backend), "experts": experts}
    model = package(family.name).Model(parsed, **options)
    mx.eval(model.parameters())
    constants = dict(zip(("scales", "biases"), _companions(parsed.hidden_size), strict=True))
    one = np.array(mx.ones((1,), DTYPES[STORED.companion_dtype]).view(mx.uint16))
    noise = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)
    for name, array in tree_flatten(model.parameters()):
        memory = np.frombuffer(memoryview(array).cast("B"), np.uint8)
        if array.dtype == mx.uint32:
            for start in range(0, memory.size, CHUNK):
                part = memory[start : start + CHUNK]
                part[:] = noise[: part.size]
        else:
            memory.view(np.uint16)[:] = constants.get(name.rpartition(".")[2], one)
    return model


def named_arrays(model: nn.Module) -> dict[str, mx.array]:
    """The parameters of a made-up model, and its routed experts as stacks, which are copies: in blobs nobody else reads
    them."""
    found = dict(tree_flatten(model.parameters()))
    if model.experts is not None:
        paths = family_for_model_type(model.args.model_type).experts(model.args)
        for path, layer in zip(paths, model.experts.layers, strict=True):
            for matrix, parts in zip(("gate", "up", "down"), layer.arena.stacked, strict=True):
                for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
                    found[f"{path}.{matrix}_proj.{part}"] = mx.contiguous(array)
    return found


def bytes_a_token(model: nn.Module, context: int) -> int:
    """What a decoded token reads at least: every weight but the rows of an embedding that is no head and the experts
    that are not chosen, and the cache."""
    config = model.args
    weights = sum(
        array.nbytes
        for name, array in tree_flatten(model.parameters())
        if config.tie_word_embeddings or "embed_tokens" not in name
    )
    if model.experts is not None:
        weights += (
            sum(array.nbytes for array in model.experts.arrays) * config.num_experts_per_tok // config.num_experts
        )
    return weights + config.kv_bytes(context, model.dtype.size)
