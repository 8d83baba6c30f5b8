"""``packed_experts``: layouts of both dialects, reading single experts, and every rule of ``layout.json``."""

import json

import numpy as np
import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.protocols import AffineFormat

from . import handmade
from .handmade import Bytes, Handmade

INT4 = AffineFormat(4, 64, "bfloat16")
LAYOUT = "packed_experts/layout.json"


def with_layout(make, change):
    """A hand-packed install whose layout was changed, with size and hash to match."""
    made = make()
    layout = json.loads(made.files[LAYOUT])
    change(layout)
    made.files[LAYOUT] = handmade.dump(layout)
    return made.seal()


@pytest.mark.parametrize("make", [handmade.swift_moe, handmade.rust_moe])
def test_experts_of_both_dialects_read_back(make, tmp_path):
    made = make()
    layout = json.loads(made.files[LAYOUT])
    with Install.open(made.write(tmp_path / "i.gturbo")) as install:
        assert install.experts
        assert install.experts.experts_per_layer == 3
        for number, layer in enumerate(install.experts.layers):
            stored = layout["layers"][number]
            assert layer.file == f"packed_experts/layer_{number:02d}.bin"
            assert layer.tensors["gate"].format == layer.tensors["down"].format == INT4
            assert layer.tensors["gate_scales"].dtype == "bfloat16"
            assert layer.tensors["up"].shape == (64, 64)
            for expert in range(3):
                blob = bytearray(layer.size)
                install.read_expert_into(number, expert, blob)
                offset = stored["experts"][expert]["offset"]
                assert blob == made.files[layer.file][offset : offset + layer.size]
        assert [layer.stride for layer in install.experts.layers] == (
            [16384, 16384] if make is handmade.swift_moe else [8192, 20480]
        )


def test_a_dense_install_has_no_experts(tmp_path):
    with Install.open(handmade.rust_dense().write(tmp_path / "i.gturbo")) as install:
        assert not install.experts
        assert install.experts.layers == ()


def test_experts_may_be_stored_in_another_order(tmp_path):
    def swap(layout):
        first = layout["layers"][0]["experts"]
        first[0]["offset"], first[2]["offset"] = first[2]["offset"], first[0]["offset"]
        first[0]["physicalRank"], first[2]["physicalRank"] = 2, 0

    with Install.open(with_layout(handmade.swift_moe, swap).write(tmp_path / "i.gturbo")) as install:
        assert install.experts.layers[0].offsets == (2 * 16384, 16384, 0)


def test_layers_are_found_by_number_not_by_position(tmp_path):
    made = with_layout(handmade.rust_moe, lambda layout: layout["layers"].reverse())
    with Install.open(made.write(tmp_path / "i.gturbo")) as install:
        assert [layer.layer for layer in install.experts.layers] == [0, 1]
        assert [layer.stride for layer in install.experts.layers] == [8192, 20480]


def mxfp4_moe():
    """Experts as the Rust engine stores gpt-oss: MXFP4 blocks, and additive biases under the companions' names."""
    noise = Bytes(4)
    blob, tensors = b"", {}
    for role in ("gate", "up", "down"):
        for name, dtype, shape, size in (
            (role, "mxfp4", [32, 64], 32 * 2 * 17),
            (f"{role}_biases", "f32", [32], 128),
        ):
            tensors[name] = {"offset": len(blob), "size": size, "dtype": dtype, "shape": shape}
            blob += noise(size)
    stride = 16384
    items = [
        {
            "layer": layer,
            "file": f"layer_{layer:02d}.bin",
            "experts": [{"offset": e * stride, "size": len(blob), "tensors": tensors} for e in range(3)],
        }
        for layer in range(2)
    ]
    made = handmade.rust_moe()
    made.manifest["arch"] |= {"family": "gptOss", "numLayers": 2, "numDenseLeadingLayers": 0}
    made.manifest["arch"]["fullAttentionLayerMask"] = [0, 1]
    made.manifest["expertStride"] = stride
    layout = {"expertStride": stride, "numLayers": 2, "expertsPerLayer": 3, "layers": items}
    made.files[LAYOUT] = handmade.dump(layout)
    for layer in range(2):
        made.files[f"packed_experts/layer_{layer:02d}.bin"] = blob.ljust(stride, b"\0") * 2 + blob
    return made.seal()


