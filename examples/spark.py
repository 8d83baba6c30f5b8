"""Spark 2.5, from an install to tokens: how far each layer sees, how much of a head turns, and which heads are heard.

python examples/spark.py                                    # makes a tiny random model: the workings, not English
python examples/spark.py --variant spark-one-key            # other switches; --variant list shows them all
python examples/spark.py --model spark-x2.5-4b.gturbo --prompt "Why is the sky blue?" --tokens 200
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx import Runner
from turbospark_mlx.store import resolve
from turbospark_mlx.testing import make_tiny_install, variants


def describe(runner: Runner) -> None:
    config = runner.model.args
    for number, kind in enumerate(config.layer_types):
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        base = config.rope_theta if config.slides(number) else config.full_rope_theta
        print(
            f"layer {number:2}: sees {sees:12} turns {config.rotary_dims(kind)} of {config.head_dim} by base {base:g}"
        )
    print()


def answer(runner: Runner, prompt: str, count: int) -> list[int]:
    """Run a chat prompt, or plain text where the model has no template, and go on greedily."""
    tokenizer = runner.tokenizer
    if tokenizer.has_chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    start = time.perf_counter()
    logits = runner.prefill(ids)
    prefilled = time.perf_counter()
    tokens = []
    for _ in range(count):
        tokens.append(int(mx.argmax(logits)))
        if tokens[-1] in tokenizer.eos_token_ids:
            break
        logits = runner.decode(tokens[-1])
    done = time.perf_counter()
    print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}")
    print(
        f"prompt {len(ids) / (prefilled - start):.1f} tokens/s,"
        f" answer {len(tokens) / (done - prefilled):.1f} tokens/s\n"
    )
    return [*ids, *tokens]


def show_gates(runner: Runner, ids: list[int]) -> None:
    """How open the gates of heads are: watch one pass by standing in for the matrices that they come from."""
    seen: dict[int, mx.array] = {}

    class Watched(nn.Module):
        def __init__(self, number, matrix):
            super().__init__()
            self.number, self.matrix = number, matrix

        def __call__(self, x):
            seen[self.number] = self.matrix(x)
            return seen[self.number]

    attentions = [layer.self_attn for layer in runner.model.layers]
    matrices = [attention.g_proj for attention in attentions]
    for number, attention in enumerate(attentions):
        attention.g_proj = Watched(number, matrices[number])
    mx.eval(runner.model(mx.array([ids])))
    for attention, matrix in zip(attentions, matrices, strict=True):
        attention.g_proj = matrix
    for number, logits in sorted(seen.items()):
        means = mx.sigmoid(logits[0].astype(mx.float32)).mean(axis=0).tolist()
        print(f"layer {number:2}: gates of heads over {len(ids)} tokens: {', '.join(f'{mean:.2f}' for mean in means)}")
    print()


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """A mark goes back to any point; a prefix is reused as far as the windows still hold what it needs."""
    runner.reset()
    runner.prefill(ids)
    mark = runner.mark()
    before = runner.decode(ids[0])
    runner.decode(ids[1])
    runner.rollback(mark)
    again = runner.decode(ids[0])
    print(f"after a rollback the logits differ by {float(mx.abs(before - again).max()):g}")
    shared = len(ids) // 2
    other = [*ids[:shared], *(i ^ 1 for i in ids[shared:])]
    print(f"{runner.reuse(other)} of the first {shared} tokens that another prompt shares could be reused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="install, alias or repository; by default a tiny random one is made")
    parser.add_argument("--variant", help="of the tiny model, or 'list'")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    if args.variant == "list":
        print("\n".join(variants("spark")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            path = resolve(args.model)
        else:
            path = make_tiny_install("spark", Path(folder) / "tiny.gturbo", variant=args.variant)
        with Runner.open(path) as runner:
            print(runner.report(), end="\n\n")
            describe(runner)
            ids = answer(runner, args.prompt, args.tokens)
            show_gates(runner, ids)
            show_reuse(runner, ids)


if __name__ == "__main__":
    main()
