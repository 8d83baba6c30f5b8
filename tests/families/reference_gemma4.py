"""Gemma 4 in float64 numpy, written from the model's published equations and from what config.json means to
transformers.

Shares no code with the package. Plain and slow: a layer, a head, a token, an expert at a time.
"""

import numpy as np

FULL = "full_attention"


def text_config(config: dict) -> dict:
    return config.get("text_config", config)


def rms(x, weight, eps):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def frequency(config: dict, kind: str, dim: int, pair: int) -> float:
    """Radians a position of pair ``pair`` of a head of ``dim`` dimensions."""
    block = config["rope_parameters"][kind]
    f = block["rope_theta"] ** (-2 * pair / dim)
    if block["rope_type"] == "proportional":
        turning = int(block["partial_rotary_factor"] * dim / 2)
        f = f / block.get("factor", 1.0) if pair < turning else 0.0
    return f


def rotate(config: dict, kind: str, x):
    """``x [tokens, heads, dim]`` at positions 0, 1, ..."""
    tokens, _, dim = x.shape
    y = x.copy()
    for pair in range(dim // 2):
        angle = np.arange(tokens)[:, None] * frequency(config, kind, dim, pair)
        a, b = x[..., pair], x[..., pair + dim // 2]
        y[..., pair] = a * np.cos(angle) - b * np.sin(angle)
        y[..., pair + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
    return y


def attend(config: dict, kind: str, q, k, v):
    tokens, heads, _ = q.shape
    share = heads // k.shape[1]
    out = np.zeros_like(q)
    for position in range(tokens):
        first = 0 if kind == FULL else max(0, position - config["sliding_window"] + 1)
        for head in range(heads):
            keys, values = (a[first : position + 1, head // share] for a in (k, v))
            scores = keys @ q[position, head]
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ values / chances.sum()
    return out


def mixture(config: dict, w: dict, path: str, x, h):
    """Routed by ``x``, computed from ``h``."""
    root, out = np.sqrt(config["hidden_size"]), np.zeros_like(h)
    scores = (rms(x, None, config["rms_norm_eps"]) * w[f"{path}.router.scale"] / root) @ w[
        f"{path}.router.proj.weight"
    ].T
    for row, token in enumerate(h):
        chosen = sorted(range(scores.shape[1]), key=lambda e: (-scores[row, e], e))[: config["top_k_experts"]]
        chances = np.exp(scores[row] - scores[row].max())
        chances /= sum(chances[expert] for expert in chosen)
        for expert in chosen:
            gate, up, down = (
                w[f"{path}.experts.switch_glu.{name}_proj.weight"][expert] for name in ("gate", "up", "down")
            )
            y = down @ (gelu(gate @ token) * (up @ token))
            out[row] += chances[expert] * w[f"{path}.router.per_expert_scale"][expert] * y
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by the names of the text model alone."""
    config, w = text_config(config), {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    eps, hidden, layers, count = config["rms_norm_eps"], config["hidden_size"], config["num_hidden_layers"], len(ids)
    each = config["hidden_size_per_layer_input"]
    embedding = w["model.embed_tokens.weight"]
    x = embedding[np.asarray(ids)] * np.sqrt(hidden)
    if each:
        known = w["model.embed_tokens_per_layer.weight"][np.asarray(ids)].reshape(count, layers, each) * np.sqrt(each)
        told = (x @ w["model.per_layer_model_projection.weight"].T / np.sqrt(hidden)).reshape(count, layers, each)
        told = (rms(told, w["model.per_layer_projection_norm.weight"], eps) + known) / np.sqrt(2)

    last = {}
    for layer, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{layer}"

        def norm(h, name, path=path):
            return rms(h, w[f"{path}.{name}.weight"], eps)

        def linear(h, name, path=path):
            return h @ w[f"{path}.{name}.weight"].T

        dim = config["global_head_dim"] if kind == FULL else config["head_dim"]
        h = norm(x, "input_layernorm")
        q = norm(linear(h, "self_attn.q_proj").reshape(count, -1, dim), "self_attn.q_norm")
        if layer < layers - config["num_kv_shared_layers"]:
            raw = linear(h, "self_attn.k_proj").reshape(count, -1, dim)
            same = config["attention_k_eq_v"] and kind == FULL
            v = raw if same else linear(h, "self_attn.v_proj").reshape(count, -1, dim)
            last[kind] = rotate(config, kind, norm(raw, "self_attn.k_norm")), rms(v, None, eps)
        y = attend(config, kind, rotate(config, kind, q), *last[kind]).reshape(count, -1)
        x = x + norm(linear(y, "self_attn.o_proj"), "post_attention_layernorm")

        h = norm(x, "pre_feedforward_layernorm")
        y = linear(gelu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
        if config["enable_moe_block"]:
            routed = mixture(config, w, path, x, norm(x, "pre_feedforward_layernorm_2"))
            y = norm(y, "post_feedforward_layernorm_1") + norm(routed, "post_feedforward_layernorm_2")
        x = x + norm(y, "post_feedforward_layernorm")
        if each:
            y = linear(gelu(linear(x, "per_layer_input_gate")) * told[:, layer], "per_layer_projection")
            x = x + norm(y, "post_per_layer_input_norm")
        x = x * w[f"{path}.layer_scalar"]
    x = rms(x, w["model.norm.weight"], eps)
    y = x @ w.get("lm_head.weight", embedding).T
    cap = config["final_logit_softcapping"]
    return y if cap is None else cap * np.tanh(y / cap)
