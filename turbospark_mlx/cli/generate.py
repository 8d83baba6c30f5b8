"""``turbospark-mlx generate``: one answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys

from turbospark_mlx.cli.options import (
    add_model_arguments,
    add_sampling_arguments,
    open_runner,
    sampling_options,
    token_limit,
)

HELP = "answer one prompt; text on stdout, figures on stderr"

EPILOG = """\
The prompt becomes a user message in the model's chat template, after the system message if there is one; --raw
completes the text as it is. Ctrl-C ends the answer, prints its figures, and exits with code 130.

examples:
  turbospark-mlx generate smollm2-135m "What is a comet?"
  turbospark-mlx generate smollm2-135m "Name a river." --system "Answer in one word." --max-tokens 8
  turbospark-mlx generate smollm2-135m --raw "The capital of France is" --stop .
  turbospark-mlx generate smollm2-135m - --temp 0.7 --top-p 0.9 --seed 1 < question.txt
  turbospark-mlx generate smollm2-135m "What is a comet?" --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="no chat template: complete the text")
    parser.add_argument(
        "--max-tokens", type=token_limit, default=256, metavar="N", help="longest answer; max fills the context (256)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and figures")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx.cli import terminal

    if args.raw and args.system is not None:
        args.usage_error("--system needs the chat template, which --raw leaves out")
    # The newline that ends a piped prompt is the shell's, not the author's.
    prompt = terminal.read_text("-").removesuffix("\n") if args.prompt == "-" else args.prompt
    sampling = sampling_options(args)
    terminal.write_anything()
    with open_runner(args, args.max_context) as runner:
        return _answer(args, runner, prompt, sampling)


def _answer(args, runner, prompt, sampling):
    from turbospark_mlx.api import figures, prompt_ids, stream_generate
    from turbospark_mlx.cli import terminal

    tokenizer = runner.tokenizer
    if not args.raw and not tokenizer.has_chat_template and args.system is None:
        print("note: this model has no chat template; completing the text as it is", file=sys.stderr)
        args.raw = True
    if not args.raw:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        prompt = [*system, {"role": "user", "content": prompt}]
    ids = prompt_ids(tokenizer, prompt)
    with terminal.interrupt() as cancelled, terminal.prompt_progress(len(ids)) as progress:
        responses = stream_generate(
            runner.model,
            tokenizer,
            ids,
            args.max_tokens,
            sampling=sampling,
            stop=args.stop,
            prompt_progress_callback=progress,
            cancelled=cancelled,
            runner=runner,
        )
        text, tokens, last = terminal.show(responses, quiet=args.json)
    peak = terminal.peak_process_bytes()
    if args.json:
        print(json.dumps(_document(args, text, tokens, last, peak), indent=2))
    else:
        print(figures(last), file=sys.stderr)
        if peak is not None:
            print(f"process peak: {peak / 1e9:.2f} GB", file=sys.stderr)
    return 130 if last.finish_reason == "cancelled" else 0


def _document(args, text, tokens, last, peak):
    return {
        "model": args.model,
        "text": text,
        "tokens": tokens,
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tokens": last.generation_tokens,
        "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
        "peak_process_memory": None if peak is None else peak / 1e9,
        "seed": last.seed,
    }
