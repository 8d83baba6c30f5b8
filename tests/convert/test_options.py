"""The policy: what each option does to which tensor, what the elder engines get, and installs as sources."""

import hashlib
import json
import struct

import numpy as np
import pytest

from turbospark_mlx.cli import main
from turbospark_mlx.convert import convert
from turbospark_mlx.convert.affine import quantize_affine
from turbospark_mlx.errors import ConvertError, InstallError, OptionError
from turbospark_mlx.gturbo import Install

from .checkpoints import (
    CONFIG,
    PREFIX,
    bfloat16,
    from_bfloat16,
    mlx_quantized,
    plain,
    read_formats,
    read_install,
    refused,
    run,
    weights,
    write_checkpoint,
)
from .ggufs import write_gguf

MATRICES = [name for name, array in weights(CONFIG).items() if array.ndim == 2]
NORM = PREFIX + "model.norm.weight"


def bytes_of(install):
    """Name -> (shape, data, scales, biases) of every tensor."""
    return {name: (t["shape"], t["data"], t["scales"], t["biases"]) for name, t in read_install(install).items()}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("companion", ["bfloat16", "float16"])
def test_one_format_everywhere(tmp_path, bits, group_size, companion):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "out.gturbo", bits=bits, group_size=group_size, companion_dtype=companion)
    tensors, formats = read_install(tmp_path / "out.gturbo"), read_formats(tmp_path / "out.gturbo")
    for name in MATRICES:
        exact = from_bfloat16(bfloat16(weights(CONFIG)[name]))
        expected = quantize_affine(exact, bits=bits, group_size=group_size, companion_dtype=companion)
        tensor = tensors[PREFIX + name]
        assert [tensor[part] for part in ("data", "scales", "biases")] == [array.tobytes() for array in expected]
        if (group_size, companion) == (64, "bfloat16"):
            assert tensor["tag"] == {4: 4, 8: 5}[bits]
        else:
            assert formats[PREFIX + name] == (bits, group_size, companion)


def test_routers_get_8_bits_whatever_the_rest_gets(tmp_path, monkeypatch):
    from turbospark_mlx.families import family_for_model_type
    from turbospark_mlx.protocols import Placement

    llama = family_for_model_type("llama")
    place = llama.place

    def with_router(name, config):
        found = place(name, config)
        router = isinstance(found, Placement) and found.name.endswith("0.mlp.up_proj.weight")
        return Placement(found.name, "router", found.checkpoint_name) if router else found

    monkeypatch.setattr(llama, "place", with_router)
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    report = run(source, tmp_path / "out.gturbo")
    tags = {name: tensor["tag"] for name, tensor in read_install(tmp_path / "out.gturbo").items()}
    assert tags.pop(PREFIX + "model.layers.0.mlp.up_proj.weight") == 5
    assert set(tags.values()) == {1, 4}
    assert report.roles["router"].tensors == 1


def test_a_width_that_groups_do_not_divide_is_kept(tmp_path):
    config = {**CONFIG, "hidden_size": 96}
    source = write_checkpoint(tmp_path / "source", config, plain(weights(config), "float16"))
    report = run(source, tmp_path / "out.gturbo")
    narrow = {PREFIX + name for name, array in weights(config).items() if array.ndim == 2 and array.shape[1] == 96}
    assert set(report.exceptions) == narrow
    assert set(report.exceptions.values()) == {
        "its input width 96 is not a multiple of the group size 64; --group-size 32 would quantize it"
    }
    tags = {name: tensor["tag"] for name, tensor in read_install(tmp_path / "out.gturbo").items()}
    assert {name for name, tag in tags.items() if tag == 4} == {
        PREFIX + name for name, array in weights(config).items() if array.ndim == 2
    } - narrow
    assert all(tags[name] == 2 for name in narrow)
    assert "not as asked" in str(report)
    assert run(source, tmp_path / "small.gturbo", group_size=32).notes == []


