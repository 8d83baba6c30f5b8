"""One report of this machine to paste into an issue: that every kernel is right, how fast it is, and a model's speed.

python benchmarks/report.py                        # smollm2-135m, pulled if need be
python benchmarks/report.py --model none           # kernels only
python benchmarks/report.py --kernels reference --output report.md

It takes a minute or two. Run it on an otherwise idle machine; on a laptop, connected to power.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
import numpy as np
from decode import PASSAGE, our_speeds
from kernels import Report, matrix, normal
from measure import by_mlx, interleaved

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kernels.report import Comparison, compare, device_name  # noqa: E402
from turbospark_mlx import custom_kernels as ck  # noqa: E402
from turbospark_mlx.custom_kernels.backends import Backend  # noqa: E402

REPEATS = {"gpu": 50, "cpu": 5}
"""Calls in one graph."""


def command(*words: str) -> str:
    """The first line that a command prints, or an empty text."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def machine(report: Report, backend: Backend) -> None:
    report("## Machine\n")
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "turbospark-mlx")]
    report(f"- {datetime.now(UTC):%Y-%m-%d}, {platform.platform()}, Python {platform.python_version()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    report(f"- {device_name(backend)}, {os.cpu_count()} cores, {memory:.0f} GiB")
    if backend.device == "gpu":
        report(f"- GPU: {', '.join(f'{key} {value}' for key, value in mx.device_info().items())}")
    report(f"- {', '.join(packages)}, commit {command('git', 'rev-parse', '--short', 'HEAD') or 'unknown'}")
    report(f"- kernels: {backend.name}, {backend.reason}")


def parity(report: Report, backend: Backend) -> bool:
    """Every variant against its reference, the worst of each op; whether all are within what is allowed."""
    report("\n## Parity\n\n| op | variants | worst error | allowed | |\n|---|---|---|---|---|")
    found: dict[str, list[Comparison]] = {}
    for comparison in compare(backend):
        found.setdefault(comparison.op, []).append(comparison)
    for op, comparisons in sorted(found.items()):
        # An error that is not a number is the worst there is.
        worst = min(comparisons, key=lambda c: c.tolerance - c.error if c.error == c.error else -np.inf)
        verdict = "ok" if worst.good else f"**WRONG** {worst.arguments}"
        report(f"| {op} | {len(comparisons)} | {worst.error:.1e} | {worst.tolerance:.0e} | {verdict} |")
    if not found:
        report("| none | | | | this back end runs no kernels |")
    return all(comparison.good for comparisons in found.values() for comparison in comparisons)


def cases(backend: Backend, dtype: mx.Dtype) -> dict[str, tuple[Callable[[], mx.array], Callable[[], mx.array]]]:
    """Per op: ours, and what MLX has built in for the same. The sizes are those of a layer with 4,096 columns."""
    width, heads, kv_heads, head_dim, keys = 4096, 32, 8, 128, 2048
    x, stream, weight = (
        normal(1, 1, width, dtype=dtype),
        normal(2, 1, width, dtype=dtype),
        normal(3, width, dtype=dtype),
    )
    group_size = 64
    square, stacked = (matrix(rows, width, 4, group_size, dtype) for rows in (width, 2 * 14336))
    table, head = (matrix(32000, width, 4, group_size, dtype) for _ in range(2))
    plain = normal(4, width, width, dtype=dtype)
    q = normal(5, 1, heads, 1, head_dim, dtype=dtype)
    k, v = (normal(seed, 1, kv_heads, keys, head_dim, dtype=dtype) for seed in (6, 7))
    qkv = normal(8, 1, 1, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    rotation = ck.rotation_table(1e4 ** (-np.arange(head_dim // 2) / (head_dim // 2)), 5, 1)
    ids = mx.array([[1234]], dtype=mx.uint32)
    mx.eval(x, stream, weight, square, stacked, table, head, plain, q, k, v, qkv, rotation, ids)
    packed, ours = {"bits": 4, "group_size": group_size}, {"backend": backend}
    product = lambda m: mx.quantized_matmul(x, *m, transpose=True, **packed)  # noqa: E731

    def mlx_gated():
        gate, up = mx.split(product(stacked), 2, axis=-1)
        return gate * mx.sigmoid(gate) * up

    def mlx_epilogue():
        split = qkv.reshape(1, 1, -1, head_dim).swapaxes(1, 2)
        turned = mx.fast.rope(split[:, : heads + kv_heads], head_dim, traditional=False, base=1e4, scale=1.0, offset=5)
        return mx.concatenate([turned, split[:, heads + kv_heads :]], axis=1)

    return {
        "rms_norm 4096": (
            lambda: ck.rms_norm(x, weight, eps=1e-5, **ours),
            lambda: mx.fast.rms_norm(x, weight, 1e-5),
        ),
        "add_rms_norm 4096": (
            lambda: ck.add_rms_norm(x, stream, weight, eps=1e-5, **ours)[0],
            lambda: mx.fast.rms_norm(x + stream, weight, 1e-5),
        ),
        "affine_matmul int4 4096 x 4096": (
            lambda: ck.affine_matmul(x, *square, **packed, **ours),
            lambda: product(square),
        ),
        "gated_affine_matmul int4 14336 x 4096": (
            lambda: ck.gated_affine_matmul(x, *stacked, **packed, **ours),
            mlx_gated,
        ),
        "greedy_head int4 32000 x 4096": (
            lambda: ck.greedy_head(x, *head, **packed, **ours),
            lambda: mx.argmax(product(head), axis=-1),
        ),
        "affine_embedding int4 32000 x 4096": (
            lambda: ck.affine_embedding(ids, *table, **packed, dtype=dtype, **ours),
            lambda: mx.dequantize(*(part[ids] for part in table), **packed),
        ),
        "dense_matmul 4096 x 4096": (lambda: ck.dense_matmul(x, plain, **ours), lambda: x @ plain.T),
        "qkv_epilogue 32/8 x 128": (
            lambda: ck.qkv_epilogue(qkv, rotation, heads=heads, kv_heads=kv_heads, **ours)[0],
            mlx_epilogue,
        ),
        "attention 32/8 x 128 over 2048 keys": (
            lambda: ck.attention(q, k, v, scale=0.1, **ours),
            lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1),
        ),
    }


def times(report: Report, backend: Backend) -> None:
    repeats = REPEATS[backend.device]
    report(f"\n## Time of one call, of {repeats} in one graph\n\n| op | ours us | mlx us | ratio |\n|---|---|---|---|")
    dtype = mx.bfloat16 if backend.device == "gpu" else mx.float32
    for name, (ours, theirs) in cases(backend, dtype).items():
        seconds = interleaved(
            {
                "ours": by_mlx(lambda ours=ours: [ours() for _ in range(repeats)]),
                "mlx": by_mlx(lambda theirs=theirs: [theirs() for _ in range(repeats)]),
            }
        )
        a, b = (seconds[key] / repeats * 1e6 for key in ("ours", "mlx"))
        report(f"| {name} | {a:.1f} | {b:.1f} | {b / a:.2f} |")


def decoding(report: Report, name: str, kernels: str) -> None:
    from turbospark_mlx import Runner
    from turbospark_mlx.store import resolve

    path = resolve(name)
    report(f"\n## {path.name}: tokens a second, 64 of a prompt and 32 new ones, median of 3\n")
    report("| engine | prefill | decode |\n|---|---|---|")
    with Runner.open(path, kernels=kernels) as runner:
        prompt = runner.tokenizer.encode(PASSAGE.read_text())[:64]
        subjects = {f"turbospark-mlx, {kernels}": lambda: our_speeds(runner, prompt, 32)}
        if importlib.util.find_spec("mlx_lm"):
            from peers import mlx_lm_model, mlx_lm_speeds

            peer = mlx_lm_model(path, None)
            subjects["mlx-lm"] = lambda: mlx_lm_speeds(peer, prompt, 32)
        for label, measure in subjects.items():
            measure()
            prefill, decode = np.median([measure() for _ in range(3)], axis=0)
            report(f"| {label} | {prefill:.1f} | {decode:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto", help="back end; see turbospark_mlx.custom_kernels.backends.select")
    parser.add_argument("--model", default="smollm2-135m", help="alias or install directory, or none")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    args = parser.parse_args()
    backend = ck.backends.select(args.kernels)
    report = Report()
    report("# turbospark-mlx report\n")
    machine(report, backend)
    good = parity(report, backend)
    times(report, backend)
    if args.model != "none":
        decoding(report, args.model, args.kernels)
    if args.output:
        args.output.write_text("\n".join(report.lines) + "\n", encoding="utf-8")
    if not good:
        raise SystemExit("some kernels are wrong")


if __name__ == "__main__":
    main()
