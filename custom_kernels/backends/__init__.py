"""Where kernels run, and the one place that chooses."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import cuda, host, metal
from turbospark_mlx.custom_kernels.backends.kernel import Launch
from turbospark_mlx.errors import BackendError

KERNELS = ("auto", "metal", "cuda", "host", "reference")
DEVICES = {"metal": "gpu", "cuda": "gpu", "host": "cpu"}
"""What the back ends with kernels of ours run on; ``"reference"`` runs on MLX's default device."""
NEEDS = {"metal": "an Apple GPU", "cuda": "an NVIDIA GPU and mlx[cuda13]"}


@dataclass(frozen=True)
class Backend:
    """What was chosen to run the ops, and how often each way of running each op was taken.

    ``device`` is ``"cpu"`` or ``"gpu"``. ``reason`` is one sentence for the user. ``launch`` runs one of our kernels,
    with None for an input that is left out, or is None where there are none. Where kernels are compiled ahead,
    ``prepare`` does it for one and ``rehearse`` for all of some passes, which it calls without computing anything;
    it is None where passes have to be run for that. ``graphs`` says that a run of kernels can be recorded as a
    `cuda_graph.GraphRecording`.
    ``counters`` maps ``(op, path)`` to a number of calls, where path is ``"kernel"``, ``"mlx"`` (plain mlx) or
    ``"blas"`` (numpy's BLAS, on a CPU).
    """

    name: str
    device: str
    reason: str
    launch: Callable[[Launch, tuple[mx.array | None, ...]], list[mx.array]] | None = field(
        default=None, compare=False, repr=False
    )
    prepare: Callable[[Launch], None] = field(default=lambda call: None, compare=False, repr=False)
    rehearse: Callable[[Iterable[Callable[[], object]]], None] | None = field(default=None, compare=False, repr=False)
    graphs: bool = field(default=False, compare=False)
    counters: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False, repr=False)

    def count(self, op: str, path: str) -> None:
        self.counters[op, path] += 1


def select(kernels: str = "auto") -> Backend:
    """Choose the back end for ``kernels``: ``"auto"``, ``"metal"``, ``"cuda"``, ``"host"`` or ``"reference"``.

    ``"auto"`` takes the one of MLX's default device; on a CPU without a C++ compiler it takes ``"reference"`` and says
    what to install. For debugging, the environment variable ``TURBOSPARK_KERNELS`` says what ``"auto"`` takes. Raises
    BackendError for a name that does not exist or that cannot run on this machine.
    """
    if kernels == "auto":
        kernels = os.environ.get("TURBOSPARK_KERNELS") or "auto"
    if kernels not in KERNELS:
        raise BackendError(f"kernels={kernels!r}: no such back end; choose one of {', '.join(KERNELS)}")
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    available = {"metal": on_gpu and mx.metal.is_available(), "cuda": on_gpu and mx.cuda.is_available()}
    if kernels == "auto":
        kernels = next((name for name, there in available.items() if there), "reference" if on_gpu else "host")
        if kernels == "host":
            try:
                return Backend("host", DEVICES["host"], host.describe(), host.launch, host.prepare, host.rehearse)
            except BackendError as error:
                return Backend("reference", "cpu", f"MLX's own operations and numpy's BLAS, because {error}")
    if kernels in available:
        if not available[kernels]:
            raise BackendError(
                f"kernels={kernels!r} needs {NEEDS[kernels]}; MLX's default device here is {mx.default_device()}: "
                "try kernels='auto'"
            )
        launch = metal.launch if kernels == "metal" else cuda.launch
        reason = f"our kernels through mx.fast.{kernels}_kernel"
        return Backend(kernels, DEVICES[kernels], reason, launch, graphs=kernels == "cuda")
    if kernels == "host":
        if on_gpu:
            raise BackendError("kernels='host' runs on a CPU; call mlx.core.set_default_device(mlx.core.cpu) first")
        return Backend("host", DEVICES["host"], host.describe(), host.launch, host.prepare, host.rehearse)
    return Backend(
        "reference", "gpu" if on_gpu else "cpu", "MLX's own operations" + ("" if on_gpu else " and numpy's BLAS")
    )


def survey() -> dict[str, Backend | str]:
    """For each back end but ``"auto"``: what `select` gives for it on this machine, or the reason why it cannot run."""
    found: dict[str, Backend | str] = {}
    for name in KERNELS[1:]:
        try:
            found[name] = select(name)
        except BackendError as error:
            found[name] = str(error)
    return found
