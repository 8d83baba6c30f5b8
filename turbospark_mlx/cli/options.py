"""Flags that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

# The names that custom_kernels.backends, the loader and gturbo.Install take; those modules are too heavy for --help.
KERNELS = ("auto", "metal", "cuda", "host", "reference")
DTYPES = ("bfloat16", "float16", "float32")
VERIFY = ("off", "auto", "full")
RESIDENCY = ("auto", "resident", "streamed", "mapped")

if TYPE_CHECKING:
    from turbospark_mlx.generation import SamplingOptions
    from turbospark_mlx.runner import Runner


def add_model_arguments(parser: argparse.ArgumentParser, *, max_context: bool = True) -> None:
    """The model and how it is run."""
    parser.add_argument(
        "model", metavar="MODEL", help="an install directory, an alias, or a hub repository (pulled on first use)"
    )
    group = parser.add_argument_group("running the model")
    if max_context:
        group.add_argument(
            "--max-context",
            type=int,
            metavar="N",
            help="longest prompt and answer together, in tokens (4096, or less where the model or memory ends before)",
        )
    group.add_argument(
        "--kernels",
        default="auto",
        choices=KERNELS,
        help="what computes: our kernels on a GPU (metal, cuda) or on the CPU through a C++ compiler (host), or MLX's"
        " own operations (reference); auto takes what the machine has (auto)",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="dtype of activations (bfloat16 on a GPU; a CPU computes in float32)"
    )
    group.add_argument(
        "--verify",
        default="auto",
        choices=VERIFY,
        help="hash the install; auto hashes what was not hashed before (auto)",
    )
    group.add_argument(
        "--residency",
        default="auto",
        choices=RESIDENCY,
        help="where the experts of a mixture live: all in memory (resident), on disk and a few in memory (streamed), or"
        " in the page cache (mapped); auto is resident where they fit, else streamed (auto)",
    )
    group.add_argument(
        "--expert-slots",
        type=slot_count,
        default="auto",
        metavar="N",
        help="experts a layer that streaming keeps in memory, or auto (auto)",
    )
    parser.set_defaults(usage_error=parser.error)


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """What the weights become."""
    parser.add_argument(
        "--bits", type=int, choices=(4, 8, 16), help="bits of every matrix; 16 keeps unquantized weights as they are"
    )
    parser.add_argument(
        "--group-size", type=int, choices=(32, 64, 128), help="input columns that share a scale and a bias (64)"
    )
    parser.add_argument(
        "--companion-dtype", choices=("bfloat16", "float16"), help="dtype of the scales and biases (bfloat16)"
    )
    parser.add_argument(
        "--elder-compatible",
        action="store_true",
        help="write only what turbo-fieldfare and turbospark read, or refuse and say what stands in the way",
    )


def open_runner(args: argparse.Namespace, max_context: int | None) -> Runner:
    """A runner over the model that the arguments name; a sentence on stderr where no kernels could be had, and where
    the context is longer than the trained one."""
    from turbospark_mlx.cli.terminal import compile_notice
    from turbospark_mlx.runner import Runner
    from turbospark_mlx.store import resolve

    path = resolve(args.model)
    with compile_notice():
        runner = Runner.open(
            path,
            max_context=max_context,
            kernels=args.kernels,
            dtype=args.dtype,
            verify=args.verify,
            residency=args.residency,
            expert_slots=args.expert_slots,
        )
    report = runner.report()
    if args.kernels == "auto" and report.backend == "reference":
        print(f"note: this runs slowly, on {report.backend_reason}", file=sys.stderr)
    if report.max_context > report.trained_context:
        print(
            f"note: the model was trained for {report.trained_context} tokens; how well it does in a context of"
            f" {report.max_context} is not known",
            file=sys.stderr,
        )
    return runner


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and where an answer ends."""
    group = parser.add_argument_group("sampling")
    # No defaults here: what is not given is left to SamplingOptions.
    group.add_argument("--temp", dest="temperature", type=float, metavar="T", help="temperature; 0 is greedy (0)")
    group.add_argument("--top-k", type=int, metavar="K", help="draw among the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="draw among the most probable tokens that hold P")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="draw among tokens at least P times as probable as the top"
    )
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="divide the logits of recent tokens by R")
    group.add_argument("--repetition-context-size", type=int, metavar="N", help="how many tokens are recent (20)")
    group.add_argument("--presence-penalty", type=float, metavar="A", help="subtract A from logits of recent tokens")
    group.add_argument("--frequency-penalty", type=float, metavar="A", help="the same for each time a token occurs")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=V",
        help="add V to the logit of token ID; -inf bans it; may be given several times",
    )
    group.add_argument("--seed", type=int, metavar="S", help="repeat the draws of an earlier run")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be given several times"
    )


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """The options that the arguments stand for. Raises OptionError."""
    from turbospark_mlx.generation.sampling import SAMPLING_NAMES, SamplingOptions

    given = {name: getattr(args, name, None) for name in SAMPLING_NAMES}
    given["logit_bias"] = dict(given["logit_bias"] or ()) or None
    return SamplingOptions(**{name: value for name, value in given.items() if value is not None})


def token_limit(text: str) -> int | None:
    """The value of ``--max-tokens``: a number, or None for the word ``max``."""
    if text == "max":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens from 1 on nor the word max")
    return int(text)


def slot_count(text: str) -> int | str:
    """The value of ``--expert-slots``: a number, or the word ``auto``."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of slots nor the word auto")
    return text if text == "auto" else int(text)


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=V, such as 42=-1.5")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=V, such as 42=-1.5") from None
