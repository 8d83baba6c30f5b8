"""Stop strings: find them in text that arrives in pieces, and show nothing of them.

A stop string matches at the first character that completes it, whatever the borders between the pieces; if one
character completes several, the longest counts. So the visible text depends on the text alone, not on how it was cut
into tokens. Text that could still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Iterable

from turbospark_mlx.errors import OptionError


def stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """The stop strings as a tuple.

    Raises OptionError for an empty one, which would stop before the first character, and for anything that is not text.
    """
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise OptionError(f"stop contains {string!r}; a stop string is text of at least one character.")
    return strings


class StopMatcher:
    """Follows a text piece by piece and gives back what may be shown.

    ``matched`` becomes True when a stop string is complete; everything from its first character on is dropped.
    """

    def __init__(self, strings: Iterable[str]):
        self.matched = False
        self._strings = tuple(strings)
        self._pending = ""
        self._longest_prefix = max((len(string) for string in self._strings), default=1) - 1

    def push(self, text: str) -> str:
        """Add ``text`` and return what has become certain to be visible."""
        if self.matched:
            return ""
        self._pending += text
        found = [(start, start + len(s)) for s in self._strings if (start := self._pending.find(s)) >= 0]
        if found:
            self.matched = True
            start, _ = min(found, key=lambda span: (span[1], span[0]))
            return self._take(start)
        return self._take(len(self._pending) - self._held())

    def finish(self) -> str:
        """The text is complete: return what was held back. Nothing after a match."""
        return "" if self.matched else self._take(len(self._pending))

    def _held(self):
        """Length of the longest suffix of the pending text, where nothing matched, that begins a stop string."""
        for length in range(min(len(self._pending), self._longest_prefix), 0, -1):
            suffix = self._pending[-length:]
            if any(s.startswith(suffix) for s in self._strings):
                return length
        return 0

    def _take(self, count):
        visible, self._pending = self._pending[:count], self._pending[count:]
        return visible
