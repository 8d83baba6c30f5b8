"""The commands generate, chat and perplexity as processes: output, exit codes, interrupts, pipes, terminals."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import get_args

import pytest

from tests import fake_command
from turbospark_mlx import cli
from turbospark_mlx.cli import options
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.families import layers
from turbospark_mlx.gturbo import install

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tests.fake_command"]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def run(monkeypatch):
    """Runs a command line in this process: ``run(*args, stdin="") -> (exit code, stdout, stderr)``."""

    def run(*args, stdin="", context=4096):
        monkeypatch.setattr(fake_command, "CONTEXT", context)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        out, err = io.StringIO(), io.StringIO()
        with fake_command.replaced(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(list(args))
            except SystemExit as exit:
                code = exit.code
        return code, out.getvalue(), err.getvalue()

    return run


def start(*args, delay=0.0, **options):
    """A command line as a process of its own."""
    environment = {**os.environ, "FAKE_DELAY": str(delay), "PYTHONUNBUFFERED": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*COMMAND, *args], cwd=ROOT, env=environment, text=True, **{**pipes, **options})


def test_text_goes_to_stdout_and_figures_to_stderr(run):
    code, out, err = run("generate", "m", "hi", "--max-tokens", "30")
    assert (code, out) == (0, ALPHABET + "abcd\n")
    # BOS, "u hi\n", "a "
    assert "prompt: 8 tokens, " in err
    assert "generated: 30 tokens, " in err
    assert "finish reason: length" in err
    assert "process peak: " in err


def test_raw_system_stdin_and_max(run):
    assert "prompt: 3 tokens" in run("generate", "m", "--raw", "hi", "--max-tokens", "1")[2]
    assert "prompt: 14 tokens" in run("generate", "m", "--system", "abc", "hi", "--max-tokens", "1")[2]
    assert "prompt: 3 tokens" in run("generate", "m", "-", "--raw", "--max-tokens", "1", stdin="hi\n")[2]
    assert "prompt: 4 tokens" in run("generate", "m", "-", "--raw", "--max-tokens", "1", stdin="hi\n\n")[2]
    code, out, _ = run("generate", "m", "hi", "--raw", "--max-tokens", "max", "--max-context", "20")
    assert (code, out) == (0, ALPHABET[:17] + "\n")


def test_flags_reach_the_sampler(run):
    assert run("generate", "m", "hi", "--stop", "fg", "--stop", "xyz")[1] == "abcde\n"
    assert run("generate", "m", "hi", "--logit-bias", "9=99", "--max-tokens", "3")[1] == "jjj\n"
    assert (
        run("generate", "m", "hi", "--logit-bias", "0=-inf", "--logit-bias", "1=0.5", "--max-tokens", "1")[1] == "b\n"
    )
    drawn = {run("generate", "m", "hi", "--temp", "5", "--seed", seed, "--max-tokens", "12")[1] for seed in "112"}
    assert len(drawn) == 2
    assert "\nseed: 5\n" in run("generate", "m", "hi", "--temp", "1", "--seed", "5", "--max-tokens", "1")[2]
    drawn = run(
        "generate", "m", "hi", "--temp", "5", "--top-k", "1", "--top-p", "0.9", "--min-p", "0.1", "--max-tokens", "3"
    )
    assert drawn[1] == "abc\n"
    # "a" (logit 5) is three times in the prompt, and the answer begins with it unless it falls below "b" (2).
    for penalty, weak, strong in (("repetition", "2", "3"), ("presence", "2.5", "3.5"), ("frequency", "0.9", "1.1")):
        for value, answer in ((weak, "a\n"), (strong, "b\n")):
            flags = (f"--{penalty}-penalty", value, "--logit-bias", "1=2")
            assert run("generate", "m", "aa", *flags, "--max-tokens", "1")[1] == answer, flags


def test_model_flags_reach_the_runner(run):
    model = ("--kernels", "reference", "--dtype", "float32", "--verify", "full")
    _, _, err = run("generate", "m", "hi", *model, "--residency", "streamed", "--expert-slots", "8")
    assert "opened m with {'kernels': 'reference', 'dtype': 'float32', 'verify': 'full'," in err
    assert "'residency': 'streamed', 'expert_slots': 8}" in err


def test_the_choices_are_those_of_the_parts_that_take_them():
    assert options.KERNELS == backends.KERNELS
    assert set(options.DTYPES) == set(layers.DTYPES)
    assert get_args(install.Verify) == options.VERIFY


def test_missing_kernels_are_told_with_their_reason(run, monkeypatch):
    monkeypatch.setattr(fake_command, "BACKEND", "reference")
    code, out, err = run("generate", "m", "hi", "--max-tokens", "3")
    assert (code, out) == (0, "abc\n")
    assert "note: this runs slowly, on plain operations, because a compiler is missing\n" in err
    assert "note" not in run("generate", "m", "hi", "--kernels", "reference")[2]
    monkeypatch.setattr(fake_command, "BACKEND", "host")
    assert "note" not in run("generate", "m", "hi")[2]


def test_a_context_beyond_the_trained_length_is_told(run, monkeypatch):
    monkeypatch.setattr(fake_command, "TRAINED", 30)
    code, out, err = run("generate", "m", "hi", "--max-tokens", "3", "--max-context", "31")
    assert (code, out) == (0, "abc\n")
    assert "note: the model was trained for 30 tokens; " in err
    assert "context of 31 " in err
    assert "note" not in run("generate", "m", "hi", "--max-tokens", "3", "--max-context", "30")[2]


def test_a_missing_half_of_mlx_is_told_in_one_sentence(tmp_path):
    """As after `pip install mlx` on Linux, where the library itself is another package."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / f"core{EXTENSION_SUFFIXES[0]}").write_text("no library")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def python(*args):
        return subprocess.run([sys.executable, *args], env=environment, cwd=tmp_path, text=True, capture_output=True)

    command = python("-m", "turbospark_mlx", "perplexity", "m", "x")
    assert (command.returncode, command.stdout) == (1, "")
    assert command.stderr.startswith("error: MLX does not load (")
    assert command.stderr.count("\n") == 1
    assert 'pip install "mlx[cpu]"' in command.stderr
    code = python("-c", "from turbospark_mlx import load")
    assert "\nturbospark_mlx.errors.BackendError: MLX does not load (" in code.stderr
    assert python("-m", "turbospark_mlx", "list").returncode == 0


