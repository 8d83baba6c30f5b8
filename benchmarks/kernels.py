"""Our kernels beside MLX's own operations: first that they agree, then how fast they are. Run it on any machine.

python benchmarks/kernels.py                       # parity and timing for the back end of this machine
python benchmarks/kernels.py --sweep               # also: which launch sizes are fastest (GPUs)
python benchmarks/kernels.py --report report.md    # write the same text to a file
python benchmarks/kernels.py --parity-only --parity-report docs/parity/NAME.json   # --changed-only: what is behind

Timings rotate through copies of a matrix (1 GB on a GPU, 256 MB on a CPU), so that no cache holds it; each figure is
the median of 7 repeats that alternate between ours and MLX's. On a GPU all copies are one graph: MLX's a compiled one,
and ours what a decode step is there, which on CUDA is recorded once. Shares are of the bandwidth measured in the same
run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np
from measure import IN_A_ROW, by_mlx, by_steps, interleaved, memory_bandwidth

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import gemv
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Launch

# The variants and their comparison are the tests'; a script's own folder is all that Python looks in by itself.
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kernels.report import comparable, compare, device_name, document, still_true, write

LARGE = ((14336, 4096), (4096, 14336), (4096, 4096), (128256, 4096))
SIZES = tuple((r, s, p, a) for r in (1, 2, 4) for s in (4, 8) for p in (1, 4) for a in (2, 4))
"""Launch sizes to try: see `gemv.Sizes`."""
SMALL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))


class Report:
    """Prints lines and keeps them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)


