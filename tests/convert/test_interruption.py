"""Death, failure and rivals: the destination is always absent, old, or new and right."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turbospark_mlx.convert import convert, staging
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.gturbo import Install, integrity

from . import kill_points
from .checkpoints import CONFIG, plain, run, weights, write_checkpoint

SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", SMALL, plain(weights(SMALL)))


def beside(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out.gturbo"))


@pytest.mark.parametrize("mode", ["fresh", "overwrite"])
def test_death_at_every_change_of_the_disk(tmp_path, source, mode):
    # A process of its own: it forks, and this one may have threads.
    command = [sys.executable, kill_points.__file__, str(tmp_path), str(source), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    # Every part of 12 tensors is written on its own; dying after the rename leaves the new install.
    assert outcome["deaths"] > 2 * 30
    assert outcome["seen_new"] > 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_at_every_change_of_the_disk(tmp_path, source, overwrite, monkeypatch):
    monkeypatch.setattr(integrity, "settle", lambda states: None)
    run(source, tmp_path / "new.gturbo")
    new = kill_points.contents(tmp_path / "new.gturbo")
    old = None
    dest = tmp_path / "out.gturbo"
    names = ("mkdir", "ftruncate", "pwrite", "fsync", "rename")
    originals = {name: getattr(os, name) for name in names}

    def failing(name, at, counter):
        def change(*args, **options):
            counter.append(name)
            if len(counter) == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return None if name == "fsync" else originals[name](*args, **options)

        return change

    for at in range(1, 1000):
        if overwrite:
            run(source, dest, bits=8, overwrite=True)
            old = kill_points.contents(dest)
        elif dest.exists():
            kill_points.shutil.rmtree(dest)
        counter: list[str] = []
        failed = False
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, failing(name, at, counter))
            try:
                run(source, dest, overwrite=overwrite)
            except OSError:
                failed = True
        found = kill_points.contents(dest) if dest.exists() else None
        assert found in ((old, new) if failed else (new,))
        assert beside(tmp_path) == (["out.gturbo"] if found is not None else [])
        if len(counter) < at:
            break
    assert at > 50


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_new_name_is_made_durable(tmp_path, source, overwrite, monkeypatch):
    """A rename is on the disk only when the directory that holds the name is."""
    destination = tmp_path / "out.gturbo"
    if overwrite:
        run(source, destination)
    synced = []

    def sync(path):
        synced.append((path, [name for name in beside(tmp_path) if "partial" not in name and "lock" not in name]))

    monkeypatch.setattr(staging, "sync_directory", sync)
    run(source, destination, overwrite=overwrite)
    assert synced[-1] == (tmp_path, ["out.gturbo"])


def test_a_rerun_says_that_it_starts_clean(tmp_path, source):
    (tmp_path / "out.gturbo.partial-4711").mkdir()
    (tmp_path / "out.gturbo.partial-4711" / "model_weights.bin").write_bytes(b"half")
    (tmp_path / "out.gturbo.partial-notes").mkdir()
    (tmp_path / "out.gturbo.lock").touch()
    report = run(source, tmp_path / "out.gturbo")
    assert report.cleared == 1
    assert "started clean" in str(report)
    # Only what a conversion leaves behind is removed.
    assert beside(tmp_path) == ["out.gturbo", "out.gturbo.partial-notes"]
    assert "started clean" not in str(run(source, tmp_path / "other.gturbo"))


def test_a_second_conversion_to_the_same_destination_is_refused(tmp_path, source):
    with staging.Staging(tmp_path / "out.gturbo", overwrite=False) as first:
        with pytest.raises(ConvertError, match=r"another conversion to it is running.*out\.gturbo\.lock"):
            run(source, tmp_path / "out.gturbo")
        # The rival has not touched what the first one is writing.
        assert first.directory.exists()
        run(source, tmp_path / "elsewhere.gturbo")
    assert beside(tmp_path) == []
    run(source, tmp_path / "out.gturbo")


def test_a_lock_on_a_removed_file_excludes_nobody(tmp_path, source, monkeypatch):
    """Between our open and our lock the holder finishes and removes the file: the lock is taken again."""
    lock = tmp_path / "out.gturbo.lock"
    flock, calls = fcntl.flock, []

    def finishing(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            lock.unlink()
        return flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", finishing)
    with staging.Staging(tmp_path / "out.gturbo", overwrite=False):
        assert len(calls) == 2
        assert lock.exists()


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path, source, monkeypatch):
    original = staging.Staging._take_lock

    def slow(self):
        descriptor = original(self)
        (tmp_path / "out.gturbo").mkdir()
        (tmp_path / "out.gturbo" / "precious").touch()
        return descriptor

    monkeypatch.setattr(staging.Staging, "_take_lock", slow)
    with pytest.raises(ConvertError, match="exists"):
        run(source, tmp_path / "out.gturbo")
    assert beside(tmp_path) == ["out.gturbo"]
    assert (tmp_path / "out.gturbo" / "precious").exists()


def test_a_destination_is_replaced_only_on_demand(tmp_path, source):
    run(source, tmp_path / "out.gturbo", bits=8)
    before = kill_points.contents(tmp_path / "out.gturbo")
    with pytest.raises(ConvertError, match="--overwrite"):
        run(source, tmp_path / "out.gturbo")
    assert kill_points.contents(tmp_path / "out.gturbo") == before
    run(source, tmp_path / "out.gturbo", overwrite=True)
    assert kill_points.contents(tmp_path / "out.gturbo") != before
    Install.open(tmp_path / "out.gturbo", verify="full").close()
    assert beside(tmp_path) == ["out.gturbo"]


def test_only_installs_are_replaced(tmp_path, source):
    for name in ("file", "folder", "link"):
        dest = tmp_path / name
        if name == "file":
            dest.touch()
        elif name == "link":
            dest.symlink_to(source)
        else:
            dest.mkdir()
            (dest / "thesis.txt").touch()
        with pytest.raises(ConvertError, match=name):
            run(source, dest, overwrite=True)
    assert (tmp_path / "folder" / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    run(source, tmp_path / "empty", overwrite=True)


def test_the_source_is_not_the_destination(tmp_path, source):
    run(source, tmp_path / "out.gturbo")
    with pytest.raises(OptionError, match="source itself"):
        run(tmp_path / "out.gturbo", tmp_path / "source" / ".." / "out.gturbo", overwrite=True)


def test_without_an_atomic_swap_nothing_is_replaced(tmp_path, source, monkeypatch):
    run(source, tmp_path / "out.gturbo", bits=8)
    before = kill_points.contents(tmp_path / "out.gturbo")

    def unsupported(first, second):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(staging, "exchange", unsupported)
    with pytest.raises(ConvertError, match="cannot be replaced in one step"):
        run(source, tmp_path / "out.gturbo", overwrite=True)
    assert kill_points.contents(tmp_path / "out.gturbo") == before
    assert beside(tmp_path) == ["out.gturbo"]
    run(source, tmp_path / "fresh.gturbo")


def test_missing_space_is_told_with_the_arithmetic(tmp_path, source, monkeypatch):
    usage = staging.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        ConvertError, match=r"needs [\d,]+ bytes \(weights 21,120 \+ other files [\d,]+ \+ reserve"
    ) as e:
        run(source, tmp_path / "out.gturbo")
    assert "has 1,000 free" in str(e.value)
    assert beside(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path, source, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "deep" / "er" / "out.gturbo")
    assert list(Path(tmp_path / "deep" / "er").iterdir()) == []


def test_parent_directories_are_made(tmp_path, source):
    report = convert(source, tmp_path / "deep" / "er" / "out.gturbo", progress=False)
    assert report.destination == tmp_path / "deep" / "er" / "out.gturbo"
    Install.open(report.destination, verify="full").close()
