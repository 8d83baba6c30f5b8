"""Models of a published shape with random weights, made in memory: for speeds that depend on the shape only.

Matrices are INT4; routers are not quantized, and routed experts, all in memory, are what the model is published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from turbospark_mlx import shaped
from turbospark_mlx.custom_kernels import BlobMatrix, ExpertArena, ExpertBlob
from turbospark_mlx.custom_kernels.backends import Backend, select
from turbospark_mlx.experts import ExpertStore, Resolved
from turbospark_mlx.experts.chunks import most_rows
from turbospark_mlx.experts.in_place import InPlace
from turbospark_mlx.families import family_for_model_type, package
from turbospark_mlx.loader import resolve_dtype
from turbospark_mlx.protocols import AffineFormat, ExpertSpec, Mxfp4Format, PackedFormat


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


def _fewer_experts(config: dict[str, Any], experts: int) -> dict[str, Any]:
    """As many are chosen for a token, so that it costs as much."""
    return config | {"text_config": config["text_config"] | {"num_experts": experts}}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen4-exp-64-experts": _fewer_experts(shaped.SHAPES["qwen4-exp-8-layers"], 64),
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
    **{
        name: shaped.SHAPES[name]
        for name in ("deepseek-v2-lite", "gemma4-26b-a4b", "gpt-oss-20b", "qwen3-30b-a3b", "spark-4b")
    },
}
STORED = AffineFormat(bits=4, group_size=64, companion_dtype="bfloat16")
CHUNK = 64 << 20


NOISE = np.random.default_rng(0).integers(0, 256, CHUNK, dtype=np.uint8)
SPREAD, FP4_SPREAD = 4.6, 2.93
"""Standard deviations of the sixteen values of INT4 and of MXFP4."""
BIAS = 0.1


def first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config.json dictionary of a model with the first ``layers`` layers of another."""
    if "text_config" in config:
        return config | {"text_config": first_layers(config["text_config"], layers)}
    kinds = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return config | {"num_hidden_layers": layers} | kinds


