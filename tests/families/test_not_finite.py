"""NaN anywhere in an install is an error of its first answer, or of its loading; never another text."""

import shutil

import numpy as np
import pytest

from tests.families.oracles import PROMPT
from turbospark_mlx import generate, load
from turbospark_mlx.custom_kernels.backends import compiler
from turbospark_mlx.errors import GenerationError, InstallError
from turbospark_mlx.gturbo import Install
from turbospark_mlx.table import DiskTable
from turbospark_mlx.testing import make_tiny_install

NAN = {"bfloat16": np.uint16(0x7FC0), "float16": np.uint16(0x7E00), "float32": np.float32("nan")}


NEEDS_A_COMPILER = pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
KERNELS = ["reference", pytest.param("host", marks=NEEDS_A_COMPILER)]


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory):
    """A tiny install to be damaged."""
    made, folder = {}, tmp_path_factory.mktemp("whole")

    def copy(to, family, variant=None):
        if (family, variant) not in made:
            made[family, variant] = make_tiny_install(family, folder / f"{family}-{variant}", variant=variant)
        return shutil.copytree(made[family, variant], to)

    return copy


def overwrite(file, offset, size, dtype):
    with open(file, "r+b") as out:
        out.seek(offset)
        out.write(np.full(size // NAN[dtype].nbytes, NAN[dtype]).tobytes())


def poison(path, name):
    """NaN for one scale of a matrix, or for one value of a vector or of a matrix that is not quantized."""
    with Install.open(path, verify="off") as install:
        entry = install.tensors[name]
    part = "scales" if entry.format else "data"
    dtype = entry.format.companion_dtype if entry.format else entry.dtype
    overwrite(path / "model_weights.bin", entry.part(part)[0], NAN[dtype].nbytes, dtype)


def answer(path, kernels, prompt=PROMPT):
    model, tokenizer = load(path, verify="off", kernels=kernels)
    return generate(model, tokenizer, prompt, max_tokens=3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.k_proj.weight"),
        ("llama", "model.layers.1.mlp.down_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen4", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("qwen4", "model.layers.2.self_attn.v_proj.weight"),
    ],
)
def test_a_weight_that_is_nan(family, name, kernels, copy_of, tmp_path):
    path = copy_of(tmp_path / "x.gturbo", family)
    poison(path, f"language_model.{name}")
    with pytest.raises(GenerationError, match=r"logit \d+ is nan; .*verify"):
        answer(path, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_scale_of_every_expert_that_is_nan(kernels, copy_of, tmp_path):
    path = copy_of(tmp_path / "x.gturbo", "gemma4")
    with Install.open(path, verify="off") as install:
        layer = install.experts.layers[1]
    scales = layer.tensors["down_scales"]
    for offset in layer.offsets:
        overwrite(path / layer.file, offset + scales.offset, 2, scales.dtype)
    with pytest.raises(GenerationError, match="is nan"):
        answer(path, kernels)


@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_of_the_table_that_is_nan(where, kernels, copy_of, tmp_path, monkeypatch):
    path, asked, rows = copy_of(tmp_path / "x.gturbo", "qwen4"), [], DiskTable.rows
    monkeypatch.setattr(DiskTable, "rows", lambda self, ids: asked.append(ids.copy()) or rows(self, ids))
    answer(path, kernels)
    (prompt,) = [ids[0] for ids in asked if ids.shape[1] == len(PROMPT)]
    with Install.open(path, verify="off") as install:
        table = install.table
    row = int(prompt[where][0])
    at, dtype = row * table.record_bytes, table.format.companion_dtype
    overwrite(path / "ngram_table" / "rows.bin", at + table.parts["data"], table.parts["scales"], dtype)
    with pytest.raises(GenerationError, match="is nan"):
        answer(path, kernels)


@pytest.mark.parametrize(
    ("family", "variant", "name"),
    [
        ("llama", "mixtral", "model.layers.1.mlp.gate.weight"),
        ("gpt_oss", None, "model.layers.1.mlp.gate.bias"),
        ("gemma4", None, "model.layers.1.router.proj.weight"),
        ("qwen", "qwen3.5-moe", "model.layers.1.mlp.gate.weight"),
        ("qwen4", None, "model.layers.1.mlp.gate.weight"),
        ("deepseek2", "deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("qwen4", None, "model.layers.2.self_attn.indexer.index_qk_proj.weight"),
        ("qwen4", None, "model.layers.2.self_attn.indexer.q_layernorm.weight"),
        ("qwen4", None, "model.layers.2.self_attn.indexer.k_layernorm.weight"),
    ],
)
def test_a_nan_that_could_be_a_choice_is_refused_when_it_is_loaded(family, variant, name, copy_of, tmp_path):
    path = copy_of(tmp_path / "x.gturbo", family, variant)
    poison(path, f"language_model.{name}")
    layer = name.split(".")[2]
    with pytest.raises(InstallError, match=rf"model_weights\.bin: model\.layers\.{layer}\..* holds NaN or infinite"):
        answer(path, "reference")
