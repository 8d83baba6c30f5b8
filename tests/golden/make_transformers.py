"""Make transformers_<family>.npz: logits of tiny models by transformers, which shares no code with us or with mlx-lm.

    pip install torch transformers==5.24.0
    python -m tests.golden.make_transformers [family ...]

Weights are those of ``tests.families.shapes``, which numpy makes again anywhere. Of every model's logits at 65
positions 16 columns are kept, of the last recurrent states each fourth row and column. ``<name>:weights`` is a checksum
of the weights that the rest is of. Everything is in float64 but for what transformers casts to float32 by itself.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.shapes import EVERY, SHAPES, prompt_of, shape_config, shape_weights

HERE = Path(__file__).parent
COLUMNS = 16
"""Logits that are kept of each position, at equal distances."""
STATE_STRIDE = 4


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(weights):
        total = zlib.crc32(weights[name].tobytes(), zlib.crc32(name.encode(), total))
    return total


def kept(logits: np.ndarray) -> np.ndarray:
    """``logits [positions, vocab]`` -> ``[positions, COLUMNS]``."""
    return logits[:, :: logits.shape[1] // COLUMNS][:, :COLUMNS]


def kept_state(state: np.ndarray) -> np.ndarray:
    """``state [heads, Dv, Dk]`` -> every fourth of the last two."""
    return state[:, ::STATE_STRIDE, ::STATE_STRIDE]


def published(weights: Mapping[str, np.ndarray], gpt_oss: bool) -> dict[str, np.ndarray]:
    """Stacks of experts joined as transformers 5 has them: gate first, or in turns and transposed in gpt-oss."""
    found: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        base, at, matrix = name.partition(".experts." if gpt_oss else ".switch_")
        if not at:
            found[name] = array
            continue
        base = f"{base.removesuffix('.experts')}.experts."
        matrix, _, kind = matrix.rpartition("_proj.")
        matrix, suffix = matrix.rpartition(".")[2], "_bias" if kind == "bias" else ""
        turned = (lambda stack: stack.swapaxes(1, 2)) if gpt_oss and not suffix else (lambda stack: stack)
        if matrix == "down":
            found[f"{base}down_proj{suffix}"] = turned(array)
        elif matrix == "gate":
            up = weights[name.replace("gate_proj", "up_proj")]
            both = np.stack([array, up], axis=2 if gpt_oss else 1)
            found[f"{base}gate_up_proj{suffix}"] = turned(both.reshape(len(array), -1, *array.shape[2:]))
    return found


def build(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    """transformers' decoder of a config.json dictionary with these weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = {**config, **config.get("text_config", {})}
    text.pop("text_config", None)
    tied = text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
    parsed = AutoConfig.for_model(text.pop("model_type"), **text)
    parsed._attn_implementation = parsed._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float64).eval()
    state = {
        name: torch.from_numpy(np.ascontiguousarray(array)).double()
        for name, array in published(weights, gpt_oss=config["model_type"] == "gpt_oss").items()
    }
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    result = model.load_state_dict(state, strict=False)
    # Layers that read the keys and values of others have unused ones of their own, and towers' constants stay.
    shared = {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(
            parsed.num_hidden_layers - (getattr(parsed, "num_kv_shared_layers", 0) or 0), parsed.num_hidden_layers
        )
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    }
    if result.unexpected_keys or set(result.missing_keys) - shared:
        raise SystemExit(f"unexpected {result.unexpected_keys}, missing {result.missing_keys}")
    return model


def golden(family: str, name: str) -> dict[str, np.ndarray]:
    import torch

    config, weights = shape_config(family, name), shape_weights(family, name)
    model = build(config, weights)
    with torch.no_grad():
        result = model(torch.tensor([prompt_of(config)]), use_cache=True)
    found = {
        name: kept(result.logits[0].double().numpy()).astype(np.float32),
        f"{name}:weights": np.array(checksum(weights), np.uint32),
    }
    if family == "qwen":
        states = [
            kept_state(layer.recurrent_states[0][0].double().numpy().swapaxes(1, 2))
            for layer in result.past_key_values.layers
            if getattr(layer, "recurrent_states", None) is not None
        ]
        found[f"{name}:states"] = np.stack(states).astype(np.float32)
    return found


def main(families: list[str]) -> None:
    import transformers

    print(f"transformers {transformers.__version__}")
    for family in families or SHAPES:
        arrays = {}
        for _, name in (each for each in EVERY if each[0] == family):
            print(family, name, flush=True)
            arrays |= golden(family, name)
        np.savez(HERE / f"transformers_{family}.npz", **arrays)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
