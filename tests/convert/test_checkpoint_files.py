"""Half downloads, stale indexes and damaged files: refused by the name of the file, or ignored and reported."""

import json
import os
import struct

import pytest

from .checkpoints import CONFIG, plain, refused, run, weights, write_checkpoint


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)), shards=3)


SECOND = "model-00002-of-00003.safetensors"


def test_a_missing_shard_is_named(sharded, tmp_path):
    (sharded / SECOND).unlink()
    refused(sharded, tmp_path, SECOND, "is missing", "Complete the download")


def test_a_missing_shard_is_named_without_an_index_too(sharded, tmp_path):
    (sharded / "model.safetensors.index.json").unlink()
    run(sharded, tmp_path / "whole.gturbo")
    (sharded / SECOND).unlink()
    refused(sharded, tmp_path, SECOND, "is missing")


def test_links_are_followed(sharded, tmp_path):
    # A snapshot in the hub's cache is a directory of links to its blobs.
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(tmp_path / f"blob-{number}")
        path.symlink_to(tmp_path / f"blob-{number}")
    run(sharded, tmp_path / "out.gturbo")


def test_a_dangling_link_is_a_missing_file(sharded, tmp_path):
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to(tmp_path / "blobs" / "gone")
    refused(sharded, tmp_path, SECOND, "is missing")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[: len(data) // 2], "declares"),
        (lambda data: data[:-1], "declares"),
        (lambda data: data + b"\0", "declares"),
        (lambda data: data[:5], "no safetensors header"),
        (lambda data: struct.pack("<Q", 1 << 62) + data[8:], "no safetensors header"),
        (lambda data: data[:8] + b"[" + data[9:], "not valid JSON"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
    ],
    ids=["empty", "half", "a byte short", "a byte long", "no header", "lying header", "damaged header", "LFS"],
)
def test_a_damaged_file_is_named(sharded, tmp_path, damage, words):
    (sharded / SECOND).write_bytes(damage((sharded / SECOND).read_bytes()))
    refused(sharded, tmp_path, SECOND, words)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [-8, 0]},
        {"dtype": "BF16", "shape": [-4], "data_offsets": [8, 0]},
        {"dtype": "BF16", "shape": [True, 4], "data_offsets": [0, 8]},
        {"dtype": "X9", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": ["BF16"], "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": 4, "data_offsets": [0, 8]},
        {"shape": [4], "data_offsets": [0, 8]},
        7,
    ],
)
def test_a_lying_header_is_refused(tmp_path, entry):
    source = write_checkpoint(tmp_path / "source", CONFIG, {})
    text = json.dumps({"model.norm.weight": entry}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    refused(source, tmp_path, "model.safetensors", "model.norm.weight")


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, {})
    entry = '"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    text = f"{{{entry}, {entry}}}".encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    refused(source, tmp_path, "model.safetensors", "twice")


def test_files_that_the_index_does_not_name_are_ignored(sharded, tmp_path):
    (sharded / "model-old.safetensors").write_bytes(b"anything")
    report = run(sharded, tmp_path / "out.gturbo")
    assert list(report.ignored) == ["model-old.safetensors"]


def test_the_single_file_wins_over_others_beside_it(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    (source / "adapters.safetensors").write_bytes(b"anything")
    report = run(source, tmp_path / "first.gturbo")
    assert list(report.ignored) == ["adapters.safetensors"]
    (source / "model.safetensors").rename(source / "weights.safetensors")
    refused(source, tmp_path, "adapters.safetensors, weights.safetensors", "not clear")


def test_an_index_of_other_weights_is_refused(sharded, tmp_path):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    moved = index["weight_map"].pop("model.norm.weight")
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, tmp_path, moved, "model.norm.weight", "index belongs to other weights")
    index["weight_map"] |= {"model.norm.weight": moved, "model.extra.weight": SECOND}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, tmp_path, SECOND, "model.extra.weight")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.bin", 7])
def test_an_index_reaches_no_other_directory(sharded, tmp_path, file):
    index = {"weight_map": {"model.norm.weight": file}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, tmp_path, "index.json", "not a safetensors file beside it")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "PyTorch pickles"),
        ("model-Q4_0.gguf", "Give the GGUF file itself"),
        ("notes.txt", "holds no safetensors"),
    ],
)
def test_a_directory_without_safetensors_says_what_to_do(tmp_path, name, words):
    source = write_checkpoint(tmp_path / "source", CONFIG, {})
    (source / "model.safetensors").rename(source / name)
    refused(source, tmp_path, words)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("data", "words"), [(b"", "is empty"), (b'{"a": ', "not valid JSON"), (b"[]", "not a JSON object")]
)
def test_damaged_side_files_are_named(sharded, tmp_path, name, data, words):
    (sharded / name).write_bytes(data)
    refused(sharded, tmp_path, name, words)


def test_a_missing_tokenizer_says_what_to_do(sharded, tmp_path):
    (sharded / "tokenizer.json").unlink()
    refused(sharded, tmp_path, "tokenizer.json", "is missing")
    (sharded / "tokenizer.model").write_bytes(b"x")
    refused(sharded, tmp_path, "tokenizer.model alone", "save_pretrained")


def test_a_special_file_does_not_hang(sharded, tmp_path):
    (sharded / SECOND).unlink()
    os.mkfifo(sharded / SECOND)
    refused(sharded, tmp_path, SECOND, "not a regular file")
