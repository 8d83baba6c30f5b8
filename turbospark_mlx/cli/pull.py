"""``turbospark-mlx pull``: fetch a model, convert it, and keep it under an alias."""

from __future__ import annotations

import argparse

from turbospark_mlx.cli.options import add_conversion_arguments

HELP = "fetch a model, convert it, and keep it under an alias"

EPILOG = """\
NAME is an alias of the catalog (see `turbospark-mlx list`), a hub repository owner/name, one GGUF file of a repository
owner/name:FILE.gguf, or the path of a local checkpoint. A model that is there already is left as it is. The directory
of the install is printed on standard output.

examples:
  turbospark-mlx pull smollm2-135m
  turbospark-mlx pull Qwen/Qwen3-0.6B --as qwen
  turbospark-mlx pull qwen3-0.6b --bits 8 --as qwen3-0.6b-8bit
  turbospark-mlx pull ./my-finetune --as mine --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what to fetch")
    parser.add_argument("--as", dest="alias", metavar="ALIAS", help="what to call it (its own name)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub repository (its main branch)")
    add_conversion_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the model that has this alias")
    parser.add_argument(
        "--keep-download", action="store_true", help="keep the downloaded file in $TURBOSPARK_HOME/downloads"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no notes on standard error")


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx import store

    path = store.pull(
        args.name,
        revision=args.revision,
        alias=args.alias,
        bits=args.bits,
        group_size=args.group_size,
        companion_dtype=args.companion_dtype,
        elder_compatible=args.elder_compatible,
        overwrite=args.overwrite,
        keep_download=args.keep_download,
        progress=not args.quiet,
    )
    print(path)
    return 0
