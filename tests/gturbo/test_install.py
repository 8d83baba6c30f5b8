"""Opening, verifying, receipts, side files, and what may lie in an install's directory."""

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.gturbo import Install, integrity
from turbospark_mlx.gturbo.files import FileState
from turbospark_mlx.gturbo.integrity import home, receipt_path

from . import handmade
from .handmade import ROOT

WEIGHTS = "model_weights.bin"


def flip(path, position=-1):
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.fixture
def dense(tmp_path):
    return handmade.rust_dense().write(tmp_path / "i.gturbo")


def test_a_damaged_byte_is_found_by_hashing_only(made, tmp_path):
    directory = made.write(tmp_path / "i.gturbo")
    flip(directory / WEIGHTS)
    Install.open(directory, verify="off").close()
    for mode in ("auto", "full"):
        with pytest.raises(InstallError, match=r"model_weights\.bin: has SHA-256 [0-9a-f]{64}; manifest"):
            Install.open(directory, verify=mode)


def test_a_receipt_saves_hashing_until_a_file_changes(dense):
    seen = []
    Install.open(dense, progress=lambda done, total: seen.append((done, total))).close()
    total = sum(record["size"] for record in handmade.rust_dense().manifest["files"].values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    Install.open(dense, progress=lambda done, total: pytest.fail("hashed again")).close()
    flip(dense / WEIGHTS)
    with pytest.raises(InstallError, match="SHA-256"):
        Install.open(dense)


def test_full_hashes_in_spite_of_a_receipt(dense):
    Install.open(dense).close()
    seen = []
    Install.open(dense, verify="full", progress=lambda *sizes: seen.append(sizes)).close()
    assert seen


def test_damage_that_leaves_no_trace_in_the_times_voids_the_receipt_when_found(dense, monkeypatch):
    with Install.open(dense) as install:
        path = Path(receipt_path(install.path))
        flip(dense / WEIGHTS)
        monkeypatch.setattr(install, "_states", Install.open(dense, verify="off")._states)
        assert path.exists()
        assert len(install.verify().faults) == 1
        assert not path.exists()


def test_a_change_that_hides_its_time_is_found(dense):
    before = (dense / WEIGHTS).stat()
    Install.open(dense).close()
    flip(dense / WEIGHTS)
    os.utime(dense / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (dense / WEIGHTS).stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    with pytest.raises(InstallError, match="SHA-256"):
        Install.open(dense)


def test_hashing_waits_until_the_clock_of_file_times_has_moved_on(monkeypatch):
    waits = []
    monkeypatch.setattr(integrity.time, "sleep", waits.append)
    monkeypatch.setattr(integrity.time, "time_ns", lambda: 10**18)
    for age in (0, 15_000_000, 20_000_000, 10**12, -(10**12)):
        integrity.settle({"old": FileState(1, 0, 0, 1), "file": FileState(1, 0, 10**18 - age, 2)})
    assert waits == [0.02, 0.005]


def _changed(change):
    def rewrite(document):
        change(document)
        return document

    return rewrite


VOID = {
    "another version": _changed(lambda d: d.update(version=2)),
    "another path": _changed(lambda d: d.update(path="/elsewhere")),
    "a file less": _changed(lambda d: d["files"].pop(WEIGHTS)),
    "a file more": _changed(lambda d: d["files"].update(more=d["files"][WEIGHTS])),
    "another size": _changed(lambda d: d["files"][WEIGHTS].update(size=1)),
    "another time": _changed(lambda d: d["files"][WEIGHTS].update(mtimeNs=1)),
    "another change time": _changed(lambda d: d["files"][WEIGHTS].update(ctimeNs=1)),
    "another inode": _changed(lambda d: d["files"][WEIGHTS].update(inode=1)),
    "another hash": _changed(lambda d: d["files"][WEIGHTS].update(sha256="0" * 64)),
    "another manifest": _changed(lambda d: d["files"]["manifest.json"].update(sha256="0" * 64)),
    "not an object": lambda document: [document],
}


@pytest.mark.parametrize("kind", VOID)
def test_a_receipt_that_says_something_else_is_void(kind, dense):
    with Install.open(dense) as install:
        path = receipt_path(install.path)
        assert install.has_receipt
        path.write_text(json.dumps(VOID[kind](json.loads(path.read_text()))))
        assert not install.has_receipt
    Install.open(dense).close()
    with Install.open(dense, verify="off") as install:
        assert install.has_receipt


@pytest.mark.parametrize("kind", ["text", "directory", "link", "writable by others", "fifo"])
def test_a_receipt_of_another_kind_is_void(kind, dense, tmp_path):
    with Install.open(dense) as install:
        path = receipt_path(install.path)
        good = path.read_bytes()
        if kind == "writable by others":
            path.chmod(0o622)
        else:
            path.unlink()
        if kind == "text":
            path.write_text("{")
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            (tmp_path / "receipt").write_bytes(good)
            (tmp_path / "receipt").chmod(0o600)
            path.symlink_to(tmp_path / "receipt")
        assert not install.has_receipt


def test_receipts_are_private(dense):
    with Install.open(dense) as install:
        path = receipt_path(install.path)
    assert path.parent == home() / "receipts"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_home_that_cannot_be_written_only_costs_the_receipt(dense, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "file"))
    with Install.open(dense) as install:
        assert not install.has_receipt


def test_a_copy_and_a_moved_install_are_hashed_again(dense, tmp_path):
    Install.open(dense).close()
    shutil.copytree(dense, tmp_path / "copy.gturbo")
    dense.rename(tmp_path / "moved.gturbo")
    for name in ("copy.gturbo", "moved.gturbo"):
        with Install.open(tmp_path / name, verify="off") as install:
            assert not install.has_receipt


def test_a_link_to_the_root_is_followed_and_shares_the_receipt(dense, tmp_path):
    (tmp_path / "link").symlink_to(dense)
    Install.open(dense).close()
    with Install.open(tmp_path / "link") as install:
        assert install.path == str(dense)
        assert install.has_receipt


def test_a_file_that_changes_while_it_is_hashed_is_noticed(dense):
    def meddle(done, total):
        os.utime(dense / WEIGHTS, ns=(1, 1))

    with pytest.raises(InstallError, match=r"model_weights\.bin: changed while it was being hashed"):
        Install.open(dense, progress=meddle)


def test_a_file_that_is_replaced_after_open_is_noticed(dense):
    with Install.open(dense, verify="off") as install:
        data = (dense / WEIGHTS).read_bytes()
        (dense / WEIGHTS).unlink()
        (dense / WEIGHTS).write_bytes(data)
        with pytest.raises(InstallError, match="changed while"):
            install.verify()
        entry = install.tensors[ROOT + "norm.weight"]
        assert install.read(entry, "data") == data[entry.offset : entry.offset + entry.size]


def test_verify_lists_every_damaged_file_and_everything_unlisted(tmp_path):
    directory = handmade.swift_moe().write(tmp_path / "i.gturbo")
    flip(directory / "packed_experts/layer_01.bin")
    flip(directory / "tokenizer/tokenizer.json")
    (directory / "packed_experts/layer_09.bin").write_bytes(b"x")
    (directory / "verified-install.json").write_bytes(b"{}")
    (directory / "manifest.json.tmp").write_bytes(b"")
    (directory / "loop").symlink_to(directory)
    (directory / "d/e/f/g").mkdir(parents=True)
    with Install.open(directory, verify="off") as install:
        found = install.verify()
    assert found.files == 6
    assert [str(fault).split(": has SHA-256")[0] for fault in found.faults] == [
        f"{directory}/packed_experts/layer_01.bin",
        f"{directory}/tokenizer/tokenizer.json",
    ]
    assert found.unhashed == ("verified-install.json",)
    assert found.unexpected == ("d/e/f/g", "loop", "manifest.json.tmp", "packed_experts/layer_09.bin")


def test_files_of_the_rust_engine_that_its_manifest_does_not_list(dense):
    with Install.open(dense, verify="off") as install:
        assert install.verify().unhashed == ("chat_template.jinja", "tokenizer.json")


def test_a_missing_manifest_means_an_incomplete_install(dense):
    (dense / "manifest.json").unlink()
    with pytest.raises(InstallError, match=r"i\.gturbo: has no manifest\.json, so it is no complete install"):
        Install.open(dense)


def test_a_path_that_is_no_directory(dense, tmp_path):
    with pytest.raises(InstallError, match="is not a directory"):
        Install.open(dense / WEIGHTS)
    with pytest.raises(InstallError, match="no such directory"):
        Install.open(tmp_path / "nothing")
    with pytest.raises(InstallError):
        Install.open(tmp_path / "nul\0")


def test_an_unknown_verify_mode(dense):
    with pytest.raises(OptionError, match="verify='quick'"):
        Install.open(dense, verify="quick")


def replace_with(kind, path, outside):
    """Put something that is not a regular file in the place of ``path``."""
    data = path.read_bytes()
    path.unlink()
    if kind == "link to a copy":
        outside.write_bytes(data)
        path.symlink_to(outside)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)


