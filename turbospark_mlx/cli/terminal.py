"""What the commands that run a model do with a terminal: streamed text, interrupts, progress, figures."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turbospark_mlx.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turbospark_mlx.generation.loop import GenerationResponse, Progress

LONG_PROMPT = 256  # tokens; shorter prompts take no progress bar


@contextmanager
def interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets instead of raising KeyboardInterrupt; a second Ctrl-C raises it."""
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def stop(number, frame):
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


class _CompileProgress(logging.Handler):
    """One line on stderr at the first record, and on a terminal how many kernels of how many are done."""

    def __init__(self):
        super().__init__()
        self._told, self._bar = False, None

    def emit(self, record: logging.LogRecord) -> None:
        if not self._told:
            print("compiling kernels for this machine; they are kept for the next time", file=sys.stderr, flush=True)
            self._told = True
        done, total = getattr(record, "kernels", (0, 0))
        if total and sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit=" kernels", desc="compiled", leave=False, mininterval=0)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        super().close()


@contextmanager
def compile_notice() -> Iterator[None]:
    """Says on stderr that kernels are being compiled, which takes seconds on first use, and how far that is."""
    logger = logging.getLogger("turbospark_mlx.custom_kernels.backends.compiler")
    handler, level = _CompileProgress(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def prompt_progress(prompt_tokens: int) -> Iterator[Progress | None]:
    """A progress bar on stderr while a long prompt is run, if stderr is a terminal."""
    if prompt_tokens < LONG_PROMPT or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=prompt_tokens, unit=" tokens", desc="prompt", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()  # before the first piece of the answer

        yield progress


def show(responses: Iterable[GenerationResponse], *, quiet: bool = False) -> tuple[str, list[int], GenerationResponse]:
    """Write an answer to stdout as it comes; returns its text, its token ids, and the last response."""
    pieces, tokens, last = [], [], None
    for last in responses:
        pieces.append(last.text)
        if last.token is not None:
            tokens.append(last.token)
        if not quiet:
            sys.stdout.write(last.text)
            sys.stdout.flush()
    text = "".join(pieces)
    if not quiet and not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return text, tokens, last


def write_anything() -> None:
    """Let stdout write a replacement for characters that its encoding lacks, instead of failing half-way."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def read_text(name: str) -> str:
    """The text of a UTF-8 file, or of stdin for ``-``. Raises OptionError for other bytes."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{'stdin' if name == '-' else name} is not UTF-8 text: {error}.") from None


def peak_process_bytes() -> int | None:
    """The most memory that this process has held, mapped files included; None where the system does not say."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else None
    except OSError:
        pass
    if sys.platform != "darwin":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