def bfloat16(values: np.ndarray | float) -> np.ndarray:
    """The bits of ``values``."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def fill(words: np.ndarray) -> None:
    """Every bit at random."""
    memory = words.reshape(-1).view(np.uint8)
    for start in range(0, memory.size, CHUNK):
        part = memory[start : start + CHUNK]
        part[:] = NOISE[: part.size]


class RandomExperts(ExpertStore):
    """Routed experts of random weights, all in memory, in blobs as an install has them."""

    def __init__(self, specs: Mapping[str, ExpertSpec], stored: PackedFormat, backend: Backend):
        """``specs`` has the path of each layer's experts."""
        resolved = Resolved("resident", "made up", 0, "", 0)
        super().__init__(None, resolved, backend=backend, policy="lfu", reader=None)
        self._specs, self._stored = specs, stored

    def __call__(self, position: int, spec: ExpertSpec) -> InPlace:
        offset = 0

        def place(nbytes: int) -> int:
            nonlocal offset
            offset += nbytes
            return offset - nbytes

        def matrix(name: str) -> BlobMatrix:
            rows, columns = spec.tensors[name]
            groups = rows * columns // self._stored.group_size
            parts = {"bits": self._stored.bits, "group_size": self._stored.group_size}
            parts["offset"] = place(rows * columns * self._stored.bits // 8)
            if isinstance(self._stored, Mxfp4Format):
                parts |= {"dtype": mx.uint8, "mode": "mxfp4", "scales": place(groups)}
            else:
                parts |= {"dtype": mx.bfloat16, "scales": place(2 * groups), "biases": place(2 * groups)}
            return BlobMatrix(
                rows, columns, **parts, bias=place(2 * rows) if spec.biases else None, bias_dtype=mx.bfloat16
            )

        matrices = [matrix(name) for name in ("gate", "up", "down")]
        blob = ExpertBlob(*matrices, activation=spec.activation, alpha=spec.alpha, limit=spec.limit)
        arena = ExpertArena.allocate(blob, spec.num_experts, -(-offset // 16384) * 16384)
        for slot in range(spec.num_experts):
            fill(arena.blobs[slot])
            for one, views in zip(matrices, arena.views(slot), strict=True):
                self._scale(one, views)
        self._most_rows = most_rows(spec.top_k, spec.hidden)
        self._layers[position] = made = InPlace(arena, self._backend)
        return made

    def _scale(self, matrix: BlobMatrix, views: list[np.ndarray]) -> None:
        """Products of numbers near 1 are near 1."""
        if matrix.mode == "mxfp4":
            views[1][...] = 127 + round(np.log2(matrix.columns**-0.5 / FP4_SPREAD))
        else:
            scale = matrix.columns**-0.5 / SPREAD
            views[1][...], views[2][...] = bfloat16(scale), bfloat16(-7.5 * scale)
        if matrix.bias is not None:
            views[-1][...] = bfloat16(BIAS)

    def parameters(self) -> dict[str, mx.array]:
        """Copies of all, stacked, under mlx-lm's names."""
        found = {}
        for position, path in enumerate(self._specs):
            arena = self._layers[position].arena
            for name, matrix, parts in zip(("gate", "up", "down"), arena.blob.matrices, arena.stacked, strict=True):
                names = ["weight", "scales", *(["biases"] if matrix.mode == "affine" else []), "bias"]
                found |= {
                    f"{path}.{name}_proj.{part}": mx.contiguous(array)
                    for part, array in zip(names, parts, strict=False)
                }
        return found

    @property
    def bytes_a_token(self) -> int:
        """What a token reads of its experts."""
        return sum(
            spec.top_k * prod(shape) * dtype.size
            for position, spec in enumerate(self._specs.values())
            for matrix in self._layers[position].arena.blob.matrices
            for _, shape, dtype in matrix.parts
        )

    def close(self) -> None:
        """There is nothing to stop."""


class RandomTable:
    """A table of as many rows as there should be, of which few differ."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape
        self._rows = np.random.default_rng(1).normal(size=(509, shape[1])).astype(np.float32)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self._rows[ids % len(self._rows)]


def _blank(config: dict[str, Any], backend: Backend, **options: Any) -> nn.Module:
    """Our model of a config.json dictionary; matrices in ``STORED``, routers and norms in its companions' dtype."""
    family = family_for_model_type(config["model_type"])
    parsed = family.config_from_hf(config)
    if hasattr(parsed, "centered_norms"):
        parsed = replace(parsed, centered_norms=False)
    formats, table = {}, None
    for name, shape in family.expected(parsed).items():
        place = family.place(name, parsed)
        table = RandomTable(shape) if place.table else table
        packed = len(shape) == 2 or place.role == "routed_expert"
        packed = packed and place.role not in ("router", "vector") and not name.endswith(".bias")
        formats[place.checkpoint_name] = STORED if packed else STORED.companion_dtype
    return package(family.name).Model(parsed, formats=formats, backend=backend, table=table, **options)


def plain_twin(model: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Our own model over the weights of one that `make_model` made, as plain ``mlx.nn`` modules: the peer where mlx-lm
    has no such model. On a CPU in float32, which is the fastest there."""
    twin = _blank(config, select("reference"), dtype=model.dtype, fused=False)
    twin.load_weights(list(arrays(model).items()))
    twin.set_dtype(model.dtype)
    mx.eval(twin.parameters())
    return twin


def make_model(config: dict[str, Any], backend: Backend) -> nn.Module:
    """A model of a config.json dictionary with random weights."""
    family = family_for_model_type(config["model_type"])
    specs = family.experts(family.config_from_hf(config))
    mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    experts = RandomExperts(specs, Mxfp4Format() if mxfp4 else STORED, backend) if specs else None
    model = _blank(config, backend, dtype=resolve_dtype(None, backend), experts=experts)
    parsed = model.args
    mx.eval(model.parameters())
    # Quantized values are uniform and weights have a mean of 0 and a spread that keeps activations near 1.
    scale = parsed.hidden_size**-0.5 / SPREAD
    constants = {"scales": scale, "biases": -7.5 * scale, "bias": BIAS}
    rng = np.random.default_rng(1)
    for name, array in tree_flatten(model.parameters()):
        memory, part = np.frombuffer(memoryview(array).cast("B"), np.uint8), name.rpartition(".")[2]
        if array.dtype == mx.uint32:
            fill(memory)
        elif array.ndim == 2 and part == "weight":
            memory.view(np.uint16)[:] = bfloat16(rng.normal(scale=parsed.hidden_size**-0.5, size=array.size))
        else:
            memory.view(np.uint16)[:] = bfloat16(constants.get(part, 1.0))
    return model


def arrays(model: nn.Module) -> dict[str, mx.array]:
    """The weights of a made-up model by name, its experts stacked."""
    experts = model.experts.parameters() if model.experts else {}
    return dict(tree_flatten(model.parameters())) | experts


def bytes_a_token(model: nn.Module, context: int) -> int:
    """What a decoded token reads at least: every weight but the rows of an embedding that is no head and the experts
    that were not chosen, and the cache."""
    config = model.args
    weights = sum(
        array.nbytes
        for name, array in tree_flatten(model.parameters())
        if config.tie_word_embeddings or "embed_tokens" not in name
    )
    if isinstance(model.experts, RandomExperts):
        weights += model.experts.bytes_a_token
    return weights + config.kv_bytes(context, model.dtype.size)
