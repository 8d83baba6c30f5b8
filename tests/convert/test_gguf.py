"""GGUF files: their meaning is kept exactly, rows come back in the published order, other types are named."""

import json

import gguf
import numpy as np
import pytest

from turbospark_mlx import families
from turbospark_mlx.convert.affine import dequantize_affine, quantize_affine
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.gturbo import Install

from .checkpoints import CONFIG, PREFIX, read_formats, read_install, refused, run, store, weights
from .ggufs import gguf_name, published, quantize, write_gguf

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
QUERY, HEAD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"


def installed_values(install):
    """float32 values of every tensor of an install, by published name."""
    formats, result = read_formats(install), {}
    raw = {1: "bfloat16", 2: "float16", 3: "float32"}
    for name, tensor in read_install(install).items():
        stem = name.removeprefix(PREFIX)
        if tensor["tag"] in raw:
            array = np.frombuffer(tensor["data"], NUMPY[raw[tensor["tag"]]])
            array = (array.astype(np.uint32) << 16).view(np.float32) if tensor["tag"] == 1 else array
            result[stem] = array.astype(np.float32).reshape(tensor["shape"])
            continue
        bits, group_size, companion = formats[name]
        rows, columns = tensor["shape"]
        words = np.frombuffer(tensor["data"], np.uint32).reshape(rows, -1)
        parts = (np.frombuffer(tensor[p], NUMPY[companion]).reshape(rows, -1) for p in ("scales", "biases"))
        result[stem] = dequantize_affine(
            words, *parts, bits=bits, group_size=group_size, companion_dtype=companion
        ).reshape(rows, columns)
    return result


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_blocks_keep_their_meaning_exactly(tmp_path, type, architecture, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.convert.source.TILE_ELEMENTS", 5 * 128)
    config = {**CONFIG, "model_type": architecture}
    exact = write_gguf(tmp_path / "m.gguf", config, {}, default=type, architecture=architecture)
    report = run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    assert report.copied == len(exact)
    bits = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}[type]
    assert set(read_formats(tmp_path / "out.gturbo").values()) == {(bits, 32, "float16")}
    installed = installed_values(tmp_path / "out.gturbo")
    assert set(installed) == set(exact)
    for name, values in exact.items():
        np.testing.assert_array_equal(installed[name], values)
    Install.open(tmp_path / "out.gturbo", verify="full").close()


def test_rows_come_back_in_the_published_order(tmp_path):
    values = weights(CONFIG)
    write_gguf(tmp_path / "m.gguf", CONFIG, {}, values=values)
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo", bits=16)
    for name, array in installed_values(tmp_path / "out.gturbo").items():
        np.testing.assert_array_equal(array, values[name])


def test_companions_are_float32_where_float16_overflows(tmp_path):
    # A block scale of 600 in Q8_0 means a bias of -76,800, beyond float16; -8 * 9000 likewise in Q4_0. A subnormal
    # scale, 2^-24, gains by the same factor and stays exact.
    rng = np.random.default_rng(3)
    values = {name: array.copy() for name, array in weights(CONFIG).items()}
    values[HEAD][0, :32] = 127 * 600.0 * np.sign(rng.standard_normal(32))
    values["model.layers.0.mlp.up_proj.weight"][5, 64:96] = -8 * 9000.0
    values["model.layers.0.mlp.gate_proj.weight"][7, :32] = np.linspace(-127, 127, 32) * 2.0**-24
    types = {HEAD: "Q8_0", "model.layers.0.mlp.up_proj.weight": "Q4_0", "model.layers.0.mlp.gate_proj.weight": "Q8_0"}
    exact = write_gguf(tmp_path / "m.gguf", CONFIG, types, values=values)
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    assert read_formats(tmp_path / "out.gturbo") == {
        PREFIX + HEAD: (8, 32, "float32"),
        PREFIX + "model.layers.0.mlp.up_proj.weight": (4, 32, "float32"),
        PREFIX + "model.layers.0.mlp.gate_proj.weight": (8, 32, "float16"),
    }
    for name, array in installed_values(tmp_path / "out.gturbo").items():
        np.testing.assert_array_equal(array, exact[name])


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_floats_are_kept_or_quantized(tmp_path, type):
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[type]
    exact = write_gguf(tmp_path / "m.gguf", CONFIG, {}, default=type)
    run(tmp_path / "m.gguf", tmp_path / "kept.gturbo", bits=16)
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    kept, quantized = read_install(tmp_path / "kept.gturbo"), read_install(tmp_path / "out.gturbo")
    for name, values in exact.items():
        form = "float32" if values.ndim == 1 else dtype
        assert kept[PREFIX + name]["data"] == store(values, form).tobytes()
    expected = quantize_affine(exact[QUERY], bits=4, group_size=64, companion_dtype="bfloat16")
    assert quantized[PREFIX + QUERY]["data"] == expected[0].tobytes()


def test_one_block_by_hand(tmp_path):
    # d = 0.5, m = -1, low nibbles 0..15 are weights 0..15, high nibbles 15..0 weights 16..31.
    block = np.frombuffer(np.array([0.5, -1], "<f2").tobytes() + bytes(n | (15 - n) << 4 for n in range(16)), np.uint8)
    stored = quantize(weights(CONFIG)[HEAD], "Q4_1")
    stored[0, :20] = block
    write_gguf(tmp_path / "m.gguf", CONFIG, {HEAD: "Q4_1"}, stored={HEAD: stored})
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    row = installed_values(tmp_path / "out.gturbo")[HEAD][0, :32]
    assert row.tolist() == [n / 2 - 1 for n in range(16)] + [(15 - n) / 2 - 1 for n in range(16)]
    data = read_install(tmp_path / "out.gturbo")[PREFIX + HEAD]["data"]
    assert data[:16].hex() == "1032547698badcfeefcdab8967452301"


