"""MXFP4 experts in layout.json: words and exponents apart, told from affine ones by the exponents' dtype."""

import json

import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import TensorSpec, experts_layout, resident_index
from turbospark_mlx.gturbo.formats import spell
from turbospark_mlx.gturbo.quant_summary import needs_extension, summary
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format

MXFP4 = Mxfp4Format()
SPECS = [
    TensorSpec("gate", (48, 64), MXFP4),
    TensorSpec("gate_bias", (48,), "bfloat16"),
    TensorSpec("up", (48, 64), MXFP4),
    TensorSpec("up_bias", (48,), "bfloat16"),
    TensorSpec("down", (64, 96), MXFP4),
    TensorSpec("down_bias", (64,), "float32"),
]


def document():
    return json.loads(experts_layout.build([SPECS], 2)[0])


def read(layout):
    stride = layout["expertStride"]
    data = json.dumps(layout).encode()
    return experts_layout.read(data, "layout.json", num_layers=1, experts_per_layer=2, stride=stride)


def test_what_is_built_reads_back():
    _, built = experts_layout.build([SPECS], 2)
    assert read(document()) == built
    tensors = built.layers[0].tensors
    assert list(tensors) == [
        *("gate", "gate_scales", "gate_bias", "up", "up_scales", "up_bias", "down", "down_scales", "down_bias"),
    ]
    assert [(tensors[role].dtype, tensors[role].size) for role in ("gate", "gate_scales", "gate_bias", "down")] == [
        *(("mxfp4", 48 * 32), ("uint8", 48 * 2), ("bfloat16", 96), ("mxfp4", 64 * 48)),
    ]
    assert tensors["down"].format == MXFP4
    assert tensors["down_scales"].shape == (64, 3)


def set_field(role, key, value):
    def change(tensors):
        tensors[role][key] = value

    return change


def drop(role):
    return lambda tensors: tensors.pop(role)


RULES = {
    "exponents missing": (drop("up_scales"), "up_scales or up_biases is missing"),
    "exponents of another size": (set_field("up_scales", "size", 95), "up_scales.size is 95"),
    "fewer exponents": (
        lambda tensors: tensors["up_scales"].update(size=48, shape=[48, 1]),
        "up_scales.size is 48; dtype and shape need 96",
    ),
    "another width": (
        set_field("gate", "shape", [32, 96]),
        r"gate_scales has shape \[48, 2\], which does not fit \[32, 96\]",
    ),
    "no whole blocks": (set_field("gate", "shape", [64, 48]), "gate has shape"),
    "bits": (set_field("gate", "bits", 8), "gate.bits is 8"),
    "floats for exponents": (set_field("gate_scales", "dtype", "f32"), "gate_scales.size is 96"),
    "bytes for a matrix": (
        lambda tensors: (tensors.pop("down_scales"), tensors["down"].update(dtype="u8", shape=[64, 48])),
        "down, which|down has dtype u8",
    ),
    "bytes for a bias": (set_field("gate_bias", "dtype", "u8"), "gate_bias.size is 96"),
    "biases beside exponents": (
        lambda tensors: tensors.update(gate_biases={"offset": 13000, "size": 192, "dtype": "bf16", "shape": [48, 2]}),
        "gate_biases is there",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule):
    change, message = RULES[rule]
    layout = document()
    for expert in layout["layers"][0]["experts"]:
        change(expert["tensors"])
    with pytest.raises(InstallError, match=message):
        read(layout)


def test_resident_matrices_cannot_be_mxfp4():
    with pytest.raises(InstallError, match=r"'a\.weight' cannot be written: only routed experts can be MXFP4"):
        resident_index.build([TensorSpec("a.weight", (32, 64), MXFP4)])
    with pytest.raises(InstallError, match="matrices of rows in blocks of 32"):
        TensorSpec("gate", (32, 80), MXFP4)


def test_the_elder_engines_are_told():
    plain = [
        TensorSpec("language_model.model.layers.0.self_attn.q_proj.weight", (64, 64), AffineFormat(4, 64, "bfloat16"))
    ]
    assert not needs_extension(plain, [], {}, {})
    assert needs_extension(plain, [SPECS[::2]], {}, {})
    slot = {"weightBits": 4, "scheme": "mxfp4", "scaleType": "e8m0", "biasType": "none", "groupSize": 32}
    assert summary(plain, [SPECS])["routedExpert"] == slot
    assert spell("mxfp4", MXFP4) == "MXFP4, words and exponents apart"