def test_json(run):
    code, out, err = run("generate", "m", "hi", "--max-tokens", "3", "--json", "--temp", "0.001", "--seed", "7")
    document = json.loads(out)
    assert code == 0
    assert document["text"] == "abc"
    assert document["tokens"] == [0, 1, 2]
    assert document["finish_reason"] == "length"
    assert (document["prompt_tokens"], document["generation_tokens"], document["seed"]) == (8, 3, 7)
    assert {"model", "prompt_tps", "generation_tps", "peak_memory", "peak_process_memory"} <= set(document)
    assert "generated" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate",), "required: MODEL, PROMPT"),
        (("generate", "m"), "required: PROMPT"),
        (("generate", "m", "hi", "--raw", "--system", "x"), "--system needs the chat template"),
        (("generate", "m", "hi", "--logit-bias", "5"), "is not ID=V"),
        (("generate", "m", "hi", "--logit-bias", "a=1"), "is not ID=V"),
        (("generate", "m", "hi", "--max-tokens", "many"), "'many' is neither a number of tokens"),
        (("generate", "m", "hi", "--max-tokens", "0"), "'0' is neither a number of tokens from 1 on nor the word max"),
        (("generate", "m", "hi", "--kernels", "fast"), "choose from 'auto', 'metal'"),
        (("generate", "m", "hi", "--dtype", "int8"), "choose from 'bfloat16'"),
        (("generate", "m", "hi", "--verify", "no"), "choose from 'off'"),
        (("chat",), "required: MODEL"),
        (("perplexity", "m"), "required: FILE"),
        ((), "required: COMMAND"),
    ],
)
def test_wrong_usage_exits_with_2(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "m", "hi", "--top-p", "2"), "error: top_p is 2.0"),
        (("generate", "m", "hi", "--max-context", "10"), "error: The prompt has 8 tokens"),
        (("generate", "m", "hi", "--stop", ""), "error: stop contains ''"),
        (("perplexity", "m", "/nowhere/at/all"), "error: /nowhere/at/all: No such file or directory"),
        (("perplexity", "m", "README.md", "--tokens", "0"), "error: --tokens is 0"),
    ],
)
def test_errors_exit_with_1_and_one_line(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.startswith("opened ")]
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_stdin_that_is_not_text_is_refused(run):
    done = subprocess.run([*COMMAND, "generate", "m", "-"], input=b"\xff\xfe", capture_output=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: stdin is not UTF-8 text")


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
def test_help_has_examples(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"examples:\n  turbospark-mlx {command} " in out


def examples():
    """Every command line that the help texts and the documents show."""
    texts = [cli.EPILOG, *(import_module(f"turbospark_mlx.cli.{name}").EPILOG for name in cli.SUBCOMMANDS)]
    texts += [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    found = (re.search(r"^(?:  |printf .* )?(turbospark-mlx .*)", line) for text in texts for line in text.splitlines())
    return sorted({match[1] for match in found if match and "[--" not in match[1]})  # a synopsis is no example


def test_the_examples_are_right_usage():
    lines = examples()
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(re.split(r" [<>|] ", line)[0])
        cli._parser().parse_args(words[1:])


def test_ctrl_c_ends_the_answer_with_its_figures():
    process = start("generate", "m", "hi", "--max-tokens", "max", delay=0.02)
    assert process.stdout.read(3) == "abc"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert ALPHABET.startswith("abc" + out.rstrip("\n")[:23])
    assert out.endswith("\n")
    assert "finish reason: cancelled" in err
    assert "Traceback" not in err


def test_ctrl_c_inside_the_prompt():
    process = start("generate", "m", "-", "--raw", "--json", delay=0.05)
    process.stdin.write("a" * 2000)
    process.stdin.close()
    assert process.stderr.readline().startswith("opened")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=30)
    document = json.loads(process.stdout.read())
    assert (code, document["finish_reason"], document["text"]) == (130, "cancelled", "")


def test_a_second_ctrl_c_does_not_wait():
    process = start("generate", "m", "hi", "--raw", delay=5)
    assert process.stderr.readline().startswith("opened")
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 4
    assert err.strip() == "stopped"


@pytest.mark.parametrize("command", [("generate", "m", "hi", "--max-tokens", "max"), ("chat", "m")])
def test_a_reader_that_goes_away_ends_it_quietly(command):
    process = start(*command, delay=0.01)
    process.stdin.write("hi\n")
    process.stdin.close()
    assert process.stdout.read(3) == "abc"
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    err = process.stderr.read()
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_output_that_cannot_be_encoded_is_replaced(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    out, _ = start("generate", "m", "hi", "--logit-bias", "28=99", "--max-tokens", "2").communicate(timeout=60)
    assert out == "??\n"


def test_piped_chat_keeps_its_cache(run):
    code, out, err = run("chat", "m", "--max-tokens", "5", stdin="hi\n\nyou\n")
    assert code == 0
    assert out == "abcde\nabcde\n"
    figures = [line for line in err.splitlines() if line.startswith("[prompt")]
    assert figures[0].startswith("[prompt 8 tokens, 0 reused; 5 generated, ")
    # The second prompt: BOS, "u hi\n", "a abcde\n", "u you\n", "a "; the runner holds up to "abcd".
    assert figures[1].startswith("[prompt 22 tokens, 12 reused; 5 generated, ")
    assert figures[1].endswith("; length]")
    assert "> " not in out


def test_chat_commands(run):
    lines = ["hi", "/reset", "hi", "/system abc", "hi", "/system", "hi", "/nonsense", "/help", "/exit", "hi"]
    code, out, err = run("chat", "m", "--max-tokens", "1", stdin="\n".join(lines))
    assert code == 0
    assert out == "a\n" * 4
    prompts = [line.split()[1] for line in err.splitlines() if line.startswith("[prompt")]
    assert prompts == ["8", "8", "14", "8"]
    assert "/nonsense is not a command" in err
    assert "/system TEXT  start over under a system message" in err


def test_chat_answers_fit_what_is_left_and_a_full_context_is_an_error(run):
    code, out, err = run("chat", "m", "--max-tokens", "10", stdin="hi\nhi\n", context=16)
    assert (code, out) == (1, "abcdefgh\n")
    assert "The prompt has 24 tokens" in err
    code, out, _ = run("chat", "m", stdin="hi\n", context=16)
    assert (code, out) == (0, "abcdefgh\n")


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, *args, delay=0.01, stdout=None):
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))

        def control():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that starts the tests behind its back ignores it
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = start(
            "chat", "m", *args, delay=delay, stdin=slave, stdout=stdout or slave, stderr=slave, preexec_fn=control
        )
        os.close(slave)
        self.text = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text, timeout=30):
        """What came up to and with ``text``."""
        deadline = time.monotonic() + timeout
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.master, 65536).decode()
        end = self.text.index(text) + len(text)
        found, self.text = self.text[:end], self.text[end:]
        return found

    def drop(self, text):
        """Type ``text`` at the prompt and Ctrl-C behind it, up to the next prompt.

        CPython's line editor looks for a signal only where it interrupts a wait: one that comes between two waits is
        not seen before the next. A user presses Ctrl-C again, and so does this.
        """
        self.type(text)
        self.wait_for(text)
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for("> ", timeout=1)
        raise AssertionError("Ctrl-C at the prompt does not lead to a new one")

    def end(self):
        code = self.process.wait(timeout=30)
        os.close(self.master)
        return code


