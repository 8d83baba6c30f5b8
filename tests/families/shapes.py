"""More shapes than ``turbospark_mlx.testing`` has variants: published models in miniature, and awkward ones.

They are compared with transformers' logits (``tests/golden/make_transformers.py``), in numbers that the variants do not
have: odd counts of heads, experts and taps, windows of 5, widths that no power of two divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from tests.families.oracles import PROMPT
from turbospark_mlx.testing import tiny_config, tiny_weights, variants


def changed(family: str, variant: str, **fields: Any) -> dict[str, Any]:
    """A variant's config.json with other ``fields``, in ``text_config`` where there is one."""
    config = tiny_config(family, variant)
    text = config.get("text_config", config)
    text |= fields
    config |= {key: text[key] for key in ("vocab_size", "tie_word_embeddings") if key in config and key in text}
    return config


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder's configuration alone, as text-only checkpoints have it."""
    return config["text_config"]


_YARN_V2 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_IN_FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_BY_TURNS = ["sliding_attention", "full_attention"]
_GEMMA4_ROPE = tiny_config("gemma4")["text_config"]["rope_parameters"]

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek2": {
        "v2-lite": changed("deepseek2", "deepseek-v2-lite", vocab_size=256, v_head_dim=16),
        "v2": changed(
            "deepseek2",
            "deepseek-v2",
            vocab_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            v_head_dim=16,
            rope_scaling={**_YARN_V2, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        "v3": changed("deepseek2", "deepseek-v3", vocab_size=256),
        # Scores of all experts are negative once their biases are added (see `shape_weights`).
        "v3-below-zero": changed("deepseek2", "deepseek-v3", num_experts_per_tok=4, topk_group=3),
        "v2-odd": changed(
            "deepseek2",
            "deepseek-v2",
            hidden_size=96,
            num_attention_heads=3,
            num_key_value_heads=3,
            qk_nope_head_dim=20,
            qk_rope_head_dim=12,
            kv_lora_rank=40,
            q_lora_rank=None,
            n_routed_experts=9,
            n_group=3,
            n_shared_experts=1,
            tie_word_embeddings=True,
            rope_scaling=None,
        ),
        "v3-odd": changed(
            "deepseek2",
            "deepseek-v3",
            hidden_size=80,
            num_attention_heads=5,
            num_key_value_heads=5,
            q_lora_rank=24,
            n_routed_experts=5,
            num_experts_per_tok=1,
            n_shared_experts=3,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            first_k_dense_replace=2,
            rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_slow": 2},
        ),
    },
    "gemma4": {
        "moe": changed("gemma4", "gemma4-moe", vocab_size=256, top_k_experts=2),
        "dense": changed("gemma4", "gemma4-dense", vocab_size=256),
        "shared": changed(
            "gemma4",
            "gemma4-small",
            vocab_size=256,
            vocab_size_per_layer_input=256,
            num_hidden_layers=4,
            layer_types=2 * _BY_TURNS,
            intermediate_size=64,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=64,
        ),
        "odd-moe": changed(
            "gemma4",
            "gemma4-moe",
            hidden_size=96,
            num_attention_heads=3,
            num_key_value_heads=3,
            num_global_key_value_heads=1,
            head_dim=24,
            global_head_dim=40,
            sliding_window=5,
            num_experts=5,
            top_k_experts=5,
            moe_intermediate_size=32,
            hidden_size_per_layer_input=32,
            final_logit_softcapping=None,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            rope_parameters={
                **_GEMMA4_ROPE,
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
            },
        ),
        "odd-shared": changed(
            "gemma4",
            "gemma4-small",
            num_attention_heads=5,
            num_key_value_heads=5,
            sliding_window=5,
            num_hidden_layers=6,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"]
            + 2 * ["full_attention"]
            + _BY_TURNS[1:],
            num_kv_shared_layers=3,
            use_double_wide_mlp=False,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=16,
            final_logit_softcapping=7.5,
        ),
    },
    "gpt_oss": {
        "published": changed(
            "gpt_oss",
            "gpt-oss",
            vocab_size=256,
            intermediate_size=64,
            num_hidden_layers=4,
            layer_types=2 * _BY_TURNS,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_scaling={**_GPT_OSS_YARN, "original_max_position_embeddings": 64},
        ),
        "all-slide": changed(
            "gpt_oss",
            "gpt-oss",
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=24,
            layer_types=2 * ["sliding_attention"],
            sliding_window=5,
            attention_bias=False,
            num_local_experts=5,
            num_experts_per_tok=1,
            rope_scaling={**_GPT_OSS_YARN, "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        "none-slides": changed(
            "gpt_oss",
            "gpt-oss",
            hidden_size=96,
            num_attention_heads=9,
            num_key_value_heads=3,
            layer_types=2 * ["full_attention"],
            tie_word_embeddings=True,
            num_local_experts=3,
            rope_scaling={**_GPT_OSS_YARN, "original_max_position_embeddings": 32, "truncate": True, "beta_fast": 8.0},
        ),
    },
    "llama": {
        "mixtral-published": changed("llama", "mixtral", vocab_size=256, intermediate_size=64),
        "mixtral-odd": changed(
            "llama",
            "mixtral",
            hidden_size=96,
            num_attention_heads=3,
            num_key_value_heads=1,
            sliding_window=5,
            num_local_experts=5,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
        ),
        "mixtral-all": changed("llama", "mixtral", num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=4),
        "qwen3-moe-published": changed("llama", "qwen3-moe", vocab_size=256, num_experts_per_tok=2),
        "qwen3-moe-odd": changed(
            "llama",
            "qwen3-moe",
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=24,
            attention_bias=True,
            num_experts=7,
            num_experts_per_tok=1,
            norm_topk_prob=False,
            mlp_only_layers=[],
            tie_word_embeddings=True,
        ),
        "qwen3-moe-windows": changed(
            "llama",
            "qwen3-moe",
            num_attention_heads=3,
            num_key_value_heads=3,
            use_sliding_window=True,
            sliding_window=5,
            num_experts=3,
            mlp_only_layers=[0],
        ),
    },
    "qwen": {
        "dense": changed(
            "qwen",
            "qwen3.5",
            vocab_size=256,
            num_hidden_layers=4,
            layer_types=_IN_FOUR,
            full_attention_interval=4,
            num_attention_heads=4,
            linear_key_head_dim=32,
            rope_parameters=_QWEN_ROPE,
        ),
        "moe": changed(
            "qwen",
            "qwen3.5-moe",
            vocab_size=256,
            num_hidden_layers=4,
            layer_types=_IN_FOUR,
            full_attention_interval=4,
            linear_key_head_dim=32,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=64,
            rope_parameters=_QWEN_ROPE,
        ),
        "odd": unwrapped(
            changed(
                "qwen",
                "qwen3.5",
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=24,
                linear_num_key_heads=3,
                linear_num_value_heads=9,
                linear_key_head_dim=24,
                linear_value_head_dim=20,
                linear_conv_kernel_dim=3,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            )
        ),
        "odd-moe": unwrapped(
            changed(
                "qwen",
                "qwen3.5-moe",
                num_attention_heads=5,
                num_key_value_heads=5,
                num_hidden_layers=3,
                layer_types=["full_attention", "linear_attention", "linear_attention"],
                full_attention_interval=None,
                linear_num_key_heads=1,
                linear_num_value_heads=5,
                linear_conv_kernel_dim=5,
                num_experts=5,
                num_experts_per_tok=1,
                shared_expert_intermediate_size=96,
                rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            )
        ),
    },
}

NOT_IN_TRANSFORMERS = {
    "deepseek-v2": "it has 3 heads, which do not divide the hidden size: v2-odd has, too",
    "deepseek-v3-flat": "transformers disregards moe_layer_freq",
    "llama-three-heads": "its 3 heads do not divide the hidden size",
    "mistral-mixed": "transformers' Mistral disregards layer_types",
}
"""Variants that transformers does not compute, and why."""

EVERY = [
    (family, name)
    for family, own in SHAPES.items()
    for name in (*variants(family), *own)
    if name not in NOT_IN_TRANSFORMERS
]


def shape_config(family: str, name: str) -> dict[str, Any]:
    """config.json of a variant or of a shape."""
    return deepcopy(SHAPES[family][name]) if name in SHAPES[family] else tiny_config(family, name)


def shape_weights(family: str, name: str) -> dict[str, np.ndarray]:
    """Its weights by checkpoint name, reproducible with numpy alone."""
    weights = tiny_weights(shape_config(family, name))
    if name == "v3-below-zero":
        for parameter in weights:
            weights[parameter] = weights[parameter] - np.float32(parameter.endswith("e_score_correction_bias"))
    return weights


def prompt_of(config: Mapping[str, Any]) -> list[int]:
    """65 ids of the vocabulary: one more than a chunk of 64."""
    vocabulary = config.get("text_config", config)["vocab_size"]
    return [token % vocabulary for token in PROMPT]
