"""DeepSeek, from an install to tokens: what is kept of a token, how it chooses experts, and attention in two forms.

python examples/deepseek2.py                                 # makes a tiny random model: the workings, not English
python examples/deepseek2.py --variant deepseek-v3           # a V3 in miniature; --variant list shows them all
python examples/deepseek2.py --model deepseek-v2-lite.gturbo --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from turbospark_mlx import Runner
from turbospark_mlx.families.deepseek2.model import routing
from turbospark_mlx.families.layers import Positions
from turbospark_mlx.families.moe import route
from turbospark_mlx.store import resolve
from turbospark_mlx.testing import make_tiny_install, variants


def describe(runner: Runner) -> None:
    """What a token costs in the caches, and what it would cost as keys and values of every head."""
    config = runner.model.args
    kept = config.kv_bytes(1, 2)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = config.num_hidden_layers * config.num_attention_heads * width * 2
    print(
        f"a token leaves {config.latent_size} numbers in each of {config.num_hidden_layers} layers: {kept} bytes in"
        f" half precision; keys and values of {config.num_attention_heads} heads would be {expanded}\n"
    )


def answer(runner: Runner, prompt: str, count: int) -> list[int]:
    """Run a chat prompt, or plain text where the model has no template, and go on greedily."""
    tokenizer = runner.tokenizer
    if tokenizer.has_chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    start = time.perf_counter()
    logits = runner.prefill(ids)
    prefilled = time.perf_counter()
    tokens = []
    for _ in range(count):
        tokens.append(int(mx.argmax(logits)))
        logits = runner.decode(tokens[-1])
    done = time.perf_counter()
    print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}")
    print(f"prompt {len(ids) / (prefilled - start):.1f} tokens/s, answer {count / (done - prefilled):.1f} tokens/s\n")
    return [*ids, *tokens]


def show_routing(runner: Runner, ids: list[int]) -> None:
    """Which experts the last token meets in each layer that has any, and how much each counts."""
    model, config = runner.model, runner.model.args
    each = config.n_routed_experts // config.n_group
    x = model.model.embed_tokens(mx.array([ids]))
    for number, layer in enumerate(model.layers):
        if number in config.routed_layers():
            read = layer.self_attn(x, Positions(0, len(ids)), norm=layer.input_layernorm, residual=x)
            gate = layer.mlp.gate
            normed = layer.post_attention_layernorm(read)[0, -1:]
            choice_bias = gate.get("e_score_correction_bias")
            chosen, weights = route(gate, normed, **routing(config), choice_bias=choice_bias, backend=model.backend)
            pairs = zip(chosen[0].tolist(), weights[0].tolist(), strict=True)
            groups = f" of {config.topk_group} groups in {config.n_group}" if config.n_group > 1 else ""
            names = ", ".join(f"{expert} in group {expert // each} ({weight:.2f})" for expert, weight in pairs)
            print(f"layer {number:2} gives the last token to experts{groups}: {names}")
        x = layer(x)
    print()


def compare_forms(runner: Runner, ids: list[int]) -> None:
    """Attention brings queries to the latents. Where something stands in for kv_b_proj, it expands latents instead."""

    class Standing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    tokens, blocks = mx.array([ids]), [layer.self_attn for layer in runner.model.layers]
    absorbed, matrices = runner.model(tokens), [block.get("kv_b_proj") for block in blocks]
    if None in matrices:
        print("this install has kv_b_proj in two parts, which are for the absorbed form")
        return
    for block, matrix in zip(blocks, matrices, strict=True):
        block.kv_b_proj = Standing(matrix)
    off = mx.abs(runner.model(tokens) - absorbed).max() / mx.sqrt(mx.var(absorbed))
    for block, matrix in zip(blocks, matrices, strict=True):
        block.kv_b_proj = matrix
    print(f"absorbed and expanded attention differ by {float(off):.1g} standard deviations of the logits")


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """A latent cache goes back to any length; a mark costs nothing."""
    runner.reset()
    runner.prefill(ids)
    mark = runner.mark()
    before = runner.decode(ids[0])
    runner.decode(ids[1])
    runner.rollback(mark)
    print(f"after a rollback the logits differ by {float(mx.abs(before - runner.decode(ids[0])).max()):g}")
    shared = len(ids) // 2
    other = [*ids[:shared], *(i ^ 1 for i in ids[shared:])]
    print(f"{runner.reuse(other)} of the first {shared} tokens that another prompt shares could be reused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="install, alias or repository; by default a tiny random one is made")
    parser.add_argument("--variant", help="of the tiny model, or 'list'")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    if args.variant == "list":
        print("\n".join(variants("deepseek2")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            path = resolve(args.model)
        else:
            path = make_tiny_install("deepseek2", Path(folder) / "tiny.gturbo", variant=args.variant)
        with Runner.open(path) as runner:
            print(runner.report(), end="\n\n")
            describe(runner)
            ids = answer(runner, args.prompt, args.tokens)
            show_routing(runner, ids)
            compare_forms(runner, ids)
            show_reuse(runner, ids)


if __name__ == "__main__":
    main()
