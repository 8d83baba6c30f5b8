"""Qwen4-Exp in float64 numpy, from what its configuration and its tensors mean to transformers.

Shares no code with the package; what Qwen 3.5 has too comes from its reference. Plain and slow: a token, a head, an
expert, a block at a time. Norms are stored less 1.
"""

import numpy as np

from tests.families.reference_qwen import mixture, recur, rms, rotate, sigmoid, silu, text_config

WORD = 2**64 - 1


def stream_rms(x, weight, streams, eps):
    shape = (len(x), streams, -1)
    return rms(x.reshape(shape), (1 + weight).reshape(streams, -1), eps).reshape(x.shape)


def connect(config: dict, w: dict, path: str, x):
    """What is read of the streams ``x [tokens, C * H]``, and what they are given of an answer ``[tokens, C]``."""
    streams = config["hc_count"]
    n = stream_rms(x, w[f"{path}.hc_norm.weight"], streams, config["rms_norm_eps"])
    low = silu(n @ w[f"{path}.input_mix_weight_down.weight"].T / streams)
    gate = sigmoid(low @ w[f"{path}.input_mix_weight_up.weight"].T)
    mixed = (gate * n).reshape(len(x), streams, -1).mean(1)
    inject = w.get(f"{path}.block_inject_weight.weight")
    return mixed, None if inject is None else 2 * sigmoid(n @ inject.T / streams)


def give(x, y, shares):
    return x + (shares[:, :, None] * y[:, None]).reshape(x.shape)


def visible(config: dict, w: dict, path: str, h):
    """Which tokens each one sees: a list of lists; and how many of the choices were between equals."""
    tokens, heads, dim = len(h), config["indexer_n_heads"], config["indexer_head_dim"]
    block, eps = config["indexer_compress_ratio"], config["rms_norm_eps"]
    top = config["indexer_budget"] // block
    rows = (h @ w[f"{path}.index_qk_proj.weight"].T).reshape(tokens, heads + 1, dim)
    turned = config | {"rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": turning(config) / dim}}
    q = rotate(turned, rms(rows[:, :heads], 1 + w[f"{path}.q_layernorm.weight"], eps))
    # Every block turned as if it were at each position, of which its first is taken.
    pooled = []
    for first in range(0, tokens - block + 1, block):
        mean = rms(rows[first : first + block, heads].mean(0), 1 + w[f"{path}.k_layernorm.weight"], eps)
        pooled.append(rotate(turned, np.repeat(mean[None, None], first + 1, axis=0))[first, 0])
    seen, ties = [], 0
    for position in range(tokens):
        whole = (position + 1) // block
        scores = [sum(max(0.0, q[position, n] @ pooled[b]) for n in range(heads)) / np.sqrt(dim) for b in range(whole)]
        order = sorted(range(whole), key=lambda b: (-scores[b], b))
        ties += whole > top and scores[order[top - 1]] == scores[order[top]]
        chosen = [block * b + i for b in sorted(order[:top]) for i in range(block)]
        seen.append(chosen + list(range(whole * block, position + 1)))
    return seen, ties


def turning(config: dict) -> int:
    return int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])


