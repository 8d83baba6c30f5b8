"""The ``turbospark-mlx`` command: one module a subcommand.

A subcommand module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int``, an ``EPILOG`` with
examples, and imports what is heavy inside ``run``, so that ``--help`` answers at once.

Exit codes: 0 done, 1 an error of ours or of the system, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from turbospark_mlx import __version__
from turbospark_mlx.errors import TurbosparkError, explain_import_error

SUBCOMMANDS = ("generate", "chat", "perplexity", "bench", "pull", "list", "rm", "convert", "info", "verify", "kernel")

EPILOG = """\
examples:
  turbospark-mlx pull smollm2-135m
  turbospark-mlx generate smollm2-135m "What is a comet?"
  turbospark-mlx chat smollm2-135m
  turbospark-mlx convert ./Qwen3-0.6B ./qwen3-0.6b.gturbo --bits 4
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turbospark-mlx",
        description="Run local language models from .gturbo installs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turbospark-mlx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        module = import_module(f"{__name__}.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except TurbosparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away (`... | head`); Python would complain again when it closes stdout.
        sys.stderr.close()
        return 1
    except OSError as error:
        # Python's own text begins with "[Errno 2]", which helps nobody who typed a wrong name.
        named = error.strerror and error.filename is not None
        print(f"error: {f'{error.filename}: {error.strerror}' if named else error}", file=sys.stderr)
        return 1
    except ImportError as error:
        explained = explain_import_error(error)
        if explained is None:
            raise
        print(f"error: {explained}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