def test_chat_on_a_terminal():
    terminal = Terminal("--max-tokens", "400")
    terminal.wait_for("/help shows the commands.")
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("abcdef")
    terminal.type("\x03")
    assert "; cancelled]" in terminal.wait_for("cancelled]")
    terminal.wait_for("> ")
    terminal.drop("half a line")
    terminal.type("you\n")
    terminal.wait_for("abcdef")  # the conversation goes on behind the part that was answered
    terminal.type("\x03")
    figures = terminal.wait_for("cancelled]")
    assert int(figures.split(" tokens, ")[1].split(" reused")[0]) >= 8 + 5
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_long_prompt_on_a_terminal_has_a_progress_bar():
    terminal = Terminal("--max-tokens", "3")
    terminal.wait_for("> ")
    terminal.type("hi\n")
    assert "prompt: " not in terminal.wait_for("length]")
    terminal.type("a" * 300 + "\n")
    terminal.wait_for("prompt: ")
    drawn = [int(done) for done in re.findall(r"(\d+)/317 ", terminal.wait_for("length]"))]
    assert drawn == sorted(drawn)
    assert 0 < drawn[-1] <= 317
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_a_chat_whose_answers_go_to_a_file(tmp_path):
    with open(tmp_path / "answers", "w") as answers:
        terminal = Terminal("--max-tokens", "3", stdout=answers)
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert (tmp_path / "answers").read_text() == "abc\n"


