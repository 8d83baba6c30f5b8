"""Installs against other programs' checkpoints: mlx-lm's own models over the bytes of our installs, installs of what
mlx-lm itself saves, and of what transformers 5 saves."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from benchmarks.peers import mlx_lm_model
from tests.families import gpt_oss_checkpoints
from tests.families.oracles import FAMILIES, PROMPT, assert_close
from tests.families.oracles import mlx_lm_model as oracle_of
from tests.golden.make_transformers import published
from turbospark_mlx import loader
from turbospark_mlx.convert import convert
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.gturbo import Install
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, tiny_config, tiny_weights, tokenizer_files

VARIANTS = [
    *(("deepseek2", "deepseek-v2-lite"), ("deepseek2", "deepseek-v2"), ("deepseek2", "deepseek-v3-flat")),
    *(("gemma4", "gemma4-moe"), ("gemma4", "gemma4-dense"), ("gemma4", "gemma4-small"), ("gemma4", "gemma4-untied")),
    ("gpt_oss", "gpt-oss-truncated"),
    *(("llama", "llama-biases"), ("llama", "qwen2"), ("llama", "mixtral"), ("llama", "qwen3-moe")),
    *(("qwen", "qwen3.5"), ("qwen", "qwen3.5-moe"), ("qwen", "qwen3.5-tied")),
]
QUICK = ("deepseek-v2", "gemma4-moe", "gpt-oss-truncated", "mixtral", "qwen3-moe", "qwen3.5-moe")
each = pytest.mark.parametrize(
    ("family", "variant"),
    [pytest.param(*v, marks=[] if v[1] in QUICK else [pytest.mark.slow], id=v[1]) for v in VARIANTS],
)


def check(path, twin):
    """Close at every position, and in chunks, decoding and streaming experts where there are any."""
    theirs = np.array(twin(mx.array([PROMPT]))[0])
    with Install.open(path) as install:
        streamed = {"expert_slots": 4} if install.experts else {}
    with Runner.open(path, kernels="reference", fused=False) as runner:
        assert_close(runner.model(mx.array([PROMPT]))[0], theirs)
    with Runner.open(path, kernels="reference", prefill_chunk=7, **streamed) as runner:
        assert_close(runner.prefill(PROMPT[:40]), theirs[39])
        assert_close(runner.decode(PROMPT[40]), theirs[40])


@each
@pytest.mark.parametrize("bits", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_an_install_answers_like_mlx_lm_on_its_bytes(family, variant, bits, tmp_path):
    """Close. Routers are of 8 bits, which DeepSeek's are not in mlx-lm: there they are what these bits stand for."""
    path = make_tiny_install(family, tmp_path / "x.gturbo", variant=variant, bits=bits)
    check(path, mlx_lm_model(path, mx.float32))


def test_mxfp4_experts(tmp_path):
    """Close, as gpt-oss is published."""
    gpt_oss_checkpoints.write(tmp_path / "source", "gpt-oss-truncated", "published")
    convert(tmp_path / "source", tmp_path / "x.gturbo", progress=False)
    twin = mlx_lm_model(tmp_path / "x.gturbo", mx.float32)
    assert twin.model.layers[0].mlp.experts.gate_proj.mode == "mxfp4"
    check(tmp_path / "x.gturbo", twin)


def saved_by_mlx_lm(folder, family, variant):
    """A checkpoint that mlx-lm quantizes and saves, with its own exceptions; returns its model."""
    config = tiny_config(family, variant)
    model = oracle_of(FAMILIES[family].mlx_lm.get(variant), config, tiny_weights(config))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, 64, 4)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name, data in tokenizer_files(config).items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    return model


@each
def test_a_checkpoint_that_mlx_lm_quantized(family, variant, tmp_path):
    """Every array is copied bit for bit, and logits are close to those of mlx-lm's model that was saved."""
    peer = saved_by_mlx_lm(tmp_path / "source", family, variant)
    report = convert(tmp_path / "source", tmp_path / "x.gturbo", progress=False)
    assert (report.quantized, report.narrowed) == (0, 0)
    with Install.open(tmp_path / "x.gturbo") as install:
        registered, config = loader.read_config(install)
        ours = dict(tree_flatten(loader.load_model(install, backend=backends.select("reference")).parameters()))
    theirs = dict(tree_flatten(peer.parameters()))
    assert len(ours) == len(theirs)
    for name, array in theirs.items():
        stem, _, part = name.rpartition(".")
        companion = part in ("scales", "biases") and f"{stem}.scales" in theirs
        placed = registered.place(f"{stem}.weight" if companion else name, config).checkpoint_name
        placed = placed.removesuffix("weight") + part if companion else placed
        assert (ours[placed].dtype, ours[placed].size) == (array.dtype, array.size), name
        assert mx.array_equal(ours[placed].reshape(array.shape), array).item(), name
    peer.set_dtype(mx.float32)
    check(tmp_path / "x.gturbo", peer)
    twin = mlx_lm_model(tmp_path / "x.gturbo", mx.float32)
    assert_close(twin(mx.array([PROMPT]))[0], peer(mx.array([PROMPT]))[0], "twin")


@each
def test_a_published_checkpoint_is_kept_bit_for_bit(family, variant, tmp_path):
    """Experts joined as transformers 5 has them, all in bfloat16: every parameter has the checkpoint's bits."""
    config = tiny_config(family, variant)
    weights = {name: mx.array(array).astype(mx.bfloat16) for name, array in tiny_weights(config).items()}
    wide = {name: np.array(array.astype(mx.float32)) for name, array in weights.items()}
    tensors = published(wide, gpt_oss=family == "gpt_oss")
    (tmp_path / "source").mkdir()
    arrays = {name: mx.array(array).astype(mx.bfloat16) for name, array in tensors.items()}
    mx.save_safetensors(str(tmp_path / "source" / "model.safetensors"), arrays, {"format": "pt"})
    for name, data in tokenizer_files(config).items():
        (tmp_path / "source" / name).write_bytes(data)
    convert(tmp_path / "source", tmp_path / "x.gturbo", bits=16, progress=False)
    with Install.open(tmp_path / "x.gturbo") as install:
        ours = dict(tree_flatten(loader.load_model(install, backend=backends.select("reference")).parameters()))
    assert ours.keys() == weights.keys()
    for name, array in weights.items():
        assert mx.array_equal(ours[name].view(mx.uint16), array.view(mx.uint16)).item(), name
