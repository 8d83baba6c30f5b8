"""A Mixture of Experts through a few slots: what is read from disk, what slots save, and that no token changes.

python examples/streaming.py                                     # a tiny random model that it makes itself
python examples/streaming.py --model gemma-4-26b --slots 8,16,32 --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from turbospark_mlx import Runner
from turbospark_mlx.errors import OptionError
from turbospark_mlx.store import resolve
from turbospark_mlx.testing import make_tiny_install


def answer(runner: Runner, ids: list[int], count: int) -> tuple[list[int], float]:
    """A greedy answer, and its tokens a second."""
    logits, tokens = runner.prefill(ids), []
    start = time.perf_counter()
    for _ in range(count):
        tokens.append(int(np.array(logits).argmax()))
        logits = runner.decode(tokens[-1])
    return tokens, count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="alias or install directory of a model with routed experts")
    parser.add_argument(
        "--slots", default="3,4,5", help="numbers of slots a layer to try, at least the experts a token takes"
    )
    parser.add_argument("--prompt", default="The moon is")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        path = (
            resolve(args.model)
            if args.model
            else make_tiny_install("gemma4", Path(scratch) / "tiny.gturbo", variant="gemma4-moe")
        )
        answers, favourites = {}, None
        for slots in map(int, args.slots.split(",")):
            with Runner.open(path, residency="streamed", expert_slots=slots) as runner:
                ids = runner.tokenizer.encode(args.prompt)
                answers[f"{slots} slots"], speed = answer(runner, ids, args.tokens)
                print(f"{slots:3} slots a layer: {speed:8.1f} tokens/s, {runner.report().expert_counters}")
                favourites = runner.experts.routing()

        # The favourites of one session can be in their slots before the first token of the next.
        with Runner.open(path, residency="streamed", expert_slots=slots) as runner:
            runner.experts.warm(favourites)
            answers["warm start"], speed = answer(runner, ids, args.tokens)
            print(f"{slots:3} slots, warmed:  {speed:8.1f} tokens/s, {runner.report().expert_counters}")

        try:
            with Runner.open(path, residency="resident") as runner:
                answers["all in memory"], speed = answer(runner, ids, args.tokens)
                print(f"all in memory:     {speed:8.1f} tokens/s")
        except OptionError as error:
            print(f"all in memory: {error}")

        tokens, *others = answers.values()
        same = "the same" if all(other == tokens for other in others) else "DIFFERENT"
        print(f"\n{len(answers)} ways, {same} tokens: {tokens}")


if __name__ == "__main__":
    main()
