"""Models that can be had by a short name: the catalog that ships with the package and the user's additions.

``catalog.json`` beside this file and ``$TURBOSPARK_HOME/catalog.json`` have one schema, described in docs/models.md.
Where both have an alias, the user's entry counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from turbospark_mlx.errors import StoreError

VERSION = 1
REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A hub repository, ``owner/name``."""

_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
# Exactly one version, because the size and the hash belong to it; and nothing that pip could take for an option.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub, or with ``file`` one GGUF file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        file = f":{self.file}" if self.file else ""
        return f"{self.repository}{file}{f'@{self.revision}' if self.revision else ''}"


@dataclass(frozen=True)
class WheelSource:
    """One file of a wheel from the Python package index. ``size`` is in bytes."""

    requirement: str
    file: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.requirement} from the package index"


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint, or an install, on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = HubSource | WheelSource | LocalSource


@dataclass(frozen=True)
class CatalogEntry:
    """One model of a catalog. ``model_id`` is the name that its publisher gives it."""

    alias: str
    source: Source
    description: str = ""
    license: str = ""
    model_id: str | None = None
    download_bytes: int | None = None


def check_alias(alias: str) -> str:
    """``alias`` itself, if it can name a directory on any file system. Raises StoreError."""
    if not _ALIAS.fullmatch(alias) or alias.endswith(".") or ".gturbo" in alias.lower():
        raise StoreError(
            f"{alias!r} cannot be an alias: use up to 128 letters, digits and . _ - + @, beginning with a letter or "
            "digit, not ending with a dot, without '.gturbo'."
        )
    return alias


def load(home: Path) -> dict[str, CatalogEntry]:
    """Every known model by alias, the user's of ``home``/catalog.json over the embedded ones.

    Raises StoreError naming the file, the alias and the field that is wrong.
    """
    embedded = resources.files("turbospark_mlx").joinpath("catalog.json").read_bytes()
    entries = parse(embedded, "the embedded catalog")
    path = home / "catalog.json"
    if path.exists():
        entries |= parse(path.read_bytes(), str(path))
    return entries


def parse(data: bytes, label: str) -> dict[str, CatalogEntry]:
    """The entries of one catalog file; ``label`` names it in messages. Raises StoreError."""
    try:
        document = json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{label}: is not a catalog: {error}. Correct it, or move it away.") from None
    fields = _Fields(document, label)
    version = fields.take("version", int)
    if version != VERSION:
        raise StoreError(f"{label}: version is {version}; this program reads version {VERSION}.")
    models = fields.take("models", dict)
    fields.end()
    entries: dict[str, CatalogEntry] = {}
    folded: dict[str, str] = {}
    for alias, value in models.items():
        where = f"{label}: models.{alias}"
        try:
            check_alias(alias)
        except StoreError as error:
            raise StoreError(f"{label}: {error}") from None
        # File systems of a Mac take names for equal that differ in case only.
        other = folded.setdefault(alias.lower(), alias)
        if other != alias:
            raise StoreError(f"{label}: models has {other!r} and {alias!r}, which differ in case only. Rename one.")
        entries[alias] = _entry(alias, _Fields(value, where))
    return entries


def _entry(alias: str, fields: _Fields) -> CatalogEntry:
    source = _Fields(fields.take("source", dict), f"{fields.label}.source")
    kind = source.take("kind", str)
    if kind not in _SOURCES:
        raise source.error("kind", f"is {kind!r}; use one of {', '.join(_SOURCES)}")
    entry = CatalogEntry(
        alias=alias,
        source=_SOURCES[kind](source),
        description=fields.take("description", str, ""),
        license=fields.take("license", str, ""),
        model_id=fields.take("model_id", str, None),
        download_bytes=fields.take("download_bytes", int, None),
    )
    source.end()
    fields.end()
    return entry


def _hub(fields: _Fields) -> HubSource:
    repository = fields.take("repository", str)
    if not REPOSITORY.fullmatch(repository):
        raise fields.error("repository", f"is {repository!r}, not owner/name")
    file = fields.take("file", str, None)
    if file is not None and not file.endswith(".gguf"):
        raise fields.error("file", f"is {file!r}; only one .gguf file can be named")
    return HubSource(repository, fields.take("revision", str, None), file)


def _wheel(fields: _Fields) -> WheelSource:
    requirement = fields.take("requirement", str)
    if not _REQUIREMENT.fullmatch(requirement):
        raise fields.error("requirement", f"is {requirement!r}, not one exact version such as name==1.0")
    file, size = fields.take("file", str), fields.take("size", int)
    if not PurePosixPath(file).name or size <= 0:
        raise fields.error("file" if size > 0 else "size", "does not name a file with content")
    sha256 = fields.take("sha256", str).lower()
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise fields.error("sha256", "is not 64 hexadecimal digits")
    return WheelSource(requirement, file, size, sha256)


def _local(fields: _Fields) -> LocalSource:
    path = Path(fields.take("path", str)).expanduser()
    if not path.is_absolute():
        raise fields.error("path", f"is {str(path)!r}; give an absolute path")
    return LocalSource(path)


_SOURCES = {"hub": _hub, "pypi-wheel": _wheel, "local": _local}
_MISSING = object()


class _Fields:
    """A JSON object whose fields are taken one by one, so that what is left over is a mistake."""

    def __init__(self, value: Any, label: str) -> None:
        if not isinstance(value, dict):
            raise StoreError(f"{label}: is not an object. Correct it; docs/models.md has the schema.")
        self.label = label
        self._left: dict[str, Any] = dict(value)

    def error(self, field: str, detail: str) -> StoreError:
        return StoreError(f"{self.label}.{field} {detail}. Correct it; docs/models.md has the schema.")

    def take(self, field: str, kind: type, default: Any = _MISSING) -> Any:
        value = self._left.pop(field, None)
        if value is None and default is not _MISSING:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            names = {str: "a text", int: "a whole number", dict: "an object"}
            found = "is missing" if value is None else f"is {value!r:.80}"
            raise self.error(field, f"{found}; it has to be {names[kind]}")
        return value

    def end(self) -> None:
        if self._left:
            raise self.error(min(self._left), "is not a field that a catalog has")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is there twice")
    return dict(pairs)
