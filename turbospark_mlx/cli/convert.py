"""``turbospark-mlx convert``: a checkpoint into an install."""

from __future__ import annotations

import argparse
import sys

from turbospark_mlx.cli.options import add_conversion_arguments

HELP = "convert a checkpoint (safetensors, MLX-quantized, GGUF, another install) to a .gturbo install"

EPILOG = """\
A quantized checkpoint is kept as it is, bit for bit, unless --bits is given. An unquantized one gets 4-bit matrices in
groups of 64 with bfloat16 scales and biases; --bits 16 keeps it unquantized.

examples:
  turbospark-mlx convert ./Qwen3-0.6B ./qwen3-0.6b.gturbo
  turbospark-mlx convert ./Qwen3-0.6B ./qwen3-0.6b-8bit.gturbo --bits 8 --group-size 32
  turbospark-mlx convert mlx-community/Qwen3-0.6B-4bit ./qwen3-0.6b.gturbo
  turbospark-mlx convert ./SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2.gturbo
  turbospark-mlx convert ./old.gturbo ./new.gturbo --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face directory, a .gguf file, a .gturbo directory, or a hub repository owner/name",
    )
    parser.add_argument("dest", metavar="DEST", help="the .gturbo directory to write")
    add_conversion_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace DEST if it is an install")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no report")


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx.convert import convert

    report = convert(
        args.source,
        args.dest,
        bits=args.bits,
        group_size=args.group_size,
        companion_dtype=args.companion_dtype,
        elder_compatible=args.elder_compatible,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )
    for note in report.notes:
        print(note, file=sys.stderr)
    if not args.quiet:
        print(report)
    return 0
