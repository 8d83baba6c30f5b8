"""DeepSeek-V2 and V3 in float64 numpy, written from the papers (arXiv:2405.04434, 2412.19437) and from what config.json
means to transformers.

Shares no code with the package. Plain and slow: keys and values are expanded for every head, experts are chosen a token
at a time.
"""

import math

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(z):
    return z / (1 + np.exp(-z))


def scaling(config: dict) -> dict:
    """The yarn block, or nothing."""
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return block if "yarn" in (block.get("type"), block.get("rope_type")) else {}


def mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def magnitude(config: dict) -> float:
    """What cosines and sines are multiplied by."""
    block = scaling(config)
    if not block:
        return 1.0
    if block.get("mscale") and block.get("mscale_all_dim"):
        return mscale(block["factor"], block["mscale"]) / mscale(block["factor"], block["mscale_all_dim"])
    return mscale(block["factor"], 1.0)


def score_scale(config: dict) -> float:
    block, width = scaling(config), config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    every = block.get("mscale_all_dim") or 0.0
    return width**-0.5 * (mscale(block["factor"], every) ** 2 if every else 1.0)


def frequency(config: dict, pair: int) -> float:
    """Radians a position of pair ``pair``."""
    dim, block = config["qk_rope_head_dim"], scaling(config)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    f = theta ** (-2 * pair / dim)
    if not block:
        return f

    def turning(times):
        length = block["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(turning(block.get("beta_fast", 32))), 0)
    high = min(math.ceil(turning(block.get("beta_slow", 1))), dim - 1)
    ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
    return f * (1 - ramp) + f / block["factor"] * ramp


def rotate(config: dict, x):
    """``x [tokens, heads, dim]`` at positions 0, 1, ..."""
    tokens, _, dim = x.shape
    y = x.copy()
    for pair in range(dim // 2):
        angle = np.arange(tokens)[:, None] * frequency(config, pair)
        i, j = (2 * pair, 2 * pair + 1) if config.get("rope_interleave", True) else (pair, pair + dim // 2)
        y[..., i] = x[..., i] * np.cos(angle) - x[..., j] * np.sin(angle)
        y[..., j] = x[..., j] * np.cos(angle) + x[..., i] * np.sin(angle)
    return y * magnitude(config)


def attend(config: dict, w: dict, path: str, h):
    count, heads = len(h), config["num_attention_heads"]
    nope, rank, values = config["qk_nope_head_dim"], config["kv_lora_rank"], config["v_head_dim"]

    def linear(x, name):
        return x @ w[f"{path}.{name}.weight"].T

    if config["q_lora_rank"] is None:
        q = linear(h, "q_proj")
    else:
        q = linear(rms(linear(h, "q_a_proj"), w[f"{path}.q_a_layernorm.weight"], 1e-6), "q_b_proj")
    q = q.reshape(count, heads, -1)
    compressed = linear(h, "kv_a_proj_with_mqa")
    latent = rms(compressed[:, :rank], w[f"{path}.kv_a_layernorm.weight"], 1e-6)
    kv = linear(latent, "kv_b_proj").reshape(count, heads, nope + values)
    turned = np.repeat(rotate(config, compressed[:, None, rank:]), heads, axis=1)
    q = np.concatenate([q[..., :nope], rotate(config, q[..., nope:])], axis=-1)
    k, v = np.concatenate([kv[..., :nope], turned], axis=-1), kv[..., nope:]
    out = np.zeros((count, heads, values))
    for position in range(count):
        for head in range(heads):
            scores = k[: position + 1, head] @ q[position, head] * score_scale(config)
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ v[: position + 1, head] / chances.sum()
    return linear(out.reshape(count, -1), "o_proj")


def choose(config: dict, scores, bias):
    """``[(expert, weight)]`` of one token with router logits ``scores [experts]``."""
    if config["model_type"] == "deepseek_v3":
        chances, best = 1 / (1 + np.exp(-scores)), 2
        ranked = chances + bias
    else:
        chances, best = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum(), 1
        ranked = chances
    experts, groups = range(len(scores)), 1
    if config["model_type"] == "deepseek_v3" or config["topk_method"] == "group_limited_greedy":
        groups = config["n_group"]
    if groups > 1:
        each = len(scores) // groups
        totals = [sum(sorted(ranked[g * each : (g + 1) * each])[-best:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-totals[g], g))[: config["topk_group"]]
        experts = [e for e in experts if e // each in kept]
    chosen = sorted(experts, key=lambda e: (-ranked[e], e))[: config["num_experts_per_tok"]]
    total = sum(chances[e] for e in chosen) + 1e-20 if config["norm_topk_prob"] else 1.0
    return [(e, chances[e] / total * config["routed_scaling_factor"]) for e in chosen]


def block(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(config: dict, w: dict, path: str, h):
    names = ("gate_proj", "up_proj", "down_proj")
    out = block(h, *(w[f"{path}.shared_experts.{name}.weight"] for name in names))
    stacks = [w[f"{path}.switch_mlp.{name}.weight"] for name in names]
    bias = w.get(f"{path}.gate.e_score_correction_bias")
    for row, token in enumerate(h):
        for expert, weight in choose(config, w[f"{path}.gate.weight"] @ token, bias):
            out[row] += weight * block(token, *(stack[expert] for stack in stacks))
    return out


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    """Float64 logits ``[len(ids), vocab]``; ``weights`` by checkpoint name."""
    w, eps = {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}, config["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        x = x + attend(config, w, f"{path}.self_attn", rms(x, w[f"{path}.input_layernorm.weight"], eps))
        h = rms(x, w[f"{path}.post_attention_layernorm.weight"], eps)
        if layer < config["first_k_dense_replace"] or layer % config["moe_layer_freq"]:
            x = x + block(h, *(w[f"{path}.mlp.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")))
        else:
            x = x + mixture(config, w, f"{path}.mlp", h)
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
