"""Routed experts: every layout of checkpoints gives the same packed files, and their bytes are the checkpoint's."""

import json

import numpy as np
import pytest

from turbospark_mlx.convert.affine import quantize_affine
from turbospark_mlx.convert.install_source import open_install
from turbospark_mlx.gturbo import Install
from turbospark_mlx.testing import tiny_config, tiny_weights

from .checkpoints import bfloat16, mlx_quantized, plain, read_install, refused, run, write_checkpoint

VARIANTS = ("mixtral", "qwen3-moe")
PARTS = ("gate", "up", "down")


def values_of(variant):
    """float32 weights by the module's names: experts as stacks below ``mlp.switch_mlp``."""
    return tiny_weights(tiny_config("llama", variant))


def stacked(variant, values):
    """As mlx-lm stores them."""
    block = "block_sparse_moe" if variant == "mixtral" else "mlp"
    return {name.replace(".mlp.", f".{block}.") if ".layers." in name else name: a for name, a in values.items()}


def single(variant, values):
    """As they are published."""
    result = {}
    for name, array in stacked(variant, values).items():
        if array.ndim != 3:
            result[name] = array
            continue
        base, matrix = name.split(".switch_mlp.")
        matrix = matrix.removesuffix(".weight")
        if variant == "mixtral":
            matrix = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[matrix]
        result |= {f"{base}.experts.{e}.{matrix}.weight": array[e] for e in range(len(array))}
    return result


def joined(variant, values):
    """As transformers 5 has them in memory."""
    result = {}
    for name, array in values.items():
        if array.ndim != 3:
            result[name] = array
            continue
        base, matrix = name.split(".switch_mlp.")
        if matrix.startswith("gate"):
            up = values[name.replace("gate_proj", "up_proj")]
            result[f"{base}.experts.gate_up_proj"] = np.concatenate([array, up], axis=1)
        elif matrix.startswith("down"):
            result[f"{base}.experts.down_proj"] = array
    return result


LAYOUTS = {"stacked": stacked, "single": single, "joined": joined}


def read_experts(install):
    """``{(position, expert, role): bytes}``, read by the layout file alone."""
    layout = json.loads((install / "packed_experts" / "layout.json").read_text())
    found = {}
    for layer in layout["layers"]:
        raw = (install / "packed_experts" / layer["file"]).read_bytes()
        for number, expert in enumerate(layer["experts"]):
            for role, tensor in expert["tensors"].items():
                start = expert["offset"] + tensor["offset"]
                found[layer["layer"], number, role] = raw[start : start + tensor["size"]]
    return found


