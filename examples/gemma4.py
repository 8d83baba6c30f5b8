"""Gemma 4, from an install to tokens: whose keys a layer reads, which experts a token meets, and what a window forgets.

python examples/gemma4.py                                    # makes a tiny random model: the workings, not English
python examples/gemma4.py --variant gemma4-small             # an E2B in miniature; --variant list shows them all
python examples/gemma4.py --model gemma-4-26b --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx import Runner
from turbospark_mlx.store import resolve
from turbospark_mlx.testing import make_tiny_install, variants


def describe(runner: Runner) -> None:
    """The layers, as far as they differ."""
    config = runner.model.args
    for number in range(config.num_hidden_layers):
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        source = config.kv_source(number)
        keys = (
            f"reads layer {source}'s" if source != number else "values are its keys" if config.k_is_v(number) else "own"
        )
        print(
            f"layer {number:2}: sees {sees:11} heads of {config.head_size(number)}, keys and values: {keys},"
            f" feed-forward {config.feed_forward_size(number)}"
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
        logits = runner.decode(tokens[-1])
    done = time.perf_counter()
    print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}")
    print(f"prompt {len(ids) / (prefilled - start):.1f} tokens/s, answer {count / (done - prefilled):.1f} tokens/s\n")
    return [*ids, *tokens]


def show_routing(runner: Runner, ids: list[int]) -> None:
    """Which experts the tokens meet: watch the routers of one pass by standing in for them."""
    seen: dict[int, mx.array] = {}

    class Watched(nn.Module):
        def __init__(self, number, router):
            super().__init__()
            self.number, self.router = number, router

        def __call__(self, x):
            indices, weights = self.router(x)
            seen[self.number] = indices
            return indices, weights

    layers = runner.model.layers
    routers = [layer.router for layer in layers]
    for number, layer in enumerate(layers):
        layer.router = Watched(number, layer.router)
    mx.eval(runner.model(mx.array([ids])))
    for layer, router in zip(layers, routers, strict=True):
        layer.router = router
    for number, indices in sorted(seen.items()):
        counts = Counter(indices.reshape(-1).tolist())
        most = ", ".join(f"{expert} ({uses}x)" for expert, uses in counts.most_common(4))
        print(
            f"layer {number:2}: {len(counts)} of {runner.model.args.num_experts} experts for {len(ids)} tokens: {most}"
        )
    print()


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """A prefix is reused as far as the windows still hold what it needs; a mark goes back to any point."""
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
        print("\n".join(variants("gemma4")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            path = resolve(args.model)
        else:
            path = make_tiny_install("gemma4", Path(folder) / "tiny.gturbo", variant=args.variant)
        with Runner.open(path) as runner:
            print(runner.report(), end="\n\n")
            describe(runner)
            ids = answer(runner, args.prompt, args.tokens)
            if runner.model.args.num_experts:
                show_routing(runner, ids)
            show_reuse(runner, ids)


if __name__ == "__main__":
    main()
