"""Decode and prefill beside mlx-lm and llama.cpp on the same weights, in one run, medians of interleaved repeats.

python benchmarks/decode.py                        # smollm2-135m, pulled if need be
python benchmarks/decode.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf   # llama.cpp too
python benchmarks/decode.py --model ./x.gturbo --prompt-tokens 128 --new-tokens 32 --repeats 5
python benchmarks/decode.py --shape llama-8b --new-tokens 128        # random INT4 weights made in memory: a GPU
python benchmarks/decode.py --shape gpt-oss-20b --new-tokens 128     # with MXFP4 experts, all in memory; also
                   # deepseek-v2-lite, gemma4-26b-a4b, qwen3-30b-a3b and qwen3.5-35b-a3b: twice for mlx-lm
python benchmarks/decode.py --shape qwen4-exp-64-experts   # beside its own plain modules: mlx-lm has no such model

The share is what a token must read at least (weights and cache) a second, of the memory bandwidth measured in the same
run. Host time is what a token takes beside waiting for the device.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
from measure import likeliest, memory_bandwidth
from peers import NOT_IN_MLX_LM, llama_cpp_model, llama_cpp_speeds, mlx_lm_model, mlx_lm_speeds, mlx_lm_twin
from shapes import SHAPES, arrays, bytes_a_token, first_layers, make_model, plain_twin

from turbospark_mlx import Runner
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.custom_kernels.backends.cuda_driver import Event
from turbospark_mlx.gturbo import Install
from turbospark_mlx.store import resolve

PASSAGE = Path(__file__).parents[1] / "tests" / "golden" / "alice.txt"
OURS = "turbospark-mlx"


def our_speeds(runner: Runner, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second, greedy."""
    runner.reset()
    start = time.perf_counter()
    token = likeliest(runner, runner.prefill(prompt))
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        token = likeliest(runner, runner.decode(token, ahead=True))
    return len(prompt) / (prefilled - start), new_tokens / (time.perf_counter() - prefilled)


def host_seconds(runner: Runner, prompt: list[int], new_tokens: int) -> float:
    """Seconds a decoded token that are not spent waiting for the device, in `mx.eval` or for a CUDA graph; the next
    token is known once that returns."""
    waited = 0.0

    def timed(wait: Callable) -> Callable:
        def run(*arguments) -> None:
            nonlocal waited
            start = time.perf_counter()
            wait(*arguments)
            waited += time.perf_counter() - start

        return run

    runner.reset()
    token = likeliest(runner, runner.prefill(prompt))
    # The first step is begun with its own token; those after it have been begun before.
    token = likeliest(runner, runner.decode(token, ahead=True))
    with mock.patch.object(mx, "eval", timed(mx.eval)), mock.patch.object(Event, "wait", timed(Event.wait)):
        start = time.perf_counter()
        for _ in range(new_tokens):
            token = likeliest(runner, runner.decode(token, ahead=True))
        return (time.perf_counter() - start - waited) / new_tokens


def bytes_of_experts(path: Path) -> int:
    """What a token reads of an install's routed experts, which are no parameters of the model."""
    with Install.open(path, verify="off") as install:
        return install.arch["topKExperts"] * sum(layer.size for layer in install.experts.layers)


def subjects_of_an_install(
    args: argparse.Namespace,
) -> tuple[str, Runner, list[int], dict[str, Callable[[], tuple[float, float]]]]:
    path = resolve(args.model)
    runner = Runner.open(path, kernels=args.kernels)
    prompt = runner.tokenizer.encode(PASSAGE.read_text())[: args.prompt_tokens]
    subjects = {OURS: lambda: our_speeds(runner, prompt, args.new_tokens)}
    for label, dtype in (("mlx-lm float32", mx.float32), ("mlx-lm default", None)):
        model = mlx_lm_model(path, dtype)
        subjects[label] = lambda model=model: mlx_lm_speeds(model, prompt, args.new_tokens)
    if args.gguf:
        peer = llama_cpp_model(args.gguf, context=len(prompt) + args.new_tokens + 8)
        subjects["llama.cpp"] = lambda: llama_cpp_speeds(peer, prompt, args.new_tokens)
    return path.name, runner, prompt, subjects


def subjects_of_a_shape(
    args: argparse.Namespace,
) -> tuple[str, Runner, list[int], dict[str, Callable[[], tuple[float, float]]]]:
    config, backend = SHAPES[args.shape], backends.select(args.kernels)
    if args.layers:
        config = first_layers(config, args.layers)
    model = make_model(config, backend)
    runner = Runner(model, max_context=args.prompt_tokens + args.new_tokens + 8)
    prompt = np.random.default_rng(1).integers(0, runner.vocab_size, args.prompt_tokens).tolist()
    subjects = {OURS: lambda: our_speeds(runner, prompt, args.new_tokens)}
    if config["model_type"] in NOT_IN_MLX_LM:
        plain = Runner(plain_twin(model, config), max_context=args.prompt_tokens + args.new_tokens + 8)
        subjects["plain mlx"] = lambda: our_speeds(plain, prompt, args.new_tokens)
    else:
        # On a CPU mlx-lm is faster in float32 than in the dtype of the weights.
        twin = mlx_lm_twin(arrays(model), config, mx.float32 if backend.device == "cpu" else None)
        subjects["mlx-lm"] = lambda: mlx_lm_speeds(twin, prompt, args.new_tokens)
    layers = f", {args.layers} layers" if args.layers else ""
    return f"{args.shape}{layers}, random weights", runner, prompt, subjects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="smollm2-135m", help="alias or install directory")
    what.add_argument("--shape", choices=tuple(SHAPES), help="a model of this shape, without an install")
    parser.add_argument("--layers", type=int, help="only so many layers of the shape")
    parser.add_argument("--kernels", default="auto", choices=backends.KERNELS, help="our back end")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gguf", type=Path, help="also measure llama.cpp on this file of the same model")
    args = parser.parse_args()
    if args.shape and args.gguf:
        parser.error("--gguf needs the same weights, which --shape makes up")
    if args.layers and not args.shape:
        parser.error("--layers is about a --shape")

    name, runner, prompt, subjects = (subjects_of_a_shape if args.shape else subjects_of_an_install)(args)
    on_gpu = runner.model.backend.device == "gpu"
    for measure in subjects.values():
        measure()
    speeds = {label: [] for label in subjects}
    for _ in range(args.repeats):
        for label, measure in subjects.items():
            speeds[label].append(measure())

    device = mx.device_info()["device_name"] if on_gpu else platform.processor() or platform.machine()
    print(f"{name} on {device}; mlx {mx.__version__}, {runner.model.backend.name}: {runner.model.backend.reason}")
    print(f"{len(prompt)} prompt tokens, {args.new_tokens} new tokens, median of {args.repeats} interleaved\n")
    print(f"{'':16} {'prefill tok/s':>14} {'decode tok/s':>14} {'ours / peer':>24}")
    medians = {
        label: [statistics.median(column) for column in zip(*runs, strict=True)] for label, runs in speeds.items()
    }
    ours = medians[OURS]
    for label, (prefill, decode) in medians.items():
        ratio = "" if label == OURS else f"{ours[0] / prefill:8.2f}x / {ours[1] / decode:.2f}x"
        print(f"{label:16} {prefill:14.1f} {decode:14.2f} {ratio:>24}")

    how, bandwidth = memory_bandwidth(1 << 30 if on_gpu else 1 << 28, on_gpu)
    read = bytes_a_token(runner.model, len(prompt) + args.new_tokens // 2)
    if not args.shape:
        read += bytes_of_experts(resolve(args.model))
    print(f"\na token reads {read / 1e9:.3f} GB; {how} {bandwidth / 1e9:.1f} GB/s")
    for label, (_, decode) in medians.items():
        print(f"{label:16} {read * decode / bandwidth:14.1%} of it")
    if on_gpu:
        print(f"{OURS:16} {host_seconds(runner, prompt, args.new_tokens) * 1e6:14.0f} us of host time a token")


if __name__ == "__main__":
    main()
