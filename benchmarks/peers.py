"""The peers that benchmarks measure beside us, on the same weights."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from turbospark_mlx.gturbo import Install
from turbospark_mlx.protocols import AffineFormat

MODULES = {"mistral": "llama"}


def mlx_lm_model(path: Path, dtype: mx.Dtype | None = None) -> nn.Module:
    """mlx-lm's own model with the weights of an install.

    ``dtype`` is what the floating point parameters are cast to, companions included, as mlx-lm's users would; None
    keeps the stored ones, which is what ``mlx_lm.load`` does.
    """
    with Install.open(path) as install:
        config = json.loads(install.read_side_file("config.json"))
        module = import_module(f"mlx_lm.models.{MODULES.get(config['model_type'], config['model_type'])}")
        model = module.Model(module.ModelArgs.from_dict(config))
        prefix = "language_model."
        formats = {
            name.removeprefix(prefix).removesuffix(".weight"): entry.format
            for name, entry in install.tensors.items()
            if entry.format
        }
        nn.quantize(
            model,
            class_predicate=lambda name, _: (
                {"bits": formats[name].bits, "group_size": formats[name].group_size} if name in formats else False
            ),
        )
        weights = []
        for name, entry in install.tensors.items():
            name = name.removeprefix(prefix)
            if entry.format is None:
                weights.append((name, _raw(install.read(entry, "data"), entry.dtype, entry.shape)))
                continue
            rows, columns = entry.shape
            packed = mx.array(memoryview(install.read(entry, "data")).cast("I")).reshape(rows, -1)
            companions = entry.format.companion_dtype, (rows, columns // entry.format.group_size)
            weights.append((name, packed))
            for part in ("scales", "biases"):
                weights.append((name.removesuffix("weight") + part, _raw(install.read(entry, part), *companions)))
    model.load_weights(weights)
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def _raw(data: bytes, dtype: str, shape) -> mx.array:
    return mx.array(memoryview(data).cast("B")).view(getattr(mx, dtype)).reshape(shape)


def mlx_lm_twin(model: nn.Module, config: dict[str, Any], stored: AffineFormat, dtype: mx.Dtype | None) -> nn.Module:
    """mlx-lm's own model of a config.json dictionary with the weights of ours, whose matrices are in ``stored`` or, in
    experts, MXFP4; ``dtype`` as in `mlx_lm_model`."""
    module = import_module(f"mlx_lm.models.{MODULES.get(config['model_type'], config['model_type'])}")
    twin = module.Model(module.ModelArgs.from_dict(config))
    prefix = "language_model." if "language_model" in twin else ""
    weights = dict(tree_flatten(model.parameters()))
    if model.experts is not None:
        weights |= model.experts.parameters()
    weights = {prefix + name: array for name, array in weights.items()}

    def form(path: str, _: nn.Module) -> dict[str, Any] | bool:
        scales = weights.get(f"{path}.scales")
        if scales is None:
            return False
        if scales.dtype == mx.uint8:
            return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
        return {"bits": stored.bits, "group_size": stored.group_size}

    nn.quantize(twin, class_predicate=form)
    twin.load_weights(list(weights.items()))
    if dtype is not None:
        twin.set_dtype(dtype)
    mx.eval(twin.parameters())
    return twin


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
