"""Decode with routed experts in memory and in slots, of one install in one run, medians of interleaved repeats.

python benchmarks/residency.py shaped.gturbo                    # in memory, in as many slots, in half as many
python benchmarks/residency.py shaped.gturbo --slots 64 --fit   # a text that fits 64 slots a layer

Every way decodes the same tokens, greedily behind the same prompt, and has to find the same. Slots are filled before.
What was missed in them while it was measured is printed beside it: a text that fits misses nothing. Random weights
choose experts at random; ``--fit`` makes routers prefer the first 64 of 64 slots, in every way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import mlx.nn as nn
from measure import likeliest
from mlx.utils import tree_flatten, tree_unflatten

from turbospark_mlx import Runner
from turbospark_mlx.experts import ExpertCounters
from turbospark_mlx.gturbo import Install

RESIDENT = "resident"
LEAST = -1e4


def decode(runner: Runner, token: int, count: int) -> tuple[list[int], float]:
    """``count`` tokens behind ``token``, and tokens a second."""
    found, start = [], time.perf_counter()
    for _ in range(count):
        token = likeliest(runner, runner.decode(token, ahead=True))
        found.append(token)
    return found, count / (time.perf_counter() - start)


def prefer(model: nn.Module, slots: int, experts: int) -> None:
    """Have routers score experts past the first ``slots`` with 0, which enough of the others exceed, or with a large
    negative bias."""
    changed = []
    for name, array in tree_flatten(model.parameters()):
        if any(part in name for part in model.choosers) and array.shape[0] == experts:
            if array.ndim == 2:
                array[slots:] = 0
            elif name.endswith(".bias"):
                array[slots:] = LEAST
            changed.append((name, array))
    model.update(tree_unflatten(changed))


def misses(runner: Runner) -> int:
    return sum(runner.experts.counters, ExpertCounters()).misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("install", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", help="slots a layer; all experts and half of them by default")
    parser.add_argument("--fit", action="store_true", help="choose only as many experts as there are slots")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--settle", type=int, default=64, help="tokens decoded before anything is measured")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.fit and len(args.slots or ()) != 1:
        parser.error("--fit is about one number of --slots")

    context = args.prompt_tokens + args.settle + args.new_tokens * args.repeats + 8
    options = {"max_context": context, "verify": "off"}
    runners = {RESIDENT: Runner.open(args.install, residency="resident", **options)}
    with Install.open(args.install, verify="off") as install:
        experts = len(install.experts.layers[0].offsets)
    for slots in args.slots or (experts, experts // 2):
        name = f"{slots} of {experts} slots"
        runners[name] = Runner.open(args.install, residency="streamed", expert_slots=slots, **options)
        runners[name].experts.warm(runners[name].experts.routing())

    token = {}
    for name, runner in runners.items():
        if args.fit:
            prefer(runner.model, args.slots[0], experts)
        behind = likeliest(runner, runner.prefill(list(range(5, 5 + args.prompt_tokens))))
        token[name] = decode(runner, behind, args.settle)[0][-1]
    before = {name: misses(runner) for name, runner in runners.items()}
    speeds, texts = {name: [] for name in runners}, {name: [] for name in runners}
    for _ in range(args.repeats):
        for name, runner in runners.items():
            found, speed = decode(runner, token[name], args.new_tokens)
            token[name] = found[-1]
            speeds[name].append(speed)
            texts[name] += found
    if any(text != texts[RESIDENT] for text in texts.values()):
        raise SystemExit("the ways do not find the same tokens")

    first, report = statistics.median(speeds[RESIDENT]), runners[RESIDENT].report()
    print(f"{args.install.name}, {report.backend} on the {report.device}, median of {args.repeats} times", end=" ")
    print(f"{args.new_tokens} tokens")
    for name, runner in runners.items():
        speed, missed = statistics.median(speeds[name]), misses(runner) - before[name]
        line = f"{name:24} {speed:8.1f} tok/s {speed / first:6.2f} of resident, {missed} misses"
        print(f"{line}, {runner.report().decode_step}")


if __name__ == "__main__":
    main()
