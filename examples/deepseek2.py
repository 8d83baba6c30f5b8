"""DeepSeek, from an install to tokens: what is kept of a token, how it chooses experts, and attention in two forms.

python examples/deepseek2.py                                 # makes a tiny random model: the workings, not English
python examples/deepseek2.py --variant deepseek-v3           # a V3 in miniature; --variant list shows them all
python examples/deepseek2.py --model deepseek-v2-lite.gturbo --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from common import answer, options, run, show_reuse, show_rollback

from turbospark_mlx import Runner
from turbospark_mlx.families.deepseek2.model import routing
from turbospark_mlx.families.layers import Positions
from turbospark_mlx.families.moe import route


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


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        show_routing(runner, ids)
        compare_forms(runner, ids)
        show_rollback(runner, ids)
        show_reuse(runner, ids)

    run("deepseek2", args, show)


if __name__ == "__main__":
    main()
