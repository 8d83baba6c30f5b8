"""Installs of published models' sizes: the sizes are right, and what is written runs."""

import numpy as np
import pytest

from turbospark_mlx import shaped
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.families.routed import parameter
from turbospark_mlx.gturbo import Install, experts_layout
from turbospark_mlx.gturbo.formats import TensorSpec
from turbospark_mlx.protocols import Mxfp4Format
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_shaped_install, tiny_config


def sizes(name):
    """Bytes of the resident tensors, and the layout of the experts, of an install of this shape."""
    source = shaped.random_source(shaped.SHAPES[name], name, seed=0, side_files={})
    resident = 0
    for tensor in source.tensors:
        place = source.family.place(tensor, source.config)
        if place.routed is None:
            resident += TensorSpec(tensor, source.tensors[tensor].shape, source.tensors[tensor].format).nbytes
    specs = source.family.experts(source.config).values()
    path = next(iter(source.family.experts(source.config)))
    stored = {
        part: source.tensors["language_model." + parameter(path, part)].format for part in next(iter(specs)).tensors
    }
    blobs = [[TensorSpec(part, shape, stored[part]) for part, shape in spec.tensors.items()] for spec in specs]
    return resident, experts_layout.build(blobs, next(iter(specs)).num_experts)[1]


def test_gemma_4_26b_has_the_published_sizes():
    """mlx-community/gemma-4-26b-a4b-it-4bit has a resident file of 1,353,771,068 bytes, its index included, and 30
    layers of 128 experts in 12,897,484,800 bytes."""
    resident, layout = sizes("gemma4-26b-a4b")
    assert 0 < 1_353_771_068 - resident < 200_000
    assert (layout.stride, layout.nbytes) == (3_358_720, 12_897_484_800)


@pytest.mark.parametrize(
    ("name", "parameters", "experts"),
    [
        ("deepseek-v2-lite", 15_706_484_224, (26, 64)),
        ("mixtral-8x7b", 46_702_792_704, (32, 8)),
        ("qwen3-30b-a3b", 30_532_122_624, (48, 128)),
        ("spark-4b", 4_112_079_360, None),
    ],
)
def test_other_shapes_have_the_published_parameters(name, parameters, experts):
    """The sums that the publishers' safetensors indices give."""
    family = family_for_model_type(shaped.SHAPES[name]["model_type"])
    config = family.config_from_hf(shaped.SHAPES[name])
    assert sum(int(np.prod(shape)) for shape in family.expected(config).values()) == parameters
    if experts:
        _, layout = sizes(name)
        assert (len(layout.layers), layout.experts_per_layer) == experts


def test_gpt_oss_has_the_published_sizes():
    """An expert's three matrices of 2880 x 2880 in blocks of 17 bytes, and its biases."""
    for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        _, layout = sizes(name)
        used = 3 * (2880 * 2880 // 32 * 17 + 2880 * 2)
        assert 0 <= layout.stride - used < 16384
        assert (len(layout.layers), layout.experts_per_layer) == (layers, experts)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shaped.SHAPES, "small", tiny_config("gemma4", "gemma4-moe"))


def test_a_shaped_install_runs(small, tmp_path):
    path = make_shaped_install("small", tmp_path / "small.gturbo", progress=False)
    with Runner.open(path, kernels="reference", expert_slots=4) as runner:
        logits = np.array(runner.prefill(runner.tokenizer.encode("Hello")))
        assert np.isfinite(logits).all()
        assert logits.std() > 0.01
        assert not np.allclose(logits, np.array(runner.decode(1)))
    with Install.open(path, verify="full") as install:
        assert install.manifest.model_id == "random/small"
        # Experts differ.
        blobs = [bytearray(install.experts.layers[0].size) for _ in range(2)]
        for expert, blob in enumerate(blobs):
            install.read_expert_into(0, expert, blob)
        assert blobs[0] != blobs[1]


def test_a_seed_is_one_model(small, tmp_path):
    made = [
        make_shaped_install("small", tmp_path / f"{i}.gturbo", seed=seed, progress=False)
        for i, seed in enumerate((1, 1, 2))
    ]
    first, again, other = ((path / "packed_experts" / "layer_01.bin").read_bytes() for path in made)
    assert first == again != other


def test_what_cannot_be_written(small, tmp_path):
    with pytest.raises(OptionError, match=r"shape 'gpt-5': known are .*gemma4-26b-a4b"):
        make_shaped_install("gpt-5", tmp_path / "x.gturbo")
    make_shaped_install("small", tmp_path / "x.gturbo", progress=False)
    with pytest.raises(ConvertError, match="exists"):
        make_shaped_install("small", tmp_path / "x.gturbo", progress=False)
    make_shaped_install("small", tmp_path / "x.gturbo", progress=False, overwrite=True)


def test_a_shaped_install_with_mxfp4_experts_runs(monkeypatch, tmp_path):
    config = tiny_config("gpt_oss", "gpt-oss") | {"quantization_config": {"quant_method": "mxfp4"}}
    monkeypatch.setitem(shaped.SHAPES, "small", config)
    path = make_shaped_install("small", tmp_path / "small.gturbo", progress=False)
    with Install.open(path) as install:
        assert install.experts.layers[0].tensors["down"].format == Mxfp4Format()
    with Runner.open(path, kernels="reference") as runner:
        logits = np.array(runner.prefill(runner.tokenizer.encode("Hello")))
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01
