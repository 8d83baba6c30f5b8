"""MLX-quantized checkpoints: copied bit for bit, whatever the mix and however the layers are spelled."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx.convert import convert
from turbospark_mlx.convert.affine import dequantize_affine, quantize_affine
from turbospark_mlx.errors import OptionError

from .checkpoints import (
    CONFIG,
    PREFIX,
    TOKENIZER,
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

VALUES = weights(CONFIG)
MATRICES = [name for name, array in VALUES.items() if array.ndim == 2]
QUERY, DOWN, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"


def checkpoint(tmp_path, formats, block, dtype="bfloat16", key="quantization"):
    stored = mlx_quantized(VALUES, formats, dtype)
    return write_checkpoint(tmp_path / "source", {**CONFIG, key: block}, stored), stored


def assert_copied(install, stored, formats, dtype="bfloat16"):
    """Every byte of the checkpoint is in the install, under a format that says what it is."""
    tensors, declared = read_install(install), read_formats(install)
    tagged = {(4, 64, "bfloat16"): 4, (8, 64, "bfloat16"): 5, (2, 128, "float16"): 16}
    for name in VALUES:
        tensor, stem = tensors[PREFIX + name], name.removesuffix(".weight")
        assert tensor["shape"] == VALUES[name].shape
        assert tensor["data"] == stored[name][1].tobytes()
        if name in formats:
            assert tensor["scales"] == stored[f"{stem}.scales"][1].tobytes()
            assert tensor["biases"] == stored[f"{stem}.biases"][1].tobytes()
            form = (*formats[name], dtype)
            assert declared.get(PREFIX + name, form) == form
            assert tensor["tag"] == tagged.get(form, 0)
            assert (PREFIX + name in declared) is (tensor["tag"] == 0)


@pytest.mark.parametrize(("bits", "group_size"), itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)))
def test_every_format_is_copied(tmp_path, bits, group_size):
    formats = dict.fromkeys(MATRICES, (bits, group_size))
    source, stored = checkpoint(tmp_path, formats, {"bits": bits, "group_size": group_size, "mode": "affine"})
    report = run(source, tmp_path / "out.gturbo")
    assert report.copied == len(VALUES)
    assert_copied(tmp_path / "out.gturbo", stored, formats)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_companions_keep_their_dtype(tmp_path, dtype):
    formats = dict.fromkeys(MATRICES, (4, 64))
    source, stored = checkpoint(tmp_path, formats, {"bits": 4, "group_size": 64}, dtype)
    run(source, tmp_path / "out.gturbo")
    assert_copied(tmp_path / "out.gturbo", stored, formats, dtype)


@pytest.mark.parametrize("spelling", ["{}", "{}.weight", "language_model.{}", "language_model.{}.weight"])
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_overrides_under_any_spelling(tmp_path, spelling, key):
    formats = dict.fromkeys(MATRICES, (4, 64))
    formats |= {f"{QUERY}.weight": (8, 32), f"{DOWN}.weight": (6, 128)}
    del formats[f"{HEAD}.weight"]
    block = {
        "bits": 4,
        "group_size": 64,
        spelling.format(QUERY): {"bits": 8, "group_size": 32, "mode": "affine"},
        spelling.format(DOWN): {"bits": 6, "group_size": 128},
        spelling.format(HEAD): False,
        spelling.format("model.embed_tokens"): True,
    }
    source, stored = checkpoint(tmp_path, formats, block, key=key)
    run(source, tmp_path / "out.gturbo")
    assert_copied(tmp_path / "out.gturbo", stored, formats)


@pytest.mark.parametrize("override", [{"bits": 8}, {"group_size": 32}, {"mode": "affine"}, {}])
def test_partial_overrides_agree_with_the_tensors(tmp_path, override):
    own = {"bits": 4, "group_size": 64} if not override or "mode" in override else {"bits": 8, "group_size": 32}
    formats = dict.fromkeys(MATRICES, (4, 64)) | {f"{QUERY}.weight": (own["bits"], own["group_size"])}
    source, stored = checkpoint(tmp_path, formats, {"bits": 4, "group_size": 64, QUERY: override})
    run(source, tmp_path / "out.gturbo")
    assert_copied(tmp_path / "out.gturbo", stored, formats)


def test_layers_without_scales_were_left_alone(tmp_path):
    # mlx-lm quantizes what has scales, whether or not the config excepts the rest.
    formats = dict.fromkeys(MATRICES[3:], (4, 64))
    source, stored = checkpoint(tmp_path, formats, {"bits": 4, "group_size": 64})
    report = run(source, tmp_path / "out.gturbo")
    assert_copied(tmp_path / "out.gturbo", stored, formats)
    assert report.quantized == 0


def test_a_tied_head_may_be_stored_as_a_copy_of_the_packed_embedding(tmp_path):
    values = {**VALUES, "lm_head.weight": VALUES["model.embed_tokens.weight"]}
    stored = mlx_quantized(values, dict.fromkeys(MATRICES, (4, 64)))
    config = {**CONFIG, "tie_word_embeddings": True, "quantization": {"bits": 4, "group_size": 64}}
    report = run(write_checkpoint(tmp_path / "same", config, stored), tmp_path / "same.gturbo")
    assert "lm_head.weight" in report.dropped
    stored["lm_head.biases"][1][5, 0] += 1
    refused(write_checkpoint(tmp_path / "other", config, stored), tmp_path, "lm_head.weight", "differs")
    # The same matrix before it was packed is not the same matrix.
    del stored["lm_head.scales"], stored["lm_head.biases"]
    stored |= plain({"lm_head.weight": VALUES["model.embed_tokens.weight"]})
    refused(write_checkpoint(tmp_path / "float", config, stored), tmp_path, "lm_head.weight", "differs")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, ("mode 'mxfp4'", "only affine")),
        ({"bits": 4, "group_size": 64, QUERY: {"mode": "nvfp4"}}, (f"{QUERY}.weight", "mode 'nvfp4'")),
        ({"bits": 4, "group_size": 64, QUERY: False}, (f"{QUERY}.weight", "quantization false")),
        ({"bits": 8, "group_size": 64}, ("bits 8, group_size 64", "do not fit")),
        ({"bits": 4, "group_size": 32}, ("bits 4, group_size 32", "do not fit")),
        ({"bits": 7, "group_size": 64}, ("bits 7",)),
        ({"bits": "4", "group_size": 64}, ("bits 4",)),
        ({"group_size": 0}, ("bits None",)),
        ({"mode": "affine"}, ("bits None",)),
        ({"bits": 4, "group_size": 64, "model.layers.9.mlp.up_proj": False}, ("layers.9",)),
        ({"bits": 4, "group_size": 64, QUERY: False, f"language_model.{QUERY}": True}, ("twice", QUERY)),
        ("int4", ("'int4'", "not an object")),
        (None, ("no quantization block",)),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path, block, words):
    source, _ = checkpoint(tmp_path, dict.fromkeys(MATRICES, (4, 64)), block)
    refused(source, tmp_path, *words)


def test_a_mode_without_biases_is_refused_by_its_name(tmp_path):
    stored = plain(VALUES)
    with mx.stream(mx.cpu):
        words, scales = mx.quantize(mx.array(VALUES["lm_head.weight"]), mode="mxfp4", group_size=32, bits=4)
    stored["lm_head.weight"] = ("U32", np.array(words))
    stored["lm_head.scales"] = ("U8", np.array(scales))
    block = {"bits": 4, "group_size": 64, "lm_head": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}
    source = write_checkpoint(tmp_path / "source", {**CONFIG, "quantization": block}, stored)
    refused(source, tmp_path, "lm_head.weight", "mode 'mxfp4'")
    del block["lm_head"]["mode"]
    (source / "config.json").write_text(json.dumps({**CONFIG, "quantization": block}))
    refused(source, tmp_path, "lm_head.weight", "no biases")


@pytest.mark.parametrize("method", ["gptq", "fp8", "mxfp4"])
def test_other_quantizers_are_named(tmp_path, method):
    block = {"quant_method": method, "bits": 4}
    source = write_checkpoint(tmp_path / "source", {**CONFIG, "quantization_config": block}, plain(VALUES))
    refused(source, tmp_path, "quant_method", method)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lm_head.scales", lambda array: None, "no scales"),
        ("lm_head.scales", lambda array: array[:-1], "have to be alike"),
        ("lm_head.scales", lambda array: array.astype(np.int8), "have to be alike"),
        ("lm_head.weight", lambda array: array[:-1], "rows differ"),
        ("lm_head.weight", lambda array: array[0], "rows differ"),
    ],
)
def test_companions_that_do_not_fit_are_refused(tmp_path, name, change, words):
    _, stored = checkpoint(tmp_path, dict.fromkeys(MATRICES, (4, 64)), {"bits": 4, "group_size": 64})
    dtype, array = stored.pop(name)
    changed = change(array)
    if changed is not None:
        stored[name] = (dtype if changed.dtype == array.dtype else "I8", changed)
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 64}}
    refused(write_checkpoint(tmp_path / "source", config, stored), tmp_path, words)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_companions_that_are_not_finite_are_refused(tmp_path, part):
    source, stored = checkpoint(tmp_path, dict.fromkeys(MATRICES, (4, 64)), {"bits": 4, "group_size": 64})
    stored[f"lm_head.{part}"][1][-1, -1] = 0x7F80
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 64}}
    refused(write_checkpoint(source, config, stored), tmp_path, "lm_head.weight", "NaN or infinite")


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_requantizing_starts_from_the_dequantized_values(tmp_path, bits):
    source, stored = checkpoint(tmp_path, dict.fromkeys(MATRICES, (bits, 64)), {"bits": bits, "group_size": 64})
    report = run(source, tmp_path / "out.gturbo", bits=4, group_size=32, companion_dtype="float16")
    assert report.quantized == len(MATRICES)
    tensor = read_install(tmp_path / "out.gturbo")[PREFIX + "lm_head.weight"]
    words, scales, biases = (stored[f"lm_head.{part}"][1] for part in ("weight", "scales", "biases"))
    exact = dequantize_affine(words, scales, biases, bits=bits, group_size=64, companion_dtype="bfloat16")
    with mx.stream(mx.cpu):
        companions = (mx.array(from_bfloat16(part)) for part in (scales, biases))
        np.testing.assert_array_equal(
            exact, np.array(mx.dequantize(mx.array(words), *companions, group_size=64, bits=bits))
        )
    expected = quantize_affine(exact, bits=4, group_size=32, companion_dtype="float16")
    for part, array in zip(("data", "scales", "biases"), expected, strict=True):
        assert tensor[part] == array.tobytes()


def test_what_has_the_asked_format_is_copied(tmp_path):
    formats = dict.fromkeys(MATRICES, (4, 64)) | {f"{QUERY}.weight": (8, 64)}
    block = {"bits": 4, "group_size": 64, QUERY: {"bits": 8, "group_size": 64}}
    source, stored = checkpoint(tmp_path, formats, block)
    report = run(source, tmp_path / "out.gturbo", bits=4)
    assert report.quantized == 1
    assert (
        read_install(tmp_path / "out.gturbo")[PREFIX + "lm_head.weight"]["data"]
        == stored["lm_head.weight"][1].tobytes()
    )


@pytest.mark.parametrize("options", [{"bits": 16}, {"group_size": 32}, {"companion_dtype": "float16"}])
def test_options_that_mean_nothing_for_a_quantized_source(tmp_path, options):
    source, _ = checkpoint(tmp_path, dict.fromkeys(MATRICES, (4, 64)), {"bits": 4, "group_size": 64})
    with pytest.raises(OptionError, match="quantized"):
        convert(source, tmp_path / "out.gturbo", progress=False, **options)
    assert not (tmp_path / "out.gturbo").exists()


def test_what_mlx_lm_itself_saves(tmp_path):
    models = pytest.importorskip("mlx_lm.models.llama")
    from mlx.utils import tree_flatten
    from mlx_lm.utils import quantize_model, save_config, save_model

    with mx.stream(mx.cpu):
        model = models.Model(models.ModelArgs.from_dict(CONFIG))
        model.load_weights([(name, mx.array(values).astype(mx.bfloat16)) for name, values in VALUES.items()])

        def predicate(path, module):
            if path.endswith("o_proj"):
                return False
            return {"bits": 6, "group_size": 32} if path.endswith("q_proj") else True

        model, config = quantize_model(model, dict(CONFIG), 64, 4, quant_predicate=predicate)
        source = tmp_path / "source"
        source.mkdir()
        save_model(source, model)
        save_config(config, source / "config.json")
        saved = {name: np.array(array.view(mx.uint8)) for name, array in tree_flatten(model.parameters())}
    (source / "tokenizer.json").write_bytes(TOKENIZER)
    report = run(source, tmp_path / "out.gturbo")
    tensors, formats = read_install(tmp_path / "out.gturbo"), read_formats(tmp_path / "out.gturbo")
    assert report.copied == len(VALUES)
    for name in VALUES:
        stem = name.removesuffix(".weight")
        for part, key in (("data", name), ("scales", f"{stem}.scales"), ("biases", f"{stem}.biases")):
            assert tensors[PREFIX + name][part] == (saved[key].tobytes() if key in saved else b"")
    assert {name: form for name, form in formats.items() if "q_proj" in name} == formats
    assert set(formats.values()) == {(6, 32, "bfloat16")}
