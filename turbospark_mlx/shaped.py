"""Installs of published models' sizes with random weights, to measure a machine before downloading a model.

Every product, every byte that is read, and every size is a real model's; only the text is nonsense. Weights are written
as they are made, so that memory stays small whatever the size. Routing is random too, and hits the slots of streamed
experts less often than text does.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbospark_mlx.convert.pipeline import write_source
from turbospark_mlx.convert.plan import Options
from turbospark_mlx.convert.source import AffineRows, Mxfp4Rows, Rows, Source, SourceTensor
from turbospark_mlx.errors import OptionError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat, Placement

_POOL_WORDS = 1 << 22
"""Random words that all matrices are cut from, at random places."""
_SPREAD = 0.5
"""Standard deviation of a matrix with one input column; it falls with the square root of their number."""
_FP4_SPREAD = 2.93
"""Standard deviation of MXFP4's sixteen values."""


def _gpt_oss(*, layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "gemma4-26b-a4b": {
        "model_type": "gemma4",
        "vocab_size": 262144,
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "sliding_window": 1024,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "spark-4b": {
        "model_type": "spark2_5",
        "vocab_size": 131072,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "headwise_attn_output_gate": True,
        "gate_attn_act_mode": "sigmoid",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 9,
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 5e6},
            "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
}


@dataclass(frozen=True)
class _Random:
    """Rows of the random tensor ``name``; the same for the same seed."""

    name: str
    place: Placement
    shape: tuple[int, ...]
    seed: int
    pool: np.ndarray
    mxfp4: bool = False

    @property
    def format(self) -> str | PackedFormat:
        if self.place.role == "vector" or self.name.endswith(".bias"):
            return "bfloat16"
        if self.mxfp4 and self.place.routed is not None:
            return Mxfp4Format()
        return AffineFormat(8 if self.place.role == "router" else 4, 64, "bfloat16")

    def read(self, start: int, stop: int) -> Rows:
        rows, columns = stop - start, self.shape[-1] if len(self.shape) > 1 else 1
        if self.format == "bfloat16":
            each = np.arange(start * columns, stop * columns, dtype=np.float32)
            return _bfloat16(1 + 0.1 * np.sin(each)).reshape(rows, columns)
        bits, words = self.format.bits, columns * self.format.bits // 32
        first = zlib.crc32(f"{self.seed} {self.name} {start}".encode()) % (len(self.pool) - rows * words)
        packed = self.pool[first : first + rows * words].reshape(rows, words)
        if isinstance(self.format, Mxfp4Format):
            exponent = 127 + round(np.log2(_SPREAD / np.sqrt(columns) / _FP4_SPREAD))
            return Mxfp4Rows(packed, np.full((rows, columns // Mxfp4Format.group_size), exponent, np.uint8))
        # A uniform value of ``bits`` bits has this spread around its mean.
        scale = _SPREAD / np.sqrt(columns) / np.sqrt((4**bits - 1) / 12)
        scales = np.full((rows, columns // 64), scale, np.float32)
        return AffineRows(
            packed,
            _bfloat16(scales),
            _bfloat16(-scales * (2**bits - 1) / 2),
        )


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_source(config: Mapping[str, Any], name: str, *, seed: int, side_files: Mapping[str, bytes]) -> Source:
    """A source of random INT4 weights for the model of ``config``, a config.json; routers have 8 bits, and experts are
    MXFP4 where it says so."""
    family = family_for_model_type(config["model_type"])
    parsed = family.config_from_hf(config)
    pool = np.random.default_rng(seed).integers(0, 1 << 32, _POOL_WORDS, dtype=np.uint32)
    mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    tensors = {}
    for tensor, shape in family.expected(parsed).items():
        made = _Random(tensor, family.place(tensor, parsed), shape, seed, pool, mxfp4)
        tensors[tensor] = SourceTensor(shape, made.format, f"random {tensor}", made.read)
    return Source("random weights", f"random/{name}", family, parsed, tensors, dict(side_files))


def make_shaped_install(
    name: str, path: str | os.PathLike[str], *, seed: int = 0, progress: bool = True, overwrite: bool = False
) -> Path:
    """Write an install of the sizes of the published model ``name`` (a key of ``SHAPES``) to ``path``; returns it.

    Weights are random, INT4 in groups of 64, or MXFP4 in the experts of gpt-oss; the tokenizer is the tiny one, so that
    answers are bytes. It takes the model's size on disk (14 GB for ``"gemma4-26b-a4b"``), a few hundred MB of memory,
    and the time to write and hash it. Raises OptionError for an unknown name, ConvertError where the disk is too small
    or ``path`` is taken.
    """
    from turbospark_mlx.testing import tokenizer_files

    if name not in SHAPES:
        raise OptionError(f"shape {name!r}: known are {', '.join(SHAPES)}.")
    config = json.loads(json.dumps(SHAPES[name]))
    source = random_source(config, name, seed=seed, side_files=tokenizer_files(config))
    with source:
        write_source(source, Path(path), Options(), overwrite=overwrite, progress=progress)
    return Path(path)