def stacks(values):
    """``(position, part, stack)`` of the experts in ``values``."""
    paths = sorted({name.split(".switch_mlp.")[0] for name in values if ".switch_mlp." in name})
    for position, path in enumerate(paths):
        for part in PARTS:
            yield position, part, values[f"{path}.switch_mlp.{part}_proj.weight"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_kept_weights_are_the_checkpoints_bytes(tmp_path, variant, layout, shards):
    values = values_of(variant)
    tensors = plain(LAYOUTS[layout](variant, values))
    source = write_checkpoint(tmp_path / "source", tiny_config("llama", variant), tensors, shards=shards)
    report = run(source, tmp_path / "out.gturbo", bits=16)
    experts = read_experts(tmp_path / "out.gturbo")
    expected = {
        (position, number, part): bfloat16(matrix).tobytes()
        for position, part, stack in stacks(values)
        for number, matrix in enumerate(stack)
    }
    assert experts == expected
    assert report.copied == report.tensors == len(values)
    assert report.roles["routed_expert"].parameters == sum(a.size for _, _, a in stacks(values))
    resident = read_install(tmp_path / "out.gturbo")
    assert (
        resident["language_model.model.layers.0.mlp.gate.weight"]["data"]
        == bfloat16(values["model.layers.0.mlp.gate.weight"]).tobytes()
    )
    assert not [name for name in resident if "experts" in name or "switch" in name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantizing_gives_the_same_files_from_every_layout(tmp_path, variant):
    values = values_of(variant)
    for layout, make in LAYOUTS.items():
        source = write_checkpoint(tmp_path / layout, tiny_config("llama", variant), plain(make(variant, values)))
        report = run(source, tmp_path / f"{layout}.gturbo")
    found = [read_experts(tmp_path / f"{layout}.gturbo") for layout in LAYOUTS]
    assert found[0] == found[1] == found[2]
    position, part, stack = list(stacks(values))[-1]
    rounded = (bfloat16(stack[2]).astype(np.uint32) << 16).view(np.float32)
    for role, array in zip(
        (part, f"{part}_scales", f"{part}_biases"),
        quantize_affine(rounded, bits=4, group_size=64, companion_dtype="bfloat16"),
        strict=True,
    ):
        assert found[0][position, 2, role] == array.tobytes()
    assert report.quantized == sum(a.ndim > 1 for a in values.values())
    assert report.roles["routed_expert"].formats.keys() == {"INT4 group 64 bfloat16"}
    assert report.roles["router"].formats.keys() == {"INT8 group 64 bfloat16"}
    assert 0 < report.roles["routed_expert"].relative_error < 0.2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["stacked", "single"])
def test_mlx_quantized_experts_are_copied_bit_for_bit(tmp_path, variant, layout):
    """With an 8-bit router by an override, as mlx-lm saves Qwen3-MoE; ``down`` has 3 bits and groups of 32."""
    values = values_of(variant)
    named = LAYOUTS[layout](variant, values)
    formats, overrides = {}, {}
    for name, array in named.items():
        if array.ndim > 1:
            router = name.endswith("mlp.gate.weight") or name.endswith("moe.gate.weight")
            down = "down_proj" in name or ".w2." in name
            formats[name] = (8, 64) if router else (3, 32) if down else (4, 64)
            if formats[name] != (4, 64):
                overrides[name.removesuffix(".weight")] = dict(zip(("bits", "group_size"), formats[name], strict=True))
    config = {**tiny_config("llama", variant), "quantization": {"bits": 4, "group_size": 64, **overrides}}
    stored = mlx_quantized(named, formats)
    report = run(write_checkpoint(tmp_path / "source", config, stored), tmp_path / "out.gturbo")
    assert report.copied == report.tensors
    experts = read_experts(tmp_path / "out.gturbo")
    paths = sorted({name.split(".switch_mlp.")[0] for name in values if ".switch_mlp." in name})
    for (position, number, role), data in experts.items():
        part, _, kind = role.partition("_")
        name = f"{paths[position]}.switch_mlp.{part}_proj.weight"
        where = LAYOUTS[layout](variant, {name: np.arange(8.0)[:, None, None]})
        key = list(where)[number if layout == "single" else 0].removesuffix("weight") + (kind or "weight")
        array = stored[key][1]
        assert data == (array[number] if layout == "stacked" else array).tobytes(), role
    assert len(experts) == 9 * sum(len(stack) for _, part, stack in stacks(values) if part == "up")


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_install_converts_to_itself_and_can_be_requantized(tmp_path, variant):
    source = write_checkpoint(tmp_path / "source", tiny_config("llama", variant), plain(values_of(variant)))
    run(source, tmp_path / "one.gturbo", bits=8)
    report = run(tmp_path / "one.gturbo", tmp_path / "two.gturbo")
    assert report.copied == report.tensors
    assert read_experts(tmp_path / "two.gturbo") == read_experts(tmp_path / "one.gturbo")
    run(tmp_path / "one.gturbo", tmp_path / "three.gturbo", bits=4, group_size=32)
    with Install.open(tmp_path / "three.gturbo") as install:
        tensor = install.experts.layers[-1].tensors["down"]
        assert (tensor.format.bits, tensor.format.group_size) == (4, 32)


def test_stacks_of_an_install_are_read_from_any_row_to_any_row(tmp_path):
    """Also within an expert and across several."""
    values = values_of("qwen3-moe")
    run(
        write_checkpoint(tmp_path / "source", tiny_config("llama", "qwen3-moe"), plain(values)),
        tmp_path / "one.gturbo",
        bits=16,
    )
    name = "model.layers.2.mlp.switch_mlp.up_proj.weight"
    rows = bfloat16(values[name]).reshape(8 * 64, 64)
    with open_install(tmp_path / "one.gturbo", None) as source:
        tensor = source.tensors[f"language_model.{name}"]
        assert (tensor.shape, tensor.rows) == ((8, 64, 64), 512)
        for start, stop in ((0, 1), (10, 20), (64, 128), (60, 70), (63, 257), (0, 512), (511, 512)):
            np.testing.assert_array_equal(tensor.read(start, stop), rows[start:stop], err_msg=f"{start} to {stop}")


def test_layers_without_experts_are_said_in_the_extension(tmp_path):
    """Positions in the files count the layers that have experts; elder engines, which cannot know, refuse it."""
    source = write_checkpoint(tmp_path / "source", tiny_config("llama", "qwen3-moe"), plain(values_of("qwen3-moe")))
    run(source, tmp_path / "one.gturbo")
    manifest = json.loads((tmp_path / "one.gturbo" / "manifest.json").read_text())
    assert (manifest["numLayers"], manifest["arch"]["numLayers"], manifest["expertsPerLayer"]) == (2, 3, 8)
    assert manifest["turbosparkMlx"]["arch"]["dense_layers"] == [1]
    assert manifest["flags"] == {"turbosparkMlxExtension": True}
    refused(source, tmp_path, "dense_layers is [1]", "elder engines assume []", elder_compatible=True)


def test_elder_compatible(tmp_path):
    source = write_checkpoint(tmp_path / "source", tiny_config("llama", "mixtral"), plain(values_of("mixtral")))
    run(source, tmp_path / "out.gturbo", elder_compatible=True)
    manifest = json.loads((tmp_path / "out.gturbo" / "manifest.json").read_text())
    assert manifest["flags"] == {}
    assert (manifest["arch"]["family"], manifest["arch"]["numExperts"], manifest["numLayers"]) == ("llama", 4, 2)
    assert manifest["quant"]["router"]["weightBits"] == 8
    assert manifest["quant"]["routedExpert"]["weightBits"] == 4


class TestRefusals:
    def checkpoint(self, tmp_path, change, variant="qwen3-moe", layout=single):
        tensors = plain(layout(variant, values_of(variant)))
        change(tensors)
        return write_checkpoint(tmp_path / "source", tiny_config("llama", variant), tensors)

    def test_a_missing_expert(self, tmp_path):
        name = "model.layers.2.mlp.experts.5.up_proj.weight"
        source = self.checkpoint(tmp_path, lambda tensors: tensors.pop(name))
        refused(source, tmp_path, "layers.2.mlp.switch_mlp.up_proj.weight of expert 5, and of 0 more of 8 experts")

    def test_a_missing_layer_of_experts(self, tmp_path):
        def change(tensors):
            for name in [n for n in tensors if ".layers.2.mlp.experts." in n]:
                del tensors[name]

        refused(
            self.checkpoint(tmp_path, change), tmp_path, "lacks 3 of", "model.layers.2.mlp.switch_mlp.gate_proj.weight"
        )

    def test_an_expert_in_two_layouts(self, tmp_path):
        stack = stacked("qwen3-moe", values_of("qwen3-moe"))["model.layers.2.mlp.switch_mlp.up_proj.weight"]

        def change(tensors):
            tensors |= plain({"model.layers.2.mlp.switch_mlp.up_proj.weight": stack})

        refused(
            self.checkpoint(tmp_path, change), tmp_path, "up of expert 0: has the same place as", "experts.0.up_proj"
        )

    def test_a_wrong_shape(self, tmp_path):
        name = "model.layers.0.mlp.experts.3.down_proj.weight"

        def change(tensors):
            tensors |= plain({name: np.zeros((32, 64), np.float32)})

        refused(self.checkpoint(tmp_path, change), tmp_path, name, "has shape [32, 64]; config.json asks for [64, 64]")

    def test_a_stack_of_too_few(self, tmp_path):
        name = "model.layers.0.mlp.switch_mlp.down_proj.weight"

        def change(tensors):
            tensors |= plain({name: np.zeros((7, 64, 64), np.float32)})

        source = self.checkpoint(tmp_path, change, layout=stacked)
        refused(source, tmp_path, name, "has shape [7, 64, 64]; config.json asks for [8, 64, 64]")

    def test_experts_stored_differently(self, tmp_path):
        name = "model.layers.0.mlp.experts.3.down_proj.weight"

        def change(tensors):
            tensors |= plain({name: np.zeros((64, 64), np.float32)}, "float32")

        words = (name, "is stored as float32", "experts.0.down_proj.weight", "stored alike")
        refused(self.checkpoint(tmp_path, change), tmp_path, *words)
