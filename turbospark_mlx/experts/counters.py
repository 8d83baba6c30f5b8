"""What streaming did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from turbospark_mlx.gturbo.files import spell_bytes


@dataclass
class ExpertCounters:
    """Sums since a layer's experts were opened.

    ``hits`` and ``misses`` count experts that were wanted, once a layer and chunk however many rows want them.
    ``bytes_read`` were asked of the file, ``read_seconds`` passed from requests to their last bytes, and for
    ``wait_seconds`` of them there was nothing else left to do.
    """

    hits: int = 0
    misses: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hits among all wanted; None where nothing was wanted."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else None

    def __add__(self, other: ExpertCounters) -> ExpertCounters:
        return ExpertCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        if self.hit_rate is None:
            return "nothing read yet"
        speed = f" at {spell_bytes(round(self.bytes_read / self.read_seconds))}/s" if self.read_seconds else ""
        return f"{self.hit_rate:.0%} hits, {spell_bytes(self.bytes_read)} read{speed}"
