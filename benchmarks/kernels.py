"""Our kernels beside MLX's own operations: first that they agree, then how fast they are. Run it on any machine.

python benchmarks/kernels.py                       # parity and timing for the back end of this machine
python benchmarks/kernels.py --sweep               # also: which launch sizes are fastest (GPUs)
python benchmarks/kernels.py --report report.md    # write the same text to a file

Timings rotate through copies of a matrix (1 GB on a GPU, 256 MB on a CPU), so that no cache holds it; each figure is
the median of 7 repeats that alternate between ours and MLX's. Shares are of the bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels import gemv, rotary, sdpa
from turbospark_mlx.custom_kernels.backends import Backend, kernel

REPEATS = 7
LARGE = ((14336, 4096), (4096, 14336), (4096, 4096), (128256, 4096))
SIZES = tuple((r, s, p, a) for r in (1, 2, 4) for s in (4, 8) for p in (1, 4) for a in (2, 4))
"""Launch sizes to try: see `gemv.Sizes`."""
SMALL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))


class Report:
    """Prints lines and keeps them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures = 0

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def compare(self, name: str, found: mx.array, expected: np.ndarray, tolerance: float) -> None:
        found = np.array(found.astype(mx.float32)).astype(np.float64)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        good = bool(error <= tolerance)
        self.failures += not good
        name = name.replace("mlx.core.", "")
        self(f"| {name} | {error:.1e} | {tolerance:.0e} | {'ok' if good else '**WRONG**'} |")


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


def wide(a: mx.array | None) -> np.ndarray | None:
    return None if a is None else np.array(a.astype(mx.float32)).astype(np.float64)


def dequantized(parts: tuple[mx.array, ...], bits: int, group_size: int) -> np.ndarray:
    """The packed matrix in float64, from its bits."""
    weight, scales, biases = parts
    rows = weight.shape[0]
    stream = np.unpackbits(np.array(weight).view(np.uint8), axis=1, bitorder="little")
    grouped = (stream.reshape(rows, -1, bits) @ (1 << np.arange(bits))).reshape(rows, -1, group_size)
    return (wide(scales)[..., None] * grouped + wide(biases)[..., None]).reshape(rows, -1)


