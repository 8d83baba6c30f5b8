"""An op as its own code and the user's table see it: its kernels, and when they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.custom_kernels.backends.kernel import Kernel


def spell_arrays(given: Mapping[str, mx.array]) -> str:
    """Names, dtypes and shapes, for an error about arrays that do not fit each other."""
    return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in given.items())


@dataclass(frozen=True)
class Op:
    """One op of this package.

    ``name`` is what it is counted as. Its ``kernels`` take up to ``rows`` rows (None: any number), where what ``only``
    says in words is so. Elsewhere it runs by MLX, on a CPU by ``cpu`` (a path of `Backend.counters`), or is not called:
    callers take ``instead``, the name of another op. ``device`` is the only one on which the kernels are worth it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    rows: int | None = None
    only: str = ""
    cpu: str = "mlx"
    instead: str | None = None
    device: str | None = None

    def refusal(self, backend: Backend, *dtypes: mx.Dtype, rows: int = 1) -> str | None:
        """Why the kernels do not take activations of these dtypes, in a few words; None where they do."""
        if backend.launch is None:
            return f"{backend.name} has no kernels"
        if backend.device == "cpu" and any(dtype != mx.float32 for dtype in dtypes):
            return "on a CPU kernels compute in float32"
        if self.device not in (None, backend.device):
            return f"its kernel is for a {self.device.upper()}"
        if self.rows is not None and rows > self.rows:
            return f"its kernel takes up to {self.rows} rows"
        return None

    def serves(self, backend: Backend, *dtypes: mx.Dtype, rows: int = 1) -> bool:
        """Whether the kernels take activations of these dtypes."""
        return self.refusal(backend, *dtypes, rows=rows) is None

    def ways(self, device: str, *, compiled: bool) -> tuple[str, ...]:
        """How it runs on a back end of ``device``, ``compiled`` or without kernels: the first way, and what is left."""
        otherwise = self.instead or (self.cpu if device == "cpu" else "mlx")
        if not compiled or self.device not in (None, device):
            return (otherwise,)
        return ("kernel",) if self.rows is None and not self.only else ("kernel", otherwise)
