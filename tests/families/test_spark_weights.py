"""Spark 2.5's tensors: where each goes, what is refused, and that conversion keeps their bytes."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.convert.checkpoints import TOKENIZER, plain, read_install, refused, run, write_checkpoint
from tests.families.models import config_of
from tests.families.oracles import FAMILIES, PROMPT, assert_close, mlx_lm_model
from tests.families.test_routed_installs import dequantized
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families.spark import FAMILY
from turbospark_mlx.protocols import Dropped, Placement
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, tiny_weights, variants

PUBLISHED = {"model.embed_tokens.": "model.embedding.", ".o_proj.": ".out_proj."}


def published(names):
    """``{name: value}`` under the names of a published checkpoint."""
    found = {}
    for name, value in names.items():
        for ours, theirs in PUBLISHED.items():
            name = name.replace(ours, theirs)
        found[name] = value
    return found


def installed(name):
    for ours, theirs in PUBLISHED.items():
        name = name.replace(theirs, ours)
    return f"language_model.{name}"


def rounded(weights):
    """As a bfloat16 checkpoint has them."""
    return {name: np.array(mx.array(a).astype(mx.bfloat16).astype(mx.float32)) for name, a in weights.items()}


@pytest.mark.parametrize(
    ("spellings", "name", "role"),
    [
        (("model.embedding.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight", "embedding"),
        (("model.norm.weight",), "model.norm.weight", "vector"),
        (
            ("model.layers.2.self_attn.out_proj.weight", "model.layers.2.self_attn.o_proj.weight"),
            "model.layers.2.self_attn.o_proj.weight",
            "attention",
        ),
        (
            ("model.layers.0.self_attn.q_k_v_proj.weight",),
            "model.layers.0.self_attn.q_k_v_proj.weight",
            "attention",
        ),
        (("model.layers.0.self_attn.g_proj.weight",), "model.layers.0.self_attn.g_proj.weight", "vector"),
        (("model.layers.1.self_attn.out_proj.bias",), "model.layers.1.self_attn.o_proj.bias", "vector"),
        (("model.layers.1.mlp.up_proj.weight",), "model.layers.1.mlp.up_proj.weight", "shared_expert"),
        (("lm_head.weight",), "lm_head.weight", "head"),
    ],
)
def test_where_tensors_go(spellings, name, role):
    config = config_of("spark", "spark-biases")
    for spelling in (*spellings, f"language_model.{name}"):
        assert FAMILY.place(spelling, config) == Placement(f"language_model.{name}", role, name)


def test_what_is_left_out():
    assert isinstance(FAMILY.place("lm_head.weight", config_of("spark", "spark")), Dropped)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert isinstance(FAMILY.place(frequencies, config_of("spark", "spark")), Dropped)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.4.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight", "model.layers.x.norm.weight"),
        *("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight", "vision.tower"),
        *("model.layers.0.self_attn.out_proj.bias", "model.layers.0.mlp.up_proj.bias", "model.embedding.bias"),
    ],
)
def test_unknown_tensors_are_refused_by_name(name):
    with pytest.raises(ConvertError) as error:
        FAMILY.place(name, config_of("spark", "spark"))
    assert repr(name) in str(error.value)


def test_an_undecided_head():
    config = dataclasses.replace(config_of("spark", "spark"), tie_word_embeddings=None)
    with pytest.raises(ConvertError, match="tie_word_embeddings is not decided"):
        FAMILY.expected(config)


def test_gguf_files_are_refused_with_what_to_take():
    with pytest.raises(ConvertError, match=r"'spark2_5', whose GGUF files .* Take the published safetensors"):
        FAMILY.hf_config_from_gguf({"general.architecture": "spark2_5"})


@pytest.mark.parametrize("variant", variants("spark"))
def test_a_published_checkpoint_keeps_its_bytes(variant, tmp_path):
    """Close to the oracle on its own weights; converted again, exact."""
    config = tiny_config("spark", variant)
    tensors = plain(published(tiny_weights(config)))
    extra = plain({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)})
    source = write_checkpoint(tmp_path / "source", config, tensors | extra, shards=2)
    report = run(source, tmp_path / "out.gturbo", bits=16)
    assert set(report.dropped) == set(extra)
    stored = read_install(tmp_path / "out.gturbo")
    assert {name: (entry["data"], entry["shape"]) for name, entry in stored.items()} == {
        installed(name): (array.tobytes(), array.shape) for name, (_, array) in tensors.items()
    }
    oracle = FAMILIES["spark"].reference(config, rounded(tiny_weights(config)), PROMPT[:30])
    with Runner.open(tmp_path / "out.gturbo", kernels="reference") as runner:
        assert_close(runner.model(mx.array([PROMPT[:30]]))[0], oracle)
        assert_close(runner.prefill(PROMPT[:28]), oracle[27])
        assert_close(runner.decode(PROMPT[28]), oracle[28])
    run(tmp_path / "out.gturbo", tmp_path / "again.gturbo", bits=16)
    assert read_install(tmp_path / "again.gturbo") == stored


def test_a_converted_checkpoint_packs_everything_but_gates_and_norms(tmp_path):
    config = tiny_config("spark", "spark")
    source = write_checkpoint(tmp_path / "source", config, plain(published(tiny_weights(config))))
    run(source, tmp_path / "out.gturbo")
    with Runner.open(tmp_path / "out.gturbo", kernels="reference") as runner:
        found = dict(tree_flatten(runner.model.parameters()))
    for name, shape in FAMILY.expected(config_of("spark", "spark")).items():
        gate_or_norm = ".g_proj." in name or len(shape) == 1
        array = found[name.removeprefix("language_model.")]
        assert array.dtype == (mx.bfloat16 if gate_or_norm else mx.uint32), name
        if gate_or_norm:
            assert array.shape == shape


@pytest.mark.parametrize("gates", ["plain", "packed"])
@pytest.mark.parametrize("variant", ["spark", "spark-biases"])
def test_an_mlx_quantized_copy(variant, gates, tmp_path):
    """What mlx-lm saves, which leaves gates as they are, and a copy whose gates are packed too: every byte is kept;
    close to the oracle on what the bytes stand for."""
    config = tiny_config("spark", variant)
    model = mlx_lm_model("spark2_5", config, tiny_weights(config))
    model.set_dtype(mx.bfloat16)
    kept = model.quant_predicate if gates == "plain" else lambda path, module: True
    nn.quantize(
        model, 64, 4, class_predicate=lambda path, module: hasattr(module, "to_quantized") and kept(path, module)
    )
    arrays = dict(tree_flatten(model.parameters()))
    (tmp_path / "source").mkdir()
    mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), arrays, {"format": "mlx"})
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    (tmp_path / "source" / "tokenizer.json").write_bytes(TOKENIZER)
    report = run(tmp_path / "source", tmp_path / "out.gturbo")
    assert report.quantized == 0
    stored = read_install(tmp_path / "out.gturbo")
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        companion = part in ("scales", "biases")
        mx.eval(array)
        entry = stored[installed(f"{stem}.weight" if companion else name)]
        assert entry[part if companion else "data"] == bytes(memoryview(array).cast("B")), name
    oracle = FAMILIES["spark"].reference(config, dequantized(tmp_path / "out.gturbo"), PROMPT[:30])
    for options in ({}, {"fused": False}):
        with Runner.open(tmp_path / "out.gturbo", kernels="reference", **options) as runner:
            gate = runner.model.layers[0].self_attn.g_proj
            assert ("scales" in gate) == (gates == "packed")
            assert_close(runner.model(mx.array([PROMPT[:30]]))[0], oracle)
            assert_close(runner.prefill(PROMPT[:28]), oracle[27])
            assert_close(runner.decode(PROMPT[28]), oracle[28])
    again = run(tmp_path / "out.gturbo", tmp_path / "again.gturbo")
    assert (again.quantized, again.copied) == (0, report.copied)
    assert read_install(tmp_path / "again.gturbo") == stored


def test_an_untied_head_that_is_not_there(tmp_path):
    config = tiny_config("spark", "spark") | {"tie_word_embeddings": False}
    tensors = published(tiny_weights(tiny_config("spark", "spark")))
    refused(write_checkpoint(tmp_path / "source", config, plain(tensors)), tmp_path, "no output head")


def test_two_spellings_of_one_tensor(tmp_path):
    config = tiny_config("spark", "spark")
    weights = tiny_weights(config)
    tensors = plain(weights) | plain({"model.embedding.weight": weights["model.embed_tokens.weight"]})
    refused(write_checkpoint(tmp_path / "source", config, tensors), tmp_path, "has the same place")


@pytest.mark.parametrize("silent", [True, False])
def test_a_head_beside_the_embedding(silent, tmp_path):
    """Where config.json is silent the tensors decide; a copy of the embedding is left out where it is tied."""
    config = tiny_config("spark", "spark") | ({"tie_word_embeddings": None} if silent else {})
    weights = published(tiny_weights(tiny_config("spark", "spark")))
    source = write_checkpoint(
        tmp_path / "source", config, plain(weights | {"lm_head.weight": weights["model.embedding.weight"]})
    )
    run(source, tmp_path / "out.gturbo", bits=16)
    assert ("language_model.lm_head.weight" in read_install(tmp_path / "out.gturbo")) == silent


def test_what_elder_engines_are_told(tmp_path):
    """The published model needs no extension; another epsilon does, and cannot be converted for them."""
    config = tiny_config("spark", "spark")
    weights = plain(published(tiny_weights(config)))
    source = write_checkpoint(tmp_path / "source", config, weights)
    run(source, tmp_path / "out.gturbo", elder_compatible=True)
    manifest = json.loads((tmp_path / "out.gturbo" / "manifest.json").read_text())
    assert manifest["arch"]["family"] == "spark2_5"
    assert not manifest["flags"].get("turbosparkMlxExtension")
    other = write_checkpoint(tmp_path / "other", config | {"rms_norm_eps": 1e-5}, weights)
    with pytest.raises(ConvertError, match="rms_norm_eps is 1e-05, where the elder engines assume 1e-06"):
        run(other, tmp_path / "other.gturbo", elder_compatible=True)
