"""Published checkpoints: what is copied, what is quantized, and what is refused by name."""

import json

import numpy as np
import pytest

from turbospark_mlx.convert.affine import quantize_affine
from turbospark_mlx.gturbo import Install

from .checkpoints import (
    CONFIG,
    PREFIX,
    TOKENIZER,
    from_bfloat16,
    plain,
    read_install,
    refused,
    run,
    safetensors_bytes,
    store,
    weights,
    write_checkpoint,
)

TAGS = {"bfloat16": 1, "float16": 2, "float32": 3}


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_matrix_in_a_stack_of_one_is_refused(name, tmp_path):
    tensors = weights(CONFIG)
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name][None]
    source = write_checkpoint(tmp_path / "stack", CONFIG, plain(tensors))
    refused(source, tmp_path, name, f"has shape [1, {rows}, {columns}]; config.json asks for [{rows}, {columns}]")


@pytest.mark.parametrize("dtype", TAGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_unquantized_weights_are_kept_bit_for_bit(tmp_path, dtype, shards):
    values = weights(CONFIG)
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(values, dtype), shards=shards)
    report = run(source, tmp_path / "out.gturbo", bits=16)
    tensors = read_install(tmp_path / "out.gturbo")
    assert set(tensors) == {PREFIX + name for name in values}
    for name, array in values.items():
        tensor = tensors[PREFIX + name]
        assert (tensor["tag"], tensor["shape"]) == (TAGS[dtype], array.shape)
        assert tensor["data"] == store(array, dtype).tobytes()
    assert (report.copied, report.quantized, report.narrowed) == (len(values), 0, 0)


@pytest.mark.parametrize("dtype", TAGS)
def test_matrices_are_quantized_and_vectors_are_not(tmp_path, dtype, monkeypatch):
    # Tiles of a few rows, so that the seams between them are in the test as well.
    monkeypatch.setattr("turbospark_mlx.convert.source.TILE_ELEMENTS", 5 * 128)
    values = weights(CONFIG)
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(values, dtype))
    report = run(source, tmp_path / "out.gturbo")
    tensors = read_install(tmp_path / "out.gturbo")
    for name, array in values.items():
        tensor = tensors[PREFIX + name]
        stored = store(array, dtype)
        if array.ndim == 1:
            assert (tensor["tag"], tensor["data"]) == (TAGS[dtype], stored.tobytes())
            continue
        exact = from_bfloat16(stored) if dtype == "bfloat16" else stored.astype(np.float32)
        expected = quantize_affine(exact, bits=4, group_size=64, companion_dtype="bfloat16")
        assert tensor["tag"] == 4
        for part, array_part in zip(("data", "scales", "biases"), expected, strict=True):
            assert tensor[part] == array_part.tobytes()
    # 4 bits in groups of 64 normal weights: about 9 % of their rms.
    assert 0.08 < report.roles["attention"].relative_error < 0.1
    assert report.roles["vector"].relative_error is None
    with Install.open(tmp_path / "out.gturbo", verify="full") as install:
        assert install.manifest.model_id == "source"


def test_relative_error_is_measured_on_what_is_stored(tmp_path):
    values = weights(CONFIG)
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(values, "float32"))
    report = run(source, tmp_path / "out.gturbo")
    tensor = read_install(tmp_path / "out.gturbo")[PREFIX + "lm_head.weight"]
    packed = np.frombuffer(tensor["data"], np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 64).astype(np.float64)
    scale, bias = (from_bfloat16(np.frombuffer(tensor[part], np.uint16))[:, None] for part in ("scales", "biases"))
    head = values["lm_head.weight"].astype(np.float64)
    difference = (codes * scale + bias).reshape(head.shape) - head
    expected = np.sqrt(np.sum(difference**2) / np.sum(head**2))
    assert report.roles["head"].relative_error == pytest.approx(expected, rel=1e-4)


