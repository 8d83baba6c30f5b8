"""Qwen 3.5's tensors: every layout that checkpoints have makes the same model, and its bytes are kept."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.convert.checkpoints import mlx_quantized, plain, read_install, refused, run, write_checkpoint
from tests.families.models import build
from tests.families.oracles import FAMILIES, PROMPT, assert_close
from tests.families.test_routed_installs import dequantized
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.families.qwen.model import Model
from turbospark_mlx.families.qwen.weights import expected, place, settle
from turbospark_mlx.protocols import Dropped
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, tiny_weights

CENTERED = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")


def rounded(weights):
    """As a bfloat16 checkpoint has them."""
    return {name: np.array(mx.array(a).astype(mx.bfloat16).astype(mx.float32)) for name, a in weights.items()}


def published(config, *, experts="joined", extra=False):
    """A checkpoint's tensors under published names."""
    found = {}
    for name, array in rounded(tiny_weights(config)).items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        base, _, matrix = name.partition(".mlp.switch_mlp.")
        if not matrix:
            found[name] = array
        elif experts == "single":
            found |= {f"{base}.mlp.experts.{e}.{matrix}": array[e] for e in range(len(array))}
        elif matrix.startswith("down"):
            found[f"{base}.mlp.experts.down_proj"] = array
        else:
            halves = found.setdefault(f"{base}.mlp.experts.gate_up_proj", {})
            halves[matrix] = array
    for name, halves in found.items():
        if isinstance(halves, dict):
            found[name] = np.concatenate([halves["gate_proj.weight"], halves["up_proj.weight"]], axis=1)
    if extra:
        found["model.visual.patch_embed.proj.weight"] = np.zeros((4, 3), np.float32)
        found["mtp.fc.weight"] = np.zeros((64, 128), np.float32)
    return found


def as_mlx(config):
    """What mlx-lm makes of the same checkpoint: other names, turned convolutions, norms with 1 added."""
    found = {}
    for name, array in rounded(tiny_weights(config)).items():
        if name.endswith("conv1d.weight"):
            array = np.moveaxis(array, 2, 1)
        elif name.endswith(CENTERED):
            array = array + 1
        found[f"language_model.{name}"] = array
    return found


def convert_and_run(tmp_path, name, config, tensors, **options):
    source = write_checkpoint(tmp_path / name, config, tensors)
    report = run(source, tmp_path / f"{name}.gturbo", **options)
    with Runner.open(tmp_path / f"{name}.gturbo", kernels="reference", residency="auto") as runner:
        return report, np.array(runner.prefill(PROMPT[:20]))


@pytest.mark.parametrize("experts", ["joined", "single"])
@pytest.mark.parametrize("extra", [True, False])
def test_a_published_checkpoint(experts, extra, tmp_path):
    """Close to the oracle on its own weights; its bytes are kept; towers and other heads are left out by name."""
    config = tiny_config("qwen", "qwen3.5-moe")
    tensors = published(config, experts=experts, extra=extra)
    report, logits = convert_and_run(tmp_path, "raw", config, plain(tensors), bits=16)
    oracle = FAMILIES["qwen"].reference(config, rounded(tiny_weights(config)), PROMPT[:20])
    assert_close(logits, oracle[-1])
    stored = read_install(tmp_path / "raw.gturbo")
    for name in ("layers.0.linear_attn.conv1d.weight", "layers.1.self_attn.q_proj.weight", "norm.weight"):
        (_, array), entry = plain(tensors)[f"model.language_model.{name}"], stored[f"language_model.model.{name}"]
        assert (entry["data"], entry["shape"]) == (array.tobytes(), array.shape)
    assert set(report.dropped) == ({"model.visual.patch_embed.proj.weight", "mtp.fc.weight"} if extra else set())
    manifest = json.loads((tmp_path / "raw.gturbo" / "manifest.json").read_text())
    assert manifest["turbosparkMlx"]["arch"]["centered_norms"] is True


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-moe"])
def test_the_mlx_layout_is_the_same_model(variant, tmp_path):
    """Close, in float32, where adding 1 loses little; then converted again, exact."""
    config = tiny_config("qwen", variant)
    _, ours = convert_and_run(tmp_path, "raw", config, plain(published(config), "float32"), bits=16)
    _, theirs = convert_and_run(tmp_path, "mlx", config, plain(as_mlx(config), "float32"), bits=16)
    assert_close(theirs, ours)
    for name in ("raw", "mlx"):
        run(tmp_path / f"{name}.gturbo", tmp_path / "again.gturbo", overwrite=True, bits=16)
        assert read_install(tmp_path / "again.gturbo") == read_install(tmp_path / f"{name}.gturbo")


