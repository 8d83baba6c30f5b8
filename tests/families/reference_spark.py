"""Spark 2.5 in float64 numpy, written from the equations of its model card.

Shares no code with the package. Plain and slow: a layer, a head, a token at a time.
"""

import math

import numpy as np

FULL = "full_attention"


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def gelu(z):
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def rotate(block: dict, x):
    """``x [tokens, heads, dim]`` at positions 0, 1, ...: pairs of the first dimensions, as many as ``block`` says."""
    tokens, _, dim = x.shape
    turning = int(dim * block.get("partial_rotary_factor", 1.0))
    y = x.copy()
    for pair in range(turning // 2):
        angle = np.arange(tokens)[:, None] * block["rope_theta"] ** (-2 * pair / turning)
        a, b = x[..., pair], x[..., pair + turning // 2]
        y[..., pair] = a * np.cos(angle) - b * np.sin(angle)
        y[..., pair + turning // 2] = a * np.sin(angle) + b * np.cos(angle)
    return y


def attend(q, k, v, window):
    """``window`` is the number of keys that a token sees, its own included; None is all."""
    tokens, heads, dim = q.shape
    share, out = heads // k.shape[1], np.zeros_like(q)
    for position in range(tokens):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            keys, values = (a[first : position + 1, head // share] for a in (k, v))
            scores = keys @ q[position, head] / math.sqrt(dim)
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ values / chances.sum()
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by the names that installs have."""
    w = {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    eps, dim, count = config["rms_norm_eps"], config["head_dim"], len(ids)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    embedding = w["model.embed_tokens.weight"]
    x = embedding[np.asarray(ids)]
    for layer, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{layer}"

        def linear(h, name, path=path):
            return h @ w[f"{path}.{name}.weight"].T + w.get(f"{path}.{name}.bias", 0.0)

        h = rms(x, w[f"{path}.input_layernorm.weight"], eps)
        rows = linear(h, "self_attn.q_k_v_proj").reshape(count, heads + 2 * kv_heads, dim)
        q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        block = config["rope_parameters"][kind]
        y = attend(rotate(block, q), rotate(block, k), v, None if kind == FULL else config["sliding_window"])
        gate = 1 / (1 + np.exp(-linear(h, "self_attn.g_proj")))
        x = x + linear((y * gate[:, :, None]).reshape(count, -1), "self_attn.o_proj")

        h = rms(x, w[f"{path}.post_attention_layernorm.weight"], eps)
        x = x + linear(gelu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", embedding).T