KINDS = ("link to a copy", "link to itself", "link to a device", "dangling link", "fifo", "directory", "socket", "gone")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", WEIGHTS, "packed_experts/layout.json", "tokenizer/tokenizer.json"])
def test_only_regular_files_are_opened(kind, name, tmp_path):
    directory = handmade.swift_moe().write(tmp_path / "i.gturbo")
    replace_with(kind, directory / name, tmp_path / "outside")
    reason = "is not a regular file" if kind in ("fifo", "directory") else ""
    with pytest.raises(InstallError, match=f"{name}.*{reason}"):
        Install.open(directory, verify="off")


@pytest.mark.parametrize("folder", ["packed_experts", "tokenizer"])
def test_a_linked_folder_is_not_followed(folder, tmp_path):
    directory = handmade.swift_moe().write(tmp_path / "i.gturbo")
    (directory / folder).rename(tmp_path / "outside")
    (directory / folder).symlink_to(tmp_path / "outside")
    with pytest.raises(InstallError, match=folder):
        Install.open(directory, verify="off")


@pytest.mark.parametrize(("size", "message"), [(0, "has 0 bytes"), (100, "has 100 bytes")])
def test_a_cut_file_is_named_with_both_sizes(size, message, dense):
    os.truncate(dense / WEIGHTS, size)
    with pytest.raises(InstallError, match=rf"model_weights\.bin: {message}; manifest\.json declares \d+"):
        Install.open(dense, verify="off")


