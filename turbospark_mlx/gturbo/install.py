"""An open install: everything structural is checked before the caller gets it, and it reads only its own files."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.gturbo import experts_layout, formats, integrity, manifest, resident_index, row_table
from turbospark_mlx.gturbo.experts_layout import ExpertsLayout
from turbospark_mlx.gturbo.files import Directory, FileState, OpenFile, damaged
from turbospark_mlx.gturbo.integrity import Progress
from turbospark_mlx.gturbo.manifest import Manifest
from turbospark_mlx.gturbo.resident_index import TensorEntry
from turbospark_mlx.gturbo.row_table import TableLayout

Verify = Literal["off", "auto", "full"]
Dialect = Literal["swift", "rust"]

TOKENIZER_DIRECTORY = "tokenizer"
_SIDE_FILE_CAP = 4 << 20
_SIDE_FILE_CAPS = {"tokenizer.json": 64 << 20}

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Verification:
    """What hashing an install found. ``faults`` has one error a damaged file; ``unhashed`` are files that belong to an
    install of the Rust engine but that its manifest does not list; ``unexpected`` are all other entries."""

    files: int
    nbytes: int
    faults: tuple[InstallError, ...]
    unhashed: tuple[str, ...]
    unexpected: tuple[str, ...]


class Install:
    """A validated ``.gturbo`` directory. Use ``Install.open``; it is a context manager."""

    def __init__(self, root: Directory) -> None:
        self.path: str = root.path
        self._root = root
        self._open: dict[str, OpenFile] = {}
        self._states: dict[str, FileState] = {}
        self._manifest_bytes = self._read_manifest()
        self.manifest: Manifest = manifest.read(self._manifest_bytes, root.label(manifest.FILE))
        try:
            self._open_files()
            resident = self._open[resident_index.FILE]
            self.tensors: Mapping[str, TensorEntry] = resident_index.read(resident, self.manifest.tensor_formats)
            self.experts: ExpertsLayout = self._read_layout()
            self.table: TableLayout | None = self._read_table()
        except BaseException:
            self.close()
            raise

    def _read_manifest(self) -> bytes:
        try:
            file = self._root.open(manifest.FILE)
        except InstallError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise InstallError(
                f"{self.path}: has no {manifest.FILE}, so it is no complete install (the manifest is written last)."
                " Download or convert the model again."
            ) from error
        with file:
            self._states[manifest.FILE] = file.state
            return file.read_all(manifest.MAX_BYTES)

    def _open_files(self) -> None:
        """Open every listed file and check its size; keep those open that hold weights."""
        for name, record in self.manifest.files.items():
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(self._root.open(name))
                file.expect_size(record.size)
                self._states[name] = file.state
                if name == resident_index.FILE or name.startswith(f"{experts_layout.DIRECTORY}/"):
                    self._open[name] = file
                    stack.pop_all()

    def _read_layout(self) -> ExpertsLayout:
        file = self._open[experts_layout.FILE]
        layout = experts_layout.read(
            file.read_all(experts_layout.MAX_BYTES),
            file.label,
            num_layers=self.manifest.num_layers,
            experts_per_layer=self.manifest.experts_per_layer,
            stride=self.manifest.expert_stride,
        )
        sizes = {name: record.size for name, record in self.manifest.files.items()}
        experts_layout.check_files(layout, sizes, file.label)
        return layout

    def _read_table(self) -> TableLayout | None:
        """The table beside the weights, where there is one, whether the manifest lists it or not."""
        try:
            header = self._root.read(row_table.HEADER, row_table.MAX_HEADER_BYTES)
        except InstallError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None
        rows = self._open[row_table.ROWS] = self._root.open(row_table.ROWS)
        return row_table.read(header, self._root.label(row_table.HEADER), rows)

    def open_table(self) -> OpenFile:
        """The table's rows, the very file that was checked, as one of the caller's own, for positioned reads from any
        thread."""
        return self._open[row_table.ROWS].duplicate()

    def read_table_into(self, row: int, buffer: Any) -> None:
        """Fill ``buffer``, writable, with whole records of the table from row ``row`` on."""
        size = self.table.record_bytes
        count = memoryview(buffer).nbytes
        if count % size or not 0 <= row <= self.table.shape[0] - count // size:
            raise ValueError(f"{count} bytes from row {row} on are no records of the table")
        self._fill(row_table.ROWS, row * size, count, buffer)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "auto",
        progress: Progress | None = None,
        allow_unrunnable: bool = False,
        readable_blocks: frozenset[str] = formats.RUNNABLE_BLOCK_TYPES,
    ) -> Install:
        """Open an install after checking its structure and, as ``verify`` says, its bytes.

        ``"off"`` checks structure and sizes. ``"auto"`` hashes every file that the manifest lists, unless a receipt
        says that the same files were hashed before, and leaves a receipt. ``"full"`` always hashes. ``progress`` is
        called with the bytes hashed so far and in all.

        An install that is sound but that no engine of this package can run is refused too, unless
        ``allow_unrunnable``; ``obstacles`` then says why. ``readable_blocks`` are the ggml block types that the caller
        reads, so that they are no obstacle to it. Raises InstallError.
        """
        if verify not in get_args(Verify):
            raise OptionError(f"verify={verify!r}: possible are {', '.join(get_args(Verify))}.")
        with contextlib.ExitStack() as stack:
            install = cls(stack.enter_context(Directory(path)))
            stack.push(install)
            obstacles = () if allow_unrunnable else install._obstacles(readable_blocks)
            if obstacles:
                raise InstallError(f"{install.path}: {' '.join(obstacles)}")
            if verify != "off":
                install._verify_at_open(verify, progress)
            stack.pop_all()
        return install

    def __enter__(self) -> Install:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; a second call does nothing."""
        for file in self._open.values():
            file.close()
        self._root.close()

    @property
    def arch(self) -> dict[str, Any]:
        """The manifest's ``arch`` object."""
        return self.manifest.arch

    @property
    def extension(self) -> dict[str, Any]:
        """What ``arch`` cannot say, from the manifest's extension block; empty where there is none."""
        return self.manifest.extension

    @property
    def dialect(self) -> Dialect:
        """Which elder engine's habits the install follows. Only the Rust engine names the family, or uses dtype tags
        above 3."""
        rust = "family" in self.arch or any(entry.tag > max(formats.RAW_TAGS) for entry in self.tensors.values())
        return "rust" if rust else "swift"

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why no engine of this package can run this install, in sentences; empty when nothing stands in the way."""
        return self._obstacles(formats.RUNNABLE_BLOCK_TYPES)

    def _obstacles(self, readable_blocks: frozenset[str]) -> tuple[str, ...]:
        found = []
        blocks = {entry.dtype: repr(entry.name) for entry in reversed(self.tensors.values())}
        blocks |= {
            tensor.dtype: f"{layer.file}: {role}"
            for layer in reversed(self.experts.layers)
            for role, tensor in layer.tensors.items()
        }
        for dtype, example in blocks.items():
            if dtype in formats.BLOCK_TYPES and dtype not in readable_blocks:
                convertible = dtype in formats.CONVERTIBLE_BLOCK_TYPES
                remedy = "convert this install to a new one" if convertible else "convert it from its source again"
                found.append(
                    f"It holds {dtype} blocks ({example}), which this package does not compute with: {remedy}."
                )
        if self.table and self.table.blocks:
            found.append(
                f"Its n-gram table holds {self.table.blocks} blocks, which this package does not read:"
                " convert it from its source again."
            )
        if "hadamard" in self.manifest.quant:
            found.append("Its weights are rotated (quant.hadamard): convert it from its source again.")
        capability = self.manifest.document.get("capability")
        if capability is not None:
            found.append(f"Its capability is {capability!r}, and this package runs language models only.")
        return tuple(found)

    def read_into(self, entry: TensorEntry, part: str, buffer: Any) -> None:
        """Fill ``buffer``, writable and of exactly the part's size, with ``"data"``, ``"scales"`` or ``"biases"``.
        Threads may share the install. Raises InstallError when the disk fails."""
        offset, size = entry.part(part)
        self._fill(resident_index.FILE, offset, size, buffer)

    def read_range_into(self, entry: TensorEntry, part: str, start: int, buffer: Any) -> None:
        """Fill ``buffer``, writable, with the bytes of a part from its byte ``start`` on, as ``read_into`` does."""
        offset, size = entry.part(part)
        count = memoryview(buffer).nbytes
        if not 0 <= start <= size - count:
            raise ValueError(f"{part} of {entry.name} has {size} bytes; {count} from {start} on are not there")
        self._fill(resident_index.FILE, offset + start, count, buffer)

    def read(self, entry: TensorEntry, part: str) -> bytes:
        """The bytes of ``"data"``, ``"scales"`` or ``"biases"`` of a resident tensor."""
        buffer = bytearray(entry.part(part)[1])
        self.read_into(entry, part, buffer)
        return bytes(buffer)

    def read_expert_into(self, layer: int, expert: int, buffer: Any) -> None:
        """Fill ``buffer``, writable and of ``experts.layers[layer].size`` bytes, with one expert's blob. ``layer``
        counts the layers that have experts."""
        place = self.experts.layers[layer]
        self._fill(place.file, place.offsets[expert], place.size, buffer)

    @property
    def resident_file(self) -> OpenFile:
        """The file of the resident tensors."""
        return self._open[resident_index.FILE]

    def expert_file(self, layer: int) -> OpenFile:
        """The open file that holds the experts of a layer, for positioned reads from any thread; ``layer`` counts the
        layers that have experts."""
        return self._open[self.experts.layers[layer].file]

    def read_expert_part_into(self, layer: int, expert: int, role: str, buffer: Any, *, start: int = 0) -> None:
        """Fill ``buffer``, writable, with the bytes of one sub-tensor of an expert (``"gate"``, ``"gate_scales"``, ...)
        from its byte ``start`` on. ``layer`` counts the layers that have experts."""
        place = self.experts.layers[layer]
        tensor, count = place.tensors[role], memoryview(buffer).nbytes
        if not 0 <= start <= tensor.size - count:
            raise ValueError(f"{role} has {tensor.size} bytes; {count} from {start} on are not there")
        self._fill(place.file, place.offsets[expert] + tensor.offset + start, count, buffer)

    def _fill(self, name: str, offset: int, size: int, buffer: Any) -> None:
        view = memoryview(buffer)
        if view.nbytes != size or view.readonly:
            raise ValueError(f"buffer of {view.nbytes} bytes (read-only: {view.readonly}); {size} writable are needed")
        if size:
            self._open[name].read_into(offset, view.cast("B"))

    def read_side_file(self, name: str, default: Any = _REQUIRED) -> Any:
        """The bytes of a file beside the weights, such as ``tokenizer.json``: looked for in the root, then in
        ``tokenizer/``. An absent file gives ``default``; without one, and for anything but a regular file of
        reasonable size with the hash that the manifest lists, raises InstallError."""
        missing: InstallError | None = None
        for path in (name, f"{TOKENIZER_DIRECTORY}/{name}"):
            try:
                data = self._root.read(path, _SIDE_FILE_CAPS.get(name, _SIDE_FILE_CAP))
            except InstallError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                missing = missing or error
                continue
            record = self.manifest.files.get(path)
            if record and hashlib.sha256(data).hexdigest() != record.sha256:
                raise damaged(self._root.label(path), "does not have the SHA-256 that manifest.json declares")
            return data
        if default is _REQUIRED:
            raise missing
        return default

    def verify(self, progress: Progress | None = None) -> Verification:
        """Hash every listed file, list what the manifest does not cover, and leave or remove the receipt."""
        faults = self._hash(progress)
        unlisted = [path for path in self._root.entries() if path not in self._states]
        unhashed = tuple(path for path in unlisted if _belongs(path))
        return Verification(
            files=len(self.manifest.files),
            nbytes=sum(record.size for record in self.manifest.files.values()),
            faults=tuple(faults),
            unhashed=unhashed,
            unexpected=tuple(path for path in unlisted if path not in unhashed),
        )

    def _hash(self, progress: Progress | None) -> list[InstallError]:
        """One error for each damaged file. Leaves a receipt where there is none, and removes an old one otherwise."""
        integrity.settle(self._states)
        listed = {name: self._states[name] for name in self.manifest.files}
        digests = integrity.sha256_files(self._root, listed, progress)
        faults = [
            damaged(self._root.label(name), f"has SHA-256 {digests[name]}; manifest.json declares {record.sha256}")
            for name, record in self.manifest.files.items()
            if digests[name] != record.sha256
        ]
        if faults:
            integrity.remove_receipt(self.path)
        else:
            integrity.write_receipt(self.path, self.manifest, self._manifest_bytes, self._states)
        return faults

    @property
    def has_receipt(self) -> bool:
        """Whether a receipt vouches for the files as they are."""
        return integrity.receipt_is_valid(self.path, self.manifest, self._manifest_bytes, self._states)

    def _verify_at_open(self, verify: Verify, progress: Progress | None) -> None:
        if verify == "auto" and self.has_receipt:
            return
        faults = self._hash(progress)
        if faults:
            more = f" {len(faults) - 1} more of its files differ." if len(faults) > 1 else ""
            raise InstallError(f"{faults[0]}{more}")


def _belongs(path: str) -> bool:
    """Whether a file that no manifest lists may lie in an install of the Rust engine, or is a known receipt."""
    if path.startswith(("tokenizer/", f"{row_table.DIRECTORY}/")) or path in (manifest.ELDER_RECEIPT, ".DS_Store"):
        return True
    name, _, extension = path.rpartition(".")
    known = ("tokenizer", "chat_template", "config", "generation_config", "special_tokens_map", "preprocessor_config")
    return extension in ("json", "jinja", "txt", "model") and name.startswith(
        (*known, "vocab", "merges", "added_tokens")
    )
