"""Muse Glimmer, from an install to tokens: which layers know positions, what gates let through, what a window keeps.

python examples/muse.py                                    # makes a tiny random model: the workings, not English
python examples/muse.py --variant muse-glimmer-tied        # other sizes and switches; --variant list shows them all
python examples/muse.py --model muse-30b.gturbo --prompt "Why is the sky blue?" --tokens 2048
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
    """The layers, and what a sequence costs."""
    config = runner.model.args
    for number in range(config.num_hidden_layers):
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        print(f"layer {number:2}: sees {sees}, {'rotates' if config.rotates[number] else 'knows no positions'}")
    for context in (1024, 131072):
        print(f"keys and values of {context:6} tokens: {config.kv_bytes(context, 2) / 1e6:.2f} MB in half precision")
    print()


def answer(runner: Runner, prompt: str, count: int) -> list[int]:
    """Run a chat prompt, or plain text where the model has no template, and go on greedily to the end of the turn."""
    tokenizer = runner.tokenizer
    if tokenizer.has_chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    start = time.perf_counter()
    logits = runner.prefill(ids)
    prefilled = time.perf_counter()
    tokens = []
    while len(tokens) < count and not tokenizer.eos_token_ids.intersection(tokens[-1:]):
        tokens.append(int(mx.argmax(logits)))
        logits = runner.decode(tokens[-1])
    done = time.perf_counter()
    print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}")
    print(
        f"prompt {len(ids) / (prefilled - start):.1f} tokens/s, answer {len(tokens) / (done - prefilled):.1f} tokens/s"
    )
    print(f"decode step: {runner.report().decode_step}\n")
    return [*ids, *tokens]


def show_gates(runner: Runner, ids: list[int]) -> None:
    """How far the gates of each layer are open, on average: watch one pass by standing in for their projections."""

    class Watched(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.gate, self.seen = gate, None

        def __call__(self, x):
            self.seen = self.gate(x)
            return self.seen

    layers = runner.model.layers
    for layer in layers:
        layer.self_attn.gate_proj = Watched(layer.self_attn.gate_proj)
    mx.eval(runner.model(mx.array([ids])))
    for number, layer in enumerate(layers):
        watched = layer.self_attn.gate_proj
        layer.self_attn.gate_proj = watched.gate
        opened = mx.sigmoid(watched.seen.astype(mx.float32))
        print(f"layer {number:2}: gates are {opened.mean().item():.0%} open, {(opened < 0.1).mean().item():.0%} shut")
    print()


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """A mark goes back to any point; another prompt reuses a prefix as far as the windows still hold it."""
    runner.reset()
    runner.prefill(ids)
    mark = runner.mark()
    before = runner.decode(ids[0])
    runner.decode(ids[1])
    runner.rollback(mark)
    again = runner.decode(ids[0])
    print(f"after a rollback the logits differ by {float(mx.abs(before - again).max()):g}")
    runner.rollback(mark)
    print(f"the same prompt again: {runner.reuse(ids)} of {len(ids)} tokens are reused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="install, alias or repository; by default a tiny random one is made")
    parser.add_argument("--variant", help="of the tiny model, or 'list'")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    if args.variant == "list":
        print("\n".join(variants("muse")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            path = resolve(args.model)
        else:
            path = make_tiny_install("muse", Path(folder) / "tiny.gturbo", variant=args.variant)
        with Runner.open(path) as runner:
            print(runner.report(), end="\n\n")
            describe(runner)
            ids = answer(runner, args.prompt, args.tokens)
            show_gates(runner, ids)
            show_reuse(runner, ids)


if __name__ == "__main__":
    main()
