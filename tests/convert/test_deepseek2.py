"""DeepSeek checkpoints: published ones, and MLX-quantized ones with kv_b_proj whole or split."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families.oracles import PROMPT, assert_close, mlx_lm_model
from tests.families.reference_deepseek2 import logits
from turbospark_mlx.gturbo import Install
from turbospark_mlx.loader import read_config
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import tiny_config, tiny_weights

from .checkpoints import TOKENIZER, plain, read_install, refused, run, write_checkpoint

INSTALLED = {"kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_a_norm", "shared_experts": "shared_expert"}


def installed(name):
    for before, after in INSTALLED.items():
        name = name.replace(f".{before}.", f".{after}.")
    return f"language_model.{name}"


def quantized_by_mlx_lm(directory, variant, module):
    """What mlx-lm saves; returns ``{name: array}``."""
    config = tiny_config("deepseek2", variant)
    model = mlx_lm_model(module, config, tiny_weights(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 64 == 0)
    arrays = dict(tree_flatten(model.parameters()))
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "mlx"})
    config["quantization"] = {"group_size": 64, "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    return arrays


def values(arrays, config):
    """float32 by the published names, with kv_b_proj whole."""
    found = {}
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if array.dtype == mx.uint32:
            companions = (arrays[f"{stem}.{kind}"].astype(mx.float32) for kind in ("scales", "biases"))
            array = mx.dequantize(array, *companions, group_size=64, bits=4)
        found[name] = np.array(array.astype(mx.float32))
    for name in [name for name in found if name.endswith("embed_q.weight")]:
        keys, base = found.pop(name).swapaxes(1, 2), name.removesuffix("embed_q.weight")
        both = np.concatenate([keys, found.pop(f"{base}unembed_out.weight")], axis=1)
        found[f"{base}kv_b_proj.weight"] = both.reshape(-1, config["kv_lora_rank"])
    return found


def stored(array):
    mx.eval(array)
    return bytes(memoryview(array).cast("B"))


@pytest.mark.parametrize(("variant", "module"), [("deepseek-v2", "deepseek_v2"), ("deepseek-v3", "deepseek_v3")])
def test_mlx_quantized_checkpoints(tmp_path, variant, module):
    """Every byte is copied, and logits are those of the bytes: kv_b_proj is never requantized in either form."""
    arrays = quantized_by_mlx_lm(tmp_path / "source", variant, module)
    report = run(tmp_path / "source", tmp_path / "out.gturbo")
    assert report.quantized == 0
    found = read_install(tmp_path / "out.gturbo")
    split = module == "deepseek_v3"
    assert any(".embed_q." in name for name in found) == split
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        if ".switch_mlp." not in name:
            tensor = found[installed(f"{stem}.weight" if part in ("scales", "biases") else name)]
            assert tensor[part if part in ("scales", "biases") else "data"] == stored(array), name
    with Install.open(tmp_path / "out.gturbo", verify="off") as install:
        assert read_config(install)[1].split_kv_b == split
    oracle = logits(tiny_config("deepseek2", variant), values(arrays, tiny_config("deepseek2", variant)), PROMPT[:30])
    for kernels in ("auto", "reference"):
        with Runner.open(tmp_path / "out.gturbo", kernels=kernels) as runner:
            assert_close(runner.model(mx.array([PROMPT[:30]]))[0], oracle)
            assert_close(runner.prefill(PROMPT[:22]), oracle[21])
            assert_close(runner.prefill(PROMPT[22:25]), oracle[24])
            for position in range(25, 30):
                assert_close(runner.decode(PROMPT[position]), oracle[position], f"{kernels}, {position}")
    with Runner.open(tmp_path / "out.gturbo", fused=False, kernels="reference") as runner:
        assert_close(runner.model(mx.array([PROMPT[:30]]))[0], oracle)
    again = run(tmp_path / "out.gturbo", tmp_path / "again.gturbo")
    assert (again.quantized, again.copied) == (0, report.copied)
    assert read_install(tmp_path / "again.gturbo") == found


def single(weights):
    """As they are published: an expert a tensor."""
    result = {}
    for name, array in weights.items():
        base, routed, matrix = name.partition(".switch_mlp.")
        one_by_one = {f"{base}.experts.{e}.{matrix}": expert for e, expert in enumerate(array)} if routed else {}
        result |= one_by_one or {name: array}
    return result


def test_a_published_checkpoint_with_a_layer_for_further_tokens(tmp_path):
    """That layer is left out, with the reason; the bias of the choice keeps its float32."""
    config = {**tiny_config("deepseek2", "deepseek-v3"), "num_nextn_predict_layers": 1}
    weights = tiny_weights(config)
    tensors = plain(single(weights))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = ("F32", weights[bias])
    more = {"model.layers.3.eh_proj.weight": np.zeros((64, 128)), "model.layers.3.enorm.weight": np.zeros(64)}
    report = run(write_checkpoint(tmp_path / "source", config, tensors | plain(more)), tmp_path / "out.gturbo", bits=16)
    assert report.dropped.keys() == more.keys()
    found = read_install(tmp_path / "out.gturbo")
    assert found[installed(bias)]["data"] == weights[bias].tobytes()
    with Runner.open(tmp_path / "out.gturbo", kernels="reference") as runner:
        rounded = {n: np.array(mx.array(a).astype(mx.bfloat16).astype(mx.float32)) for n, a in weights.items()}
        rounded[bias] = weights[bias]
        assert_close(runner.model(mx.array([PROMPT[:20]]))[0], logits(config, rounded, PROMPT[:20]))


class TestRefusals:
    def checkpoint(self, tmp_path, change):
        config = tiny_config("deepseek2", "deepseek-v3")
        tensors = single(tiny_weights(config))
        for layer in range(3):
            change(f"model.layers.{layer}.self_attn.", tensors)
        return write_checkpoint(tmp_path / "source", config, plain(tensors))

    def split(self, base, tensors):
        each = tensors.pop(f"{base}kv_b_proj.weight").reshape(4, 96, 64)
        tensors[f"{base}embed_q.weight"] = each[:, :64].swapaxes(1, 2)
        tensors[f"{base}unembed_out.weight"] = each[:, 64:]

    def test_one_layer_whole_among_split_ones(self, tmp_path):
        def change(base, tensors):
            if ".1." not in base:
                self.split(base, tensors)

        refused(self.checkpoint(tmp_path, change), tmp_path, "lacks 2 of", "embed_q")

    def test_parts_of_other_heads(self, tmp_path):
        def change(base, tensors):
            self.split(base, tensors)
            tensors[f"{base}unembed_out.weight"] = tensors[f"{base}unembed_out.weight"].reshape(8, 16, 64)

        refused(self.checkpoint(tmp_path, change), tmp_path, "unembed_out.weight", "4 heads of 32 rows")
