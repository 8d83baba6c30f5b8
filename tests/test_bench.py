"""`turbospark-mlx bench`: its figures add up, a sweep is a run a value, and what cannot be measured is refused."""

import json
import os
import sys

import pytest

from turbospark_mlx import cli, measure
from turbospark_mlx.errors import ContextError, OptionError
from turbospark_mlx.experts.blob import used_bytes
from turbospark_mlx.gturbo import Install
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install

COUNTS = ("--prompt-tokens", "20", "--tokens", "5", "--repeats", "1", "--kernels", "reference")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_install("gemma4", tmp_path_factory.mktemp("models") / "moe.gturbo")


def bench(capsys, *args):
    code = cli.main(["bench", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_figures_add_up(path, monkeypatch):
    dropped = []
    with Runner.open(path, kernels="reference", expert_slots=4) as runner, Install.open(path) as install:
        if hasattr(os, "posix_fadvise"):
            advise = os.posix_fadvise
            monkeypatch.setattr(os, "posix_fadvise", lambda *args: (dropped.append(args[3]), advise(*args)))
        found = measure.measure(runner, install, prompt_tokens=20, tokens=5, repeats=3)
        counters = runner.report().expert_counters
        blob = used_bytes(install.experts.layers[0])
    assert (found["prefill"]["tokens"], found["decode"]["tokens"]) == (20, 5)
    for phase in (found["prefill"], found["decode"]):
        assert phase["tokens_per_second"] == pytest.approx(phase["tokens"] / phase["seconds"])
        assert phase["bytes_per_token"] * phase["tokens"] % blob == 0
        assert 0 <= phase["waiting"] <= 1
    # A token wants three experts in each of four layers.
    misses = round(found["decode"]["bytes_per_token"] * 5 / blob)
    assert found["decode"]["hit_rate"] == pytest.approx(1 - misses / (5 * 4 * 3))
    assert counters.misses > misses
    assert (found["residency"], found["expert_slots"]) == ("streamed", 4)
    assert found["predicted_memory"] > 4 * 4 * 16384
    if hasattr(os, "posix_fadvise"):
        assert found["cold"]
        assert found["raw_bandwidth"] > 0
        # Before the plain read and before the model's, in each of three repeats, for each of four layers.
        assert dropped == [os.POSIX_FADV_DONTNEED] * 24


def test_without_experts_there_is_nothing_of_a_disk(tmp_path):
    path = make_tiny_install("llama", tmp_path / "dense.gturbo")
    with Runner.open(path, kernels="reference") as runner, Install.open(path) as install:
        found = measure.measure(runner, install, prompt_tokens=9, tokens=2, repeats=1)
    assert found["raw_bandwidth"] is found["residency"] is None
    assert not found["cold"]
    assert "hit_rate" not in found["decode"]


def test_the_command(path, capsys):
    code, out, _ = bench(capsys, path, *COUNTS, "--expert-slots", 5, "--json")
    document = json.loads(out)
    assert (code, document["expert_slots"]) == (0, 5)
    code, out, _ = bench(capsys, path, *COUNTS, "--residency", "mapped", "--warm")
    assert code == 0
    assert "experts    mapped (as asked)" in out
    assert "decode" in out
    assert "disk" not in out


def test_no_disk_is_measured_for_resident_experts(path, capsys, monkeypatch):
    for name in ("_drop", "_raw_bandwidth"):
        monkeypatch.setattr(measure, name, lambda *_, **__: pytest.fail("went to the disk"))
    code, out, _ = bench(capsys, path, *COUNTS, "--residency", "resident", "--json")
    document = json.loads(out)
    assert (code, document["residency"], document["raw_bandwidth"], document["cold"]) == (0, "resident", None, False)
    _, out, _ = bench(capsys, path, *COUNTS, "--residency", "resident")
    assert "disk       not measured: all experts are in memory" in out.splitlines()


def test_a_sweep_is_a_run_a_value(path, capfd):
    code = cli.main(["bench", str(path), *COUNTS, "--sweep", "expert_slots=3,8", "--json"])
    results = json.loads(capfd.readouterr().out)
    assert code == 0
    assert [result["expert_slots"] for result in results] == [3, 8]
    assert [result["prefill"]["tokens"] for result in results] == [20, 20]
    assert results[0]["predicted_memory"] < results[1]["predicted_memory"]
    # The error of a run is the sweep's.
    assert cli.main(["bench", str(path), *COUNTS, "--sweep", "expert_slots=2"]) == 1
    assert "every token uses 3 experts" in capfd.readouterr().err


def test_a_plot(path, tmp_path, capfd):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "slots.png"
    assert cli.main(["bench", str(path), *COUNTS, "--sweep", "expert_slots=3,8", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "expert_slots=8\n  prefill" in capfd.readouterr().out


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = bench(capsys, path, "--sweep", "expert_slots=3", "--plot", "x.png")
    assert (code, out) == (1, "")
    assert 'pip install "turbospark-mlx[plot]"' in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sweep", "seed=1,2"), "is not NAME=A,B,... with a name of expert_slots, prompt_tokens, residency"),
        (("--sweep", "expert_slots="), "is not NAME=A,B"),
        (("--plot", "x.png"), "--plot draws a --sweep"),
        (("--sweep", "expert_slots=3", "--text", "-"), "--text - can be read once"),
        (("--expert-slots", "few"), "'few' is neither a number of slots nor the word auto"),
    ],
)
def test_wrong_usage(path, capsys, flags, message):
    with pytest.raises(SystemExit):
        bench(capsys, path, *flags)
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_refused(path):
    with Runner.open(path, kernels="reference", max_context=30) as runner, Install.open(path) as install:
        with pytest.raises(ContextError, match="max_context 30 has no room for a prompt of 20 and 11 more tokens"):
            measure.measure(runner, install, prompt_tokens=20, tokens=11)
        with pytest.raises(OptionError, match="repeats=0"):
            measure.measure(runner, install, prompt_tokens=20, tokens=5, repeats=0)
        with pytest.raises(OptionError, match="no tokens in it"):
            measure.measure(runner, install, prompt_tokens=20, tokens=5, text="")
