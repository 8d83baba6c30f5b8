"""The models that benchmarks make up: ours and mlx-lm's are one model, so that their speeds are of the same work."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from turbospark_mlx import Runner
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.testing import make_tiny_install

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 640,
}

TINY_QWEN = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 640,
}
TINY_EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 192,
}

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def benchmarks(monkeypatch):
    """The scripts' own folder, as they see it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent.name == "benchmarks":
            del sys.modules[name]


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
KINDS = ["sliding_attention", "full_attention"]
SMALLER = {
    "llama-8b": {},
    "llama-1b": {},
    "deepseek-v2-lite": {
        "moe_intermediate_size": 128,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
    },
    # mlx-lm does not know that gpt-oss rounds no borders of YaRN.
    "gpt-oss-20b": {"num_local_experts": 8, "layer_types": KINDS, "rope_scaling": YARN},
    "qwen3-30b-a3b": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128},
    "muse-30b": {"layer_types": KINDS, "layer_rope_theta": [500000.0, 0]},
    "spark-4b": {"layer_types": KINDS},
    "qwen3.5-0.8b": TINY_QWEN,
    "qwen3.5-35b-a3b": TINY_QWEN | TINY_EXPERTS,
    "gemma4-26b-a4b": {
        "layer_types": KINDS,
        "num_global_key_value_heads": 1,
        "global_head_dim": 128,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 128,
    },
}


def tiny(shapes, shape):
    """The shape with other sizes."""
    config, changed = shapes.SHAPES[shape], TINY | SMALLER[shape]
    if "text_config" in config:
        return {**config, "vocab_size": TINY["vocab_size"], "text_config": config["text_config"] | changed}
    return config | changed


@pytest.mark.parametrize("shape", SMALLER)
def test_a_made_up_model_and_its_twin_are_the_same(benchmarks, shape):
    import peers
    import shapes

    config = tiny(shapes, shape)
    model = shapes.make_model(config, backends.select("reference"))
    twin = peers.mlx_lm_twin(shapes.arrays(model), config, mx.float32)
    ids = [5, 600, 17, 33]
    ours = np.array(Runner(model, max_context=16).prefill(ids))
    theirs = np.array(twin(mx.array([ids]))[0, -1])
    assert np.isfinite(ours).all()
    assert 0.1 < ours.std() < 10
    assert np.abs(ours - theirs).max() < 1e-4 * ours.std()


def test_what_a_token_reads(benchmarks):
    import shapes

    config = {**shapes.SHAPES["llama-8b"], **TINY}
    model = shapes.make_model(config, backends.select("reference"))
    everything = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    table = 640 * 256 // 2 + 2 * 2 * 640 * 256 // 64
    cache = 2 * 2 * 10 * 2 * 64 * 4  # keys and values, layers, tokens, heads, dimensions, bytes
    assert shapes.bytes_a_token(model, 10) == everything - table + cache
    tied = shapes.make_model({**config, "tie_word_embeddings": True}, backends.select("reference"))
    assert shapes.bytes_a_token(tied, 10) == everything - table + cache
    one, other = (
        shapes.make_model(tiny(shapes, "qwen3-30b-a3b") | {"num_experts_per_tok": top_k}, backends.select("reference"))
        for top_k in (2, 3)
    )
    # Two layers, three matrices of 256 x 128 in four bits, and half a bit for companions.
    expert = 2 * 3 * 256 * 128 * 9 // 16
    assert shapes.bytes_a_token(other, 10) - shapes.bytes_a_token(one, 10) == expert


def test_fewer_layers(benchmarks):
    import shapes

    for shape in ("gpt-oss-20b", "qwen3-30b-a3b"):
        config = tiny(shapes, shape)
        model = shapes.make_model(shapes.first_layers(config, 1), backends.select("reference"))
        assert len(model.layers) == 1
        assert model.args.hidden_size == TINY["hidden_size"]


def test_the_shape_of_llama_8b(benchmarks):
    import shapes

    from turbospark_mlx.families import family_for_model_type

    config = shapes.SHAPES["llama-8b"]
    family = family_for_model_type("llama")
    expected = family.expected(family.config_from_hf(config))
    # Llama 3.1 8B's model card: 8,030,261,248 parameters.
    assert sum(int(np.prod(shape)) for shape in expected.values()) == 8_030_261_248


def test_the_shape_of_qwen_35b(benchmarks):
    import shapes

    from turbospark_mlx.families import family_for_model_type

    config = shapes.SHAPES["qwen3.5-35b-a3b"]
    family = family_for_model_type("qwen3_5_moe")
    parsed = family.config_from_hf(config)
    # The model card: 35 billion parameters, of which 3 are read for a token.
    assert 34e9 < sum(int(np.prod(shape)) for shape in family.expected(parsed).values()) < 35.5e9
    assert parsed.num_hidden_layers == 40
    assert sum(map(parsed.recurs, range(40))) == 30


def test_what_a_token_reads_of_experts(benchmarks):
    import shapes

    config = tiny(shapes, "qwen3.5-35b-a3b")
    model = shapes.make_model(config, backends.select("reference"))
    kept = sum(a.nbytes for name, a in tree_flatten(model.parameters()) if "embed_tokens" not in name)
    chosen = 4 * 3 * 3 * 128 * 256 * (4 + 2 * 16 / 64) // 8  # layers, experts, matrices of 128 x 256
    assert shapes.bytes_a_token(model, 10) == kept + chosen + model.args.kv_bytes(10, 4)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="caches of files are dropped on Linux")
def test_a_streamed_model_beside_what_info_says(tmp_path):
    path = make_tiny_install("gemma4", tmp_path / "tiny.gturbo", variant="gemma4-moe")
    script = Path(__file__).parents[1] / "benchmarks" / "streaming.py"
    options = ["--slots", "4", "--context", "32", "--prompt-tokens", "8", "--no-limit"]
    command = [sys.executable, str(script), str(path), *options]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("4 slots: opened in ")
    # The context is filled but for the tokens that are decoded.
    assert [line.split()[0] for line in lines[1:]] == ["8", "24"]
    assert all("GB held" in line and "predicted" in line for line in lines[1:])


@pytest.mark.parametrize(("options", "names"), [([], ("6 of 6", "3 of 6")), (["--slots", "4", "--fit"], ("4 of 6",))])
def test_residencies_decode_the_same_tokens(tmp_path, options, names):
    """The script refuses to print otherwise. A text that fits finds all in the slots, which were filled before."""
    path = make_tiny_install("gpt_oss", tmp_path / "x.gturbo")
    script = Path(__file__).parents[1] / "benchmarks" / "residency.py"
    command = [sys.executable, str(script), str(path), "--settle", "4", "--new-tokens", "4", "--repeats", "2", *options]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[1].startswith("resident ")
    assert [line.partition(" slots ")[0] for line in lines[2:]] == list(names)
    assert "of resident, 0 misses" in lines[2]
