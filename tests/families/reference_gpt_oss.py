"""gpt-oss in float64 numpy, written from the equations of OpenAI's release (openai/gpt-oss, gpt_oss/torch/model.py) and
from what config.json means to transformers.

Shares no code with the package. Plain and slow: a layer, a head, a token, an expert at a time.
"""

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def rotation(config: dict) -> tuple[np.ndarray, float]:
    """Radians a position of each pair, and what queries and keys are multiplied by."""
    dim, block = config["head_dim"], {**config, **(config.get("rope_scaling") or config["rope_parameters"])}
    theta, frequencies = block["rope_theta"], []
    if block["rope_type"] == "default":
        return np.array([theta ** (-2 * pair / dim) for pair in range(dim // 2)]), 1.0
    low, high = (
        dim / 2 * np.log(block["original_max_position_embeddings"] / (turns * 2 * np.pi)) / np.log(theta)
        for turns in (block["beta_fast"], block["beta_slow"])
    )
    if block["truncate"]:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    for pair in range(dim // 2):
        kept = 1 - min(1.0, max(0.0, (pair - low) / (high - low)))
        f = theta ** (-2 * pair / dim)
        frequencies.append(f / block["factor"] * (1 - kept) + f * kept)
    return np.array(frequencies), 0.1 * np.log(block["factor"]) + 1


def rotate(config: dict, x):
    """``x [tokens, heads, dim]`` at positions 0, 1, ..."""
    (frequencies, factor), half = rotation(config), x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate(turned, axis=-1) * factor


def attend(config: dict, kind: str, q, k, v, sinks):
    tokens, heads, dim = q.shape
    out = np.zeros_like(q)
    for position in range(tokens):
        first = 0 if kind == "full_attention" else max(0, position - config["sliding_window"] + 1)
        for head in range(heads):
            keys, values = (a[first : position + 1, head * k.shape[1] // heads] for a in (k, v))
            chances = np.exp(keys @ q[position, head] / np.sqrt(dim))
            out[position, head] = chances @ values / (chances.sum() + np.exp(sinks[head]))
    return out


def mixture(config: dict, w: dict, path: str, h):
    out, alpha, limit = np.zeros_like(h), config.get("swiglu_alpha", 1.702), config["swiglu_limit"]
    scores = h @ w[f"{path}.router.weight"].T + w[f"{path}.router.bias"]
    for row, token in enumerate(h):
        chosen = sorted(range(scores.shape[1]), key=lambda e: (-scores[row, e], e))[: config["num_experts_per_tok"]]
        total = sum(np.exp(scores[row, expert]) for expert in chosen)
        for expert in chosen:

            def linear(x, name, expert=expert):
                matrix, bias = (w[f"{path}.experts.{name}_proj.{kind}"][expert] for kind in ("weight", "bias"))
                return matrix @ x + bias

            gate, up = np.minimum(linear(token, "gate"), limit), np.clip(linear(token, "up"), -limit, limit)
            y = linear(gate * sigmoid(alpha * gate) * (up + 1), "down")
            out[row] += np.exp(scores[row, expert]) / total * y
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by parameter name."""
    w = {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    eps, dim, count = config["rms_norm_eps"], config["head_dim"], len(ids)
    embedding = w["model.embed_tokens.weight"]
    x = embedding[np.asarray(ids)]
    for layer, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{layer}"

        def linear(h, name, path=path):
            return h @ w[f"{path}.self_attn.{name}.weight"].T + w.get(f"{path}.self_attn.{name}.bias", 0)

        h = rms(x, w[f"{path}.input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"{name}_proj").reshape(count, -1, dim) for name in "qkv")
        y = attend(config, kind, rotate(config, q), rotate(config, k), v, w[f"{path}.self_attn.sinks"])
        x = x + linear(y.reshape(count, -1), "o_proj")
        h = rms(x, w[f"{path}.post_attention_layernorm.weight"], eps)
        x = x + mixture(config, w, f"{path}.mlp", h)
    return rms(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", embedding).T
