"""Make smollm2.json: the losses and greedy continuations of the default model, by a path that shares no code with ours.

    python tests/golden/make_smollm2_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

numpy only, float64, straight from the GGUF file: its own dequantizer (``gguf.quants``), its rows in their stored order
with the interleaved rotation that llama.cpp applies to them, and a tokenizer assembled from the file's vocabulary with
the ``tokenizers`` library. The INT8 and INT4 losses are of the same weights rounded by a second writing of the
converter's rule.
``docs/models.md`` says where the file comes from; it takes some minutes on two cores.
"""

import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, there was a",
    "<|im_start|>user\nName three primary colors.<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, the first human to walk on the Moon was",
]
GREEDY_TOKENS = 20


def tokenizer_of(metadata) -> Tokenizer:
    """The GPT-2 byte-level BPE of the file, digits split one by one (pre-tokenizer ``smollm``)."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == control])
    return tokenizer


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded(weights: np.ndarray, bits: int, group_size: int = 64) -> np.ndarray:
    """What a matrix [rows, columns] becomes at 4 or 8 bits with bfloat16 scale and bias, dequantized.

    The grid contains zero and the group's extreme of larger magnitude, and codes are chosen for the rounded grid.
    """
    out, codes = np.empty(weights.shape, np.float32), 2**bits - 1
    for first in range(0, weights.shape[1], group_size):
        group = weights[:, first : first + group_size].astype(np.float32)
        low, high = group.min(1), group.max(1)
        step = np.maximum((high - low) / np.float32(codes), np.float32(1e-7))
        edge = np.where(-low > high, low, high)
        step = np.where(-low > high, step, -step)
        count = np.rint(edge / step)
        bias = np.where(count == 0, np.float32(0), edge)
        step = np.where(count == 0, step, edge / np.where(count == 0, np.float32(1), count))
        step, bias = bfloat16(step)[:, None], bfloat16(bias)[:, None]
        out[:, first : first + group_size] = np.clip(np.rint((group - bias) / step), 0, codes) * step + bias
    return out


class Llama:
    """Llama in float64 with the whole sequence recomputed at every step: slow, and hard to get wrong."""

    def __init__(self, reader: gguf.GGUFReader, metadata: dict, bits: int | None = None):
        self.weights = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self.weights[tensor.name] = (rounded(values, bits) if bits and values.ndim == 2 else values).astype(
                np.float64
            )
        self.layers = metadata["llama.block_count"]
        self.heads = metadata["llama.attention.head_count"]
        self.kv_heads = metadata["llama.attention.head_count_kv"]
        self.eps = metadata["llama.attention.layer_norm_rms_epsilon"]
        self.theta = metadata["llama.rope.freq_base"]

    def _norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[name]

    def _rotate(self, x):
        """Adjacent pairs (2i, 2i + 1) of ``x`` [heads, length, head_dim], as GGUF stores llama's rows."""
        length, head_dim = x.shape[1:]
        angle = np.arange(length)[:, None] * self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def hidden(self, ids) -> np.ndarray:
        """Hidden states [length, hidden] after the final norm."""
        w = self.weights
        x = w["token_embd.weight"][ids]
        length = len(ids)
        visible = np.tril(np.ones((length, length), bool))
        for n in range(self.layers):
            b = f"blk.{n}."
            h = self._norm(x, b + "attn_norm.weight")
            q, k, v = (
                (h @ w[f"{b}attn_{m}.weight"].T).reshape(length, heads, -1).transpose(1, 0, 2)
                for m, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            q, k = self._rotate(q), self._rotate(k)
            k, v = (np.repeat(a, self.heads // self.kv_heads, axis=0) for a in (k, v))
            scores = np.where(visible, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -np.inf)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out = (scores / scores.sum(-1, keepdims=True)) @ v
            x = x + out.transpose(1, 0, 2).reshape(length, -1) @ w[b + "attn_output.weight"].T
            h = self._norm(x, b + "ffn_norm.weight")
            gate = h @ w[b + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        return self._norm(x, "output_norm.weight")

    def logits(self, hidden) -> np.ndarray:
        return hidden @ self.weights["token_embd.weight"].T


def losses(model: Llama, ids) -> list[float]:
    """Negative log-likelihood in nats of ids[1:], each given everything before it."""
    logits = model.logits(model.hidden(ids[:-1]))
    top = logits.max(-1, keepdims=True)
    log_total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return (log_total - logits[np.arange(len(ids) - 1), ids[1:]]).tolist()


def greedy(model: Llama, ids) -> tuple[list[int], list[float]]:
    """Greedy continuation and, for each step, the gap between the two largest logits."""
    ids, gaps = list(ids), []
    for _ in range(GREEDY_TOKENS):
        logits = model.logits(model.hidden(ids)[-1])
        second, first = np.sort(logits)[-2:]
        gaps.append(float(first - second))
        ids.append(int(logits.argmax()))
    return ids[-GREEDY_TOKENS:], gaps


def main(path: str) -> None:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = tokenizer_of(metadata)
    model = Llama(reader, metadata)
    passage = tokenizer.encode((HERE / "alice.txt").read_text()).ids
    passage_losses = losses(model, passage)
    int8_losses, int4_losses = (losses(Llama(reader, metadata, bits), passage) for bits in (8, 4))
    prompts = []
    for text in PROMPTS:
        ids = tokenizer.encode(text).ids
        continuation, gaps = greedy(model, ids)
        prompts.append({"text": text, "ids": ids, "greedy": continuation, "gaps": [round(g, 6) for g in gaps]})
        print(repr(text), "->", repr(tokenizer.decode(continuation)), f"smallest gap {min(gaps):.4g}")
    golden = {
        "source_sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "passage": "alice.txt",
        "ids": passage,
        "losses": [round(loss, 7) for loss in passage_losses],
        "int8_losses": [round(loss, 7) for loss in int8_losses],
        "int4_losses": [round(loss, 7) for loss in int4_losses],
        "prompts": prompts,
    }
    (HERE / "smollm2.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    for label, values in (("as stored", passage_losses), ("INT8", int8_losses), ("INT4", int4_losses)):
        print(f"{len(passage)} tokens, {label}: perplexity {np.exp(np.mean(values)):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
