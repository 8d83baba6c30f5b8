"""Make qwen4.npz: logits of tiny Qwen4-Exp models by transformers, from weights that the tests make again.

    python tests/golden/make_qwen4_golden.py

Needs torch and transformers 5.24 or later beside this package (numpy alone otherwise). float32, eager attention, the
whole prompt at once. transformers leaves open which of two blocks with equal scores is chosen; here its choice is
replaced by a stable one, which takes the lower. Every fifth logit is kept.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from turbospark_mlx.testing import tiny_config, tiny_weights

FILE = Path(__file__).parent / "qwen4.npz"
PROMPT = np.random.default_rng(11).integers(0, 320, 48).tolist()
KEPT = slice(None, None, 5)
CASES = {
    "qwen4": ("qwen4", False),
    "qwen4-ten": ("qwen4-ten", False),
    "qwen4-plain": ("qwen4-plain", False),
    "ties": ("qwen4", True),
}


def case(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and weights, by the names of the text model alone, of one of `CASES`."""
    variant, ties = CASES[name]
    config = tiny_config("qwen4", variant)
    weights = tiny_weights(config)
    if ties:
        text = config["text_config"]
        width = text["indexer_head_dim"]
        # What all tokens have in common, and queries that point away from the keys of that: most scores are cut to
        # zero, and are equal.
        weights["model.embed_tokens.weight"] += 0.5 * np.random.default_rng(5).standard_normal(64).astype(np.float32)
        for key, rows in weights.items():
            if key.endswith("index_qk_proj.weight"):
                rows[:-width] -= np.tile(rows[-width:], (text["indexer_n_heads"], 1))
    return config, weights


def by_transformers(config: dict, weights: dict[str, np.ndarray]) -> tuple[np.ndarray, int, int]:
    """Logits, the number of choices between blocks, and how many of these were between equals."""
    import torch
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    text = {key: value for key, value in config["text_config"].items() if value is not None}
    tied = config["tie_word_embeddings"]
    parsed = Qwen4ExpTextConfig(**{**text, "tie_word_embeddings": tied}, attn_implementation="eager")
    model = Qwen4ExpForCausalLM(parsed).eval()
    state, halves = {}, {}
    for name, array in weights.items():
        tensor = torch.from_numpy(array)
        if name.endswith(("gate_proj.weight", "up_proj.weight")) and ".switch_mlp." in name:
            halves.setdefault(name.partition(".switch_mlp.")[0], {})[name.split(".")[-2]] = tensor
        elif ".switch_mlp." in name:
            state[name.replace(".switch_mlp.", ".experts.").removesuffix(".weight")] = tensor
        else:
            state[name] = tensor.reshape(len(tensor), 1, -1) if name.endswith("conv1d.weight") else tensor
    for path, pair in halves.items():
        state[f"{path}.experts.gate_up_proj"] = torch.cat([pair["gate_proj"], pair["up_proj"]], dim=1)
    found = model.load_state_dict(state, strict=False)
    constants = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    missing = [name for name in found.missing_keys if not name.endswith(constants)]
    assert not found.unexpected_keys, found
    assert missing == (["lm_head.weight"] if tied else []), found

    choices = []

    def stable(scores, count, dim):
        order = torch.sort(scores, dim=dim, descending=True, stable=True)
        if count < len(scores):
            choices.append(bool(order.values[count - 1] == order.values[count]))
        return torch.return_types.topk((order.values[:count], order.indices[:count]))

    original, torch.Tensor.topk = torch.Tensor.topk, stable
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    finally:
        torch.Tensor.topk = original
    return logits, len(choices), sum(choices)


def main() -> None:
    import torch
    import transformers

    arrays, about = {}, {"torch": torch.__version__, "transformers": transformers.__version__, "cases": {}}
    for name in CASES:
        logits, choices, ties = by_transformers(*case(name))
        arrays[name] = logits[:, KEPT]
        about["cases"][name] = {"choices": choices, "ties": ties}
    np.savez_compressed(FILE, about=json.dumps(about), **arrays)
    print(json.dumps(about, indent=1), FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