@pytest.mark.parametrize(
    ("width", "options", "named"),
    [
        (96, [], "64; --group-size 32 would"),
        (192, ["--group-size", "128"], "128; --group-size 64 would"),
        (48, ["--group-size", "32", "--quiet"], "32, nor of any other"),
        (96, ["--elder-compatible"], "64)"),
    ],
)
def test_a_checkpoint_of_which_nothing_was_quantized_is_a_warning(width, options, named, tmp_path, capsys):
    config = {**CONFIG, "hidden_size": width, "intermediate_size": width}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width}
    source = write_checkpoint(tmp_path / "source", config, plain(weights(config)))
    assert main(["convert", str(source), str(tmp_path / "out.gturbo"), *options]) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("warning: nothing was quantized: ")
    assert f"its input width {width} is not a multiple of the group size {named}" in line
    assert (line in out.splitlines()) == ("--quiet" not in options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4, "group_size": 16}, "group_size is 16"),
        ({"bits": 4, "companion_dtype": "float32"}, "companion_dtype is 'float32'"),
        ({"bits": 16, "group_size": 64}, "bits 16"),
        ({"bits": 16, "elder_compatible": True}, "bits 16"),
        ({"group_size": 32, "elder_compatible": True}, "group_size 64"),
        ({"companion_dtype": "float16", "elder_compatible": True}, "bfloat16"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_read(tmp_path, options, word):
    with pytest.raises(OptionError, match=word):
        convert(tmp_path / "absent", tmp_path / "out.gturbo", **options)


def elder_source(tmp_path, kind):
    """A checkpoint with float32 norms, of every kind whose formats the elder engines lack."""
    values = weights(CONFIG)
    if kind == "float32":
        return write_checkpoint(tmp_path / "source", CONFIG, plain(values, "float32")), 4
    if kind == "gguf":
        write_gguf(tmp_path / "m.gguf", CONFIG, {"lm_head.weight": "F16"}, default="Q4_1", values=values)
        return tmp_path / "m.gguf", 4
    bits, group_size, dtype = {"6 bits": (6, 64, "float32"), "float16": (4, 64, "float16")}[kind]
    stored = mlx_quantized(values, dict.fromkeys(MATRICES, (bits, group_size)), dtype)
    config = {**CONFIG, "quantization": {"bits": bits, "group_size": group_size}}
    return write_checkpoint(tmp_path / "source", config, stored), 8 if bits == 6 else 4


@pytest.mark.parametrize("kind", ["float32", "gguf", "6 bits", "float16"])
def test_elder_compatible(tmp_path, kind):
    source, bits = elder_source(tmp_path, kind)
    report = run(source, tmp_path / "out.gturbo", elder_compatible=True)
    tags = {name: tensor["tag"] for name, tensor in read_install(tmp_path / "out.gturbo").items()}
    for name in MATRICES:
        # Elder manifests may say 8 bits of feed-forward matrices only.
        expected = 5 if bits == 8 and ".mlp." in name else 4
        assert tags[PREFIX + name] == (1 if kind == "gguf" and name == "lm_head.weight" else expected)
    assert tags[NORM] == 1
    manifest = json.loads((tmp_path / "out.gturbo" / "manifest.json").read_text())
    assert manifest["flags"] == {}
    assert "tensors" not in manifest["turbosparkMlx"] or not manifest["turbosparkMlx"]["tensors"]
    vectors = [array for name, array in weights(CONFIG).items() if array.ndim == 1]
    if kind == "float32":
        lossy = sum(int(np.sum(from_bfloat16(bfloat16(array)) != array)) for array in vectors)
        assert 0 < lossy == report.lossy_values
        assert report.narrowed == len(vectors)
        norm = read_install(tmp_path / "out.gturbo")[NORM]
        assert norm["data"] == bfloat16(weights(CONFIG)["model.norm.weight"]).tobytes()


def test_elder_compatible_copies_what_the_elder_engines_read(tmp_path):
    stored = mlx_quantized(weights(CONFIG), dict.fromkeys(MATRICES, (4, 64)))
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 64}}
    source = write_checkpoint(tmp_path / "source", config, stored)
    report = run(source, tmp_path / "elder.gturbo", elder_compatible=True)
    assert report.copied == report.tensors
    assert (report.lossy_values, report.exceptions) == (0, {})
    run(source, tmp_path / "own.gturbo")
    assert bytes_of(tmp_path / "elder.gturbo") == bytes_of(tmp_path / "own.gturbo")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 1e-6}, ("rms_norm_eps is 1e-06", "assume 1e-05")),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling is", "linear")),
    ],
)
def test_elder_compatible_refuses_what_it_cannot_say(tmp_path, change, words):
    source = write_checkpoint(tmp_path / "source", {**CONFIG, **change}, plain(weights(CONFIG)))
    refused(source, tmp_path, *words, "without --elder-compatible", elder_compatible=True)