def test_a_git_lfs_pointer_is_recognised(dense):
    (dense / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InstallError, match=r"is a Git LFS pointer.*git lfs pull"):
        Install.open(dense, verify="off")


def test_side_files_are_looked_for_in_the_root_and_then_in_tokenizer(tmp_path):
    made = handmade.swift_moe()
    made.unlisted["tokenizer_config.json"] = b'{"where": "root"}'
    with Install.open(made.write(tmp_path / "i.gturbo")) as install:
        assert install.read_side_file("tokenizer_config.json") == b'{"where": "root"}'
        assert install.read_side_file("tokenizer.json") == b'{"model": {"type": "BPE"}}'
        assert install.read_side_file("generation_config.json", default=None) is None
        with pytest.raises(InstallError, match=r"i\.gturbo/generation_config\.json: is missing"):
            install.read_side_file("generation_config.json")


def test_side_files_keep_to_the_rules(dense, tmp_path):
    with Install.open(dense) as install:
        (dense / "big.json").write_bytes(b" " * ((4 << 20) + 1))
        (tmp_path / "secret").write_text("secret")
        (dense / "link.json").symlink_to(tmp_path / "secret")
        for name in ("big.json", "link.json", "../secret", "/etc/passwd", ""):
            with pytest.raises(InstallError):
                install.read_side_file(name, default=None)


def test_a_listed_side_file_that_changed_after_open_is_refused(tmp_path):
    directory = handmade.swift_moe().write(tmp_path / "i.gturbo")
    with Install.open(directory) as install:
        flip(directory / "tokenizer/tokenizer.json")
        with pytest.raises(InstallError, match=r"tokenizer/tokenizer\.json: does not have the SHA-256"):
            install.read_side_file("tokenizer.json")


def test_buffers_have_exactly_the_parts_size(dense):
    with Install.open(dense) as install:
        entry = install.tensors[ROOT + "norm.weight"]
        for buffer in (bytearray(127), bytearray(129), bytes(128)):
            with pytest.raises(ValueError, match="128 writable"):
                install.read_into(entry, "data", buffer)
        with pytest.raises(ValueError, match="part 'words'"):
            install.read(entry, "words")
        assert install.read(entry, "scales") == b""


def test_reads_go_on_after_short_ones(dense, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    with Install.open(dense, verify="full") as install:
        entry = install.tensors[ROOT + "embed_tokens.weight"]
        data = handmade.rust_dense().files[WEIGHTS]
        assert install.read(entry, "data") == data[entry.offset : entry.offset + entry.size]


def test_a_file_cut_after_open_is_an_error_of_ours(dense):
    with Install.open(dense) as install:
        os.truncate(dense / WEIGHTS, 16384 + 10)
        with pytest.raises(InstallError, match=r"model_weights\.bin: ends at byte 16394"):
            install.read(install.tensors[ROOT + "embed_tokens.weight"], "data")


def test_threads_share_an_install(dense):
    with Install.open(dense) as install:
        wanted = {entry.name: install.read(entry, "data") for entry in install.tensors.values()}
        wrong = []

        def work():
            for _ in range(50):
                wrong.extend(n for n, data in wanted.items() if install.read(install.tensors[n], "data") != data)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_closed_install_reads_nothing(dense):
    install = Install.open(dense)
    install.close()
    install.close()
    with pytest.raises(InstallError, match="after the install was closed"):
        install.read(install.tensors[ROOT + "norm.weight"], "data")
    with pytest.raises(InstallError, match="after the install was closed"):
        install.read_side_file("tokenizer.json")


def test_no_file_stays_open_after_a_refusal(dense):
    os.truncate(dense / "packed_experts/layout.json", 3)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(InstallError):
            Install.open(dense)
    assert len(os.listdir("/dev/fd")) == before


def test_a_read_only_install_opens(dense):
    for path in [*dense.rglob("*"), dense]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        Install.open(dense).close()
    finally:
        for path in [dense, *dense.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
