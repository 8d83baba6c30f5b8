"""Which expert is in which slot of a layer's cache, and which one gives way.

The rules are those of the elder engines, so that hit rates can be compared: a plan counts a use of every wanted expert
and takes slots from the others, and only experts that have been read in full are published.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turbospark_mlx.errors import OptionError

Policy = Literal["lfu", "lru"]
EMPTY = -1


@dataclass(frozen=True)
class Plan:
    """Where wanted experts are or will be: ``slots[i]`` is that of ``experts[i]``, ``misses`` are the positions that
    have to be read."""

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def hits(self) -> int:
        return len(self.experts) - len(self.misses)


class SlotTable:
    """The slots of one layer. Use counts live as long as the table and are never aged.

    ``"lfu"`` gives up empty slots first, then the expert with the fewest uses, then the one not used for longest, then
    the lowest slot. ``"lru"`` goes by the last use of the slot alone, then by its number.
    """

    def __init__(self, slots: int, experts: int, policy: Policy = "lfu"):
        if policy not in get_args(Policy):
            raise OptionError(f"expert_policy={policy!r}: possible are {', '.join(get_args(Policy))}.")
        self._policy = policy
        self._clock = 0
        self.arrivals = 0
        """How often experts were published."""
        self.expert_of = [EMPTY] * slots
        self.last_use = [0] * slots
        self.use_count = [0] * experts
        self._slot_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.expert_of)

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot_of

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot. Then none will ever have to give way."""
        return len(self._slot_of) == len(self.use_count)

    def plan(self, wanted: Sequence[int], protected: Collection[int] = ()) -> Plan | None:
        """Place distinct ``wanted`` experts, in order, without overwriting ``protected`` slots, which may still be hit.

        The slots of misses are emptied until ``commit``. Returns None, and changes nothing, where they do not fit.
        """
        slots = [self._slot_of.get(expert, EMPTY) for expert in wanted]
        reserved = {*slots, *protected}
        misses = tuple(i for i, slot in enumerate(slots) if slot == EMPTY)
        free = [slot for slot in range(len(self)) if slot not in reserved] if misses else []
        if len(free) < len(misses):
            return None
        free.sort(key=self._eviction_order)
        self._clock += 1
        for expert, slot in zip(wanted, slots, strict=True):
            self.use_count[expert] += 1
            if slot != EMPTY:
                self.last_use[slot] = self._clock
        for miss, slot in zip(misses, free, strict=False):
            slots[miss] = slot
            self._slot_of.pop(self.expert_of[slot], None)
            self.expert_of[slot] = EMPTY
            self.last_use[slot] = self._clock
        return Plan(tuple(wanted), tuple(slots), misses)

    def _eviction_order(self, slot: int) -> tuple[int, ...]:
        if self._policy == "lru":
            return (self.last_use[slot],)
        expert = self.expert_of[slot]
        return (expert != EMPTY, 0 if expert == EMPTY else self.use_count[expert], self.last_use[slot])

    def commit(self, plan: Plan) -> None:
        """Publish the misses of ``plan``, every one of which has been read."""
        self.arrivals += bool(plan.misses)
        for miss in plan.misses:
            expert, slot = plan.experts[miss], plan.slots[miss]
            self.expert_of[slot] = expert
            self._slot_of[expert] = slot
