"""Spark 2.5, from an install to tokens: how far each layer sees, how much of a head turns, and which heads are heard.

python examples/spark.py                                    # makes a tiny random model: the workings, not English
python examples/spark.py --variant spark-one-key            # other switches; --variant list shows them all
python examples/spark.py --model spark-x2.5-4b.gturbo --prompt "Why is the sky blue?" --tokens 200
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from common import answer, options, run, show_reuse, show_rollback

from turbospark_mlx import Runner


def describe(runner: Runner) -> None:
    config = runner.model.args
    for number, kind in enumerate(config.layer_types):
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        base = config.rope_theta if config.slides(number) else config.full_rope_theta
        print(
            f"layer {number:2}: sees {sees:12} turns {config.rotary_dims(kind)} of {config.head_dim} by base {base:g}"
        )
    print()


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


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        show_gates(runner, ids)
        show_rollback(runner, ids)
        show_reuse(runner, ids)

    run("spark", args, show)


if __name__ == "__main__":
    main()
