"""Tiny random models: for tests, for examples, and for trying out a change in a second.

>>> from turbospark_mlx import Runner
>>> from turbospark_mlx.testing import make_tiny_install
>>> with Runner.open(make_tiny_install("llama", "/tmp/tiny.gturbo")) as runner:  # doctest: +SKIP
...     logits = runner.prefill(runner.tokenizer.encode("Hello"))

A variant is a configuration that reaches some switch of its family. Weights are random but never zero or one where that
would hide a fault: matrices have a spread of 0.15, norms are near 1, biases have a spread of 0.3.
``make_shaped_install`` writes installs of published models' sizes instead.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turbospark_mlx.errors import OptionError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.protocols import Placement
from turbospark_mlx.shaped import make_shaped_install as make_shaped_install

WINDOW = 8
"""The sliding window of every variant that has one."""

_DENSE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def _llama(**fields: Any) -> dict[str, Any]:
    return {"model_type": "llama", **_DENSE, **fields}


def _scaled(**scaling: Any) -> dict[str, Any]:
    return _llama(rope_scaling=scaling)


_MISTRAL = _llama(model_type="mistral", head_dim=32, sliding_window=WINDOW, rope_theta=1e6)
_QWEN2 = _llama(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)
_QWEN3 = _llama(model_type="qwen3", head_dim=32, rms_norm_eps=1e-6, rope_theta=1e6)
_MIXTRAL = _llama(model_type="mixtral", rope_theta=1e6, num_local_experts=4, num_experts_per_tok=2)
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

_GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def _gemma4(kinds: str, **fields: Any) -> dict[str, Any]:
    """``kinds`` has an s or an f for each layer."""
    return {
        "model_type": "gemma4",
        "vocab_size": 320,
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds],
            "sliding_window": WINDOW,
            "rope_parameters": _GEMMA4_ROPE,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 320,
            "enable_moe_block": False,
            **fields,
        },
    }


def _deepseek(version: int, **fields: Any) -> dict[str, Any]:
    """DeepSeek-V2-Lite or V3 in miniature. YaRN keeps some of the 4 pairs, blends and divides the others."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    scaled = {**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = {
        "model_type": f"deepseek_v{version}",
        **_DENSE,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 3,
        "num_key_value_heads": fields.get("num_attention_heads", 4),
        "max_position_embeddings": 2560,
        "rope_scaling": scaled,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    }
    if version == 3:
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
        config |= {"n_shared_experts": 1, "routed_scaling_factor": 2.5}
        config["rope_scaling"] = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {**config, **fields}


_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}


def _gpt_oss(**fields: Any) -> dict[str, Any]:
    config = {
        "model_type": "gpt_oss",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": True,
        "rope_theta": 150000,
        "rope_scaling": _GPT_OSS_YARN,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        **fields,
    }
    if config["rope_scaling"] is None:
        del config["rope_theta"], config["rope_scaling"]
    return config


def _muse(kinds: str, **fields: Any) -> dict[str, Any]:
    """``kinds`` has an s or an f for each layer, as a capital where it has rotary positions."""
    theta = fields.get("rope_parameters", {}).get("rope_theta", 500000.0)
    return {
        "model_type": "muse_glimmer",
        "text_config": {
            "model_type": "muse_glimmer_text",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "hidden_activation": "silu",
            "attention_bias": False,
            "layer_types": [{"s": "sliding_attention", "f": "full_attention"}[kind.lower()] for kind in kinds],
            "layer_rope_theta": [theta if kind.isupper() else 0 for kind in kinds],
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "sliding_window": WINDOW,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
            **fields,
        },
    }


def _qwen(kinds: str, experts: int = 0, **fields: Any) -> dict[str, Any]:
    """``kinds`` has an l or an f for each layer, and an f at the end of each period."""
    name = "qwen3_5_moe" if experts else "qwen3_5"
    blocks = {
        "num_experts": experts,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    }
    return {
        "model_type": name,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": f"{name}_text",
            "vocab_size": 320,
            "hidden_size": 64,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "layer_types": [{"l": "linear_attention", "f": "full_attention"}[kind] for kind in kinds],
            "full_attention_interval": kinds.index("f") + 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
            "tie_word_embeddings": False,
            **(blocks if experts else {"intermediate_size": 128}),
            **fields,
        },
    }


_SPARK_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.25},
}


