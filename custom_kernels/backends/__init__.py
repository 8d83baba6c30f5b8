"""Where kernels run, and the one place that chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import mlx.core as mx

from turbospark_mlx.errors import BackendError

KERNELS = ("auto", "reference")


@dataclass(frozen=True)
class Backend:
    """What was chosen to run the ops, and how often each way of running each op was taken.

    ``device`` is ``"cpu"`` or ``"gpu"``. ``reason`` is one sentence for the user. ``counters`` maps ``(op, path)`` to a
    number of calls, where path is ``"mlx"`` (plain mlx) or ``"blas"`` (numpy's BLAS, on a CPU).
    """

    name: str
    device: str
    reason: str
    counters: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False, repr=False)

    def count(self, op: str, path: str) -> None:
        self.counters[op, path] += 1


def select(kernels: str = "auto") -> Backend:
    """Choose the back end for ``kernels``: ``"auto"`` or ``"reference"``.

    Raises BackendError for a name that does not exist or that cannot run on this machine.
    """
    if kernels not in KERNELS:
        raise BackendError(f"kernels={kernels!r}: no such back end; choose one of {', '.join(KERNELS)}")
    device = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    if device == "gpu":
        return Backend("reference", device, "MLX's own operations on its GPU")
    return Backend("reference", device, "MLX's own operations and numpy's BLAS on the CPU")
