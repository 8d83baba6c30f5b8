"""``turbospark-mlx chat``: a conversation that keeps its cache.

Every turn renders the whole conversation again; what the runner holds of it already, compared token by token, is not
run again. Templates that rewrite earlier turns therefore cost time, never correctness.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from turbospark_mlx.cli.options import (
    add_model_arguments,
    add_sampling_arguments,
    open_runner,
    sampling_options,
    token_limit,
)
from turbospark_mlx.errors import ContextError, OptionError, TurbosparkError

HELP = "talk with a model, turn by turn"

EPILOG = """\
One line is one turn. Ctrl-C ends the answer and keeps what there is of it; Ctrl-D ends the conversation. The answers go
to stdout and all else to stderr, so that a conversation can be piped.

commands:
  /system TEXT  start over under a system message (without TEXT: without one)
  /reset        start over under the same system message
  /help         show these commands
  /exit         leave

examples:
  turbospark-mlx chat smollm2-135m
  turbospark-mlx chat smollm2-135m --system "You are terse." --temp 0.7 --top-p 0.9
  printf 'Name a river.\\nAnd another.\\n' | turbospark-mlx chat smollm2-135m
"""

COMMANDS = EPILOG[EPILOG.index("commands:") : EPILOG.index("\nexamples:")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=token_limit, metavar="N", help="longest answer (by default, what the context has left)"
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx.cli import terminal

    sampling = sampling_options(args)
    terminal.write_anything()
    interactive = sys.stdin.isatty()
    with open_runner(args, args.max_context) as runner:
        if not runner.tokenizer.has_chat_template:
            raise OptionError(
                f"{args.model} has no chat template, so it cannot chat. Use: turbospark-mlx generate --raw"
            )
        conversation = Conversation(runner, args.system, sampling, args.max_tokens, args.stop)
        if interactive:
            _enable_line_editing()
            print(f"{args.model}, context {runner.max_context}. /help shows the commands.", file=sys.stderr)
        while (line := _read_line(interactive)) is not None:
            if line.startswith("/"):
                if not _command(conversation, line):
                    break
            elif line.strip():
                try:
                    conversation.turn(line)
                except TurbosparkError as error:
                    if not interactive:
                        raise
                    hint = " /reset starts over." if isinstance(error, ContextError) else ""
                    print(f"error: {error}{hint}", file=sys.stderr)
    return 0


class Conversation:
    """The messages so far, and the runner that holds their tokens."""

    def __init__(self, runner, system, sampling, max_tokens, stop):
        self._runner, self._sampling, self._max_tokens, self._stop = runner, sampling, max_tokens, stop
        self.start_over(system)

    def start_over(self, system: str | None) -> None:
        self.system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def turn(self, text: str) -> None:
        """Answer ``text`` on stdout. A turn that fails, or is stopped before it has text, leaves no trace."""
        from turbospark_mlx.api import prompt_ids, stream_generate
        from turbospark_mlx.cli import terminal

        runner, asked = self._runner, [*self._messages, {"role": "user", "content": text}]
        ids = prompt_ids(runner.tokenizer, asked)
        left = runner.max_context - len(ids)
        max_tokens = self._max_tokens if self._max_tokens is None or left < 1 else min(self._max_tokens, left)
        with terminal.interrupt() as cancelled, terminal.prompt_progress(len(ids)) as progress:
            responses = stream_generate(
                runner.model,
                runner.tokenizer,
                ids,
                max_tokens,
                sampling=self._sampling,
                stop=self._stop,
                prompt_progress_callback=progress,
                cancelled=cancelled,
                runner=runner,
            )
            answer, _, last = terminal.show(responses)
        if answer or last.finish_reason != "cancelled":
            self._messages = [*asked, {"role": "assistant", "content": answer}]
        print(
            f"[prompt {last.prompt_tokens} tokens, {last.reused_tokens} reused; {last.generation_tokens} generated,"
            f" {last.generation_tps:.1f} tokens/s; {last.finish_reason}]",
            file=sys.stderr,
        )


def _command(conversation: Conversation, line: str) -> bool:
    """Do what a line that begins with a slash says; False ends the conversation."""
    name, _, text = line.partition(" ")
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.start_over(conversation.system)
    elif name == "/system":
        conversation.start_over(text.strip() or None)
    elif name == "/help":
        print(COMMANDS, file=sys.stderr)
    else:
        print(f"{name} is not a command. /help shows the commands.", file=sys.stderr)
    return True


def _read_line(interactive: bool) -> str | None:
    """The next line, or None at the end of the input. Ctrl-C drops what was typed."""
    while True:
        try:
            if not interactive or sys.stdout.isatty():
                return input("> " if interactive else "")
            print("> ", end="", file=sys.stderr, flush=True)
            return input()
        except EOFError:
            if interactive:
                print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(file=sys.stderr)
        except UnicodeDecodeError as error:
            raise OptionError(f"stdin is not text: {error}.") from None


def _enable_line_editing():
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (importing it is what gives input() line editing)