@pytest.mark.parametrize("variant", ["qwen3.5", "qwen3.5-moe"])
def test_an_mlx_quantized_copy(variant, tmp_path):
    """Packed matrices are kept bit for bit; close to the oracle on what they stand for."""
    config, tensors = tiny_config("qwen", variant), as_mlx(tiny_config("qwen", variant))
    routers = (".mlp.gate.weight", "shared_expert_gate.weight")
    formats = {
        name: (8 if name.endswith(routers) else 4, 64)
        for name, array in tensors.items()
        if array.ndim > 1 and "conv1d" not in name
    }
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    eight = {name.removesuffix(".weight"): settings | {"bits": 8} for name, form in formats.items() if form[0] == 8}
    quantized = config | {"quantization": settings | eight}
    stored = mlx_quantized(tensors, formats)
    _, logits = convert_and_run(tmp_path, "mlx", quantized, stored)
    entries = read_install(tmp_path / "mlx.gturbo")
    for name, entry in entries.items():
        assert entry["data"] == stored[name][1].tobytes(), name
        if name in formats:
            assert entry["scales"] == stored[name.replace(".weight", ".scales")][1].tobytes(), name
    weights = dequantized(tmp_path / "mlx.gturbo")
    for name in weights:
        weights[name] = weights[name] - 1 if name.endswith(CENTERED) else weights[name]
    assert_close(logits, FAMILIES["qwen"].reference(config, weights, PROMPT[:20])[-1])


def test_half_a_conversion_is_refused(tmp_path):
    config = tiny_config("qwen", "qwen3.5")
    tensors = published(config)
    name = "model.language_model.layers.1.linear_attn.conv1d.weight"
    tensors[name] = np.moveaxis(tensors[name], 2, 1)
    source = write_checkpoint(tmp_path / "half", config, plain(tensors))
    refused(source, tmp_path, name, "nobody knows which norms are stored less 1")


def test_a_manifest_that_contradicts_its_tensors_is_refused(tmp_path):
    config = tiny_config("qwen", "qwen3.5")
    convert_and_run(tmp_path, "raw", config, plain(published(config)), bits=16)
    path = tmp_path / "raw.gturbo" / "manifest.json"
    path.write_text(path.read_text().replace('"centered_norms": true', '"centered_norms": false'))
    with pytest.raises(InstallError, match=r"conv1d\.weight' is \[.*, 1, 4\]; manifest\.json calls for \[.*, 4, 1\]"):
        Runner.open(tmp_path / "raw.gturbo", verify="off")


def test_settling_twice_changes_nothing():
    config = family_for_model_type("qwen3_5").config_from_hf(tiny_config("qwen"))
    for centered in (True, False):
        settled = replace(config, centered_norms=centered)
        assert settle(config, expected(settled), None) == settled
        assert settle(settled, expected(settled), None) == settled


def test_roles_and_names():
    config = family_for_model_type("qwen3_5_moe").config_from_hf(tiny_config("qwen", "qwen3.5-moe"))
    roles = {
        "model.language_model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.language_model.layers.0.linear_attn.in_proj_a.weight": "attention",
        "model.language_model.layers.0.linear_attn.conv1d.weight": "vector",
        "model.language_model.layers.0.linear_attn.A_log": "vector",
        "model.language_model.layers.0.mlp.gate.weight": "router",
        "model.language_model.layers.0.mlp.shared_expert_gate.weight": "router",
        "model.language_model.layers.0.mlp.shared_expert.up_proj.weight": "shared_expert",
        "model.language_model.layers.0.mlp.experts.down_proj": "routed_expert",
    }
    for name, role in roles.items():
        assert place(name, config).role == role
    dropped = ("model.visual.blocks.0.attn.qkv.weight", "vision_tower.x", "mtp.norm.weight", "language_model.mtp.x")
    assert all(isinstance(place(name, config), Dropped) for name in dropped)
    for name, words in {
        "model.layers.0.self_attn.q_proj.weight": "no place in a layer of linear_attention",
        "model.layers.1.linear_attn.A_log": "no place in a layer of full_attention",
        "model.layers.0.mlp.up_proj.weight": "no place",
        "model.layers.2.input_layernorm.weight": "is of layer 2; the configuration has 2 layers",
        "model.layers.00.input_layernorm.weight": "is of layer 00",
        "model.rope.weight": "not one of the qwen family",
    }.items():
        with pytest.raises(ConvertError, match=words):
            place(name, config)


def test_gguf_files_are_refused():
    registered = family_for_model_type("qwen3_5")
    with pytest.raises(ConvertError, match="'qwen35moe', whose GGUF files this version does not convert"):
        registered.hf_config_from_gguf({"general.architecture": "qwen35moe"})


def test_plain_norms_are_multiplied_as_they_are():
    """Close: a model of either convention, with norms that stand for the same."""
    config = tiny_config("qwen", "qwen3.5")
    parsed = replace(family_for_model_type("qwen3_5").config_from_hf(config), centered_norms=False)
    model = Model(parsed, backend=backends.select("reference"))
    weights = {name.removeprefix("language_model."): mx.array(a) for name, a in as_mlx(config).items()}
    model.load_weights(list(weights.items()))
    raw = build(config)
    raw.load_weights([(name, mx.array(a)) for name, a in rounded(tiny_weights(config)).items()])
    assert_close(model(mx.array([PROMPT[:9]]))[0], raw(mx.array([PROMPT[:9]]))[0])