def matrix(rows: int, columns: int, bits: int, group_size: int, companions: mx.Dtype) -> tuple[mx.array, ...]:
    rng = np.random.default_rng(rows + columns + bits)
    weight = mx.array(rng.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32))
    scales = mx.array(rng.normal(size=(rows, columns // group_size)).astype(np.float32) / 2**bits).astype(companions)
    biases = mx.array(rng.normal(size=(rows, columns // group_size)).astype(np.float32)).astype(companions)
    mx.eval(weight, scales, biases)
    return weight, scales, biases


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def parity(report: Report, backend: Backend, target: Path | None, changed_only: bool) -> bool:
    """Every variant beside its reference; whether all agree. ``target`` is where the report to commit goes;
    ``changed_only`` keeps what that says of kernels whose text has not changed since."""
    known = {}
    if changed_only:
        before = json.loads(target.read_text(encoding="utf-8"))
        if not comparable(before, backend):
            raise SystemExit(f"{target} is of another machine or other versions: make all of it anew")
        known = still_true(before)
    report("\n## Parity\n\n| op | arguments | error relative to the largest | allowed | |\n|---|---|---|---|---|")
    comparisons = []
    for found in compare(backend, known):
        comparisons.append(found)
        verdict = "ok" if found.good else "**WRONG**"
        report(f"| {found.op} | {found.arguments} | {found.error:.1e} | {found.tolerance:.0e} | {verdict} |")
    wrong = sum(not found.good for found in comparisons)
    report(f"\n{wrong} of {len(comparisons)} are wrong")
    if target is not None:
        write(target, document(backend, comparisons))
    return wrong == 0


def rate(report: Report, name: str, count: int, size: int, seconds: dict[str, float], bandwidth: float) -> None:
    ours, theirs = seconds["ours"] / count, seconds["mlx"] / count
    speed = size / ours
    report(
        f"| {name} | {ours * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / ours:.2f} | {speed / 1e9:.1f} "
        f"| {speed / bandwidth:.0%} |"
    )


def copies_of(parts: tuple[mx.array, ...], total: int) -> tuple[list[tuple[mx.array, ...]], int]:
    """As many copies of a matrix as make ``total`` bytes, and the bytes of one."""
    size = sum(part.nbytes for part in parts)
    copies = [tuple(mx.array(part) for part in parts) for _ in range(max(2, total // size))]
    mx.eval(copies)
    return copies, size


def beside(
    ours: Callable[[], list[mx.array]],
    theirs: Callable[[], list[mx.array]],
    known: Sequence[mx.array],
    backend: Backend,
) -> dict[str, float]:
    """Seconds of both. On a GPU ours run as in a decode step, MLX's as one compiled graph."""
    if backend.device == "cpu":
        return interleaved({"ours": by_mlx(ours), "mlx": by_mlx(theirs)})
    works = {"ours": by_steps(ours, known, backend), "mlx": by_mlx(theirs, compiled=True)}
    return interleaved(works, in_a_row=IN_A_ROW)


def product_speed(
    report: Report, backend: Backend, out: int, columns: int, total: int, bits: int, dtype: mx.Dtype, bandwidth: float
) -> None:
    group_size, companions = (64, dtype) if backend.device == "gpu" else (32, mx.float16)
    options = {"bits": bits, "group_size": group_size}
    copies, size = copies_of(matrix(out, columns, bits, group_size, companions), total)
    x = normal(1, 1, columns, dtype=dtype)
    mx.eval(x)
    seconds = beside(
        lambda: [ck.affine_matmul(x, *parts, **options, backend=backend) for parts in copies],
        lambda: [mx.quantized_matmul(x, *parts, transpose=True, **options) for parts in copies],
        [x, *chain(*copies)],
        backend,
    )
    rate(report, f"int{bits} {out} x {columns}", len(copies), size, seconds, bandwidth)


def sweep(
    report: Report, backend: Backend, out: int, columns: int, total: int, dtype: mx.Dtype, bandwidth: float
) -> None:
    """The same INT4 product with other launch sizes."""
    copies, size = copies_of(matrix(out, columns, 4, 64, dtype), total)
    x = normal(1, 1, columns, dtype=dtype)
    mx.eval(x)
    calls = {}
    for sizes in SIZES:
        arguments = (backend.name, x.shape, 1, out, 4, 64, gemv.Form(), dtype, gemv.Dtypes.alike(dtype), None, None)
        call = gemv.plan(*arguments, gemv.Sizes(*sizes))
        calls["rows {}, simdgroups {}, passes {}, ahead {}".format(*sizes)] = call
    known = [x, *chain(*copies)]

    def launched(call: Launch) -> list[mx.array]:
        return [backend.launch(call, (*parts, x, None, None, None, None))[0] for parts in copies]

    works = {name: by_steps(partial(launched, call), known, backend) for name, call in calls.items()}
    seconds = interleaved(works, in_a_row=IN_A_ROW)
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        speed = size * len(copies) / value
        microseconds = value / len(copies) * 1e6
        report(f"| {out} x {columns}: {name} | {microseconds:.1f} | {speed / 1e9:.1f} | {speed / bandwidth:.0%} |")


def attention_speed(
    report: Report,
    backend: Backend,
    sizes: tuple[int, int, int, int],
    total: int,
    dtype: mx.Dtype,
    bandwidth: float,
) -> None:
    heads, kv_heads, head_dim, keys = sizes
    size = 2 * kv_heads * keys * head_dim * dtype.size
    count = max(2, min(200, total // size))
    caches = [normal(i, 2, 1, kv_heads, keys, head_dim, dtype=dtype) for i in range(count)]
    q = normal(1, 1, heads, 1, head_dim, dtype=dtype)
    start = mx.array([keys - 1], mx.int32)
    mx.eval(caches, q, start)
    scale = head_dim**-0.5
    seconds = beside(
        lambda: [ck.cache_attention(q, c, start, scale=scale, backend=backend) for c in caches],
        lambda: [mx.fast.scaled_dot_product_attention(q, c[0], c[1], scale=scale) for c in caches],
        [q, start, *caches],
        backend,
    )
    rate(report, f"attention {heads}/{kv_heads} D {head_dim} over {keys} keys", count, size, seconds, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto", help="back end; see turbospark_mlx.custom_kernels.backends.select")
    parser.add_argument("--sweep", action="store_true", help="try other launch sizes (GPUs)")
    parser.add_argument("--parity-only", action="store_true")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--parity-report", type=Path, metavar="FILE", help="write the parity report to commit (JSON)")
    parser.add_argument(
        "--changed-only", action="store_true", help="compare only kernels whose text has changed since that report"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all that is printed to this file")
    args = parser.parse_args()
    if args.changed_only and not (args.parity_report and args.parity_report.is_file()):
        parser.error("--changed-only is about a --parity-report that exists")

    backend = ck.backends.select(args.kernels)
    if backend.launch is None:
        raise SystemExit(f"{backend.name} has no kernels: {backend.reason}")
    on_gpu = backend.device == "gpu"
    report = Report()
    name = f"{datetime.now(UTC):%Y-%m-%d}, {device_name(backend)}"
    report(f"{name}, mlx {mx.__version__}, back end {backend.name}: {backend.reason}")
    agree = args.speed_only or parity(report, backend, args.parity_report, args.changed_only)

    if not args.parity_only:
        total = 1 << 30 if on_gpu else 1 << 28
        measured, bandwidth = memory_bandwidth(total, on_gpu)
        report(f"\n## Speed\n\nMemory: {measured} {bandwidth / 1e9:.1f} GB/s.\n")
        head = "| op | ours us | mlx us | ratio | ours GB/s | share |\n|---|---|---|---|---|---|"
        for dtype in (mx.float16, mx.bfloat16) if on_gpu else (mx.float32,):
            report(f"\nActivations {str(dtype).removeprefix('mlx.core.')}\n\n{head}")
            for bits in (4, 8):
                for out, columns in LARGE if on_gpu else SMALL:
                    product_speed(report, backend, out, columns, total, bits, dtype, bandwidth)
            large = [(32, 8, 128, n) for n in (512, 4096, 32768)] + [(16, 2, 512, 4096)]
            for sizes in [*(large if on_gpu else []), *((9, 3, 64, n) for n in (100, 1000, 4000))]:
                attention_speed(report, backend, sizes, total // 4, dtype, bandwidth)
        if args.sweep and on_gpu:
            report("\n## Launch sizes\n\n| product | us | GB/s | share |\n|---|---|---|---|")
            for out, columns in LARGE:
                sweep(report, backend, out, columns, total, mx.bfloat16, bandwidth)
    if args.report:
        args.report.write_text("\n".join(report.lines) + "\n", encoding="utf-8")
    if not agree:
        raise SystemExit("comparisons are out of tolerance")


if __name__ == "__main__":
    main()