def test_elder_compatible_refuses_values_beyond_bfloat16(tmp_path):
    values = weights(CONFIG)
    values["model.norm.weight"][3] = np.finfo(np.float32).max
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(values, "float32"))
    refused(source, tmp_path, "model.norm.weight", "range of bfloat16", elder_compatible=True)


def swift_dialect(install):
    """Rewrite an install as the Swift engine writes index and manifest: tag 0 for packed words, no extension."""
    path = install / "model_weights.bin"
    raw = bytearray(path.read_bytes())
    for number in range(struct.unpack_from("<QQQ", raw)[2]):
        at = 24 + 72 * number + 6
        raw[at] = 0 if raw[at] in (4, 5) else raw[at]
    path.write_bytes(raw)
    manifest = json.loads((install / "manifest.json").read_text())
    manifest["files"]["model_weights.bin"]["sha256"] = hashlib.sha256(raw).hexdigest()
    manifest["flags"] = {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False}
    del manifest["turbosparkMlx"]
    (install / "manifest.json").write_text(json.dumps(manifest))


def test_an_install_of_the_other_dialect_is_rewritten(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "own.gturbo", elder_compatible=True)
    run(source, tmp_path / "swift.gturbo", elder_compatible=True)
    swift_dialect(tmp_path / "swift.gturbo")
    report = run(tmp_path / "swift.gturbo", tmp_path / "out.gturbo")
    assert report.copied == report.tensors
    assert bytes_of(tmp_path / "out.gturbo") == bytes_of(tmp_path / "own.gturbo")
    for name in ("manifest.json", "model_weights.bin", "tokenizer.json", "config.json"):
        assert (tmp_path / "out.gturbo" / name).read_bytes() == (tmp_path / "own.gturbo" / name).read_bytes()


def test_an_install_can_be_quantized(tmp_path, monkeypatch):
    monkeypatch.setattr("turbospark_mlx.convert.source.TILE_ELEMENTS", 5 * 128)
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "kept.gturbo", bits=16)
    run(tmp_path / "kept.gturbo", tmp_path / "four.gturbo", bits=4)
    run(source, tmp_path / "direct.gturbo", bits=4)
    assert bytes_of(tmp_path / "four.gturbo") == bytes_of(tmp_path / "direct.gturbo")
    write_gguf(tmp_path / "m.gguf", CONFIG, {}, default="Q4_1")
    run(tmp_path / "m.gguf", tmp_path / "blocks.gturbo")
    run(tmp_path / "blocks.gturbo", tmp_path / "again.gturbo")
    assert bytes_of(tmp_path / "again.gturbo") == bytes_of(tmp_path / "blocks.gturbo")
    assert read_formats(tmp_path / "again.gturbo") == read_formats(tmp_path / "blocks.gturbo")


def test_damaged_installs_are_refused(tmp_path, home):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "a.gturbo")
    raw = bytearray((tmp_path / "a.gturbo" / "model_weights.bin").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a.gturbo" / "model_weights.bin").write_bytes(raw)
    with pytest.raises(InstallError, match=r"model_weights\.bin"):
        run(tmp_path / "a.gturbo", tmp_path / "out.gturbo")
    (tmp_path / "b.gturbo").mkdir()
    with pytest.raises(InstallError, match=r"manifest\.json"):
        run(tmp_path / "b.gturbo", tmp_path / "out.gturbo")


def test_an_install_without_a_tokenizer_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "a.gturbo")
    (tmp_path / "a.gturbo" / "tokenizer.json").unlink()
    manifest = json.loads((tmp_path / "a.gturbo" / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    (tmp_path / "a.gturbo" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConvertError, match=r"tokenizer\.json: is missing"):
        run(tmp_path / "a.gturbo", tmp_path / "out.gturbo")


def test_the_result_opens_with_a_receipt(tmp_path):
    source = write_checkpoint(tmp_path / "source", CONFIG, plain(weights(CONFIG)))
    run(source, tmp_path / "out.gturbo")
    with Install.open(tmp_path / "out.gturbo", verify="off") as install:
        assert install.has_receipt
