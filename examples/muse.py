"""Muse Glimmer, from an install to tokens: which layers know positions, what gates let through, what a window keeps.

python examples/muse.py                                    # makes a tiny random model: the workings, not English
python examples/muse.py --variant muse-glimmer-tied        # other sizes and switches; --variant list shows them all
python examples/muse.py --model muse-30b.gturbo --prompt "Why is the sky blue?" --tokens 2048
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from common import answer, options, run, show_rollback

from turbospark_mlx import Runner


def describe(runner: Runner) -> None:
    """The layers, and what a sequence costs."""
    config = runner.model.args
    for number in range(config.num_hidden_layers):
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        print(f"layer {number:2}: sees {sees}, {'rotates' if config.rotates[number] else 'knows no positions'}")
    for context in (1024, 131072):
        print(f"keys and values of {context:6} tokens: {config.kv_bytes(context, 2) / 1e6:.2f} MB in half precision")
    print()


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


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        print(f"decode step: {runner.report().decode_step}\n")
        show_gates(runner, ids)
        show_rollback(runner, ids)
        print(f"the same prompt again: {runner.reuse(ids)} of {len(ids)} tokens are reused")

    run("muse", args, show)


if __name__ == "__main__":
    main()
