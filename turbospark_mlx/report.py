"""What a runner says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from turbospark_mlx.experts import ExpertCounters, Resolved
from turbospark_mlx.gturbo.files import spell_bytes


@dataclass(frozen=True)
class Report:
    """What a runner resolved its options to. ``str()`` is a few lines for people. Sizes are in bytes.

    ``kv_bytes`` is what the caches take when the context is full, ``kv_bytes_now`` what they hold. ``operations`` maps
    ``(op, way it was run)`` to the number of calls so far; a decode step that runs as a whole counts when it is found.
    ``decode_step`` says how that is. ``experts`` says where routed experts live, and ``expert_counters`` what was read
    of them; None where there are none, or where they are parameters.
    """

    model_type: str
    parameters: int
    backend: str
    backend_reason: str
    device: str
    dtype: str
    fused: bool
    max_context: int
    context_reason: str
    trained_context: int
    prefill_chunk: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_now: int
    experts: Resolved | None
    expert_counters: ExpertCounters | None
    operations: dict[tuple[str, str], int]
    decode_step: str

    def __str__(self) -> str:
        ways = ", ".join(sorted(f"{op} by {way}" for op, way in self.operations))
        return "\n".join(
            (
                f"model      {self.model_type}, {self.parameters / 1e6:.1f} M parameters",
                f"back end   {self.backend} on the {self.device}: {self.backend_reason}",
                f"dtype      {self.dtype}, {'joint' if self.fused else 'plain mlx.nn'} matrices",
                f"memory     weights {spell_bytes(self.weight_bytes)}, caches {spell_bytes(self.kv_bytes)} when full,"
                f" {spell_bytes(self.kv_bytes_now)} now",
                f"context    {self.max_context} tokens ({self.context_reason}), trained for {self.trained_context},"
                f" prompts in chunks of {self.prefill_chunk}",
                *([f"experts    {self.experts}, {self.expert_counters}"] if self.experts else ()),
                f"operations {ways or 'none yet'}",
                f"decoding   {self.decode_step}",
            )
        )
