"""The llama family, from an install to tokens, with nothing hidden: the runner, its marks, and the model's modules.

python examples/llama.py                                     # makes a tiny random model: the workings, not English
python examples/llama.py --variant mistral                   # one of the family's switches; --variant list shows them
python examples/llama.py --variant qwen3-moe                 # a mixture of experts: Mixtral and Qwen3-MoE
python examples/llama.py --model smollm2-135m --prompt "The moon is"
"""

from __future__ import annotations

import time

import mlx.core as mx
from common import options, run

from turbospark_mlx import Runner
from turbospark_mlx.families.layers import Positions
from turbospark_mlx.families.moe import route


def greedy(runner: Runner, logits: mx.array, count: int) -> list[int]:
    """The ``count`` most probable tokens, one after the other, from the logits behind what was run."""
    tokens = []
    for _ in range(count):
        tokens.append(int(mx.argmax(logits)))
        logits = runner.decode(tokens[-1])
    return tokens


def show(runner: Runner, prompt: str, count: int) -> None:
    ids = runner.tokenizer.encode(prompt)
    start = time.perf_counter()
    logits = runner.prefill(ids)
    prefilled = time.perf_counter()
    answer = greedy(runner, logits, count)
    done = time.perf_counter()
    print(f"{prompt!r} -> {runner.tokenizer.decode(answer)!r}")
    print(f"prompt {len(ids) / (prefilled - start):.1f} tokens/s, answer {count / (done - prefilled):.1f} tokens/s\n")

    # A mark is a place to come back to: try each of the three likeliest next tokens from the same point.
    runner.reset()
    logits = runner.prefill(ids)
    mark = runner.mark()
    chances = mx.softmax(logits)
    for token in mx.argsort(-logits)[:3].tolist():
        rest = greedy(runner, runner.decode(token), 8)
        print(f"{float(chances[token]):6.1%}  {runner.tokenizer.decode([token, *rest])!r}")
        runner.rollback(mark)

    # A longer prompt with the same beginning runs only what is new.
    longer = [*ids, *answer[:4]]
    print(f"\n{runner.reuse(longer)} of {len(longer)} tokens of a longer prompt were already there")

    show_experts(runner, ids)

    # The model is an ordinary mlx.nn.Module: call it without a cache, or layer by layer.
    model, tokens = runner.model, mx.array([ids])
    x = model.model.embed_tokens(tokens)
    for number, layer in enumerate(model.layers):
        x, before = layer(x), x
        if number in (0, len(model.layers) - 1):
            change = mx.linalg.norm(x - before, axis=-1) / mx.linalg.norm(before, axis=-1)
            print(f"layer {number} changes the residual stream by {float(change.mean()):.0%} of its length")
    by_layer = model.head(model.model.norm(x))
    print(f"layer by layer and at once differ by at most {float(mx.abs(by_layer - model(tokens)).max()):.1g}")


def show_experts(runner: Runner, ids: list[int]) -> None:
    """Which experts the last token meets in each layer that has any, and how much each counts."""
    model, config = runner.model, runner.model.args
    x = model.model.embed_tokens(mx.array([ids]))
    for number, layer in enumerate(model.layers):
        if number in config.routed_layers():
            read = layer.self_attn(x, Positions(0, len(ids)), norm=layer.input_layernorm, residual=x)
            logits = layer.mlp.gate(layer.post_attention_layernorm(read)[0, -1:].astype(mx.float32))
            chosen, weights = route(logits, config.num_experts_per_tok, normalize=config.norm_topk_prob)
            pairs = zip(chosen[0].tolist(), weights[0].tolist(), strict=True)
            print(f"layer {number} gives the last token to", ", ".join(f"expert {e} ({w:.0%})" for e, w in pairs))
        x = layer(x)


def main() -> None:
    args = options(__doc__, prompt="The moon is").parse_args()
    run("llama", args, lambda runner, _: show(runner, args.prompt, args.tokens))


if __name__ == "__main__":
    main()
