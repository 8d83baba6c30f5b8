"""Muse Glimmer from the checkpoints that people publish to installs, models and answers."""

import json

import mlx.core as mx
import numpy as np
import pytest

from tests.convert.checkpoints import mlx_quantized, plain, read_install, refused, run, write_checkpoint
from tests.families import reference_muse
from tests.families.oracles import PROMPT, assert_close, mlx_lm_model
from tests.families.test_routed_installs import dequantized
from turbospark_mlx.gturbo import Install
from turbospark_mlx.gturbo.elder_engines import RUST, refusals
from turbospark_mlx.gturbo.manifest import EXTENSION_FLAG
from turbospark_mlx.loader import read_config
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, tiny_weights, variants

TOWER = {
    "vision_tower.layers.0.attn.q_proj.weight": np.zeros((64, 64), np.float32),
    "vision_adapter.fc1.weight": np.zeros((64, 64), np.float32),
    "vision_projection.weight": np.zeros((64, 64), np.float32),
}


def rounded(weights):
    """As a bfloat16 checkpoint has them."""
    return {name: np.array(mx.array(a).astype(mx.bfloat16).astype(mx.float32)) for name, a in weights.items()}


def published(weights):
    """Under published names, with some of the tower for images."""
    renamed = {name.replace("model.", "model.language_model.", 1): array for name, array in weights.items()}
    return renamed | {f"model.{name}": array for name, array in TOWER.items()}


def as_mlx(weights):
    """Under the names of MLX's copies, which keep the tower too."""
    return {f"language_model.{name}": array for name, array in weights.items()} | TOWER


def assert_answers(path, oracle, what):
    """Close to the oracle: at once, in chunks, decoded; fused and plain."""
    for fused in (True, False):
        with Runner.open(path, kernels="reference", prefill_chunk=7, fused=fused) as runner:
            assert_close(runner.model(mx.array([PROMPT[:30]]))[0], oracle, f"{what}, fused {fused}")
            assert_close(runner.prefill(PROMPT[:28]), oracle[27], f"{what}, fused {fused}")
            assert_close(runner.decode(PROMPT[28]), oracle[28], f"{what}, fused {fused}")


@pytest.mark.parametrize("variant", variants("muse"))
def test_a_published_checkpoint_is_copied(variant, tmp_path):
    """Exact bytes; close to the oracle on its own weights, and to mlx-lm; the tower is left out by name."""
    config, weights = tiny_config("muse", variant), rounded(tiny_weights(tiny_config("muse", variant)))
    tensors = plain(published(weights))
    report = run(write_checkpoint(tmp_path / "raw", config, tensors), tmp_path / "raw.gturbo", bits=16)
    found = read_install(tmp_path / "raw.gturbo")
    assert found.keys() == {f"language_model.{name}" for name in weights}
    for name in weights:
        (_, array), entry = tensors[name.replace("model.", "model.language_model.", 1)], found[f"language_model.{name}"]
        assert (entry["data"], entry["shape"], entry["tag"]) == (array.tobytes(), array.shape, 1)
    assert report.dropped == {f"model.{name}": "of the tower for images and video; text alone is run" for name in TOWER}
    oracle = reference_muse.logits(config, weights, PROMPT[:30])
    assert_answers(tmp_path / "raw.gturbo", oracle, variant)
    assert_close(mlx_lm_model("muse_glimmer", config, weights)(mx.array([PROMPT[:30]]))[0], oracle)


@pytest.mark.parametrize("variant", variants("muse"))
def test_an_mlx_quantized_copy(variant, tmp_path):
    """Exact bytes; close to the oracle on what they stand for; converted again, the same install."""
    config, tensors = tiny_config("muse", variant), as_mlx(tiny_weights(tiny_config("muse", variant)))
    formats = {name: (4, 64) for name, a in tensors.items() if a.ndim > 1 and name not in TOWER}
    formats["language_model.model.embed_tokens.weight"] = (8, 32)
    embedding = {"language_model.model.embed_tokens": {"group_size": 32, "bits": 8}}
    settings = {"quantization": {"group_size": 64, "bits": 4, "mode": "affine"} | embedding}
    stored = mlx_quantized(tensors, formats)
    source = write_checkpoint(tmp_path / "mlx", config | settings, stored)
    report = run(source, tmp_path / "mlx.gturbo")
    assert (report.quantized, report.dropped.keys()) == (0, TOWER.keys())
    found = read_install(tmp_path / "mlx.gturbo")
    for name, (_, array) in stored.items():
        if name in TOWER:
            continue
        stem, _, part = name.rpartition(".")
        entry = found[name if part == "weight" else f"{stem}.weight"]
        assert entry["data" if part == "weight" else part] == array.tobytes(), name
    meant = dequantized(tmp_path / "mlx.gturbo")
    assert_answers(tmp_path / "mlx.gturbo", reference_muse.logits(config, meant, PROMPT[:30]), variant)
    run(tmp_path / "mlx.gturbo", tmp_path / "again.gturbo")
    assert read_install(tmp_path / "again.gturbo") == found


def elder(path):
    """Make an install what the elder engine writes: without the extension."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("turbosparkMlx")
    flags = manifest.get("flags", {})
    assert not flags.get(EXTENSION_FLAG)
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_an_elder_install_runs(tmp_path):
    """Exact: what its manifest does not say is what the published model has."""
    config, weights = tiny_config("muse"), rounded(tiny_weights(tiny_config("muse")))
    source = write_checkpoint(tmp_path / "raw", config, plain(published(weights)))
    answers = []
    for name, change in (("ours", lambda path: path), ("theirs", elder)):
        run(source, tmp_path / f"{name}.gturbo", bits=4)
        path = change(tmp_path / f"{name}.gturbo")
        with Install.open(path) as install:
            assert install.manifest.family == "museGlimmer"
            assert not refusals(install)[RUST]
            assert read_config(install)[1].output_multiplier == 26**-0.5
        with Runner.open(path, kernels="reference") as runner:
            answers.append(np.array(runner.prefill(PROMPT[:20])))
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("variant", variants("muse")[1:])
def test_what_the_elder_engine_would_run_wrongly_is_flagged(variant, tmp_path):
    config, weights = tiny_config("muse", variant), rounded(tiny_weights(tiny_config("muse", variant)))
    run(write_checkpoint(tmp_path / "raw", config, plain(published(weights))), tmp_path / "x.gturbo", bits=4)
    with Install.open(tmp_path / "x.gturbo") as install:
        assert install.manifest.flags[EXTENSION_FLAG]


def test_learned_head_norms_are_another_model(tmp_path):
    config, weights = tiny_config("muse"), rounded(tiny_weights(tiny_config("muse")))
    weights["model.layers.0.self_attn.q_norm.weight"] = np.ones(32, np.float32)
    refused(
        write_checkpoint(tmp_path / "raw", config, plain(published(weights))),
        tmp_path,
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "normalises queries and keys without weights",
    )
