"""``turbospark-mlx rm``: delete a model from the store."""

from __future__ import annotations

import argparse
import sys

HELP = "delete an installed model, or what an unfinished pull left"

EPILOG = """\
Only models of the store are deleted, never what a link points to. Asks first, unless --yes; without a terminal to ask
at, --yes is needed.

examples:
  turbospark-mlx rm smollm2-135m
  turbospark-mlx rm qwen3-0.6b --yes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="alias of the model (see `turbospark-mlx list`)")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx import store
    from turbospark_mlx.errors import OptionError

    paths = " and ".join(map(str, store.removable(args.name)))
    if not args.yes:
        if not sys.stdin.isatty():
            raise OptionError(f"There is no terminal to ask at. To delete {paths}, add --yes.")
        print(f"Delete {paths}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("kept", file=sys.stderr)
            return 1
    store.remove(args.name)
    print(f"deleted {paths}")
    return 0