def test_published_and_transformers_5_spelling_give_one_install(tmp_path):
    values = plain(weights(CONFIG))
    scaling = {"rope_type": "linear", "factor": 4.0}
    published = {**CONFIG, "rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    renamed = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    renamed |= {"rope_parameters": {"rope_theta": 500000.0, **scaling}, "dtype": "bfloat16"}
    manifests = []
    for name, config in (("published", published), ("renamed", renamed)):
        write_checkpoint(tmp_path / name, config, values)
        run(tmp_path / name, tmp_path / f"{name}.gturbo")
        manifests.append(json.loads((tmp_path / f"{name}.gturbo" / "manifest.json").read_text()))
    assert manifests[0]["arch"] == manifests[1]["arch"]
    assert manifests[0]["arch"]["ropeTheta"] == 500000.0
    assert manifests[0]["turbosparkMlx"] == manifests[1]["turbosparkMlx"]
    assert manifests[0]["turbosparkMlx"]["arch"]["rope_scaling"] is not None


def test_side_files(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    copied = {
        "tokenizer_config.json": b'{"chat_template": "x"}',
        "chat_template.jinja": b"{{ messages }}",
        "chat_template.json": b'{"chat_template": "y"}',
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "special_tokens_map.json": b"{}",
    }
    for name, data in {**copied, "README.md": b"words", "LICENSE": b"words", "vocab.json": b"{}"}.items():
        (source / name).write_bytes(data)
    run(source, tmp_path / "out.gturbo")
    expected = {**copied, "tokenizer.json": TOKENIZER, "config.json": (source / "config.json").read_bytes()}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out.gturbo").iterdir() if path.is_file()}
    del written["manifest.json"], written["model_weights.bin"]
    assert written == expected


def test_a_copy_of_the_embedding_in_a_dtype_that_cannot_be_read_is_refused(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = plain(weights(config)) | {"lm_head.weight": ("F64", np.zeros((96, 128)))}
    refused(write_checkpoint(tmp_path / "source", config, tensors), tmp_path, "lm_head.weight", "F64")


def test_buffers_are_left_out_and_reported(tmp_path):
    tensors = plain(weights(CONFIG))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(16, np.float32))
    report = run(write_checkpoint(tmp_path / "source", CONFIG, tensors), tmp_path / "out.gturbo")
    assert list(report.dropped) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert "inv_freq" in str(report)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("head", ["none", "copy", "other"])
def test_tied_head(tmp_path, flag, head):
    config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    if flag is not None:
        config["tie_word_embeddings"] = flag
    values = weights({**CONFIG, "tie_word_embeddings": True})
    if head != "none":
        values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    if head == "other":
        values["lm_head.weight"][-1, -1] += 1
    source = write_checkpoint(tmp_path / "source", config, plain(values))
    if flag is True and head == "other":
        refused(source, tmp_path, "model.safetensors: lm_head.weight", "tie_word_embeddings true")
        return
    if flag is False and head == "none":
        refused(source, tmp_path, "tie_word_embeddings is false", "no output head")
        return
    report = run(source, tmp_path / "out.gturbo")
    arch = json.loads((tmp_path / "out.gturbo" / "manifest.json").read_text())["arch"]
    tied = flag is True or head == "none"
    assert arch["tieWordEmbeddings"] is tied
    assert ("language_model.lm_head.weight" in read_install(tmp_path / "out.gturbo")) is not tied
    assert ("lm_head.weight" in report.dropped) is (flag is True and head == "copy")


def _with(tmp_path, changes, config=CONFIG):
    tensors = plain(weights(config))
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return write_checkpoint(tmp_path / "source", config, tensors)


NORM = "model.layers.1.input_layernorm.weight"


def test_missing_tensors_are_named(tmp_path):
    refused(_with(tmp_path, {NORM: None}), tmp_path, "lacks 1 of 21", NORM)


def test_unknown_tensors_are_named(tmp_path):
    extra = ("BF16", np.zeros(4, np.uint16))
    refused(_with(tmp_path, {"model.layers.0.self_attn.sinks": extra}), tmp_path, "model.layers.0.self_attn.sinks")


def test_wrong_shapes_are_named(tmp_path):
    source = _with(tmp_path, {NORM: ("BF16", np.zeros(64, np.uint16))})
    refused(source, tmp_path, f"model.safetensors: {NORM}", "[64]", "[128]")


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    source = _with(tmp_path, {f"language_model.{NORM}": ("BF16", np.zeros(128, np.uint16))})
    refused(source, tmp_path, NORM, "same place")


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_other_dtypes_are_named(tmp_path, dtype):
    size = 8 if dtype == "F64" else 1
    source = _with(tmp_path, {NORM: (dtype, np.zeros(128, f"V{size}"))})
    refused(source, tmp_path, NORM, dtype, "cannot be converted")


@pytest.mark.parametrize("dtype", TAGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("bits", [4, 16])
def test_values_that_are_not_finite_are_refused(tmp_path, dtype, bad, name, bits):
    values = weights(CONFIG)
    stored = {name: store(array, dtype) for name, array in values.items()}
    bit_patterns = {"bfloat16": {np.inf: 0x7F80, -np.inf: 0xFF80}}
    flat = stored[name].reshape(-1)
    flat[-1] = bit_patterns[dtype].get(bad, 0x7FC0) if dtype == "bfloat16" else bad
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    source = write_checkpoint(tmp_path / "source", CONFIG, {n: (code, array) for n, array in stored.items()})
    refused(source, tmp_path, f"model.safetensors: {name}", "NaN or infinite", bits=bits)


def test_weights_beyond_float16_are_refused_with_float16_companions(tmp_path):
    values = weights(CONFIG)
    values["lm_head.weight"][0, 0] = 1e6
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(values))
    refused(source, tmp_path, "lm_head.weight", "range of float16", bits=4, companion_dtype="float16")
    run(source, tmp_path / "out.gturbo")


def test_an_unsupported_model_is_named(tmp_path):
    source = write_checkpoint(tmp_path / "source", {**CONFIG, "model_type": "bert"}, {})
    refused(source, tmp_path, "bert")
    source = write_checkpoint(tmp_path / "other", {"vocab_size": 3}, {})
    refused(source, tmp_path, "config.json", "no model_type")


def test_a_source_that_is_nothing_is_named(tmp_path):
    refused(tmp_path / "absent", tmp_path, "absent", "does not exist")
    (tmp_path / "weights.safetensors").write_bytes(safetensors_bytes({}))
    refused(tmp_path / "weights.safetensors", tmp_path, "weights.safetensors", "neither a directory nor a GGUF file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "config.json", "is missing")
