"""JSON of untrusted files: one meaning or an error, and bounded work.

Refused: duplicate keys, NaN and infinities (also ``1e999``), text that is not UTF-8, nesting that would exhaust the
stack, and texts whose parsed form would be far larger than the file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from turbospark_mlx.gturbo.files import damaged

MAX_DEPTH = 32
# Every value beyond the first needs a comma or a bracket; 512 experts in 100 layers need about 5 million.
MAX_VALUES = 8_000_000

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

_OPENING, _CLOSING, _COMMA = 1, -1, 2
_STRUCTURE = np.zeros(256, dtype=np.int8)
_STRUCTURE[list(b"[{")] = _OPENING
_STRUCTURE[list(b"]}")] = _CLOSING
_STRUCTURE[list(b",")] = _COMMA
_MISSING: Any = object()


def parse(data: bytes, label: str) -> Any:
    """The value of a JSON text. Raises InstallError naming ``label``."""
    _check_structure(data, label)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            twice, _ = Counter(key for key, _ in items).most_common(1)[0]
            raise damaged(label, f"holds the key {twice!r} twice in one object")
        return made

    def constant(text: str) -> NoReturn:
        raise damaged(label, f"holds {text}, which is no JSON number")

    def finite(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise damaged(label, f"is not UTF-8 text (byte {error.start})") from None
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=finite)
    except ValueError as error:
        raise damaged(label, f"is not valid JSON: {error}") from None


def _check_structure(data: bytes, label: str) -> None:
    """Bound depth and size before the parser recurses and allocates: brackets and commas outside strings."""
    text = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    in_string = np.logical_xor.accumulate(text == ord('"'))
    structure = _STRUCTURE[text]
    structure = structure[(structure != 0) & ~in_string]
    if structure.size > MAX_VALUES:
        raise damaged(label, f"holds more than {MAX_VALUES} JSON values")
    depth = np.cumsum(structure[structure != _COMMA], dtype=np.int32)
    if depth.size and depth.max() > MAX_DEPTH:
        raise damaged(label, f"nests JSON deeper than {MAX_DEPTH} levels")


class Record:
    """A JSON object whose fields are taken out by type. Errors name the file and the field's path."""

    def __init__(self, value: Any, label: str, path: str = "") -> None:
        self.label = label
        self.path = path
        if not isinstance(value, dict):
            raise damaged(label, f"{path or 'the document'} is {_kind(value)}; an object is needed")
        self.value: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def field(self, key: str) -> str:
        """The path of a field, as messages spell it."""
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, detail: str) -> NoReturn:
        """Raise InstallError about the field ``key``."""
        raise damaged(self.label, f"{self.field(key)} {detail}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.value.get(key)
        if value is None:
            if default is not _MISSING:
                return default
            self.fail(key, "is missing")
        return value

    def _expect(self, key: str, value: Any, kind: type, wanted: str) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(key, f"is {_kind(value)}; {wanted} is needed")
        return value

    def integer(self, key: str, minimum: int = 0, maximum: int = U64_MAX, default: Any = _MISSING) -> int:
        """An integer within bounds; an absent or null field gives ``default``."""
        value = self._get(key, default)
        if value is default:
            return value
        self._expect(key, value, int, "an integer")
        if not minimum <= value <= maximum:
            shown = value if abs(value) <= 1 << 70 else "a huge number"
            self.fail(key, f"is {shown}; it must be between {minimum} and {maximum}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number; an absent or null field gives ``default``."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"is {_kind(value)}; a number is needed")
        if isinstance(value, int) and abs(value) > U64_MAX:
            self.fail(key, "is a huge number")
        return float(value)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        """True or false; an absent or null field gives ``default``."""
        value = self._get(key, default)
        return value if value is default else self._expect(key, value, bool, "true or false")

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A string; an absent or null field gives ``default``."""
        value = self._get(key, default)
        return value if value is default else self._expect(key, value, str, "a string")

    def array(self, key: str, default: Any = _MISSING) -> list[Any]:
        """An array; an absent or null field gives ``default``."""
        value = self._get(key, default)
        return value if value is default else self._expect(key, value, list, "an array")

    def integers(self, key: str, minimum: int = 0, maximum: int = U64_MAX, default: Any = _MISSING) -> list[int]:
        """An array of integers within bounds; an absent or null field gives ``default``."""
        value = self.array(key, default)
        if value is default:
            return value
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= maximum:
                self.fail(key, f"may hold only integers between {minimum} and {maximum}")
        return value

    def record(self, key: str, default: Mapping[str, Any] | Any = _MISSING) -> Record:
        """An object; an absent or null field gives a record of ``default``."""
        return Record(self._get(key, default), self.label, self.field(key))

    def only(self, *keys: str) -> None:
        """Raise InstallError for any field that is not one of ``keys``."""
        for key in self.value:
            if key not in keys:
                self.fail(key, "is not known to this version; a newer turbospark-mlx may read it")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return {int: "an integer", float: "a fraction", str: "a string", list: "an array"}.get(type(value), "an object")