def product_parity(report: Report, backend: Backend, dtypes: dict[mx.Dtype, float]) -> None:
    for bits, group_size, companions in (
        *((bits, 64, mx.bfloat16) for bits in (2, 3, 4, 5, 6, 8)),
        (4, 32, mx.float16),
        (8, 128, mx.float32),
    ):
        for dtype, tolerance in dtypes.items():
            for rows, columns, out in ((1, 1056 // group_size * group_size, 130), (3, 640, 45), (8, 384, 301)):
                parts = matrix(out, columns, bits, group_size, companions)
                x = normal(1, rows, columns, dtype=dtype)
                y = ck.affine_matmul(x, *parts, bits=bits, group_size=group_size, backend=backend)
                name = f"int{bits} g{group_size} {companions} x {dtype} {rows} x [{out}, {columns}]"
                report.compare(name, y, wide(x) @ dequantized(parts, bits, group_size).T, tolerance)
    for dtype, tolerance in dtypes.items():
        parts = matrix(514, 14336, 4, 64, mx.bfloat16)
        full = dequantized(parts, 4, 64)
        for rows in (1, 5):
            x, norm = normal(2, rows, 14336, dtype=dtype), normal(3, 14336, dtype=dtype)
            bias, residual = normal(4, 514, dtype=dtype), normal(5, rows, 514, dtype=dtype)
            normalized = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 0.1) * wide(norm)
            options = {"bits": 4, "group_size": 64, "norm_weight": norm, "eps": 0.1}
            name = f"{rows} x [514, 14336] {dtype}"
            y = ck.affine_matmul(x, *parts, **options, bias=bias, residual=residual, backend=backend)
            report.compare(
                f"norm, bias, residual {name}", y, normalized @ full.T + wide(bias) + wide(residual), 2 * tolerance
            )
            gate, up = np.split(normalized @ full.T, 2, axis=-1)
            y = ck.gated_affine_matmul(x, *parts, **options, backend=backend)
            report.compare(
                f"norm, gated {name}", y, gate / (1 + np.exp(-np.clip(gate, -700, None))) * up, 4 * tolerance
            )
        ids = mx.array([[0, 513, 7]])
        rows = ck.affine_embedding(ids, *parts, bits=4, group_size=64, dtype=dtype, backend=backend)
        report.compare(f"embedding {dtype}", rows, full[np.array(ids)], tolerance)


def attention_parity(report: Report, backend: Backend, dtypes: dict[mx.Dtype, float]) -> None:
    for dtype, tolerance in dtypes.items():
        for heads, kv_heads, length, keys, head_dim, value_dim, window, sunk in (
            (1, 1, 1, 1, 64, 64, None, False),
            (8, 1, 1, 31, 128, 128, None, True),
            (8, 2, 3, 33, 64, 64, 7, True),
            (32, 8, 1, 1000, 128, 128, None, False),
            (32, 8, 1, 4097, 128, 128, None, True),
            (9, 3, 8, 4097, 64, 64, 1000, False),
            (16, 2, 1, 1000, 512, 512, None, False),
            (16, 1, 1, 1000, 576, 512, None, False),
            (3, 1, 2, 100, 80, 80, None, False),
        ):
            q = normal(6, 2, heads, length, head_dim, dtype=dtype)
            k = normal(7, 2, kv_heads, keys + 3, head_dim, dtype=dtype)[:, :, :keys]
            v = normal(8, 2, kv_heads, keys + 3, value_dim, dtype=dtype)[:, :, :keys]
            sinks = normal(9, heads, dtype=dtype) if sunk else None
            options = {"scale": head_dim**-0.5, "mask": "causal", "window": window, "sinks": sinks}
            y = ck.attention(q, k, v, **options, backend=backend)
            with mx.stream(mx.cpu):
                arrays = [mx.array(wide(a).astype(np.float32)) for a in (q, k, v)]
                options["sinks"] = None if sinks is None else mx.array(wide(sinks).astype(np.float32))
                expected = wide(sdpa.attention_reference(*arrays, **options))
            name = (
                f"attention {heads}/{kv_heads} x {length} over {keys} D {head_dim}/{value_dim} window {window} {dtype}"
            )
            report.compare(name, y, expected, tolerance)
        for normed in (False, True):
            qkv = normal(10, 2, 3, 48 * 64, dtype=dtype)
            rotation = mx.array(ck.rotation_table(1e4 ** (-np.arange(32) / 32), 5, 3))
            norms = {"q_norm": normal(11, 64, dtype=dtype), "k_norm": normal(12, 64, dtype=dtype), "eps": 0.1}
            sizes = {"heads": 32, "kv_heads": 8} | (norms if normed else {})
            found = ck.qkv_epilogue(qkv, rotation, **sizes, backend=backend)
            exact = {k: v.astype(mx.float32) if isinstance(v, mx.array) else v for k, v in sizes.items()}
            expected = rotary.qkv_epilogue_reference(qkv.astype(mx.float32), rotation, **exact)
            for part, a, b in zip(("q", "kv"), found, expected, strict=True):
                report.compare(f"qkv epilogue {part} norm {normed} {dtype}", a, wide(b), tolerance)


def interleaved(functions: dict[str, Callable[[], list[mx.array]]]) -> dict[str, float]:
    """Median seconds of each function's work, which is evaluated in one go."""
    for function in functions.values():
        for _ in range(2):
            mx.eval(function())
    times = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            mx.eval(function())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def memory_bandwidth(total: int, on_gpu: bool) -> tuple[str, float]:
    """What was done to measure it, and bytes a second."""
    if on_gpu:
        a = mx.ones((total // 4,), mx.float32)
        mx.eval(a)
        return "a large a + 1 reads and writes", 2 * a.nbytes / interleaved({"add": lambda: [a + 1.0]})["add"]
    x, y = (np.ones(total // 8, np.float32) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        np.dot(x, y)
        times.append(time.perf_counter() - start)
    return "a large dot product of the BLAS reads", (x.nbytes + y.nbytes) / statistics.median(times)


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


def product_speed(
    report: Report, backend: Backend, out: int, columns: int, total: int, bits: int, dtype: mx.Dtype, bandwidth: float
) -> None:
    group_size, companions = (64, dtype) if backend.device == "gpu" else (32, mx.float16)
    options = {"bits": bits, "group_size": group_size}
    copies, size = copies_of(matrix(out, columns, bits, group_size, companions), total)
    x = normal(1, 1, columns, dtype=dtype)
    mx.eval(x)
    seconds = interleaved(
        {
            "ours": lambda: [ck.affine_matmul(x, *parts, **options, backend=backend) for parts in copies],
            "mlx": lambda: [mx.quantized_matmul(x, *parts, transpose=True, **options) for parts in copies],
        }
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
        arguments = (backend.name, x.shape, 1, out, 4, 64, gemv.Form(), dtype, dtype, None, None)
        call = gemv.plan(*arguments, gemv.Sizes(*sizes))
        calls["rows {}, simdgroups {}, passes {}, ahead {}".format(*sizes)] = call
    seconds = interleaved(
        {
            name: lambda call=call: [backend.launch(call, (*parts, x, None, None, None))[0] for parts in copies]
            for name, call in calls.items()
        }
    )
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
    seconds = interleaved(
        {
            "ours": lambda: [ck.cache_attention(q, c, start, scale=scale, backend=backend) for c in caches],
            "mlx": lambda: [mx.fast.scaled_dot_product_attention(q, c[0], c[1], scale=scale) for c in caches],
        }
    )
    rate(report, f"attention {heads}/{kv_heads} D {head_dim} over {keys} keys", count, size, seconds, bandwidth)


def source_hashes() -> dict[str, str]:
    """What was measured: a short hash of each kernel's text."""
    files = sorted(kernel.METAL.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto", help="back end; see turbospark_mlx.custom_kernels.backends.select")
    parser.add_argument("--sweep", action="store_true", help="try other launch sizes (GPUs)")
    parser.add_argument("--parity-only", action="store_true")
    parser.add_argument("--report", type=Path, help="write the report to this file")
    args = parser.parse_args()

    backend = ck.backends.select(args.kernels)
    on_gpu = backend.device == "gpu"
    device = (
        mx.device_info().get("device_name", platform.processor() or platform.machine())
        if on_gpu
        else platform.machine()
    )
    report = Report()
    report(f"{datetime.now(UTC):%Y-%m-%d}, {device}, mlx {mx.__version__}, back end {backend.name}: {backend.reason}")
    report("sources: " + ", ".join(f"{name} {digest}" for name, digest in source_hashes().items()))

    dtypes = {mx.float32: 1e-5}
    if on_gpu:
        dtypes |= {mx.float16: 5e-3, mx.bfloat16: 1e-2}
    report("\n## Parity\n\n| op | error relative to the largest | allowed | |\n|---|---|---|---|")
    product_parity(report, backend, dtypes)
    attention_parity(report, backend, dtypes)
    report(f"\n{report.failures} wrong; paths taken: {dict(backend.counters)}")

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
    if report.failures:
        raise SystemExit(f"{report.failures} comparisons are out of tolerance")


if __name__ == "__main__":
    main()
