"""The peers that benchmarks measure beside us, on the same weights."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.gturbo import Install
from turbospark_mlx.loader import load_model

MODULES = {
    "mistral": "llama",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""config.json's ``model_type`` -> mlx-lm's module, where that has another name."""
NOT_IN_MLX_LM = ("qwen4_exp",)
"""``model_type`` of models that mlx-lm does not have."""
PUBLISHED = {"spark2_5": {"embed_tokens": "embedding", "o_proj": "out_proj"}}
"""``model_type`` -> what mlx-lm calls modules that installs call otherwise."""


def mlx_lm_model(path: Path, dtype: mx.Dtype | None = None) -> nn.Module:
    """mlx-lm's own model with the weights of an install, routed experts included, all of them in memory.

    ``dtype`` is what the floating point parameters are cast to, companions included, as mlx-lm's users would; None
    keeps the stored ones, which is what ``mlx_lm.load`` does.
    """
    with Install.open(path) as install:
        config = json.loads(install.read_side_file("config.json"))
        model = load_model(install, backend=backends.select("reference"))
    return mlx_lm_twin(dict(tree_flatten(model.parameters())), config, dtype)


def mlx_lm_twin(
    arrays: Mapping[str, mx.array], config: Mapping[str, Any], dtype: mx.Dtype | None = None, module: str | None = None
) -> nn.Module:
    """mlx-lm's own model of a config.json dictionary over ``arrays``, which have the names of our parameters.

    Matrices are packed as they are in ``arrays``, except for those that mlx-lm's model cannot have packed so, which are
    dequantized. ``dtype`` as in `mlx_lm_model`; ``module`` is mlx-lm's, by default that of the ``model_type``.
    """
    peer = _blank(config, module or MODULES.get(config["model_type"], config["model_type"]))
    if dtype is not None:
        arrays = {n: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a for n, a in arrays.items()}
    arrays = _as_published(arrays, config)
    arrays = peer.sanitize(arrays) if hasattr(peer, "sanitize") else arrays
    columns = {name: array.shape[-1] for name, array in tree_flatten(peer.parameters())}
    modules, packings = dict(peer.named_modules()), {}
    for stem in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
        packing = _packing(arrays, stem, columns[f"{stem}.weight"])
        if hasattr(modules[stem], "to_quantized"):
            packings[stem] = packing
        else:
            _dequantize(arrays, stem, packing)
    nn.quantize(peer, class_predicate=lambda name, _: packings.get(name, False))
    peer.load_weights(list(arrays.items()))
    if dtype is not None:
        peer.set_dtype(dtype)
    mx.eval(peer.parameters())
    return peer


def _blank(config: Mapping[str, Any], module: str) -> nn.Module:
    """mlx-lm's model with weights of its own, of which none is ever computed."""
    module_type = import_module(f"mlx_lm.models.{module}")
    config = dict(config)
    text = dict(config.get("text_config", config))
    if module.startswith("qwen3_5"):
        tied = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
        config = {"model_type": module, "text_config": {**text, "tie_word_embeddings": tied}}
    elif module == "gemma4_text":
        config = text
    return module_type.Model(module_type.ModelArgs.from_dict(config))


def _as_published(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Under the names that mlx-lm's ``sanitize`` takes, and with what that would pack again dequantized."""
    arrays = dict(arrays)
    if renamed := PUBLISHED.get(config["model_type"]):
        return {".".join(renamed.get(part, part) for part in name.split(".")): a for name, a in arrays.items()}
    if config["model_type"] == "mixtral":
        return {name.replace(".mlp.", ".block_sparse_moe."): array for name, array in arrays.items()}
    if config["model_type"] == "deepseek_v3":
        for stem in [n.removesuffix(".scales") for n in arrays if n.endswith(".kv_b_proj.scales")]:
            _dequantize(arrays, stem, _packing(arrays, stem, config["kv_lora_rank"]))
        for name in [n for n in arrays if ".embed_q." in n or ".unembed_out." in n]:
            arrays[name] = arrays[name].reshape(config["num_attention_heads"], -1, arrays[name].shape[-1])
    return arrays


def _packing(arrays: Mapping[str, mx.array], stem: str, columns: int) -> dict[str, Any]:
    """How a matrix of ``columns`` columns is packed, in the words of ``mx.quantize``."""
    words, scales = arrays[f"{stem}.weight"], arrays[f"{stem}.scales"]
    return {
        "group_size": columns // scales.shape[-1],
        "bits": 32 * words.shape[-1] // columns,
        "mode": "mxfp4" if scales.dtype == mx.uint8 else "affine",
    }


def _dequantize(arrays: dict[str, mx.array], stem: str, packing: Mapping[str, Any]) -> None:
    parts = (arrays.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
    arrays[f"{stem}.weight"] = mx.dequantize(*parts, **packing)


def mlx_lm_speeds(model: nn.Module, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second, as mlx-lm's own generate loop runs them."""
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt), model, max_tokens=new_tokens + 1)
    start = time.perf_counter()
    next(steps)
    prefilled = time.perf_counter()
    for _ in steps:
        pass
    return len(prompt) / (prefilled - start), new_tokens / (time.perf_counter() - prefilled)


def llama_cpp_model(gguf: Path, context: int):
    """llama.cpp on a GGUF file, with as many threads as there are cores. Needs ``pip install llama-cpp-python``."""
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Llama(str(gguf), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)


def llama_cpp_speeds(model, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second, greedy."""
    model.reset()
    start = time.perf_counter()
    steps = model.generate(prompt, temp=0.0, reset=False)
    next(steps)
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        next(steps)
    return len(prompt) / (prefilled - start), new_tokens / (time.perf_counter() - prefilled)
