"""Installs of the Rust engine whose tensors are ggml blocks: conversion makes packed words of them, bit for bit.

The installs are packed by hand; what their blocks mean is for the gguf package to say.
"""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from tests.families import reference_gpt_oss
from tests.families.oracles import PROMPT, assert_close, assert_exact
from tests.gturbo import handmade
from turbospark_mlx import loader
from turbospark_mlx.convert.blocks import mxfp4_rows
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import InstallError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.gturbo import Install
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, tiny_weights, tokenizer_files

from .checkpoints import bfloat16, from_bfloat16, refused, run

CONFIG = tiny_config("gpt_oss", "gpt-oss")
TAGS = {"Q8_0": 6, "Q4_0": 9, "Q6_K": 8}
STRIDE = 32768


def blocks(values, kind):
    """The bytes of ``values [..., columns]`` in blocks of ``kind``, and what these stand for."""
    form = gguf.GGMLQuantizationType[kind]
    packed = quantize(values, form)
    return packed.tobytes(), dequantize(packed, form)


def elder(resident="Q8_0", experts="MXFP4"):
    """gpt-oss as the Rust engine installs it, and the float32 weights that it stands for, by parameter name."""
    weights, entries, meant = tiny_weights(CONFIG), [], {}
    for name, value in weights.items():
        if ".experts." in name:
            continue
        installed = name.replace("mlp.router", "mlp.gate").replace("sinks", "sinks.weight")
        if "router.weight" in name:
            packed = mx.quantize(mx.array(value).astype(mx.bfloat16), group_size=64, bits=8)
            words, *companions = (np.array(part.view(mx.uint16 if i else mx.uint32)) for i, part in enumerate(packed))
            entry = 5, value.shape, words.tobytes(), *(part.tobytes() for part in companions)
            wide = [mx.array(from_bfloat16(part)) for part in companions]
            meant[name] = np.array(mx.dequantize(mx.array(words), *wide, group_size=64, bits=8))
        elif value.ndim == 1:
            entry = 1, value.shape, bfloat16(value).tobytes(), b"", b""
            meant[name] = from_bfloat16(bfloat16(value))
        else:
            data, meant[name] = blocks(value, resident)
            entry = TAGS[resident], value.shape, data, b"", b""
        entries.append((f"language_model.{installed}", *entry))
    files, layers = {}, []
    for layer in range(2):
        base, file, items = f"model.layers.{layer}.mlp.experts.", b"", []
        for expert in range(6):
            blob, tensors = b"", {}
            for matrix in ("gate", "up", "down"):
                value, bias = (weights[f"{base}{matrix}_proj.{kind}"][expert] for kind in ("weight", "bias"))
                data, stands_for = blocks(value, experts)
                meant.setdefault(f"{base}{matrix}_proj.weight", []).append(stands_for)
                for role, dtype, part, shape in (
                    (matrix, experts.lower(), data, value.shape),
                    (f"{matrix}_biases", "f32", bias.tobytes(), bias.shape),
                ):
                    tensors[role] = {"offset": len(blob), "size": len(part), "dtype": dtype, "shape": list(shape)}
                    blob += part
            items.append({"offset": expert * STRIDE, "size": len(blob), "tensors": tensors})
            file += blob.ljust(STRIDE, b"\0")
        for matrix in ("gate", "up", "down"):
            meant[f"{base}{matrix}_proj.weight"] = np.stack(meant[f"{base}{matrix}_proj.weight"])
            meant[f"{base}{matrix}_proj.bias"] = weights[f"{base}{matrix}_proj.bias"]
        files[f"packed_experts/layer_{layer:02d}.bin"] = file
        layers.append({"layer": layer, "file": f"layer_{layer:02d}.bin", "experts": items})
    layout = {"expertStride": STRIDE, "numLayers": 2, "expertsPerLayer": 6, "layers": layers}
    files |= {
        "model_weights.bin": handmade.index(entries, align=4),
        "packed_experts/layout.json": handmade.dump(layout),
    }
    arch = family_for_model_type("gpt_oss").config_from_hf(CONFIG).to_manifest()[0]
    document = handmade.manifest(arch, numLayers=2, expertsPerLayer=6, expertStride=STRIDE)
    side = {name: data for name, data in tokenizer_files(CONFIG).items() if name != "config.json"}
    return handmade.Handmade(document, files, side).seal(), meant


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``(elder install, what it stands for, converted install)``."""
    folder = tmp_path_factory.mktemp("elder")
    install, meant = elder()
    install.write(folder / "elder.gturbo")
    report = run(folder / "elder.gturbo", folder / "x.gturbo")
    assert report.quantized == 0
    return folder / "elder.gturbo", meant, folder / "x.gturbo"


def test_a_block_by_hand():
    """Element j is the low half of byte j, element j + 16 its high half; words have them in order."""
    raw = np.array([[127, *(j | (15 - j) << 4 for j in range(16))]], np.uint8)
    words, exponents = mxfp4_rows(raw)
    assert exponents.tolist() == [[127]]
    codes = [(int(word) >> 4 * n) & 15 for word in words[0] for n in range(8)]
    assert codes == [*range(16), *range(15, -1, -1)]
    values = mx.dequantize(mx.array(words), mx.array(exponents), mode="mxfp4", dtype=mx.float32)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[0, :16].tolist() == [*positive, *(-value for value in positive)]


def test_logits_are_those_of_the_blocks(made):
    """Close, to the float64 reference on what the gguf package makes of the blocks."""
    _, meant, path = made
    oracle = reference_gpt_oss.logits(CONFIG, meant, PROMPT)
    for options in ({"residency": "resident"}, {"expert_slots": 4}):
        with Runner.open(path, kernels="reference", prefill_chunk=7, **options) as runner:
            assert_close(runner.prefill(PROMPT[:-1]), oracle[-2])
            assert_close(runner.decode(PROMPT[-1]), oracle[-1])


def test_every_value_is_kept(made):
    """Exact: matrices in 8 bits and groups of 32, experts in MXFP4, biases of experts in float32."""
    _, meant, path = made
    with Install.open(path) as install:
        tensors, layer = install.tensors, install.experts.layers[0].tensors
        assert tensors["language_model.lm_head.weight"].format == AffineFormat(8, 32, "float16")
        assert tensors["language_model.model.layers.0.mlp.gate.weight"].format == AffineFormat(8, 64, "bfloat16")
        assert (layer["down"].format, layer["down_bias"].dtype) == (Mxfp4Format(), "float32")
        parameters = dict(tree_flatten(loader.load_model(install, backend=backends.select("reference")).parameters()))
    for name, value in meant.items():
        array, stem = parameters[name], name.removesuffix("weight")
        scales = parameters.get(f"{stem}scales") if array.dtype == mx.uint32 else None
        if scales is None:
            found = array.astype(mx.float32)
        elif scales.dtype == mx.uint8:
            found = mx.dequantize(array, scales, mode="mxfp4", dtype=mx.float32)
        else:
            biases = parameters[f"{stem}biases"].astype(mx.float32)
            group_size = 64 if ".router." in name else 32
            found = mx.dequantize(array, scales.astype(mx.float32), biases, group_size=group_size, bits=8)
        assert_exact(found, value, name)


def test_experts_in_other_blocks(tmp_path):
    """Close."""
    install, meant = elder("Q4_0", "Q8_0")
    install.write(tmp_path / "elder.gturbo")
    run(tmp_path / "elder.gturbo", tmp_path / "x.gturbo")
    with Runner.open(tmp_path / "x.gturbo", kernels="reference") as runner:
        assert_close(runner.prefill(PROMPT[:20]), reference_gpt_oss.logits(CONFIG, meant, PROMPT[:20])[-1])


def test_requantizing_keeps_mxfp4(made, tmp_path):
    report = run(made[0], tmp_path / "x.gturbo", bits=4)
    assert any("MXFP4 is kept" in reason for reason in report.exceptions.values())
    with Install.open(tmp_path / "x.gturbo") as install:
        assert install.tensors["language_model.lm_head.weight"].format == AffineFormat(4, 64, "bfloat16")
        assert install.experts.layers[1].tensors["up"].format == Mxfp4Format()


def test_it_does_not_run_as_it_is(made):
    with pytest.raises(InstallError, match=r"MXFP4 blocks \(.*convert this install to a new one"):
        Install.open(made[0])


class TestRefusals:
    def write(self, tmp_path, change):
        install, _ = elder()
        change(install)
        return install.seal().write(tmp_path / "elder.gturbo")

    def test_an_exponent_that_is_no_number(self, tmp_path):
        def change(install):
            name = "packed_experts/layer_01.bin"
            data = bytearray(install.files[name])
            data[2 * STRIDE + 17 * 5] = 255
            install.files[name] = bytes(data)

        refused(self.write(tmp_path, change), tmp_path, "layer_01.bin: gate", "expert 2", "NaN or infinite")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda document: document["quant"].update(hadamard={"block": 64}), "weights are rotated"),
            (lambda document: document.update(capability="embedding"), "capability is 'embedding'"),
        ],
    )
    def test_what_is_in_the_way_of_every_reader(self, change, words, tmp_path):
        path = self.write(tmp_path, lambda install: change(install.manifest))
        with pytest.raises(InstallError, match=words):
            run(path, tmp_path / "x.gturbo")

    def test_blocks_that_are_no_packed_words(self, tmp_path):
        def change(install):
            layout = json.loads(install.files["packed_experts/layout.json"])
            for item in layout["layers"]:
                for expert in item["experts"]:
                    expert["tensors"]["down"] |= {"dtype": "iq4_nl", "size": 64 * 128 // 32 * 18}
                    expert["tensors"]["down_biases"]["offset"] += 64 * 128 // 32
                    expert["size"] += 64 * 128 // 32
            install.files["packed_experts/layout.json"] = handmade.dump(layout)

        path = self.write(tmp_path, change)
        with pytest.raises(InstallError, match=r"IQ4_NL blocks \(.*: down\).*convert it from its source again"):
            run(path, tmp_path / "x.gturbo")

    def test_mxfp4_outside_of_experts(self, tmp_path):
        def change(install):
            entries = [("language_model.model.embed_tokens.weight", 14, (320, 64), bytes(320 * 2 * 17), b"", b"")]
            install.files["model_weights.bin"] = handmade.index(entries)

        refused(self.write(tmp_path, change), tmp_path, "embed_tokens.weight: is MXFP4, which only routed")