def test_additive_biases_of_block_experts_are_not_taken_for_companions(tmp_path):
    directory = mxfp4_moe().write(tmp_path / "i.gturbo")
    with Install.open(directory, allow_unrunnable=True) as install:
        tensors = install.experts.layers[0].tensors
        assert (tensors["gate"].dtype, tensors["gate"].format) == ("MXFP4", None)
        assert (tensors["gate_biases"].dtype, tensors["gate_biases"].shape) == ("float32", (32,))
    with pytest.raises(InstallError, match="MXFP4 blocks"):
        Install.open(directory)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(layout):
        for key in path:
            layout = layout[key]
        layout[last] = value

    return change


E0 = ("layers", 0, "experts", 0)


def all_tensors(role, key, value):
    """Change one field of a sub-tensor in every expert of layer 0."""

    def change(layout):
        for expert in layout["layers"][0]["experts"]:
            expert["tensors"][role][key] = value

    return change


def drop_role(role):
    def change(layout):
        for expert in layout["layers"][0]["experts"]:
            del expert["tensors"][role]

    return change


def numbered_twice(layout):
    for expert in layout["layers"][0]["experts"]:
        expert["expert"] = 1


RULES = {
    "stride": (put("expertStride", 16384), "expertStride is 16384; manifest.json declares 20480"),
    "layer count": (put("numLayers", 3), "numLayers is 3; manifest.json declares 2"),
    "expert count": (put("expertsPerLayer", 1 << 40), "expertsPerLayer"),
    "layers missing": (put("layers", []), "layers has 0 entries"),
    "layers as an object": (put("layers", {}), "layers is an object"),
    "layer as a number": (put("layers", 0, 7), r"layers\[0\] is an integer"),
    "layer id out of range": (put("layers", 0, "layer", 2), r"layers\[0\].layer is 2"),
    "layer id twice": (put("layers", 1, "layer", 0), r"layers\[1\].layer is 0, like"),
    "file twice": (put("layers", 1, "file", "LAYER_00.bin"), r"layers\[1\].file .* like"),
    "file in the parent": (put("layers", 0, "file", "../model_weights.bin"), r"layers\[0\].file"),
    "file below": (put("layers", 0, "file", "a/b.bin"), r"layers\[0\].file"),
    "absolute file": (put("layers", 0, "file", "/etc/passwd"), r"layers\[0\].file"),
    "the layout itself": (put("layers", 0, "file", "Layout.json"), r"layers\[0\].file"),
    "unlisted file": (put("layers", 0, "file", "layer_02.bin"), "layer_02.bin, which files in manifest.json"),
    "layer stride above the model's": (put("layers", 0, "expertStride", 24576), r"layers\[0\].expertStride is 24576"),
    "layer stride": (put("layers", 0, "expertStride", 8191), r"layers\[0\].expertStride is 8191"),
    "experts missing": (put("layers", 0, "experts", []), r"layers\[0\].experts has 0 entries"),
    "expert as an array": (put(*E0, []), r"layers\[0\].experts\[0\] is an array"),
    "some numbers": (put(*E0, "expert", 0), "numbers to some experts"),
    "number twice": (numbered_twice, r"experts\[1\].expert is taken"),
    "rank out of range": (put(*E0, "physicalRank", 3), "physicalRank is 3"),
    "rank twice": (put(*E0, "physicalRank", 1), "physicalRank is taken"),
    "offset missing": (put(*E0, "offset", None), r"experts\[0\].offset is missing"),
    "overlap": (put(*E0[:3], 1, "offset", 8191), "experts overlap: one at 0"),
    "past the file": (put(*E0[:3], 2, "offset", 16385), "at 16385 of packed_experts/layer_00.bin"),
    "offset huge": (put(*E0[:3], 2, "offset", (1 << 64) - 1), "at 18446744073709551615"),
    "size 0": (put(*E0, "size", 0), "size is 0"),
    "size above the stride": (put(*E0, "size", 8193), "size is 8193"),
    "sizes differ": (put(*E0[:3], 1, "size", 8000), r"experts\[1\].size is 8000"),
    "tensors differ": (put(*E0[:3], 1, "tensors", "gate", "offset", 16), "differ from those of the layer's first"),
    "tensors missing": (put(*E0, "tensors", None), r"experts\[0\].tensors is missing"),
    "unknown dtype": (all_tensors("gate", "dtype", "q9_9"), "gate.dtype is 'q9_9'"),
    "no dtype": (all_tensors("gate", "dtype", None), "gate.dtype is missing"),
    "shape of nothing": (all_tensors("gate", "shape", []), "gate.shape has 0 axes"),
    "shape with 0": (all_tensors("gate", "shape", [64, 0]), "gate.shape may hold only"),
    "five axes": (all_tensors("gate_scales", "shape", [1, 1, 1, 64, 1]), "gate_scales.shape has 5 axes"),
    "past the blob": (all_tensors("down_biases", "offset", 8191), "exceed the expert's 8192 bytes"),
    "sub-tensors overlap": (all_tensors("up", "offset", 0), "overlaps"),
    "a matrix missing": (drop_role("down"), "tensors.down is missing"),
    "scales missing": (drop_role("up_scales"), "tensors.up_scales or up_biases is missing"),
    "bits": (all_tensors("gate", "bits", 8), "gate.size is 2048, which does not fit"),
    "bits of no format": (all_tensors("gate", "shape", [16, 64]), "gate has 16 bits"),
    "shape and size": (all_tensors("gate", "shape", [63, 64]), "gate.size is 2048, which does not fit"),
    "companion dtypes differ": (all_tensors("gate_biases", "dtype", "fp16"), "gate_biases differs from gate_scales"),
    "companion size": (all_tensors("gate_scales", "size", 64), "gate_scales.size is 64"),
    "group size": (all_tensors("gate", "shape", [32, 128]), "gate_scales.size"),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_the_layout(rule, tmp_path):
    change, message = RULES[rule]
    made = with_layout(handmade.rust_moe, change)
    with pytest.raises(InstallError, match=r"layout\.json: .*" + message):
        Install.open(made.write(tmp_path / "i.gturbo"), verify="off")


def test_a_layout_for_a_dense_model_is_refused(tmp_path):
    made = handmade.rust_dense()
    made.files[LAYOUT] = handmade.rust_moe().files[LAYOUT]
    with pytest.raises(InstallError, match=r"layout\.json: numLayers is 2; manifest\.json declares 0"):
        Install.open(made.seal().write(tmp_path / "i.gturbo"), verify="off")


def test_the_worked_layout_of_gemma_4_26b(tmp_path):
    """Offsets and stride of one expert of the published model, [704, 2816] gate and up, [2816, 704] down."""
    from turbospark_mlx.gturbo import experts_layout

    expert = [TensorSpec(name, shape, INT4) for name, shape in GEMMA.items()]
    data, layout = experts_layout.build([expert] * 30, 128)
    offsets = {role: tensor.offset for role, tensor in layout.layers[0].tensors.items()}
    assert offsets == {
        "gate": 0,
        "gate_scales": 991232,
        "gate_biases": 1053184,
        "up": 1115136,
        "up_scales": 2106368,
        "up_biases": 2168320,
        "down": 2230272,
        "down_scales": 3221504,
        "down_biases": 3283456,
    }
    assert layout.stride == 3358720
    assert layout.nbytes == 12_897_484_800
    assert len(data) < 16 << 20


GEMMA = {"gate": (704, 2816), "up": (704, 2816), "down": (2816, 704)}

MIXED = [
    [
        TensorSpec("gate", (32, 64), INT4),
        TensorSpec("gate_bias", (32,), "float32"),
        TensorSpec("up", (32, 64), AffineFormat(6, 32, "float16")),
        TensorSpec("down", (64, 32), "bfloat16"),
    ],
    [TensorSpec(name, (64, 64), INT4) for name in ("gate", "up", "down")],
]


def write_moe(directory, experts=MIXED):
    """Write an install with routed experts of noise; returns the blobs' parts by (layer, expert, name, part)."""
    directory.mkdir()
    noise, parts = Bytes(9), {}
    writer = InstallWriter(directory, [TensorSpec("norm.weight", (64,), "bfloat16")], experts=experts, num_experts=3)
    writer.write("norm.weight", "data", noise(128))
    for layer, specs in enumerate(experts):
        for expert in range(3):
            for spec in specs:
                for part, size in spec.parts.items():
                    parts[layer, expert, spec.name, part] = noise(size)
    for key in reversed(parts):
        writer.write_expert(*key, parts[key][5:], offset=5)
        writer.write_expert(*key, parts[key][:5])
    arch = handmade.arch(**handmade.MOE_ARCH, family="qwen3moe")
    writer.finish(arch=arch, extension={}, elder_assumption={}, model_id="m")
    return parts


def test_written_experts_read_back(tmp_path):
    parts = write_moe(tmp_path / "i.gturbo")
    with Install.open(tmp_path / "i.gturbo") as install:
        for (layer, expert, name, part), data in parts.items():
            place = install.experts.layers[layer]
            tensor = place.tensors[name if part == "data" else f"{name}_{part}"]
            blob = bytearray(place.size)
            install.read_expert_into(layer, expert, blob)
            assert blob[tensor.offset : tensor.offset + tensor.size] == data
            assert tensor.offset % 16 == 0
        for layer, specs in enumerate(MIXED):
            for spec in specs:
                tensor = install.experts.layers[layer].tensors[spec.name]
                assert (tensor.format or tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
        # The unused tail of a blob is zero.
        blob = np.frombuffer((tmp_path / "i.gturbo/packed_experts/layer_00.bin").read_bytes(), np.uint8)
        used = max(tensor.offset + tensor.size for tensor in install.experts.layers[0].tensors.values())
        assert not blob[used : install.experts.layers[0].stride].any()
        assert install.manifest.flags == {"turbosparkMlxExtension": True}


def test_experts_that_the_elder_engine_runs_need_no_flag(tmp_path):
    write_moe(tmp_path / "i.gturbo", MIXED[1:] * 2)
    with Install.open(tmp_path / "i.gturbo") as install:
        assert install.manifest.flags == {}
        assert install.manifest.quant["routedExpert"] == handmade.slot(4)


def test_a_byte_of_an_expert_that_was_not_written_is_named(tmp_path):
    directory = tmp_path / "i.gturbo"
    directory.mkdir()
    writer = InstallWriter(directory, [], experts=MIXED[1:], num_experts=1)
    for spec in MIXED[1]:
        for part, size in spec.parts.items():
            writer.write_expert(0, 0, spec.name, part, bytes(size - (spec.name == "up" and part == "scales")))
    with pytest.raises(InstallError, match="up_scales of layer 0, expert 0: byte 127 of 128 was never written"):
        writer.finish(arch={}, extension={}, elder_assumption={}, model_id="m")
    with pytest.raises(InstallError, match="bytes from 0 to 1 were written before"):
        writer.write_expert(0, 0, "up", "scales", b"x")


def test_an_expert_without_a_matrix_cannot_be_declared(tmp_path):
    with pytest.raises(InstallError, match="down is missing"):
        InstallWriter(tmp_path, [], experts=[MIXED[1][:2]], num_experts=1)


def test_layer_files_are_checked_at_their_size(tmp_path):
    made = handmade.rust_moe()
    name = "packed_experts/layer_01.bin"
    made.files[name] = made.files[name][: 2 * 20480 + 100]
    with pytest.raises(InstallError, match=r"at 40960 of packed_experts/layer_01\.bin, which has 41060 bytes"):
        Install.open(Handmade(made.manifest, made.files).seal().write(tmp_path / "i.gturbo"), verify="off")
