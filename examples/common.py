"""What the examples of families share: their options, a model to run, a greedy answer, and going back."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark_mlx import Runner, TurbosparkError, families
from turbospark_mlx.store import resolve
from turbospark_mlx.testing import make_tiny_install, variants


def options(description: str, prompt: str = "Why is the sky blue?") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="install, alias or repository; by default a tiny random one is made")
    parser.add_argument("--variant", help="of the tiny model, or 'list'")
    parser.add_argument("--prompt", default=prompt)
    parser.add_argument("--tokens", type=int, default=24)
    return parser


def run(family: str, args: argparse.Namespace, show: Callable[[Runner, Path], None], **opening: Any) -> None:
    """Open the model that ``args`` name and ``show(runner, path of the install)``; ``opening`` is for Runner.open. What
    goes wrong is said in one line."""
    try:
        if args.variant == "list":
            print("\n".join(variants(family)))
        else:
            with tempfile.TemporaryDirectory() as folder:
                if args.model:
                    path = resolve(args.model)
                else:
                    path = make_tiny_install(family, Path(folder) / "tiny.gturbo", variant=args.variant)
                with Runner.open(path, **opening) as runner:
                    if not isinstance(runner.model, families.package(family).Model):
                        sys.exit(
                            f"error: {path} is a {runner.model.model_type} model, and this example is about {family}."
                        )
                    print(runner.report(), end="\n\n")
                    show(runner, path)
        sys.stdout.flush()
    except TurbosparkError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        # The reader has seen enough (`... | head`). What is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prompt_ids(runner: Runner, prompt: str) -> list[int]:
    """A chat with one message, or plain text where the model has no template."""
    tokenizer = runner.tokenizer
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def answer(runner: Runner, args: argparse.Namespace) -> list[int]:
    """Run the prompt, go on greedily to the end of the turn, which means nothing in a random model, and say how fast.
    Returns all tokens."""
    ids = prompt_ids(runner, args.prompt)
    ends = runner.tokenizer.eos_token_ids if args.model else ()
    start = time.perf_counter()
    logits = runner.prefill(ids)
    mx.eval(logits)
    prefilled, tokens = time.perf_counter(), []
    while len(tokens) < args.tokens:
        tokens.append(int(mx.argmax(logits)))
        if tokens[-1] in ends:
            break
        logits = runner.decode(tokens[-1])
    done = time.perf_counter()
    print(f"{args.prompt!r} -> {runner.tokenizer.decode(tokens)!r}")
    print(
        f"prompt {len(ids) / (prefilled - start):.1f} tokens/s,"
        f" answer {len(tokens) / (done - prefilled):.1f} tokens/s\n"
    )
    return [*ids, *tokens]


def show_rollback(runner: Runner, ids: list[int]) -> None:
    """A mark goes back to any point, and what comes after it comes again; the runner is left behind ``ids``."""
    runner.reset()
    runner.prefill(ids)
    mark = runner.mark()
    before = runner.decode(ids[0])
    runner.decode(ids[1])
    runner.rollback(mark)
    again = runner.decode(ids[0])
    print(f"after a rollback the logits differ by {float(mx.abs(before - again).max()):g}")
    runner.rollback(mark)


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """Behind ``ids``: how much of the half that another prompt shares the caches still hold."""
    shared = len(ids) // 2
    other = [*ids[:shared], *(i ^ 1 for i in ids[shared:])]
    print(f"{runner.reuse(other)} of the first {shared} tokens that another prompt shares could be reused")