@pytest.mark.parametrize("bits", [4, 8])
def test_requantizing_starts_from_the_dequantized_values(tmp_path, bits):
    exact = write_gguf(tmp_path / "m.gguf", CONFIG, {}, default="Q4_0")
    report = run(tmp_path / "m.gguf", tmp_path / "out.gturbo", bits=bits, group_size=128)
    assert report.quantized == sum(array.ndim == 2 for array in exact.values())
    expected = quantize_affine(exact[QUERY], bits=bits, group_size=128, companion_dtype="bfloat16")
    tensor = read_install(tmp_path / "out.gturbo")[PREFIX + QUERY]
    for part, array in zip(("data", "scales", "biases"), expected, strict=True):
        assert tensor[part] == array.tobytes()


@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_say_whether_the_head_is_tied(tmp_path, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    write_gguf(tmp_path / "m.gguf", config, {}, default="Q8_0")
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    manifest = json.loads((tmp_path / "out.gturbo" / "manifest.json").read_text())
    assert manifest["arch"]["tieWordEmbeddings"] is tied
    assert json.loads((tmp_path / "out.gturbo" / "config.json").read_text())["tie_word_embeddings"] is tied
    assert manifest["modelID"] == "m"
    assert manifest["arch"]["ropeTheta"] == 10000.0
    assert manifest["turbosparkMlx"]["arch"]["rms_norm_eps"] == 1e-5


def test_the_side_files_come_from_the_metadata(tmp_path):
    write_gguf(tmp_path / "m.gguf", CONFIG, {}, extra=lambda writer: writer.add_chat_template("{{ messages }}"))
    run(tmp_path / "m.gguf", tmp_path / "out.gturbo")
    tokenizer = json.loads((tmp_path / "out.gturbo" / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["ab"] == 2
    assert (tmp_path / "out.gturbo" / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    assert (tmp_path / "out.gturbo" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("type", ["Q5_0", "Q5_1", "Q6_K", "Q4_K", "IQ4_NL"])
def test_other_types_are_named(tmp_path, type):
    size = {"Q5_0": 22, "Q5_1": 24, "Q6_K": 210, "Q4_K": 144, "IQ4_NL": 18}[type]
    block = 256 if type.endswith("_K") else 32
    config = {**CONFIG, "hidden_size": 256}
    stored = {QUERY: np.zeros((128, 256 // block * size), np.uint8)}
    write_gguf(tmp_path / "m.gguf", config, {QUERY: type}, stored=stored)
    refused(tmp_path / "m.gguf", tmp_path, "m.gguf: blk.1.attn_q.weight", type, "Q4_1")


@pytest.mark.parametrize(("type", "at"), [("Q8_0", 0), ("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2)])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_are_refused(tmp_path, type, at, bits):
    stored = quantize(weights(CONFIG)[HEAD], type)
    stored[-1, at : at + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
    write_gguf(tmp_path / "m.gguf", CONFIG, {HEAD: type}, stored={HEAD: stored})
    refused(tmp_path / "m.gguf", tmp_path, "output.weight", "NaN or infinite")


def test_an_unknown_architecture_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", CONFIG, {}, architecture="mamba")
    refused(tmp_path / "m.gguf", tmp_path, "mamba", "Supported: llama, qwen2, qwen3.")


@pytest.mark.parametrize(
    "architecture", [name for name in families.PACKAGES for name in families.package(name).FAMILY.gguf_architectures]
)
def test_the_architectures_called_supported_are_those_that_are_not_refused(tmp_path, architecture):
    with pytest.raises(ConvertError) as unknown:
        families.family_for_gguf("mamba")
    supported = str(unknown.value).partition("Supported: ")[2].removesuffix(".").split(", ")
    with pytest.raises(ConvertError) as empty:
        families.family_for_gguf(architecture).hf_config_from_gguf({"general.architecture": architecture})
    assert ("does not convert" in str(empty.value)) == (architecture not in supported)


def test_a_part_of_a_split_file_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", CONFIG, {}, extra=lambda writer: writer.add_uint16("split.count", 3))
    refused(tmp_path / "m.gguf", tmp_path, "one of 3 parts", "llama-gguf-split --merge")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:-100], "damaged"),
        (lambda data: data[:300], "damaged"),
        (lambda data: data[:4] + b"\x63\0\0\0" + data[8:], "damaged"),
        (lambda data: data[:8] + b"\xff" * 16 + data[24:], "damaged"),
        (lambda data: b"GGML" + data[4:], "damaged"),
        (lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "damaged"),
    ],
    ids=["empty", "short payload", "short header", "version", "counts", "magic", "name twice"],
)
def test_a_damaged_file_is_named(tmp_path, damage, words):
    write_gguf(tmp_path / "m.gguf", CONFIG, {})
    (tmp_path / "m.gguf").write_bytes(damage((tmp_path / "m.gguf").read_bytes()))
    refused(tmp_path / "m.gguf", tmp_path, "m.gguf", words)


@pytest.mark.slow
def test_every_tensor_of_the_default_model(smollm2_gguf, tmp_path):
    run(smollm2_gguf, tmp_path / "out.gturbo")
    installed = installed_values(tmp_path / "out.gturbo")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert len(installed) == len(stored) == 272
    for name, array in installed.items():
        tensor = stored[gguf_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        np.testing.assert_array_equal(array, published(expected, heads) if heads else expected)