def _spark(kinds: str, **fields: Any) -> dict[str, Any]:
    """``kinds`` has an s or an f for each layer."""
    return {
        "model_type": "spark2_5",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "headwise_attn_output_gate": True,
        "gate_attn_act_mode": "sigmoid",
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds],
        "sliding_window": WINDOW,
        "rope_parameters": _SPARK_ROPE,
        "tie_word_embeddings": True,
        **fields,
    }


# Scalings change only what lies past their original length, so that is 16 here and shows in short prompts.
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek2": {
        "deepseek-v2-lite": _deepseek(2),
        "deepseek-v2": _deepseek(
            2,
            num_attention_heads=3,
            q_lora_rank=64,
            v_head_dim=24,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=16.0,
            rope_scaling={
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.6,
            },
        ),
        "deepseek-v3": _deepseek(3, q_lora_rank=64, qk_nope_head_dim=64, n_group=4, topk_group=2),
        "deepseek-v3-flat": _deepseek(
            3, rope_scaling=None, moe_layer_freq=2, first_k_dense_replace=0, norm_topk_prob=False
        ),
        "deepseek-v3-halves": _deepseek(
            3,
            num_hidden_layers=2,
            num_attention_heads=5,
            rope_interleave=False,
            tie_word_embeddings=True,
            n_group=2,
            topk_group=1,
            rope_scaling=None,
            rope_theta=None,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    },
    "gemma4": {
        "gemma4-moe": _gemma4("sfsf", enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=64),
        "gemma4-dense": _gemma4("ssf"),
        "gemma4-small": _gemma4(
            "sfsfssf",
            attention_k_eq_v=False,
            num_global_key_value_heads=None,
            num_key_value_heads=1,
            num_kv_shared_layers=4,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=32,
        ),
        "gemma4-untied": _gemma4(
            "sf",
            tie_word_embeddings=False,
            final_logit_softcapping=None,
            attention_k_eq_v=False,
            hidden_size_per_layer_input=32,
            rope_parameters={**_GEMMA4_ROPE, "full_attention": {"rope_type": "default", "rope_theta": 5e5}},
        ),
    },
    "gpt_oss": {
        "gpt-oss": _gpt_oss(),
        "gpt-oss-truncated": _gpt_oss(
            num_attention_heads=6, num_key_value_heads=2, rope_scaling=_GPT_OSS_YARN | {"truncate": True}
        ),
        "gpt-oss-plain": _gpt_oss(
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            attention_bias=False,
            tie_word_embeddings=True,
            num_experts_per_tok=2,
            swiglu_alpha=1.3,
            swiglu_limit=0.75,
            rope_scaling=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    },
    "llama": {
        "llama": _llama(),
        "llama-tied": _llama(tie_word_embeddings=True),
        "llama-biases": _llama(attention_bias=True, mlp_bias=True),
        "llama-one-head": _llama(num_attention_heads=1, num_key_value_heads=1),
        "llama-three-heads": _llama(num_attention_heads=3, num_key_value_heads=1, head_dim=64),
        "llama-linear": _scaled(type="linear", factor=4.0),
        "llama-llama3": _scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        "llama-yarn": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        "llama-yarn-exact": _scaled(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            truncate=False,
            beta_fast=4.0,
            attention_factor=1.3,
        ),
        "llama-yarn-mscale": _scaled(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.3
        ),
        "llama-longrope": _scaled(
            rope_type="longrope",
            original_max_position_embeddings=16,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
        ),
        "mistral": _MISTRAL,
        "mistral-mixed": _MISTRAL | {"layer_types": ["sliding_attention", "full_attention"]},
        "qwen2": _QWEN2,
        "qwen2-windows": _QWEN2 | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "qwen3": _QWEN3,
        "qwen3-biases": _QWEN3 | {"attention_bias": True},
        "mixtral": _MIXTRAL,
        "mixtral-windows": _MIXTRAL | {"sliding_window": WINDOW},
        "qwen3-moe": _QWEN3_MOE,
        "qwen3-moe-sums": _QWEN3_MOE
        | {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    },
    "muse": {
        "muse-glimmer": _muse("SSSf"),
        "muse-glimmer-three-heads": _muse(
            "fSS",
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=64,
            rms_norm_eps=1e-3,
            qk_scale_factor=1.7,
            output_multiplier=1.5,
            final_logit_softcapping=5.0,
        ),
        "muse-glimmer-tied": _muse(
            "sFSf",
            num_attention_heads=6,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            post_norm_eps=1e-2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    },
    "qwen": {
        "qwen3.5": _qwen("llf", num_attention_heads=6, linear_num_value_heads=6),
        "qwen3.5-moe": _qwen("lf", experts=8),
        "qwen3.5-tied": _qwen(
            "lf",
            tie_word_embeddings=None,
            linear_num_key_heads=4,
            linear_key_head_dim=48,
            linear_conv_kernel_dim=2,
        )
        | {"tie_word_embeddings": True},
    },
    "spark": {
        "spark": _spark("sssf"),
        "spark-biases": _spark(
            "fss",
            num_attention_heads=6,
            num_key_value_heads=3,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        "spark-one-key": _spark(
            "sf",
            num_attention_heads=5,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            rope_parameters={
                "sliding_attention": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "full_attention": {"rope_theta": 10000.0},
            },
        ),
        "spark-full": _spark(
            "ff", head_dim=40, rope_parameters={"full_attention": _SPARK_ROPE["full_attention"]}, sliding_window=None
        ),
    },
}


def variants(family: str) -> tuple[str, ...]:
    """The names of a family's variants; the first is the default. Raises OptionError for an unknown family."""
    if family not in _VARIANTS:
        raise OptionError(f"family={family!r}: tiny models exist for {', '.join(_VARIANTS)}.")
    return tuple(_VARIANTS[family])


def tiny_config(family: str, variant: str | None = None) -> dict[str, Any]:
    """The config.json of a variant. Raises OptionError for names that do not exist."""
    names = variants(family)
    if variant is not None and variant not in names:
        raise OptionError(f"variant={variant!r}: the {family} family has {', '.join(names)}.")
    return json.loads(json.dumps(_VARIANTS[family][variant or names[0]]))


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of the model that ``config`` describes, by checkpoint name."""
    family = family_for_model_type(config["model_type"])
    parsed = family.config_from_hf(config)
    weights = {}
    for name, shape in family.expected(parsed).items():
        place = family.place(name, parsed)
        assert isinstance(place, Placement)
        values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        if place.role != "vector" and not name.endswith(".bias"):
            values *= 0.15
        elif re.search(r"norm(_\d)?\.weight$|scale$|scalar$", name):
            stored_less_1 = getattr(parsed, "centered_norms", False) and ".linear_attn." not in name
            values = 0.2 * values + (0 if stored_less_1 else 1)
        else:
            values *= 0.3
        weights[place.checkpoint_name] = values.astype(np.float32)
    return weights


def tiny_checkpoint(
    family: str,
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> Path:
    """Write a tiny checkpoint, as a hub repository has it, into the directory ``path``, which is made.

    It has config.json, generation_config.json, model.safetensors in ``dtype`` (``"bfloat16"``, ``"float16"`` or
    ``"float32"``), and a byte-level BPE tokenizer with a ChatML template. Returns the path.
    """
    import mlx.core as mx

    config = tiny_config(family, variant)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    arrays = {name: mx.array(a).astype(getattr(mx, dtype)) for name, a in tiny_weights(config, seed).items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "pt"})
    for name, data in tokenizer_files({**config, "torch_dtype": dtype}).items():
        (path / name).write_bytes(data)
    return path


def tokenizer_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a byte-level BPE tokenizer with a ChatML template; config.json too, with its end token."""
    eos = _SPECIAL.index("<|im_end|>")
    files = {
        "config.json": {**config, "eos_token_id": eos},
        "generation_config.json": {"eos_token_id": [eos, _SPECIAL.index("<|endoftext|>")]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
        },
    }
    return {
        **{name: json.dumps(content, indent=2).encode() for name, content in files.items()},
        "tokenizer.json": _tokenizer().to_str(pretty=True).encode(),
        "chat_template.jinja": _CHATML.encode(),
    }


def make_tiny_install(
    family: str,
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    seed: int = 0,
    bits: int | None = None,
    group_size: int | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Convert a tiny checkpoint into an install at ``path``, replacing one that is there; returns the path.

    ``bits`` and ``group_size`` are those of ``convert``: by default INT4 in groups of 64, 16 for no quantization.
    """
    from turbospark_mlx.convert import convert

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(family, Path(folder) / f"tiny-{family}", variant=variant, seed=seed, dtype=dtype)
        convert(checkpoint, path, bits=bits, group_size=group_size, overwrite=True, progress=False)
    return Path(path)


_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = "Ġ t,h e,Ġt he,i n,a n,Ġ a,o n,r e,e r,Ġa n,Ġan d,Ġ o,Ġo f,in g,Ġ c,l l,e ll,Ġ w"
_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _tokenizer() -> Any:
    """Byte-level BPE with a few merges of common English pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(pair.split(" ")) for pair in _MERGES.split(",")]
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer
