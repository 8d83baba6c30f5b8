"""Decode and prefill beside mlx-lm and llama.cpp on the same weights, in one run, medians of interleaved repeats.

python benchmarks/decode.py                        # smollm2-135m, pulled if need be
python benchmarks/decode.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf   # llama.cpp too
python benchmarks/decode.py --model ./x.gturbo --prompt-tokens 128 --new-tokens 32 --repeats 5
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import mlx.core as mx
from peers import llama_cpp_model, llama_cpp_speeds, mlx_lm_model, mlx_lm_speeds

from turbospark_mlx import Runner
from turbospark_mlx.store import resolve

PASSAGE = Path(__file__).parents[1] / "tests" / "golden" / "alice.txt"


def our_speeds(runner: Runner, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second, greedy."""
    runner.reset()
    start = time.perf_counter()
    logits = runner.prefill(prompt)
    token = int(mx.argmax(logits))
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        token = int(mx.argmax(runner.decode(token)))
    return len(prompt) / (prefilled - start), new_tokens / (time.perf_counter() - prefilled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias or install directory")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gguf", type=Path, help="also measure llama.cpp on this file of the same model")
    args = parser.parse_args()

    path = resolve(args.model)
    runner = Runner.open(path)
    prompt = runner.tokenizer.encode(PASSAGE.read_text())[: args.prompt_tokens]
    subjects = {"turbospark-mlx": lambda: our_speeds(runner, prompt, args.new_tokens)}
    for label, dtype in (("mlx-lm float32", mx.float32), ("mlx-lm default", None)):
        model = mlx_lm_model(path, dtype)
        subjects[label] = lambda model=model: mlx_lm_speeds(model, prompt, args.new_tokens)

    if args.gguf:
        peer = llama_cpp_model(args.gguf, context=len(prompt) + args.new_tokens + 8)
        subjects["llama.cpp"] = lambda: llama_cpp_speeds(peer, prompt, args.new_tokens)

    speeds = {label: [] for label in subjects}
    for _ in range(args.repeats):
        for label, measure in subjects.items():
            speeds[label].append(measure())

    print(f"{path.name} on {mx.default_device()}, {platform.processor() or platform.machine()}; mlx {mx.__version__}")
    print(f"{len(prompt)} prompt tokens, {args.new_tokens} new tokens, median of {args.repeats} interleaved\n")
    print(f"{'':16} {'prefill tok/s':>14} {'decode tok/s':>14} {'ours / peer':>24}")
    medians = {
        label: [statistics.median(column) for column in zip(*runs, strict=True)] for label, runs in speeds.items()
    }
    ours = medians["turbospark-mlx"]
    for label, (prefill, decode) in medians.items():
        ratio = "" if label == "turbospark-mlx" else f"{ours[0] / prefill:8.2f}x / {ours[1] / decode:.2f}x"
        print(f"{label:16} {prefill:14.1f} {decode:14.2f} {ratio:>24}")


if __name__ == "__main__":
    main()
