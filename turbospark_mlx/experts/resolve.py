"""Where experts live and how many slots they get, from what was asked for and what memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from turbospark_mlx.admission import whole_number
from turbospark_mlx.errors import OptionError, counted
from turbospark_mlx.gturbo import ExpertsLayout, Install
from turbospark_mlx.gturbo.files import spell_bytes

Residency = Literal["auto", "resident", "streamed", "mapped"]

AUTO_SLOTS = (8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of slots that are chosen without being asked for."""
AUTO_FLOOR = 16
"""As few slots as are chosen where memory holds them."""
AUTO_SHARE = 0.25
"""Of the free memory, what more slots than the floor may take."""
RESIDENT_RESERVE = 1 << 30
"""What must stay free beside a whole install for it to be made resident."""


@dataclass(frozen=True)
class Resolved:
    """``residency`` with the reason in a few words; ``slots`` a layer, or 0 where there are none; ``nbytes`` is what
    the experts take of memory."""

    residency: str
    reason: str
    slots: int
    slots_reason: str
    nbytes: int

    def __str__(self) -> str:
        slots = f", {self.slots} slots a layer ({self.slots_reason})" if self.slots else ""
        return f"{self.residency} ({self.reason}){slots}, {spell_bytes(self.nbytes)}"


def resolve(layout: ExpertsLayout, top_k: int, *, residency: str, slots: int | str, room: int) -> Resolved:
    """Choose residency and slots. ``room`` is the memory in bytes that is free beside everything else of the model,
    its caches included. Raises OptionError for what cannot work."""
    if residency not in get_args(Residency):
        raise OptionError(f"residency={residency!r}: possible are {', '.join(get_args(Residency))}.")
    asked = None if slots == "auto" else whole_number("expert_slots", slots)
    if asked is not None and residency in ("resident", "mapped"):
        raise OptionError(f"expert_slots={asked}: there are no slots with residency={residency!r}. Leave one out.")
    slot_bytes = sum(layer.stride for layer in layout.layers)
    experts, layers = layout.experts_per_layer, len(layout.layers)
    whole = experts * slot_bytes
    reason = "as asked"
    if residency == "auto":
        fits = asked is None and whole + RESIDENT_RESERVE <= room
        residency = "resident" if fits else "streamed"
        reason = "slots were asked for" if asked is not None else f"experts of {spell_bytes(whole)}"
        if asked is None:
            reason += f" {'fit' if fits else 'do not fit'} into {spell_bytes(room)} of free memory"
    if residency == "resident":
        if whole > room:
            raise OptionError(
                f"residency='resident': {counted(layers, 'layer')} x {counted(experts, 'expert')}"
                f" take {spell_bytes(whole)}, and {spell_bytes(room)} of memory are free beside the rest of the model."
                " Choose 'streamed'."
            )
        return Resolved(residency, reason, 0, "", whole)
    if residency == "mapped":
        return Resolved(residency, reason, 0, "", 0)
    count, why = _slots(asked, top_k, experts, slot_bytes, room)
    needed = count * slot_bytes
    if count < top_k:
        raise OptionError(
            f"expert_slots={count}: every token uses {top_k} experts of a layer at once, so that at least {top_k} slots"
            f" are needed: {counted(layers, 'layer')} x {top_k} slots take {spell_bytes(top_k * slot_bytes)}."
        )
    if needed > room:
        raise OptionError(
            f"expert_slots={count}: {counted(layers, 'layer')} x {counted(count, 'slot')}"
            f" take {spell_bytes(needed)}, and {spell_bytes(room)} of memory are free beside the rest of the model."
            f" At least {counted(top_k, 'slot')} ({spell_bytes(top_k * slot_bytes)}) must fit."
        )
    return Resolved(residency, reason, count, why, needed)


def least_bytes(install: Install, *, residency: str, slots: int | str, fused: bool = True) -> int:
    """The least memory that experts opened with these options take; all of it where they are parameters. Raises
    OptionError for options that do not go with the install, or with ``fused=False``."""
    given = {"residency": residency, "expert_slots": slots}
    if named := [f"{name}={value!r}" for name, value in given.items() if value != "auto"]:
        if not install.experts:
            raise OptionError(f"{named[0]}: {install.path} has no routed experts. Leave it out.")
        if not fused:
            raise OptionError(f"{named[0]}: with fused=False experts are parameters, all in memory. Leave it out.")
    if residency == "resident" or not fused:
        return install.experts.nbytes
    if residency == "mapped":
        return 0
    count = install.arch["topKExperts"] if slots == "auto" else whole_number("expert_slots", slots)
    return min(count, install.experts.experts_per_layer) * sum(layer.stride for layer in install.experts.layers)


def _slots(asked: int | None, top_k: int, experts: int, slot_bytes: int, room: int) -> tuple[int, str]:
    if asked is not None:
        return min(asked, experts), "as asked" if asked <= experts else f"all; {asked} were asked for"
    fitting = [count for count in AUTO_SLOTS if count >= top_k and count * slot_bytes <= room]
    count = max(
        (count for count in fitting if count <= AUTO_FLOOR or count * slot_bytes <= room * AUTO_SHARE), default=top_k
    )
    return min(count, experts), "as memory allows"