def attend(config: dict, w: dict, path: str, h):
    tokens, dim, eps = len(h), config["head_dim"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    both = (h @ w[f"{path}.q_proj.weight"].T).reshape(tokens, heads, 2, dim)
    q, gate = both[:, :, 0], both[:, :, 1]
    k, v = ((h @ w[f"{path}.{name}_proj.weight"].T).reshape(tokens, kv_heads, dim) for name in "kv")
    q = rotate(config, rms(q, 1 + w[f"{path}.q_norm.weight"], eps))
    k = rotate(config, rms(k, 1 + w[f"{path}.k_norm.weight"], eps))
    out = np.zeros_like(q)
    seen, _ = visible(config, w, f"{path}.indexer", h)
    for position in range(tokens):
        for head in range(heads):
            keys, values = (a[seen[position], head // (heads // kv_heads)] for a in (k, v))
            scores = keys @ q[position, head] / np.sqrt(dim)
            chances = np.exp(scores - scores.max())
            out[position, head] = chances @ values / chances.sum()
    return (out * sigmoid(gate)).reshape(tokens, -1) @ w[f"{path}.o_proj.weight"].T


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def table_rows(config: dict, ids) -> list[list[int]]:
    """The rows of the n-gram table that belong to each token."""
    order, each, eos = config["ngram_size"], config["heads_per_ngram"], config["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    half = (2**63 - 1) // config["vocab_size"] // 2
    keys = [
        2 * (splitmix((config.get("seed", 1234) + 0x9E3779B97F4A7C15 * (s + 1)) & WORD) % half) + 1
        for s in range(order)
    ]
    sizes, candidate = [], config["ngram_vocab_size_base"]
    while len(sizes) < (order - 1) * each:
        if all(candidate % d for d in range(2, candidate)):
            sizes.append(candidate)
        candidate += 1
    history, found = [eos] * (order - 1), []
    for token in map(int, ids):
        mixed, rows = token * keys[0], []
        for back in range(1, order):
            mixed ^= history[-back] * keys[back]
            for head in range((back - 1) * each, back * each):
                rows.append(mixed % sizes[head] + sum(sizes[:head]))
        found.append(rows)
        history = [eos] * (order - 1) if token == eos else [*history[1:], token]
    return found


def tell(config: dict, w: dict, path: str, x, ids):
    """What the n-gram layer adds to the streams ``x``."""
    tokens, streams, eps = len(x), config["hc_count"], config["rms_norm_eps"]
    table = w[f"{path}.ple_embedding.ngram_embedding.weight"]
    e = np.stack([table[rows].reshape(-1) for rows in table_rows(config, ids)])
    shape = (tokens, streams, -1)
    key = stream_rms(e @ w[f"{path}.key_proj.weight"].T, w[f"{path}.norm_key.weight"], streams, eps).reshape(shape)
    query = stream_rms(x, w[f"{path}.norm_query.weight"], streams, eps).reshape(shape)
    t = (key * query).sum(-1) / np.sqrt(config["hidden_size"])
    t = np.sign(t) * np.sqrt(np.maximum(np.abs(t), 1e-6))
    told = (sigmoid(t)[:, :, None] * (e @ w[f"{path}.value_proj.weight"].T)[:, None]).reshape(x.shape)
    normed = stream_rms(told, w[f"{path}.norm_conv.weight"], streams, eps)
    taps, apart, weight = config["ple_conv_kernel_size"], config["ngram_size"], w[f"{path}.conv1d.weight"]
    convolved = np.zeros_like(x)
    for t in range(tokens):
        for tap in range(taps):
            if (source := t - apart * (taps - 1 - tap)) >= 0:
                convolved[t] += weight.reshape(-1, taps)[:, tap] * normed[source]
    return told + silu(convolved)


def run(config: dict, weights: dict, ids) -> tuple[np.ndarray, list[np.ndarray]]:
    """Float64 logits ``[len(ids), vocab]``, and the last state of each recurrent layer; ``weights`` by the names of the
    text model alone."""
    config, w = text_config(config), {name: np.asarray(a, dtype=np.float64) for name, a in weights.items()}
    gate, states = {"sigmoid": sigmoid, "silu": silu}[config.get("output_gate_type") or "silu"], []
    x = np.tile(w["model.embed_tokens.weight"][np.asarray(ids)], (1, config["hc_count"]))
    for layer, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{layer}"
        if layer + 1 in (config.get("ple_layer_ids") or []):
            x = x + tell(config, w, f"{path}.ple", x, ids)
        h, shares = connect(config, w, f"{path}.attn_hyper_connection", x)
        if kind == "linear_attention":
            y, state = recur(config, w, f"{path}.linear_attn", h, gate)
            states.append(state)
        else:
            y = attend(config, w, f"{path}.self_attn", h)
        x = give(x, y, shares)
        h, shares = connect(config, w, f"{path}.mlp_hyper_connection", x)
        x = give(x, mixture(config, w, f"{path}.mlp", h), shares)
    h, _ = connect(config, w, "model.hyper_connection_mixer", x)
    return h @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T, states


def logits(config: dict, weights: dict, ids) -> np.ndarray:
    return run(config, weights, ids)[0]
