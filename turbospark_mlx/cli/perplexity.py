"""``turbospark-mlx perplexity``: how well a model predicts a text file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from turbospark_mlx.cli.options import add_model_arguments, open_runner
from turbospark_mlx.errors import OptionError

HELP = "measure how well a model predicts a text file"

EPILOG = """\
Perplexity is exp(nll), and nll the mean of -log p(token) in nats. The text is cut into windows of --context tokens,
each behind a BOS where the tokenizer adds one; the first window predicts all that it can, every later one the next
--stride tokens, so that each token is predicted once. A smaller stride gives every token a longer context and takes
longer.

examples:
  turbospark-mlx perplexity smollm2-135m alice.txt
  turbospark-mlx perplexity smollm2-135m alice.txt --context 512 --stride 256 --tokens 4096
  turbospark-mlx perplexity ./qwen3-0.6b.gturbo - --json < alice.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, max_context=False)
    parser.add_argument("file", metavar="FILE", help="a UTF-8 text; - is stdin")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens a window (2048, or the trained context if that is less)"
    )
    parser.add_argument("--stride", type=int, metavar="N", help="tokens that a window predicts (as --context)")
    parser.add_argument("--tokens", type=int, metavar="N", help="use only the first N tokens of the text")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from turbospark_mlx.cli.terminal import read_text
    from turbospark_mlx.perplexity import perplexity

    if args.tokens is not None and args.tokens < 1:
        raise OptionError(f"--tokens is {args.tokens}; it must be at least 1.")
    text = read_text(args.file)
    with open_runner(args, args.context) as runner:
        tokenizer = runner.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
        begins_with_bos = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer.encode("")[:1]
        # disable=None: a bar on terminals only.
        with tqdm(total=len(ids), unit=" tokens", desc="perplexity", leave=False, disable=None) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            result = perplexity(
                runner.model,
                ids,
                bos=tokenizer.bos_token_id if begins_with_bos else None,
                context=args.context,
                stride=args.stride,
                progress=progress,
            )
    if args.json:
        print(
            json.dumps({"model": args.model, **asdict(result), "tokens_per_second": result.tokens_per_second}, indent=2)
        )
    else:
        print(f"perplexity {result.perplexity:.4f}")
        print(f"nll        {result.nll:.6f} nats a token")
        print(f"tokens     {result.tokens} predicted, in {result.windows} window{'s' * (result.windows > 1)}")
        print(f"speed      {result.tokens_per_second:.1f} tokens/s")
    return 0
