"""Kernels beside their references on the machine at hand, as a report that is committed.

A report names the back end and the machine, a hash of all the text that each kernel is compiled from, and for every
variant the error relative to the largest expected value. It is stale for kernels whose text has changed since.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path

import mlx.core as mx

from tests.kernels import parity
from tests.kernels.variants import awkward, variants
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels.backends import DEVICES, Backend, cuda
from turbospark_mlx.custom_kernels.backends.kernel import METAL, Kernel

BACKENDS = METAL.parent / "backends"
SHIMS = {"metal": METAL / "prelude.h", "cuda": BACKENDS / "cuda.cuh", "host": BACKENDS / "host.h"}
HALF = 5e-3
"""What a result may be off where half precision is involved: GPUs add a few products of halves in half precision."""
CHAIN = 2.0
"""What a chain of operations, an activation behind a product, is allowed more."""
KERNELS = {kernel.name: kernel for op in ck.OPS for kernel in op.kernels}


@dataclass(frozen=True)
class Comparison:
    """One variant: what was called, which kernels that launched with which parameters, and how far off it was."""

    op: str
    arguments: str
    launches: list[str]
    error: float
    tolerance: float

    @property
    def subject(self) -> tuple[str, str, tuple[str, ...]]:
        """What was compared."""
        return self.op, self.arguments, tuple(self.launches)

    @property
    def good(self) -> bool:
        return self.error <= self.tolerance


def fingerprint(kernel: Kernel, backend: str) -> str:
    """A hash of the text that a back end compiles a kernel from: shims, headers and body."""
    files = [SHIMS[backend]]
    for name in kernel.headers:
        own = [path for path in BACKENDS.glob(f"{backend}_{name}.*") if path.suffix in (".h", ".cuh")]
        files += own or [METAL / f"{name}.h"]
    text = "\0".join([*(path.read_text(encoding="utf-8") for path in files), kernel.source])
    return hashlib.sha256((cuda.translate(text) if backend == "cuda" else text).encode()).hexdigest()


def still_true(report: dict) -> dict[tuple, Comparison]:
    """The comparisons of kernels whose text is what it was, by what they compare."""
    behind, every = set(stale(report)), (Comparison(**row) for row in report["variants"])
    return {c.subject: c for c in every if behind.isdisjoint(launch.partition(" ")[0] for launch in c.launches)}


def comparable(report: dict, backend: Backend) -> bool:
    """Whether a report is of this back end, machine and MLX."""
    made = document(backend, [])
    return all(report[fact] == made[fact] for fact in ("backend", "device", "versions"))


def compare(backend: Backend, known: Mapping[tuple, Comparison] | None = None) -> Iterator[Comparison]:
    """Every variant that takes a kernel on this back end, beside the reference back end in float32 on the CPU; those
    that are ``known`` (`still_true`) are not run again."""
    launches: list[str] = []
    runs = True

    def launch(call, inputs):
        parameters = " ".join(f"{name}={_spell(value)}" for name, value in call.template)
        launches.append(f"{call.kernel.name} {parameters}")
        if not runs:
            return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]
        return backend.launch(call, inputs)

    noting, reference = replace(backend, launch=launch), Backend("reference", "cpu", "")
    pairs = zip(chain(variants(noting), awkward(noting)), chain(variants(reference), awkward(reference)), strict=True)
    for (function, arrays), (defined, _) in pairs:
        noting.counters.clear()
        launches.clear()
        spelled = ", ".join(f"{_spell(a.dtype)} {list(a.shape)}" for a in arrays)
        if known:
            runs = False
            function(*arrays)
            runs = True
            subject = (", ".join(op for op, _ in noting.counters), spelled, tuple(launches))
            if subject in known:
                yield known[subject]
                continue
            noting.counters.clear()
            launches.clear()
        found = parity.outputs(function(*arrays))
        mx.eval(found)
        if {way for _, way in noting.counters} != {"kernel"}:
            continue
        worst = max(parity.errors(found, parity.reference(defined, arrays), arrays), key=_excess)
        allowed = worst[1] if mx.float16 not in [a.dtype for a in arrays] else max(worst[1], HALF * (worst[1] > 0))
        ops = [op for op, _ in noting.counters]
        yield Comparison(
            op=", ".join(ops),
            arguments=spelled,
            launches=list(launches),
            error=float(f"{worst[0]:.3g}"),
            tolerance=allowed * (CHAIN if ops[0].startswith("gated_") else 1),
        )


def _excess(pair: tuple[float, float]) -> float:
    """How far over what is allowed; NaN is as far as can be."""
    error, allowed = pair
    if not math.isfinite(error):
        return math.inf
    return error / max(allowed, 1e-30)


def _spell(value) -> str:
    return str(value).removeprefix("mlx.core.")


def device_name(backend: Backend) -> str:
    if backend.device == "gpu":
        return mx.device_info().get("device_name", "a GPU")
    names = [line for line in _cpu_lines() if line.startswith(("model name", "Model"))]
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def document(backend: Backend, comparisons: list[Comparison]) -> dict:
    """The report as a JSON object."""
    launched = {launch.partition(" ")[0] for comparison in comparisons for launch in comparison.launches}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "backend": backend.name,
        "device": device_name(backend),
        "reason": backend.reason,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("mlx", "numpy")},
        },
        "sources": {name: fingerprint(KERNELS[name], backend.name) for name in sorted(launched)},
        "variants": [asdict(comparison) for comparison in comparisons],
    }


def write(path: Path, report: dict) -> None:
    """A line a variant, so that a change of one shows as one."""
    *facts, (_, rows) = report.items()
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in facts]
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["{", *lines, '  "variants": [', body, "  ]", "}", ""]), encoding="utf-8")


def faults(report: dict) -> list[str]:
    """What is wrong with a report, whatever the kernels look like today."""
    try:
        if report["backend"] not in SHIMS or not all(isinstance(report[k], str) for k in ("date", "device", "reason")):
            return ["backend, date, device or reason is not what it should be"]
        comparisons = [Comparison(**row) for row in report["variants"]]
        launched = {launch.partition(" ")[0] for comparison in comparisons for launch in comparison.launches}
        if not launched or launched != set(report["sources"]):
            return ["sources are not those of the kernels that were launched"]
        return [
            f"{comparison.op} of {comparison.arguments}: {comparison.error:.1e} is over {comparison.tolerance:.0e}"
            for comparison in comparisons
            if not (math.isfinite(comparison.error) and comparison.good)
            or comparison.tolerance > CHAIN * max(parity.TOLERANCE.values())
        ]
    except (KeyError, TypeError, AttributeError) as error:
        return [f"{type(error).__name__}: {error}"]


def stale(report: dict) -> list[str]:
    """The kernels of its back end that the report does not speak of as they are today."""
    sources, backend = report["sources"], report["backend"]
    taken = {k.name: k for op in ck.OPS if op.device in (None, DEVICES[backend]) for k in op.kernels}
    return [name for name, kernel in taken.items() if sources.get(name) != fingerprint(kernel, backend)]
