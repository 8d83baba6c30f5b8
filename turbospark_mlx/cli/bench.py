"""``turbospark-mlx bench``: how fast a model answers here, and how fast its experts come from disk."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from turbospark_mlx.cli.options import add_model_arguments, open_runner
from turbospark_mlx.errors import OptionError

HELP = "measure how fast a model answers, and how fast its experts are read"

EPILOG = """\
A prompt and a greedy answer are run a few times; the median counts. Where experts stay on disk, what the system caches
of their files is dropped before each time (Linux only), and the bandwidth of a plain parallel read of the same files
is measured in the same run, to compare with; --warm leaves the cache alone.

examples:
  turbospark-mlx bench ./gemma4.gturbo --expert-slots 16
  turbospark-mlx bench ./gemma4.gturbo --prompt-tokens 512 --tokens 64 --json
  turbospark-mlx bench ./gemma4.gturbo --sweep expert_slots=8,16,32,64 --plot slots.png

A machine can be measured before a model is downloaded:
  python -c "from turbospark_mlx.testing import *; make_shaped_install('gemma4-26b-a4b', 'shaped.gturbo')"
  turbospark-mlx bench shaped.gturbo
"""

SWEEPS = ("expert_slots", "prompt_tokens", "residency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of the prompt (128)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens of the answer (32)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times that both are run (3)")
    parser.add_argument("--warm", action="store_true", help="leave what the system caches of the experts")
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text to take the prompt from; - is stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object (a list for --sweep)")
    parser.add_argument(
        "--sweep", metavar="NAME=A,B,...", help=f"one run, in a process of its own, a value of {', '.join(SWEEPS)}"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw a sweep; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    if args.sweep is not None:
        return _sweep(args)
    if args.plot is not None:
        args.usage_error("--plot draws a --sweep")
    from tqdm import tqdm

    from turbospark_mlx.cli.terminal import peak_process_bytes, read_text
    from turbospark_mlx.gturbo import Install
    from turbospark_mlx.measure import TEXT, measure
    from turbospark_mlx.store import resolve

    text = TEXT if args.text is None else read_text(args.text)
    with (
        open_runner(args, args.max_context) as runner,
        Install.open(resolve(args.model), verify="off") as install,
        tqdm(total=args.repeats, unit=" runs", desc="bench", leave=False, disable=None) as bar,
    ):
        result = measure(
            runner,
            install,
            prompt_tokens=args.prompt_tokens,
            tokens=args.tokens,
            repeats=args.repeats,
            cold=not args.warm,
            text=text,
            progress=lambda done, total: bar.update(done - bar.n),
        )
        lines = str(runner.report()).splitlines()
    result["peak_process_memory"] = peak_process_bytes()
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join([*lines, *_text(result)]))
    return 0


def _text(result: dict[str, Any]) -> list[str]:
    from turbospark_mlx.gturbo.files import spell_bytes

    lines = []
    for name in ("prefill", "decode"):
        phase = result[name]
        line = f"{name:10} {phase['tokens_per_second']:.2f} tokens/s over {phase['tokens']}"
        if phase.get("hit_rate") is not None:
            line += f", {phase['hit_rate']:.1%} hits, {spell_bytes(round(phase['bytes_per_token']))} read a token"
        if phase.get("read_bandwidth"):
            line += f" at {spell_bytes(round(phase['read_bandwidth']))}/s, waiting {phase['waiting']:.0%} of the time"
        lines.append(line)
    if result["raw_bandwidth"]:
        lines.append(
            f"disk       {spell_bytes(round(result['raw_bandwidth']))}/s by plain parallel reads of the same files"
        )
    elif result["residency"] == "resident":
        lines.append("disk       not measured: all experts are in memory")
    peak = result["peak_process_memory"]
    lines.append(
        f"memory     {spell_bytes(result['predicted_memory'])} predicted with a full context"
        + (f", {spell_bytes(peak)} the most that the process held" if peak else "")
        + f"; {spell_bytes(result['free_memory'])} free at the start"
    )
    return lines


def _sweep(args: argparse.Namespace) -> int:
    name, equals, listed = args.sweep.partition("=")
    values = [value for value in listed.split(",") if value]
    if not equals or name not in SWEEPS or not values:
        args.usage_error(f"--sweep {args.sweep!r} is not NAME=A,B,... with a name of {', '.join(SWEEPS)}")
    if args.text == "-":
        args.usage_error("--text - can be read once, and a --sweep needs the text for each value; name a file")
    if args.plot is not None:
        _matplotlib()
    results = []
    for value in values:
        command = [sys.executable, "-m", "turbospark_mlx", "bench", args.model, *_flags(args, {name: value}), "--json"]
        # Peaks of memory are a process's, so each value gets its own.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        results.append({"value": value, **json.loads(done.stdout)})
        if not args.json:
            print(f"{name}={value}", *(f"  {line}" for line in _text(results[-1])), sep="\n", flush=True)
    if args.json:
        print(json.dumps(results, indent=2))
    if args.plot is not None:
        _draw(name, results, args.plot)
    return 0


def _flags(args: argparse.Namespace, changed: dict[str, str]) -> list[str]:
    """The options of ``args``, with some of them changed, as they are typed."""
    names = ("max_context", "kernels", "dtype", "verify", "residency", "expert_slots")
    names += ("prompt_tokens", "tokens", "repeats", "text")
    given = {name: getattr(args, name) for name in names} | changed
    flags = [
        part for name, value in given.items() if value is not None for part in (f"--{name.replace('_', '-')}", value)
    ]
    return [*map(str, flags), *(["--warm"] if args.warm else [])]


def _matplotlib() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise OptionError('--plot needs matplotlib: pip install "turbospark-mlx[plot]".') from None
    return pyplot


def _draw(name: str, results: list[dict[str, Any]], path: str) -> None:
    """Speed, hits and memory, over the values of a sweep."""
    pyplot = _matplotlib()
    values = [result["value"] for result in results]
    panels = {
        "tokens/s": {phase: [r[phase]["tokens_per_second"] for r in results] for phase in ("prefill", "decode")},
        "hits while decoding, %": {"decode": [100 * (r["decode"].get("hit_rate") or 0) for r in results]},
        "memory, GB": {"process": [(r["peak_process_memory"] or 0) / 1e9 for r in results]},
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, heights in lines.items():
            axis.plot(values, heights, marker="o", label=label)
        axis.set(title=title, xlabel=name.replace("_", " "), ylim=(0, None))
        if len(lines) > 1:
            axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
