"""gpt-oss, from an install to tokens: which layers see how far, what the sinks take, which experts a token meets, and
what is read from disk where experts are streamed.

python examples/gpt_oss.py                                   # makes a tiny random model: the workings, not English
python examples/gpt_oss.py --variant gpt-oss-plain           # other switches; --variant list shows them all
python examples/gpt_oss.py --model gpt-oss-20b.gturbo --prompt "Why is the sky blue?" --tokens 200
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
from common import answer, options, prompt_ids, run

from turbospark_mlx import Runner
from turbospark_mlx.families.layers import Positions
from turbospark_mlx.families.moe import route


def show_layers(runner: Runner, ids: list[int]) -> None:
    """One pass, a layer at a time: what each router chose, and what the layer's sinks are."""
    model, config = runner.model, runner.model.args
    x = model.model.embed_tokens(mx.array([ids])).astype(model.dtype)
    for number, layer in enumerate(model.layers):
        attended = layer.self_attn(x, Positions(0, len(ids)), norm=layer.input_layernorm, residual=x)
        rows = layer.post_attention_layernorm(attended).reshape(-1, config.hidden_size)
        options = {"normalize": True, "backend": model.backend}
        indices, _ = route(layer.mlp.router, rows, config.num_experts_per_tok, **options)
        counts = Counter(np.array(indices).reshape(-1).tolist())
        sinks = layer.self_attn["sinks"].astype(mx.float32)
        sees = f"the last {config.sliding_window}" if config.slides(number) else "all"
        most = ", ".join(f"{expert} ({uses}x)" for expert, uses in counts.most_common(3))
        print(
            f"layer {number:2}: sees {sees:12} sinks {float(sinks.min()):5.2f} to {float(sinks.max()):5.2f},"
            f" {len(counts)} of {config.num_experts} experts: {most}"
        )
        x = layer(x)
    print()


def show_streaming(path: Path, ids: list[int]) -> None:
    """Where experts live changes no bit of the answer, only what is read."""
    found = {}
    for residency in ("resident", "streamed"):
        with Runner.open(path, residency=residency) as runner:
            logits = [np.array(runner.prefill(ids)), np.array(runner.decode(ids[0]))]
            found[residency] = logits
            counters = runner.report().expert_counters
    off = max(np.abs(a - b).max() for a, b in zip(found["resident"], found["streamed"], strict=True))
    print(f"streamed logits differ by {off:g}; {counters.bytes_read / 1e6:.1f} MB of experts were read")


def main() -> None:
    args = options(__doc__).parse_args()

    def show(runner: Runner, path: Path) -> None:
        ids = prompt_ids(runner, args.prompt)
        show_layers(runner, ids)
        # Special tokens are shown: they part the channels, of which only ``final`` is meant for the user.
        answer(runner, args)
        if not args.model:
            show_streaming(path, ids)

    run("gpt_oss", args, show)


if __name__ == "__main__":
    main()
