"""Muse Glimmer in float64 numpy, written from the model's published equations and from what config.json means to
transformers.

Shares no code with the package. Plain and slow: a layer, a head, a token at a time.
"""

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def rotate(x, theta):
    """``x [tokens, heads, dim]`` at positions 0, 1, ...: dimension i turns with dimension i + dim / 2."""
    tokens, _, dim = x.shape
    y = x.copy()
    for pair in range(dim // 2):
        angle = np.arange(tokens)[:, None] * theta ** (-2 * pair / dim)
        a, b = x[..., pair], x[..., pair + dim // 2]
        y[..., pair] = a * np.cos(angle) - b * np.sin(angle)
        y[..., pair + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
    return y


def attend(q, k, v, window):
    tokens, heads, dim = q.shape
    share = heads // k.shape[1]
    out = np.zeros_like(q)
    for position in range(tokens):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            keys, values = (a[first : position + 1, head // share] for a in (k, v))
            scores = keys @ q[position, head] / np.sqrt(dim)
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ values / chances.sum()
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by the names of the text model alone."""
    config = config.get("text_config", config)
    w = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}
    eps, post_eps, count, dim = config["rms_norm_eps"], config["post_norm_eps"], len(ids), config["head_dim"]
    embedding = w["model.embed_tokens.weight"]
    x = rms(embedding[np.asarray(ids)], 1, eps)
    for layer, (kind, theta) in enumerate(zip(config["layer_types"], config["layer_rope_theta"], strict=True)):
        path = f"model.layers.{layer}"

        def norm(h, name, eps, path=path):
            return rms(h, 1 + w[f"{path}.{name}.weight"], eps)

        def linear(h, name, path=path):
            return h @ w[f"{path}.{name}.weight"].T

        h = norm(x, "input_layernorm", eps)
        q, k, v = (linear(h, f"self_attn.{name}_proj").reshape(count, -1, dim) for name in "qkv")
        q, k = rms(q, 1, eps) * config["qk_scale_factor"], rms(k, 1, eps)
        if theta:
            q, k = rotate(q, theta), rotate(k, theta)
        y = attend(q, k, v, config["sliding_window"] if kind == "sliding_attention" else None).reshape(count, -1)
        y = linear(y * sigmoid(linear(h, "self_attn.gate_proj")), "self_attn.o_proj")
        x = x + norm(y, "post_attention_layernorm", post_eps)
        h = norm(x, "pre_feedforward_layernorm", eps)
        gate = linear(h, "mlp.gate_proj")
        y = linear(gate * sigmoid(gate) * linear(h, "mlp.up_proj"), "mlp.down_proj")
        x = x + norm(y, "post_feedforward_layernorm", post_eps)
    y = rms(x, w["model.norm.weight"], eps) @ w.get("lm_head.weight", embedding).T
    cap = config["final_logit_softcapping"]
    return cap * np.tanh(y * config["output_multiplier"] / cap)
