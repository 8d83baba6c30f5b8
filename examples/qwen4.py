"""Qwen4-Exp, from an install to tokens: which tokens a sparse layer sees, what that changes, and which rows of the
n-gram table were read for it.

python examples/qwen4.py                                  # makes a tiny random model: the workings, not English
python examples/qwen4.py --variant qwen4-ten              # ten experts a token; --variant list shows them all
python examples/qwen4.py --model qwen4.gturbo --expert-slots 16 --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import numpy as np
from common import answer, options, run

from turbospark_mlx import Runner


def describe(runner: Runner) -> None:
    """What each layer sees, and what it is told."""
    config = runner.model.args
    print(f"{config.hc_count} residual streams of {config.hidden_size}, {config.num_experts_per_tok} experts a token")
    for number in range(config.num_hidden_layers):
        if config.recurs(number):
            sees = f"{config.linear_num_value_heads} recurrent states"
        else:
            sees = (
                f"the {config.block_top_k} best blocks of {config.indexer_compress_ratio} tokens, and those behind the"
                " last whole one"
            )
        told = ", and is told about n-grams" if number == config.ple_layer else ""
        print(f"layer {number:2}: {sees}{told}")
    print()


def show_choice(runner: Runner, ids: list[int]) -> None:
    """What the last token sees in the first sparse layer, as its indexer scored it."""
    layer = next(layer for layer in runner.model.layers if "self_attn" in layer)
    indexer, found = layer.self_attn.indexer, []
    scores = indexer.scores

    def watching(queries, blocks, positions):
        found.append(scores(queries, blocks, positions))
        return found[-1]

    indexer.scores = watching
    runner.reset()
    runner.prefill(ids)
    del indexer.scores
    if not found:
        print(f"{len(ids)} tokens are no more than a query may see: attention saw everything\n")
        return
    last, top_k = np.array(found[-1])[0, -1], runner.model.args.block_top_k
    best = sorted(np.argsort(-last, kind="stable")[:top_k].tolist())
    print(f"the last token chose {top_k} of {len(last)} blocks, the first of them {best[:8]}")


def compare(runner: Runner, ids: list[int]) -> None:
    """The same prompt with every block in sight."""
    chances = []
    for sparse in (True, False):
        runner.model.attend_sparsely(sparse)
        runner.reset()
        logits = np.array(runner.prefill(ids), np.float64)
        chances.append(logits - np.logaddexp.reduce(logits))
    runner.model.attend_sparsely(True)
    divergence = (np.exp(chances[0]) * (chances[0] - chances[1])).sum()
    print(f"KL(sparse || dense) behind {len(ids)} tokens: {divergence:.2g} nats\n")


def show_table(runner: Runner, count: int) -> None:
    """How little of the n-gram table was read."""
    layer = next((layer for layer in runner.model.layers if "ple" in layer), None)
    if layer is None:
        print("this model has no table of n-grams")
        return
    table = layer.ple.ple_embedding.table
    print(f"{table.rows_read} rows of {table.shape[0]:,} were read, for {count} tokens three times over")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--expert-slots", type=int, help="experts of a layer that are in memory at once")
    args = parser.parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        show_choice(runner, ids)
        compare(runner, ids)
        show_table(runner, len(ids))

    run("qwen4", args, show, expert_slots="auto" if args.expert_slots is None else args.expert_slots)


if __name__ == "__main__":
    main()
