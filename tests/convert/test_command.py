"""``turbospark-mlx convert``: options arrive, errors are one line, the report says what was done."""

import os
import pty
import subprocess
import sys
import termios

import pytest

from turbospark_mlx.cli import main
from turbospark_mlx.convert import download

from .checkpoints import CONFIG, plain, read_formats, read_install, weights, write_checkpoint


@pytest.fixture
def source(tmp_path):
    tensors = plain(weights(CONFIG), "float32") | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", weights(CONFIG)["model.norm.weight"][:16])
    }
    return write_checkpoint(tmp_path / "tiny", CONFIG, tensors)


def test_options_and_report(tmp_path, source, capsys):
    dest = tmp_path / "out.gturbo"
    arguments = ["convert", str(source), str(dest), "--bits", "8", "--group-size", "32"]
    assert main([*arguments, "--companion-dtype", "float16"]) == 0
    assert set(read_formats(dest).values()) == {(8, 32, "float16")}
    report = capsys.readouterr().out
    assert f"tiny (llama, safetensors) -> {dest}" in report
    assert "16 quantized" in report
    assert "INT8 group 32 float16 100%  relative error 0.00" in report
    assert "left out: model.layers.0.self_attn.rotary_emb.inv_freq" in report
    assert main(arguments) == 1
    assert main([*arguments, "--overwrite", "--quiet"]) == 0
    assert set(read_formats(dest).values()) == {(8, 32, "bfloat16")}
    assert main(["convert", str(source), str(dest), "--elder-compatible", "--overwrite"]) == 0
    assert {tensor["tag"] for tensor in read_install(dest).values()} == {1, 4}
    out, err = capsys.readouterr()
    assert "5 narrowed to bfloat16" in out
    assert "values changed when they were narrowed" in out
    assert err.splitlines() == [f"error: {dest}: exists. Replace it with --overwrite, or choose another destination."]


def test_wrong_usage_exits_with_2(tmp_path, source, capsys):
    for arguments in (["--bits", "5"], ["--group-size", "48"], ["--companion-dtype", "float32"], []):
        with pytest.raises(SystemExit) as caught:
            main(["convert", str(source), *([str(tmp_path / "o")] if arguments else []), *arguments])
        assert caught.value.code == 2
    assert main(["convert", str(source), str(tmp_path / "o"), "--bits", "16", "--group-size", "32"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: bits 16 keeps")


def test_a_repository_is_fetched_and_gives_its_name(tmp_path, source, capsys, monkeypatch):
    asked = []

    def fetch(repo_id, revision=None, progress=True):
        asked.append(repo_id)
        return source

    monkeypatch.setattr(download, "fetch_repository", fetch)
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "owner/Tiny-1.0", "out.gturbo"]) == 0
    assert asked == ["owner/Tiny-1.0"]
    assert capsys.readouterr().out.startswith("owner/Tiny-1.0 (llama, safetensors)")
    # A path that exists is never taken for a repository.
    (tmp_path / "owner").mkdir()
    source.rename(tmp_path / "owner" / "Tiny-1.0")
    assert main(["convert", "owner/Tiny-1.0", "second.gturbo"]) == 0
    assert asked == ["owner/Tiny-1.0"]


def test_progress_is_shown_on_terminals_only(tmp_path, source):
    command = [sys.executable, "-m", "turbospark_mlx", "convert", str(source)]
    done = subprocess.run([*command, str(tmp_path / "a.gturbo")], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    subprocess.run([*command, str(tmp_path / "b.gturbo")], stdout=subprocess.DEVNULL, stderr=follower, check=True)
    shown = os.read(leader, 1 << 16)
    os.close(follower)
    os.close(leader)
    assert b"convert: 100%" in shown
    assert b"hash: 100%" in shown
