"""Qwen 3.5, from an install to tokens: what each layer remembers, and what a state that cannot forget means for reuse.

python examples/qwen.py                                   # makes a tiny random model: the workings, not English
python examples/qwen.py --variant qwen3.5-moe             # with routed experts; --variant list shows them all
python examples/qwen.py --model qwen3.5.gturbo --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import mlx.core as mx
from common import answer, options, run

from turbospark_mlx import Runner
from turbospark_mlx.cache import RecurrentState


def describe(runner: Runner) -> None:
    """What each layer keeps of a sequence."""
    config = runner.model.args
    for number in range(config.num_hidden_layers):
        if config.recurs(number):
            keeps = (
                f"{config.linear_num_value_heads} states of {config.linear_value_head_dim} x"
                f" {config.linear_key_head_dim}, whatever the length"
            )
        else:
            keeps = f"keys and values of every token, {config.num_key_value_heads} heads of {config.head_dim}"
        print(f"layer {number:2}: {keeps}")
    print()


def show_memory(runner: Runner, ids: list[int]) -> None:
    """Caches at two lengths: those of keys and values grow, those of states do not."""
    for length in (len(ids) // 2, len(ids)):
        caches = runner.model.make_cache(runner.max_context)
        mx.eval(runner.model(mx.array([ids[:length]]), cache=caches))
        states = sum(cache.nbytes for cache in caches if isinstance(cache, RecurrentState))
        print(f"after {length:3} tokens: {states:,} bytes of states, {runner.model.args.kv_bytes(length, 4):,} in all")
    print()


def show_reuse(runner: Runner, ids: list[int]) -> None:
    """A state holds all tokens before it: it goes on, goes back to a mark, or begins again."""
    runner.reset()
    shared = len(ids) // 2
    runner.prefill(ids[:shared])
    mark = runner.mark()
    before = runner.prefill(ids[shared:])
    print(f"the same prompt again: {runner.reuse(ids)} of {len(ids)} tokens are reused")
    runner.rollback(mark)
    print(f"after a rollback the logits differ by {float(mx.abs(before - runner.prefill(ids[shared:])).max()):g}")
    other = [*ids[: shared - 1], *(i ^ 1 for i in ids[shared - 1 :])]
    print(f"{runner.reuse(other)} of the first {shared - 1} tokens are reused that another prompt shares")


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, _) -> None:
        describe(runner)
        ids = answer(runner, args)
        show_memory(runner, ids)
        show_reuse(runner, ids)

    run("qwen", args, show)


if __name__ == "__main__":
    main()