def test_an_error_on_a_terminal_does_not_end_the_chat():
    terminal = Terminal("--max-context", "20")
    terminal.wait_for("> ")
    terminal.type("abcdefghijklmnop\n")
    assert terminal.wait_for("/reset starts over.").count("error: The prompt has 22 tokens") == 1
    terminal.wait_for("> ")
    terminal.type("hi\n")
    terminal.wait_for("[prompt 8 tokens")
    terminal.wait_for("> ")
    terminal.drop("half a line")  # behind a whole answer, too
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_compiling_is_told_once_and_counted_on_a_terminal(capsys, monkeypatch):
    import logging
    import sys

    from turbospark_mlx.cli.terminal import compile_notice

    logger = logging.getLogger("turbospark_mlx.custom_kernels.backends.compiler")

    def compile_two():
        with compile_notice():
            logger.info("compiling the kernel a")
            for done in (1, 2):
                logger.info("%d of %d", done, 2, extra={"kernels": (done, 2)})
        return capsys.readouterr().err

    line = "compiling kernels for this machine; they are kept for the next time\n"
    assert compile_two() == line
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    err = compile_two()
    assert err.startswith(line)
    assert "2/2" in err
    with compile_notice():
        pass
    assert capsys.readouterr().err == ""
    assert logger.handlers == []
