"""gpt-oss from the checkpoints that people publish to packed files, models and answers."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families import gpt_oss_checkpoints, reference_gpt_oss
from tests.families.oracles import PROMPT, assert_close, assert_exact
from turbospark_mlx import loader
from turbospark_mlx.convert import convert
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.families import family_for_manifest
from turbospark_mlx.gturbo import Install
from turbospark_mlx.gturbo.manifest import EXTENSION_FLAG
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config

VARIANT = "gpt-oss"
FORMATS = {
    "published": Mxfp4Format(),
    "mlx-mxfp4": Mxfp4Format(),
    "mlx-int4": AffineFormat(4, 64, "bfloat16"),
    "bfloat16": None,
    "mlx-bfloat16": None,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``(checkpoint, install, what its tensors stand for)`` of a kind of checkpoint, converted as it is."""
    known = {}

    def of(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp("gpt-oss")
            meant = gpt_oss_checkpoints.write(folder / "source", VARIANT, kind)
            bits = 16 if kind.endswith("bfloat16") else None
            convert(folder / "source", folder / "x.gturbo", bits=bits, progress=False)
            known[kind] = folder / "source", folder / "x.gturbo", meant
        return known[kind]

    return of


def load(path, **options):
    with Install.open(path) as install:
        return loader.load_model(install, backend=backends.select("reference"), **options)


@pytest.mark.parametrize("kind", gpt_oss_checkpoints.KINDS)
def test_every_layout_gives_its_own_logits(made, kind):
    """Close, to the float64 reference with the checkpoint's values: at once, and with experts read in place."""
    _, path, meant = made(kind)
    oracle = reference_gpt_oss.logits(tiny_config("gpt_oss", VARIANT), meant, PROMPT[:30])
    for fused in (True, False):
        assert_close(load(path, fused=fused)(mx.array([PROMPT[:30]]))[0], oracle, f"{kind}, fused {fused}")
    for kernels in ("auto", "reference"):
        with Runner.open(path, kernels=kernels, residency="resident", prefill_chunk=7) as runner:
            assert_close(runner.prefill(PROMPT[:25]), oracle[24], kind)
            for position in range(25, 30):
                assert_close(runner.decode(PROMPT[position]), oracle[position], f"{kind}, {kernels}, {position}")


@pytest.mark.parametrize("kind", gpt_oss_checkpoints.KINDS)
def test_experts_are_stored_as_they_were(made, kind):
    """Exact: parameters are the checkpoint's values, and packed ones its words and scales."""
    source, path, meant = made(kind)
    parameters = dict(tree_flatten(load(path).parameters()))
    with Install.open(path) as install:
        assert {install.experts.layers[0].tensors[name].format for name in ("gate", "up", "down")} == {FORMATS[kind]}
        assert install.experts.layers[0].tensors["gate_bias"].dtype == "bfloat16"
    stored = mx.load(str(source / "model.safetensors"))
    for name, value in meant.items():
        array = parameters[name]
        if array.dtype != mx.uint32:
            assert_exact(array.astype(mx.float32), value, name)
        elif kind.startswith("mlx"):
            for part in ("weight", "scales", "biases"):
                part = name.replace("weight", part)
                assert (part in stored) == (part in parameters)
                if part in stored:
                    assert_exact(parameters[part].view(mx.uint8), stored[part].view(mx.uint8), part)
        else:
            scales = parameters[name.replace("weight", "scales")]
            assert_exact(mx.dequantize(array, scales, mode="mxfp4", dtype=mx.float32), value, name)


def test_mxfp4_experts_stay_when_the_rest_is_packed(made, tmp_path):
    source, _, _ = made("published")
    report = convert(source, tmp_path / "x.gturbo", bits=8, progress=False)
    assert any("MXFP4 is kept" in reason for reason in report.exceptions.values())
    with Install.open(tmp_path / "x.gturbo") as install:
        assert install.experts.layers[0].tensors["up"].format == Mxfp4Format()
        assert install.tensors["language_model.model.layers.0.self_attn.q_proj.weight"].format.bits == 8
        assert install.tensors["language_model.model.layers.0.mlp.gate.weight"].format.bits == 8
    assert report.roles["routed_expert"].formats.keys() == {"MXFP4", "bfloat16"}


def test_an_install_converts_to_itself(made, tmp_path):
    _, path, _ = made("published")
    convert(path, tmp_path / "again.gturbo", progress=False)
    for name in ("packed_experts/layer_00.bin", "packed_experts/layout.json", "model_weights.bin"):
        assert (tmp_path / "again.gturbo" / name).read_bytes() == (path / name).read_bytes()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_residency_changes_no_bit_of_mxfp4(made, kernels):
    """Exact."""
    answers = []
    for options in ({"residency": "resident"}, {"residency": "mapped"}, {"expert_slots": 3}, {"expert_slots": 5}):
        with Runner.open(made("published")[1], kernels=kernels, prefill_chunk=8, **options) as runner:
            answers.append([np.array(runner.prefill(PROMPT[:20])), np.array(runner.decode(PROMPT[20]))])
    for other in answers[1:]:
        assert_exact(other, answers[0])


def test_elder_names(made):
    """An install calls the router and the sinks what the elder engine does, and carries the flag that it needs us."""
    _, path, _ = made("published")
    with Install.open(path) as install:
        assert install.manifest.flags[EXTENSION_FLAG]
        names = set(install.tensors)
        assert install.manifest.quant["routedExpert"]["scheme"] == "mxfp4"
    layer = "language_model.model.layers.1."
    assert {f"{layer}mlp.gate.weight", f"{layer}mlp.gate.bias", f"{layer}self_attn.sinks.weight"} <= names


class TestRefusals:
    def edit(self, tmp_path, kind, change):
        source = tmp_path / "source"
        gpt_oss_checkpoints.write(source, VARIANT, kind)
        arrays = dict(mx.load(str(source / "model.safetensors")))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(str(source / "model.safetensors"), arrays)
        return source

    def refused(self, source, tmp_path, match, **options):
        with pytest.raises(ConvertError, match=match):
            convert(source, tmp_path / "x.gturbo", progress=False, **options)

    def test_blocks_without_scales(self, tmp_path):
        name = "model.layers.0.mlp.experts.down_proj_scales"
        source = self.edit(tmp_path, "published", lambda arrays: arrays.pop(name))
        self.refused(source, tmp_path, "down_proj_blocks.*scales are missing")

    def test_an_exponent_that_is_no_number(self, tmp_path):
        def change(arrays):
            scales = np.array(arrays["model.layers.0.mlp.experts.down_proj_scales"])
            scales[2, 5, 1] = 255
            arrays["model.layers.0.mlp.experts.down_proj_scales"] = mx.array(scales)

        self.refused(self.edit(tmp_path, "published", change), tmp_path, "down_proj_blocks.*expert 2.*NaN or infinite")

    def test_one_expert_too_few(self, tmp_path):
        def change(arrays):
            name = "model.layers.1.mlp.experts.gate_up_proj_bias"
            arrays[name] = arrays[name][:-1]

        self.refused(self.edit(tmp_path, "bfloat16", change), tmp_path, r"gate_up_proj_bias.*\[5, 256\].*\[6, 256\]")

    def test_rows_that_are_not_transposed(self, tmp_path):
        def change(arrays):
            name = "model.layers.0.mlp.experts.gate_up_proj"
            arrays[name] = mx.contiguous(arrays[name].swapaxes(1, 2))

        source = self.edit(tmp_path, "bfloat16", change)
        self.refused(source, tmp_path, r"gate_up_proj: has shape \[6, 256, 64\].*\[6, 64, 256\]")

    def test_packed_matrices_that_no_expert_has(self, tmp_path):
        def change(arrays):
            name = "model.layers.0.self_attn.q_proj"
            words, scales = gpt_oss_checkpoints.mxfp4_of(np.array(arrays[f"{name}.weight"].astype(mx.float32)))
            arrays[f"{name}.weight"], arrays[f"{name}.scales"] = words, scales

        self.refused(self.edit(tmp_path, "mlx-mxfp4", change), tmp_path, "q_proj.*only affine, and mxfp4 of routed")

    def test_the_elder_engines_layout(self, made, tmp_path):
        self.refused(made("bfloat16")[0], tmp_path, "experts have biases", elder_compatible=True)

    def test_keeping_what_is_not_plain(self, made, tmp_path):
        with pytest.raises(OptionError, match="this checkpoint is quantized"):
            convert(made("published")[0], tmp_path / "x.gturbo", bits=16, progress=False)


def test_manifest_and_family(made):
    with Install.open(made("bfloat16")[1]) as install:
        family = family_for_manifest(install.manifest.family)
        config = family.config_from_manifest(install.arch, install.extension)
    assert config == family.config_from_hf(json.loads((made("bfloat16")[0] / "config.json").read_text()))
