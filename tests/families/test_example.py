"""The example scripts run as they stand."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from turbospark_mlx import families
from turbospark_mlx.testing import make_tiny_install

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("family", families.PACKAGES)
def test_every_family_has_an_example_that_runs_at_once(family, monkeypatch, capsys):
    assert len(run(f"{family}.py", monkeypatch=monkeypatch, capsys=capsys).splitlines()) > 5


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_it_runs_on_a_tiny_model_that_it_makes(variant, monkeypatch, capsys):
    out = run("llama.py", "--variant", variant, "--tokens", "12", monkeypatch=monkeypatch, capsys=capsys)
    assert "parameters" in out
    assert out.count("%  '") + out.count('%  "') == 3
    assert "differ by at most 0" in out


def test_it_lists_the_variants(monkeypatch, capsys):
    out = run("llama.py", "--variant", "list", monkeypatch=monkeypatch, capsys=capsys)
    assert "mistral-mixed" in out.split()


@pytest.mark.parametrize("variant", ["gpt-oss", "gpt-oss-plain"])
def test_gpt_oss_runs_on_a_tiny_model_that_it_makes(variant, monkeypatch, capsys):
    out = run("gpt_oss.py", "--variant", variant, "--tokens", "6", monkeypatch=monkeypatch, capsys=capsys)
    assert "sees the last 8" in out
    assert "sees all" in out
    assert "streamed logits differ by 0;" in out


def test_gemma4_runs_on_a_tiny_model_that_it_makes(monkeypatch, capsys):
    out = run("gemma4.py", "--variant", "gemma4-moe", "--tokens", "6", monkeypatch=monkeypatch, capsys=capsys)
    assert "layer  0: sees the last 8" in out
    assert "values are its keys" in out
    assert "after a rollback the logits differ by 0" in out


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, str(EXAMPLES / "llama.py"), "--variant", "list"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("spark.py", ["--variant", "none"], "error: variant='none': the spark family has spark"),
        ("muse.py", ["--model", "./none.gturbo"], r"error: \./none\.gturbo does not exist"),
        ("qwen4.py", ["--tokens", "600"], "error: max_context 512 has no room for"),
        ("qwen4.py", ["--expert-slots", "1"], "error: expert_slots=1: every token uses 3 experts"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(script, arguments, words, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=words):
        run(script, *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_an_example_refuses_a_model_of_another_family(tmp_path, monkeypatch, capsys):
    path = make_tiny_install("muse", tmp_path / "x.gturbo")
    with pytest.raises(SystemExit, match="is a museGlimmer model, and this example is about spark"):
        run("spark.py", "--model", str(path), monkeypatch=monkeypatch, capsys=capsys)


def test_streaming_changes_no_token(monkeypatch, capsys):
    out = run("streaming.py", "--tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert "5 ways, the same tokens" in out
    assert out.count("% hits") == 4


def test_latent_attention_in_both_forms(monkeypatch, capsys):
    out = run("deepseek2.py", "--variant", "deepseek-v2", "--tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert "a token leaves 72 numbers in each of 3 layers" in out
    assert out.count("to experts of 2 groups in 4") == 2
    assert "after a rollback the logits differ by 0" in out


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-moe"])
def test_recurrent_states_and_what_they_allow(variant, monkeypatch, capsys):
    out = run("qwen.py", "--variant", variant, "--tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert "whatever the length" in out
    assert "the same prompt again: 41 of 42 tokens are reused" in out
    assert "after a rollback the logits differ by 0" in out
    assert "0 of the first 20 tokens are reused" in out


@pytest.mark.parametrize("variant", ["qwen4", "qwen4-plain"])
def test_sparse_attention_and_a_table_on_disk(variant, monkeypatch, capsys):
    out = run("qwen4.py", "--variant", variant, "--tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert "the last token chose" in out
    assert "nats" in out
    assert "KL(sparse || dense) behind 42 tokens: 0 nats" not in out
    assert ("rows of 440 were read" in out) == (variant == "qwen4")


@pytest.mark.parametrize("variant", ["muse-glimmer", "muse-glimmer-tied"])
def test_layers_without_positions_and_gates(variant, monkeypatch, capsys):
    out = run("muse.py", "--variant", variant, "--tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert out.count("knows no positions") == (1 if variant == "muse-glimmer" else 2)
    assert out.count("% open") == 4
    assert "after a rollback the logits differ by 0" in out
    reused, prompt = re.search(r"the same prompt again: (\d+) of (\d+) tokens are reused", out).groups()
    assert int(reused) == int(prompt) - 1


@pytest.mark.parametrize("variant", ["spark", "spark-biases"])
def test_spark_shows_windows_and_gates(variant, monkeypatch, capsys):
    out = run("spark.py", "--variant", variant, "--tokens", "6", monkeypatch=monkeypatch, capsys=capsys)
    assert out.count("sees the last 8") == (3 if variant == "spark" else 2)
    assert "sees all" in out
    heads = 4 if variant == "spark" else 6
    gates = [line for line in out.splitlines() if "gates of heads" in line]
    assert gates
    assert all(line.count(", ") == heads - 1 for line in gates)
    assert "after a rollback the logits differ by 0" in out
