"""Gemma 4, from an install to tokens: whose keys a layer reads, which experts a token meets, and what a window forgets.

python examples/gemma4.py                                    # makes a tiny random model: the workings, not English
python examples/gemma4.py --variant gemma4-small             # an E2B in miniature; --variant list shows them all
python examples/gemma4.py --model gemma-4-26b --prompt "Why is the sky blue?"
"""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
from common import answer, options, run, show_reuse, show_rollback

from turbospark_mlx import Runner


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


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        if runner.model.args.num_experts:
            show_routing(runner, ids)
        show_rollback(runner, ids)
        show_reuse(runner, ids)

    run("gemma4", args, show)


if __name__ == "__main__":
    main()
