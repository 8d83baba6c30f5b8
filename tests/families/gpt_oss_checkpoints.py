"""gpt-oss checkpoints in the layouts that people publish, made of the weights of a tiny variant."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark_mlx.testing import tiny_config, tiny_weights, tokenizer_files

KINDS = ("published", "bfloat16", "mlx-mxfp4", "mlx-int4", "mlx-bfloat16")
EXPERTS = ".mlp.experts."


def mxfp4_of(stack: np.ndarray) -> tuple[mx.array, mx.array]:
    """Words and exponents of a stack ``[experts, rows, columns]``, by MLX's own quantizer."""
    words, scales = mx.quantize(mx.array(stack), group_size=32, bits=4, mode="mxfp4")
    return words, scales


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """``[experts, 2 rows, ...]``: a row of the gate, then one of the up matrix, and so on."""
    joined = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), gate.dtype)
    joined[:, 0::2], joined[:, 1::2] = gate, up
    return joined


def write(path: Path, variant: str, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a checkpoint of ``kind`` to ``path``. Returns what its tensors stand for, float32 by parameter name."""
    config, values = tiny_config("gpt_oss", variant), tiny_weights(tiny_config("gpt_oss", variant), seed)
    stored: dict[str, mx.array] = {}
    meant: dict[str, np.ndarray] = {}
    for name, value in values.items():
        array = mx.array(value).astype(mx.bfloat16)
        meant[name] = np.array(array.astype(mx.float32))
        if EXPERTS not in name:
            stored[name] = array
    if kind in ("published", "mlx-mxfp4"):
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if kind == "mlx-mxfp4":
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    if kind == "mlx-int4":
        config["quantization"] = {"group_size": 64, "bits": 4}
    for base in {name.partition("gate_proj")[0] for name in values if f"{EXPERTS}gate_proj" in name}:
        gate, up, down = (meant[f"{base}{matrix}_proj.weight"] for matrix in ("gate", "up", "down"))
        biases = [meant[f"{base}{matrix}_proj.bias"] for matrix in ("gate", "up", "down")]
        if kind == "published":
            for name, stack in (("gate_up", interleaved(gate, up)), ("down", down)):
                words, scales = mxfp4_of(stack)
                stored[f"{base}{name}_proj_blocks"] = words.view(mx.uint8).reshape(*scales.shape, 16)
                stored[f"{base}{name}_proj_scales"] = scales
        elif kind == "bfloat16":
            for name, stack in (("gate_up", interleaved(gate, up)), ("down", down)):
                stored[f"{base}{name}_proj"] = mx.array(stack.swapaxes(1, 2)).astype(mx.bfloat16)
        else:
            for name, stack in (("gate", gate), ("up", up), ("down", down)):
                if kind == "mlx-bfloat16":
                    stored[f"{base}{name}_proj.weight"] = mx.array(stack).astype(mx.bfloat16)
                    continue
                mode = mxfp4_of(stack) if kind == "mlx-mxfp4" else mx.quantize(mx.array(stack).astype(mx.bfloat16))
                for part, array in zip(("weight", "scales", "biases"), mode, strict=False):
                    stored[f"{base}{name}_proj.{part}"] = array
        if kind in ("published", "bfloat16"):
            stored[f"{base}gate_up_proj_bias"] = mx.array(interleaved(*biases[:2])).astype(mx.bfloat16)
            stored[f"{base}down_proj_bias"] = mx.array(biases[2]).astype(mx.bfloat16)
        else:
            for name, bias in zip(("gate", "up", "down"), biases, strict=True):
                stored[f"{base}{name}_proj.bias"] = mx.array(bias).astype(mx.bfloat16)
        for name, stack in (("gate", gate), ("up", up), ("down", down)):
            if kind in ("published", "mlx-mxfp4"):
                value = mx.dequantize(*mxfp4_of(stack), group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
                meant[f"{base}{name}_proj.weight"] = np.array(value)
            elif kind == "mlx-int4":
                words, *rest = mx.quantize(mx.array(stack).astype(mx.bfloat16))
                meant[f"{base}{name}_proj.weight"] = np.array(
                    mx.dequantize(words, *(a.astype(mx.float32) for a in rest))
                )
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), stored, {"format": "pt"})
    for name, data in tokenizer_files(config).items():
        (path / name).write_bytes(data)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt_oss"
    return meant
