"""An install whose experts come from disk: opening it beside a plain read of its file, and its memory beside `info`.

python benchmarks/streaming.py shaped.gturbo                       # 8 and 16 slots a layer, 4096 tokens of context
python benchmarks/streaming.py shaped.gturbo --slots 8 --no-limit  # without a limit on the process's data

One process a number of slots. It opens the install with the system's cache of its files dropped, a receipt there and
kernels built; runs a short prompt, then one that fills the context but for the tokens that are decoded; and compares
the most that it ever held (VmHWM) with what `turbospark-mlx info` says of that context and those slots. RLIMIT_DATA is
a tenth above that. The speed of streaming itself, beside plain reads, is what `turbospark-mlx bench` measures. For
Linux. An install to measure with, of any disk:

python -c "from turbospark_mlx.testing import *; make_shaped_install('gemma4-26b-a4b', 'shaped.gturbo')"
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from turbospark_mlx import Runner
from turbospark_mlx.cli.info import describe
from turbospark_mlx.cli.terminal import peak_process_bytes
from turbospark_mlx.gturbo import Install, resident_index

DECODED = 8
PIECE = 16 << 20


def drop_cached(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(path: Path) -> float:
    """Seconds to read a file from front to back into one piece of memory, uncached."""
    memory = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        while file.readinto(memory):
            pass
        return time.perf_counter() - started


def one(args: argparse.Namespace) -> dict:
    """What one process finds, as an object for JSON; sizes in bytes."""
    directory, slots = Path(args.model), args.slots[0]
    with Install.open(directory, verify="auto") as install:  # leaves a receipt
        predicted = describe(install, max_context=args.context, expert_slots=slots)["memory"]["total"]["float32"]
    if args.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (predicted * 11 // 10,) * 2)
    read = plain_read(directory / resident_index.FILE)
    drop_cached(directory)
    started = time.perf_counter()
    runner = Runner.open(directory, residency="streamed", expert_slots=slots, max_context=args.context)
    found = {"slots": slots, "predicted": predicted, "open": time.perf_counter() - started, "read": read, "prompts": []}
    with runner:
        for length in (args.prompt_tokens, args.context - DECODED):
            runner.reset()
            ids = [3 + 7 * position % 250 for position in range(length)]
            times = [time.perf_counter()]
            runner.prefill(ids)
            times.append(time.perf_counter())
            for token in ids[:DECODED]:
                runner.decode(token)
            times.append(time.perf_counter())
            found["prompts"].append(
                {"tokens": length, "prefill": times[1] - times[0], "decode": (times[2] - times[1]) / DECODED}
            )
            found["prompts"][-1]["held"] = peak_process_bytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an install with routed experts")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16], help="experts a layer in memory (8 16)")
    parser.add_argument("--context", type=int, default=4096, help="tokens that fill the context (4096)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of the prompt before that (128)")
    parser.add_argument("--no-limit", dest="limit", action="store_false", help="set no RLIMIT_DATA")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args)))
        return
    for slots in args.slots:
        command = [sys.executable, __file__, args.model, "--one", "--slots", str(slots), "--context", str(args.context)]
        command += ["--prompt-tokens", str(args.prompt_tokens), *([] if args.limit else ["--no-limit"])]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(f"{slots} slots: opened in {found['open']:.2f} s, beside {found['read']:.2f} s to read the resident file")
        for prompt in found["prompts"]:
            more = prompt["held"] - found["predicted"]
            print(
                f"  {prompt['tokens']} tokens: {prompt['tokens'] / prompt['prefill']:.2f} tokens/s, then"
                f" {1 / prompt['decode']:.2f}; {prompt['held'] / 1e9:.3f} GB held, {more / 1e6:+.0f} MB beside"
                f" {found['predicted'] / 1e9:.3f} predicted",
                flush=True,
            )


if __name__ == "__main__":
    main()
