"""Writing an install: the sizes are fixed first, the bytes come in any order, the manifest comes last.

A directory without ``manifest.json`` is no install, so a writer that dies at any point leaves nothing that opens. The
caller writes into a partial directory and renames it once ``finish`` has returned.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import (
    experts_layout,
    formats,
    integrity,
    manifest,
    quant_summary,
    resident_index,
    row_table,
)
from turbospark_mlx.gturbo.files import MAX_TRANSFER, Directory, FileState, fold, split_path
from turbospark_mlx.gturbo.formats import TensorSpec
from turbospark_mlx.gturbo.integrity import Progress
from turbospark_mlx.gturbo.manifest import FileRecord
from turbospark_mlx.protocols import AffineFormat

_RESERVED = (
    *(manifest.FILE, manifest.ELDER_RECEIPT, resident_index.FILE),
    *(experts_layout.DIRECTORY, row_table.DIRECTORY, "tokenizer"),
)


class InstallWriter:
    """Writes one install into an existing, empty directory. Not for use from several threads.

    ``tensors`` are the resident tensors, in file order. ``experts[i]`` are the tensors of one routed expert of the
    i-th layer that has them (``gate``, ``up``, ``down``, and ``gate_bias`` and so on for additive biases), of which
    there are ``num_experts`` a layer. ``table`` is the matrix that is read by the row, where the model has one, and
    ``table_facts`` what its header says of the model. Raises InstallError, and OSError when the disk fails.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tensors: Sequence[TensorSpec],
        *,
        experts: Sequence[Sequence[TensorSpec]] = (),
        num_experts: int = 0,
        table: TensorSpec | None = None,
        table_facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = os.path.realpath(directory)
        if os.listdir(self._path):
            raise InstallError(f"{self._path}: is not empty; an install is written into an empty directory. Clear it.")
        if bool(experts) != bool(num_experts):
            raise InstallError(f"{len(experts)} layers of experts are given with num_experts={num_experts}.")
        index, self._entries, size = resident_index.build(tensors)
        self._layout_bytes, self._layout = experts_layout.build(experts, num_experts)
        self._specs = tuple(tensors)
        self._experts = tuple(tuple(specs) for specs in experts)
        os.mkdir(os.path.join(self._path, experts_layout.DIRECTORY))
        self._files: dict[str, _FixedFile] = {}
        self._create(resident_index.FILE, size)
        for layer in self._layout.layers:
            self._create(layer.file, layer.stride * num_experts)
        self._files[resident_index.FILE].write(0, index)
        self._table = table
        if table is not None:
            header = row_table.build(table, table_facts)
            os.mkdir(os.path.join(self._path, row_table.DIRECTORY))
            self._create(row_table.HEADER, len(header))
            self._create(row_table.ROWS, table.nbytes)
            self._files[row_table.HEADER].write(0, header)
        self._side_files: dict[str, str] = {}
        self._states: dict[str, FileState] = {}
        self._manifest: tuple[manifest.Manifest, bytes] | None = None

    def _create(self, name: str, size: int) -> None:
        self._files[name] = _FixedFile(os.path.join(self._path, name), size)

    def write(self, name: str, part: str, data: Any, *, offset: int = 0) -> None:
        """Write bytes of a resident tensor: ``part`` is ``"data"``, ``"scales"`` or ``"biases"``, ``offset`` counts
        from the start of the part, ``data`` is any contiguous buffer. Parts come in any order and in any pieces; no
        byte may be written twice."""
        if name not in self._entries:
            raise InstallError(f"Tensor {name!r} was not declared to the writer.")
        start, size = self._entries[name].part(part)
        self._put(resident_index.FILE, f"{part} of tensor {name!r}", start, size, offset, data)

    def write_expert(self, layer: int, expert: int, name: str, part: str, data: Any, *, offset: int = 0) -> None:
        """Write bytes of one expert's tensor, as ``write`` does; ``layer`` counts the layers that have experts."""
        place = self._layout.layers[layer]
        role = name if part == "data" else f"{name}_{part}"
        if role not in place.tensors:
            raise InstallError(f"Expert tensor {role!r} was not declared to the writer for layer {layer}.")
        tensor = place.tensors[role]
        start = place.offsets[expert] + tensor.offset
        self._put(place.file, f"{role} of layer {layer}, expert {expert}", start, tensor.size, offset, data)

    def write_table(self, row: int, records: Any) -> None:
        """Write whole records of the table, parts one after the other in each, from row ``row`` on."""
        size = self._table.nbytes // self._table.shape[0]
        self._put(row_table.ROWS, "rows of the table", 0, self._table.nbytes, row * size, records)

    def _put(self, file: str, what: str, start: int, size: int, offset: int, data: Any) -> None:
        view = memoryview(data)
        if view.nbytes == 0:
            return
        if offset < 0 or offset + view.nbytes > size:
            raise InstallError(f"{what} has {size} bytes; {view.nbytes} were to be written at {offset}.")
        if not self._files[file].write(start + offset, view.cast("B")):
            raise InstallError(f"{what}: bytes from {offset} to {offset + view.nbytes} were written before.")

    def add_side_file(self, name: str, data: bytes) -> None:
        """Write a file beside the weights, such as ``tokenizer.json``. The manifest lists and hashes it."""
        folded = fold(name)
        if len(split_path(name, self._path)) != 1 or folded in _RESERVED or folded in self._side_files:
            raise InstallError(f"Side file {name!r}: it has a path or a reserved name, or was added before.")
        self._side_files[folded] = name
        self._write_whole(name, data)

    def _write_whole(self, name: str, data: bytes) -> None:
        file = _FixedFile(os.path.join(self._path, name), len(data))
        file.write(0, data)
        file.sync()
        file.close()

    def finish(
        self,
        *,
        arch: Mapping[str, Any],
        extension: Mapping[str, Any],
        elder_assumption: Mapping[str, Any],
        model_id: str,
        progress: Progress | None = None,
    ) -> None:
        """Check that every byte was written, make everything durable, hash it, and write the manifest last.

        ``arch`` is complete; ``extension`` is what it cannot say; ``elder_assumption`` is what the elder engines
        assume for each key of ``extension``. Where they would be wrong, or where a tensor is stored as they cannot
        read it, the manifest carries the flag that makes them refuse the install. ``progress`` is called with the
        bytes hashed so far and in all.
        """
        self._check_complete()
        for file in self._files.values():
            file.sync()
            file.close()
        self._write_whole(experts_layout.FILE, self._layout_bytes)
        names = [*self._files, experts_layout.FILE, *self._side_files.values()]
        data = manifest.build(
            model_id=model_id,
            arch=arch,
            extension=extension,
            tensor_formats={
                spec.name: spec.dtype
                for spec in self._specs
                if isinstance(spec.dtype, AffineFormat) and spec.tag == formats.TAG_WORDS
            },
            needs_extension=quant_summary.needs_extension(self._specs, self._experts, extension, elder_assumption)
            or (self._table is not None and self._table.dtype != row_table.ELDER_FORMAT),
            quant=quant_summary.summary(self._specs, self._experts),
            files=self._hash(names, progress),
            num_layers=len(self._layout.layers),
            experts_per_layer=self._layout.experts_per_layer,
            expert_stride=self._layout.stride,
        )
        self._sync_directory(experts_layout.DIRECTORY)
        if self._table is not None:
            self._sync_directory(row_table.DIRECTORY)
        partial = f"{manifest.FILE}.tmp"
        self._write_whole(partial, data)
        self._sync_directory(".")
        os.rename(os.path.join(self._path, partial), os.path.join(self._path, manifest.FILE))
        self._sync_directory(".")
        self._manifest = manifest.read(data, manifest.FILE), data

    def _check_complete(self) -> None:
        for entry in self._entries.values():
            for part in resident_index.PARTS:
                self._check_written(resident_index.FILE, f"{part} of tensor {entry.name!r}", *entry.part(part))
        if self._table is not None:
            self._check_written(row_table.ROWS, "the table", 0, self._table.nbytes)
        for layer in self._layout.layers:
            for expert, offset in enumerate(layer.offsets):
                for role, tensor in layer.tensors.items():
                    what = f"{role} of layer {layer.layer}, expert {expert}"
                    self._check_written(layer.file, what, offset + tensor.offset, tensor.size)

    def _check_written(self, file: str, what: str, start: int, size: int) -> None:
        gap = self._files[file].first_gap(start, start + size)
        if gap is not None:
            raise InstallError(f"{what}: byte {gap - start} of {size} was never written.")

    def _hash(self, names: Sequence[str], progress: Progress | None) -> dict[str, FileRecord]:
        with Directory(self._path) as root:
            for name in names:
                with root.open(name) as file:
                    self._states[name] = file.state
            digests = integrity.sha256_files(root, self._states, progress)
        return {name: FileRecord(self._states[name].size, digests[name]) for name in names}

    def _sync_directory(self, name: str) -> None:
        fd = os.open(os.path.join(self._path, name), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_receipt(self, path: str | os.PathLike[str]) -> bool:
        """After the caller has renamed the directory to ``path``: leave the receipt for the hashes computed by
        ``finish``. Returns False where the files are no longer those that were hashed, or where it cannot be
        written."""
        checked, data = self._manifest
        with Directory(path) as root:
            with root.open(manifest.FILE) as file:
                if file.read_all(manifest.MAX_BYTES) != data:
                    return False
                states = {**self._states, manifest.FILE: file.state}
            for name, state in self._states.items():
                with root.open(name) as file:
                    if file.state != state:
                        return False
            integrity.settle(states)
            return integrity.write_receipt(root.path, checked, data, states)


class _FixedFile:
    """A new file of a fixed size that remembers which of its bytes have been written."""

    def __init__(self, path: str, size: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self.close = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, size)
        # Written ranges, disjoint, sorted and never adjacent.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Write all of ``data``; False, and nothing is written, where some of those bytes were written before."""
        end = offset + len(data)
        left = bisect.bisect_left(self._ends, offset)
        right = bisect.bisect_right(self._starts, end)
        if any(self._starts[i] < end and self._ends[i] > offset for i in range(left, right)):
            return False
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + MAX_TRANSFER], offset + done)
        self._starts[left:right] = [min([offset, *self._starts[left:right]])]
        self._ends[left:right] = [max([end, *self._ends[left:right]])]
        return True

    def first_gap(self, start: int, end: int) -> int | None:
        """The first byte between ``start`` and ``end`` that was not written."""
        at = bisect.bisect_right(self._starts, start) - 1
        written = self._ends[at] if at >= 0 else 0
        if start >= end or written >= end:
            return None
        return max(start, written)

    def sync(self) -> None:
        os.fsync(self._fd)
