"""States of one layer that go on and back together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turbospark_mlx.protocols import LayerCache


def reusable_prefix(states: Sequence[LayerCache], prefix_len: int) -> int:
    """The longest prefix, at most ``prefix_len``, that every state can go back to by itself."""
    while prefix_len > 0:
        shorter = min(state.reusable(prefix_len) for state in states)
        if shorter == prefix_len:
            break
        prefix_len = shorter
    return prefix_len


class JointState:
    """What a layer keeps in several ways: ``parts``, in the order in which the layer adds tokens to them."""

    def __init__(self, *parts: LayerCache) -> None:
        self.parts = parts

    @property
    def offset(self) -> int:
        """The number of tokens seen."""
        return self.parts[0].offset

    @property
    def arrays(self) -> list[Any]:
        """What must be evaluated for this state to be complete."""
        return [array for part in self.parts for array in part.arrays]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def empty(self) -> bool:
        return self.offset == 0

    def size(self) -> int:
        return self.offset

    def places(self, length: int) -> bool:
        """Whether kernels may write ``length`` more tokens into every part themselves."""
        return all(part.places(length) for part in self.parts)

    def place(self, length: int) -> tuple[Any, ...]:
        """Make room for ``length`` more tokens in every part, each of which has some already; returns their buffers."""
        return tuple(part.place(length) for part in self.parts)

    def written(self, output: Any) -> None:
        """``output`` exists once what `place` made room for does, in every part."""
        for part in self.parts:
            part.written(output)

    def make_mask(self, N: int, **options: Any) -> Any:
        """The mask of the next ``N`` tokens in mlx-lm's terms."""
        return self.parts[0].make_mask(N, **options)

    @property
    def state(self) -> tuple[Any, ...]:
        return tuple(part.state for part in self.parts)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.state = own

    def is_trimmable(self) -> bool:
        return all(part.is_trimmable() for part in self.parts)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens, or all of them; returns how many. Parts that the layer had not come to when it
        failed have nothing to forget. Raises ContextError, and changes nothing, where a part cannot go back so far."""
        n = min(n, self.offset)
        target = self.offset - n
        # Those that cannot come first, so that they say why before another has gone.
        for part in sorted(self.parts, key=lambda part: part.reusable(target) == target):
            part.trim(max(0, part.offset - target))
        return n

    def reusable(self, prefix_len: int) -> int:
        return reusable_prefix(self.parts, min(prefix_len, self.offset))

    def mark(self) -> tuple[Any, ...]:
        return tuple(part.mark() for part in self.parts)

    def check(self, mark: tuple[Any, ...]) -> None:
        """Raise ContextError unless ``rollback(mark)`` will succeed."""
        for part, own in zip(self.parts, mark, strict=True):
            part.check(own)

    def rollback(self, mark: tuple[Any, ...]) -> None:
        self.check(mark)
        for part, own in zip(self.parts, mark, strict=True):
            part.rollback(own)
