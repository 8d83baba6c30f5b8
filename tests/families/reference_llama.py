"""The llama family in float64 numpy, written from the equations and from what config.json means to transformers.

Shares no code with the package. Plain and slow: one token's row at a time where that is clearer.
"""

import math

import numpy as np


def inverse_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """``(inv_freq [D/2], factor on q and k)`` in the published spelling of config.json."""
    dim = head_dim(config)
    theta = config.get("rope_theta", 10000.0)
    inv = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    longest = config["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings", longest)
    if kind == "default":
        return inv, 1.0
    if kind == "linear":
        return inv / factor, 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        result = []
        for f in inv:
            wavelength = 2 * math.pi / f
            if wavelength < original / high:
                result.append(f)
            elif wavelength > original / low:
                result.append(f / factor)
            else:
                smooth = (original / wavelength - low) / (high - low)
                result.append((1 - smooth) * f / factor + smooth * f)
        return np.array(result), 1.0
    if kind == "yarn":

        def correction(rotations):
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        def mscale(weight):
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        low, high = correction(scaling.get("beta_fast", 32)), correction(scaling.get("beta_slow", 1))
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        result = []
        for i, f in enumerate(inv):
            ramp = min(max((i - low) / (high - low), 0), 1)
            result.append(f / factor * ramp + f * (1 - ramp))
        if "attention_factor" in scaling:
            return np.array(result), scaling["attention_factor"]
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            return np.array(result), mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
        return np.array(result), mscale(1)
    if kind == "longrope":
        stretch = longest / original
        return inv / np.array(scaling["long_factor"]), math.sqrt(1 + math.log(stretch) / math.log(original))
    raise AssertionError(kind)


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def window_of(config: dict, layer: int) -> int | None:
    window = config.get("sliding_window")
    if config.get("layer_types"):
        return window if config["layer_types"][layer] == "sliding_attention" else None
    if config["model_type"] in ("mistral", "mixtral"):
        return window
    if config["model_type"] == "qwen3_moe":
        return window if config.get("use_sliding_window") else None
    if config.get("use_sliding_window") and layer >= config["max_window_layers"]:
        return window
    return None


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def is_routed(config: dict, layer: int) -> bool:
    if config["model_type"] == "qwen3_moe":
        return (
            layer not in config.get("mlp_only_layers", []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        )
    return config["model_type"] == "mixtral"


def mixture(config: dict, w: dict, path: str, h: np.ndarray) -> np.ndarray:
    """A token at a time, an expert at a time."""
    top_k = config["num_experts_per_tok"]
    out = np.zeros_like(h)
    for row, token in enumerate(h):
        scores = w[f"{path}.gate.weight"] @ token
        chosen = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:top_k]
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        if config["model_type"] == "mixtral" or config.get("norm_topk_prob", False):
            chances /= sum(chances[expert] for expert in chosen)
        for expert in chosen:
            gate, up, down = (w[f"{path}.switch_mlp.{name}_proj.weight"][expert] for name in ("gate", "up", "down"))
            z = gate @ token
            out[row] += chances[expert] * (down @ (z / (1 + np.exp(-z)) * (up @ token)))
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by checkpoint name."""
    w = {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    dim, heads, eps = head_dim(config), config["num_attention_heads"], config["rms_norm_eps"]
    kv_heads = config.get("num_key_value_heads", heads)
    inv, factor = inverse_frequencies(config)
    angles = np.arange(len(ids))[:, None] * inv
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def split(x, name, count):
        return linear(x, name).reshape(len(ids), count, dim).transpose(1, 0, 2)

    def rotate(x):
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        h = rms(x, w[f"{path}.input_layernorm.weight"], eps)
        q = split(h, f"{path}.self_attn.q_proj", heads)
        k = split(h, f"{path}.self_attn.k_proj", kv_heads)
        v = split(h, f"{path}.self_attn.v_proj", kv_heads)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            q = rms(q, w[f"{path}.self_attn.q_norm.weight"], eps)
            k = rms(k, w[f"{path}.self_attn.k_norm.weight"], eps)
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(dim)
        query, key = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
        hidden = key > query
        if window := window_of(config, layer):
            hidden |= key <= query - window
        scores[:, hidden] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + linear((scores @ v).transpose(1, 0, 2).reshape(len(ids), -1), f"{path}.self_attn.o_proj")
        h = rms(x, w[f"{path}.post_attention_layernorm.weight"], eps)
        if is_routed(config, layer):
            x = x + mixture(config, w, f"{path}.mlp", h)
            continue
        gate = linear(h, f"{path}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{path}.mlp.up_proj"), f"{path}.mlp.down_proj")
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
