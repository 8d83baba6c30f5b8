"""What a conversion did, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path

from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat


@dataclass
class RoleReport:
    """The tensors of one role. ``formats`` counts parameters by stored format; sizes are in bytes."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    squared_weights: float = 0.0
    squared_error: float = 0.0

    def add(self, shape: tuple[int, ...], form: str | PackedFormat, nbytes: int) -> None:
        """Count a tensor in."""
        self.tensors += 1
        self.parameters += prod(shape)
        self.nbytes += nbytes
        self.formats[describe(form)] += prod(shape)

    @property
    def relative_error(self) -> float | None:
        """rms(w - w') / rms(w) over the tensors that this conversion quantized; None where it quantized none."""
        return sqrt(self.squared_error / self.squared_weights) if self.squared_weights else None


@dataclass
class ConversionReport:
    """The result of ``convert``.

    ``dropped`` are tensors that are left out, ``exceptions`` tensors whose format is not the one that was asked for,
    ``ignored`` files, each with the reason; ``packed`` counts the tensors that are quantized, ``quantized`` those of
    which this conversion did it; ``lossy_values`` counts the values that narrowing to bfloat16 changed.
    """

    destination: Path
    model_id: str
    source_kind: str
    family: str
    roles: dict[str, RoleReport] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    quantized: int = 0
    packed: int = 0
    narrowed: int = 0
    lossy_values: int = 0
    cleared: int = 0
    seconds: float = 0.0

    @property
    def tensors(self) -> int:
        return sum(role.tensors for role in self.roles.values())

    @property
    def nbytes(self) -> int:
        return sum(role.nbytes for role in self.roles.values())

    @property
    def notes(self) -> list[str]:
        """What is not as it was asked for, a line each."""
        title = "not as asked" if self.packed else "warning: nothing was quantized"
        return [f"{title}: {name} ({reason})" for name, reason in _folded(self.exceptions)]

    @property
    def copied(self) -> int:
        """Tensors whose stored values are the source's, bit for bit."""
        return self.tensors - self.quantized - self.narrowed

    def __str__(self) -> str:
        lines = [f"{self.model_id} ({self.family}, {self.source_kind}) -> {self.destination}"]
        if self.cleared:
            lines.append("started clean: an earlier conversion to this destination had not finished")
        lines.append(
            f"{self.tensors} tensors, {self.nbytes:,} bytes in {self.seconds:.1f} s:"
            f" {self.copied} copied, {self.quantized} quantized, {self.narrowed} narrowed to bfloat16"
        )
        for name, role in self.roles.items():
            formats = ", ".join(f"{form} {share / role.parameters:.0%}" for form, share in role.formats.most_common())
            error = "" if role.relative_error is None else f"  relative error {role.relative_error:.4f}"
            lines.append(f"  {name:<14}{role.tensors:>5} tensors{role.nbytes:>16,} bytes  {formats}{error}")
        if self.lossy_values:
            lines.append(f"{self.lossy_values:,} values changed when they were narrowed to bfloat16")
        lines += self.notes
        for title, entries in (("left out", self.dropped), ("ignored", self.ignored)):
            lines += [f"{title}: {name} ({reason})" for name, reason in _folded(entries)]
        return "\n".join(lines)


def describe(form: str | PackedFormat) -> str:
    """A format in words."""
    if isinstance(form, Mxfp4Format):
        return "MXFP4"
    if isinstance(form, AffineFormat):
        return f"INT{form.bits} group {form.group_size} {form.companion_dtype}"
    return form


def _folded(entries: dict[str, str]) -> list[tuple[str, str]]:
    """One line a reason: a model has the same tensors in every layer."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in entries.items():
        by_reason.setdefault(reason, []).append(name)
    more = {reason: f" and {len(names) - 1} more" if len(names) > 1 else "" for reason, names in by_reason.items()}
    return [(names[0] + more[reason], reason) for reason, names in by_reason.items()]
