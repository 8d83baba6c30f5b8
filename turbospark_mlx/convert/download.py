"""Checkpoints from the Hugging Face hub, through the hub library's own cache.

Only what a conversion reads is fetched, at one commit. A broken connection is taken up at the byte where it broke;
after a kill, whole files are kept and the one under way starts again. ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` mean what they mean everywhere.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tqdm import tqdm

from turbospark_mlx.catalog import REPOSITORY
from turbospark_mlx.convert.huggingface import SIDE_FILES
from turbospark_mlx.convert.safetensors_file import INDEX, SINGLE
from turbospark_mlx.errors import StoreError

_HASH_BYTES = 1 << 24


def fetch_repository(repo_id: str, revision: str | None = None, progress: bool = True) -> Path:
    """The local copy of a hub repository's checkpoint: a directory, or for ``owner/name:FILE.gguf`` that file.

    The directory's name is the commit. ``revision`` is a branch, tag or commit; none is the main branch. Without a
    network a complete copy in the cache is used. Raises StoreError: unknown, private or gated repository, unknown
    revision, no network, a file that is missing or damaged, a full disk.
    """
    repository, _, file = repo_id.partition(":")
    if not REPOSITORY.fullmatch(repository) or (file and not file.endswith(".gguf")):
        raise StoreError(f"{repo_id}: is not a hub repository. Write owner/name, or owner/name:FILE.gguf for one file.")
    with _progress_bars(progress):
        return _fetch(repository, revision, file, progress)


def _fetch(repository: str, revision: str | None, file: str, progress: bool) -> Path:
    where = repository if revision is None else f"{repository} at {revision}"
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:
        _raise_if_refused(error, repository, revision)
        return _cached(repository, revision, file, error)
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}

    def read_index() -> bytes:
        return Path(huggingface_hub.hf_hub_download(repository, INDEX, revision=info.sha)).read_bytes()

    try:
        wanted = _wanted(files, file, read_index, where)
        # By its name, not by its commit: so the cache learns which commit the name stood for, and can serve it offline.
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=[glob.escape(name) for name in wanted]
        )
    except StoreError:
        raise
    except Exception as error:
        _raise_if_refused(error, repository, revision)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StoreError(
                f"{where}: the disk of {constants.HF_HUB_CACHE} is full. Make room, or move the cache with HF_HOME, "
                "and run the same command again; whole files are kept."
            ) from error
        raise StoreError(
            f"{where}: the download was interrupted: {_reason(error)}. Run the same command again; whole files are "
            "kept."
        ) from error
    if Path(folder).name != info.sha:
        raise StoreError(f"{where}: was changed during the download. Run the same command again.")
    hashes = {name: files[name].lfs.sha256 for name in wanted if files[name].lfs}
    _check(Path(folder), {name: files[name].size for name in wanted}, hashes, where, progress)
    return Path(folder, file)


def _cached(repository: str, revision: str | None, file: str, cause: Exception) -> Path:
    """The copy in the cache, for when the hub cannot be asked."""
    where = repository if revision is None else f"{repository} at {revision}"
    first = file or "config.json"
    try:
        found = Path(huggingface_hub.hf_hub_download(repository, first, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise StoreError(
            f"{where}: {constants.ENDPOINT} cannot be reached ({_reason(cause)}), and the cache has no copy. Try again "
            "with a network, or give a local directory."
        ) from cause
    folder = found.parents[len(Path(first).parts) - 1]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    _wanted(present, file, (folder / INDEX).read_bytes, where)
    return folder / file


def _wanted(names: Collection[str], file: str, read_index: Callable[[], bytes], where: str) -> list[str]:
    """The files of a repository that a conversion reads. ``names`` are all it has."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if file:
        if file not in names:
            raise StoreError(f"{where}: has no file {file}. GGUF files there: {', '.join(ggufs) or 'none'}.")
        return [file]
    if INDEX in names:
        weights = [INDEX, *_indexed(read_index(), where)]
        missing = sorted(set(weights) - set(names))
        if missing:
            raise StoreError(f"{where}: {missing[0]} is missing, which {INDEX} names. Use another copy of the model.")
    else:
        weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        weights = [SINGLE] if SINGLE in weights else weights
    if "config.json" in names and weights:
        return [*weights, *(name for name in (*SIDE_FILES, "tokenizer.model") if name in names)]
    if ggufs:
        raise StoreError(f"{where}: has GGUF files only. Name one: {', '.join(f'{where}:{name}' for name in ggufs)}.")
    what = "no safetensors weights" if "config.json" in names else "no config.json"
    raise StoreError(f"{where}: has {what}, so there is nothing to convert. Choose another repository.")


def _indexed(data: bytes, where: str) -> set[str]:
    try:
        weight_map = json.loads(data)["weight_map"]
        return {name for name in weight_map.values() if "/" not in name}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError(f"{where}: {INDEX} is damaged. Use another copy of the model.") from None


def _check(folder: Path, sizes: dict[str, int | None], hashes: dict[str, str], where: str, progress: bool) -> None:
    """Compare what lies in the cache with what the hub declares, and remove what differs."""
    total = sum(sizes[name] or 0 for name in hashes)
    with tqdm(total=total, unit="B", unit_scale=True, desc="check", disable=None if progress else True) as bar:
        for name, size in sizes.items():
            path = folder / name
            found = path.stat().st_size
            what = None if size is None or found == size else f"has {found:,} bytes instead of {size:,}"
            if what is None and name in hashes and _sha256(path, bar) != hashes[name].lower():
                what = "does not have the SHA-256 that the hub declares"
            if what is not None:
                # The file is a link to where the cache keeps it under its hash.
                for stale in (path.resolve(), path):
                    stale.unlink(missing_ok=True)
                raise StoreError(f"{where}: {name} {what}; it was removed from the cache. Run the same command again.")


def _sha256(path: Path, bar: tqdm) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _raise_if_refused(error: Exception, repository: str, revision: str | None) -> None:
    """Raise StoreError where the hub has answered that it will not serve this."""
    page = f"{constants.ENDPOINT}/{repository}"
    token = "a token in HF_TOKEN, or `hf auth login`"
    if isinstance(error, GatedRepoError):
        refusal = f"is gated. Accept its terms at {page}, then give {token}"
    elif isinstance(error, RepositoryNotFoundError):
        refusal = f"does not exist at {constants.ENDPOINT}, or is private. Check the name; a private one needs {token}"
    elif isinstance(error, RevisionNotFoundError):
        refusal = f"has no revision {revision!r}. See {page}/tree/main for its branches and tags"
    elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        refusal = f"was refused by {constants.ENDPOINT} ({error.response.status_code}). It needs {token}"
    else:
        return
    raise StoreError(f"{repository}: {refusal}.") from error


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    hide = not shown and not are_progress_bars_disabled() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
