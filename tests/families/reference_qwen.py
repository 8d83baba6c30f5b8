"""Qwen 3.5 in float64 numpy, from the published equations and from what config.json means to transformers.

Shares no code with the package. Plain and slow: a layer, a head, a token, an expert at a time. Norms are stored less 1.
"""

import numpy as np


def text_config(config: dict) -> dict:
    return config.get("text_config", config)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rotate(config: dict, x):
    """``x [tokens, heads, dim]`` at positions 0, 1, ...: the first dimensions of a head, in halves."""
    block = config["rope_parameters"]
    turning = int(x.shape[-1] * block["partial_rotary_factor"])
    y = x.copy()
    for pair in range(turning // 2):
        angle = np.arange(x.shape[0])[:, None] * block["rope_theta"] ** (-2 * pair / turning)
        a, b = x[..., pair], x[..., pair + turning // 2]
        y[..., pair] = a * np.cos(angle) - b * np.sin(angle)
        y[..., pair + turning // 2] = b * np.cos(angle) + a * np.sin(angle)
    return y


def attend(config: dict, w: dict, path: str, h):
    tokens, dim, eps = len(h), config["head_dim"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    both = (h @ w[f"{path}.q_proj.weight"].T).reshape(tokens, heads, 2, dim)
    q, gate = both[:, :, 0], both[:, :, 1]
    k, v = ((h @ w[f"{path}.{name}_proj.weight"].T).reshape(tokens, kv_heads, dim) for name in "kv")
    q = rotate(config, rms(q, 1 + w[f"{path}.q_norm.weight"], eps))
    k = rotate(config, rms(k, 1 + w[f"{path}.k_norm.weight"], eps))
    out = np.zeros_like(q)
    for position in range(tokens):
        for head in range(heads):
            keys, values = (a[: position + 1, head // (heads // kv_heads)] for a in (k, v))
            scores = keys @ q[position, head] / np.sqrt(dim)
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ values / chances.sum()
    return (out * sigmoid(gate)).reshape(tokens, -1) @ w[f"{path}.o_proj.weight"].T


def delta_rule(q, k, v, decay, strength, state):
    """One head: ``q``, ``k [tokens, Dk]`` of length 1 or scaled, ``v [tokens, Dv]`` -> outputs and the last state
    ``[Dv, Dk]``."""
    out = np.zeros_like(v)
    for t in range(len(v)):
        state = decay[t] * state
        state = state + np.outer(strength[t] * (v[t] - state @ k[t]), k[t])
        out[t] = state @ q[t]
    return out, state


def recur(config: dict, w: dict, path: str, h, gate=silu):
    """What a recurrent layer answers, and its last state ``[value heads, Dv, Dk]``; ``gate`` is its activation."""
    tokens, taps = len(h), config["linear_conv_kernel_dim"]
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    z, b, a, qkv = (h @ w[f"{path}.in_proj_{name}.weight"].T for name in ("z", "b", "a", "qkv"))
    taps_of = w[f"{path}.conv1d.weight"].reshape(-1, taps)
    convolved = np.zeros_like(qkv)
    for t in range(tokens):
        for tap in range(taps):
            if (source := t - (taps - 1) + tap) >= 0:
                convolved[t] += taps_of[:, tap] * qkv[source]
    convolved = silu(convolved)
    q, k = (convolved[:, n * keys * key_dim :][:, : keys * key_dim].reshape(tokens, keys, key_dim) for n in (0, 1))
    v = convolved[:, 2 * keys * key_dim :].reshape(tokens, heads, value_dim)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    decay = np.exp(-np.exp(w[f"{path}.A_log"]) * np.log1p(np.exp(a + w[f"{path}.dt_bias"])))
    out, states = np.zeros_like(v), []
    for head in range(heads):
        own = head // (heads // keys)
        rule = q[:, own] / np.sqrt(key_dim), k[:, own], v[:, head], decay[:, head], sigmoid(b[:, head])
        out[:, head], state = delta_rule(*rule, np.zeros((value_dim, key_dim)))
        states.append(state)
    out = rms(out, w[f"{path}.norm.weight"], config["rms_norm_eps"]) * gate(z.reshape(out.shape))
    return out.reshape(tokens, -1) @ w[f"{path}.out_proj.weight"].T, np.array(states)


def feed_forward(w: dict, path: str, h):
    gate, up = (h @ w[f"{path}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (silu(gate) * up) @ w[f"{path}.down_proj.weight"].T


def mixture(config: dict, w: dict, path: str, h):
    out = feed_forward(w, f"{path}.shared_expert", h) * sigmoid(h @ w[f"{path}.shared_expert_gate.weight"].T)
    scores = h @ w[f"{path}.gate.weight"].T
    for row, token in enumerate(h):
        chances = np.exp(scores[row] - scores[row].max())
        chosen = sorted(range(len(chances)), key=lambda e: (-chances[e], e))[: config["num_experts_per_tok"]]
        for expert in chosen:
            gate, up, down = (w[f"{path}.switch_mlp.{name}_proj.weight"][expert] for name in ("gate", "up", "down"))
            share = chances[expert] / sum(chances[e] for e in chosen)
            out[row] += share * (down @ (silu(gate @ token) * (up @ token)))
    return out


def run(config: dict, weights: dict, ids) -> tuple[np.ndarray, list[np.ndarray]]:
    """Float64 logits ``[len(ids), vocab]``, and the last state of each recurrent layer; ``weights`` by the names of the
    text model alone."""
    config, w = text_config(config), {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    eps, states = config["rms_norm_eps"], []
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for layer, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{layer}"
        h = rms(x, 1 + w[f"{path}.input_layernorm.weight"], eps)
        if kind == "linear_attention":
            y, state = recur(config, w, f"{path}.linear_attn", h)
            states.append(state)
        else:
            y = attend(config, w, f"{path}.self_attn", h)
        x = x + y
        h = rms(x, 1 + w[f"{path}.post_attention_layernorm.weight"], eps)
        x = x + (mixture(config, w, f"{path}.mlp", h) if "num_experts" in config else feed_forward(w, f"{path}.mlp", h))
    x = rms(x, 1 + w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T, states


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    return run(config, weights, ids)[0]
