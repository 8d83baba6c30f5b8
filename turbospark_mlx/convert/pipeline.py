"""From a source to an install, a tile of a tensor at a time, so that memory does not grow with the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from turbospark_mlx.catalog import REPOSITORY
from turbospark_mlx.convert.affine import quantize_affine
from turbospark_mlx.convert.floats import all_finite, from_float32, to_float32
from turbospark_mlx.convert.gguf_source import open_gguf
from turbospark_mlx.convert.huggingface import open_huggingface
from turbospark_mlx.convert.install_source import open_install
from turbospark_mlx.convert.plan import Options, Plan, PlannedTensor, plan
from turbospark_mlx.convert.report import ConversionReport, RoleReport
from turbospark_mlx.convert.source import AffineRows, Mxfp4Rows, Rows, Source, check_downloaded, tiles, values
from turbospark_mlx.convert.staging import Staging, check_destination, check_free_space
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.gturbo import InstallWriter, TensorSpec
from turbospark_mlx.gturbo.formats import PAGE
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat

# For the manifest, the layout file and the index, whose size follows from the number of tensors.
_RESERVE_BYTES = 1 << 25


def run(
    source: str | Path,
    destination: str | Path,
    options: Options,
    *,
    overwrite: bool,
    model_id: str | None,
    progress: bool,
) -> ConversionReport:
    """Convert one checkpoint; see ``turbospark_mlx.convert.convert``."""
    start = time.monotonic()
    destination = Path(destination)
    check_destination(destination, overwrite=overwrite)
    path, repository = _locate(source, progress)
    if destination.exists() and path.samefile(destination):
        raise OptionError(f"{destination}: is the source itself. Choose another destination.")
    with _open(path, model_id or repository) as opened:
        report = write_source(opened, destination, options, overwrite=overwrite, progress=progress)
    report.seconds = time.monotonic() - start
    return report


def write_source(
    source: Source, destination: Path, options: Options, *, overwrite: bool, progress: bool
) -> ConversionReport:
    """Write the install that ``source`` becomes. Raises as ``turbospark_mlx.convert.convert`` does."""
    made = plan(source, options)
    with Staging(destination, overwrite=overwrite) as staging:
        report = ConversionReport(
            destination=staging.destination,
            model_id=source.model_id,
            source_kind=source.kind,
            family=source.family.name,
            dropped=made.dropped,
            exceptions=made.exceptions,
            ignored=source.ignored,
            cleared=staging.cleared,
        )
        writer = _write(source, made, staging.directory, report, progress)
        staging.commit()
        writer.write_receipt(staging.destination)
    return report


def _locate(source: str | Path, progress: bool) -> tuple[Path, str | None]:
    """The local path of a source, and the name of the repository that it was fetched from."""
    path = Path(source)
    if path.exists():
        return path, None
    repository = str(source).partition(":")[0]
    if not REPOSITORY.fullmatch(repository):
        raise ConvertError(f"{source}: does not exist. Give a directory, a .gguf file, or a hub repository owner/name.")
    from turbospark_mlx.convert.download import fetch_repository

    return fetch_repository(str(source), progress=progress), repository


def _open(path: Path, model_id: str | None) -> Source:
    if path.is_dir():
        is_install = (path / "manifest.json").exists() or path.suffix == ".gturbo"
        return open_install(path, model_id) if is_install else open_huggingface(path, model_id)
    check_downloaded(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF" or path.suffix == ".gguf"
    if is_gguf:
        return open_gguf(path, model_id)
    raise ConvertError(
        f"{path}: is neither a directory nor a GGUF file. Give the directory that holds config.json and the weights."
    )


def _write(source: Source, made: Plan, directory: Path, report: ConversionReport, progress: bool) -> InstallWriter:
    specs = [TensorSpec(tensor.name, tensor.source.shape, tensor.target) for tensor in made.tensors]
    experts = [[TensorSpec(m.tensor, m.shape[1:], m.target) for m in matrices] for matrices in made.experts]
    num_experts = made.experts[0][0].shape[0] if made.experts else 0
    expert_bytes = sum(sum(spec.nbytes for spec in layer) for layer in experts) * num_experts
    table = made.table and TensorSpec(made.table.parts[0].name, made.table.shape, made.table.target)
    weight_bytes = sum(spec.nbytes for spec in specs) + expert_bytes + (table.nbytes if table else 0)
    needed = {
        "weights": weight_bytes,
        "other files": sum(map(len, source.side_files.values())),
        "reserve": _RESERVE_BYTES,
    }
    if experts:
        needed["alignment of experts"] = len(experts) * num_experts * PAGE
    check_free_space(directory, needed)
    writer = InstallWriter(
        directory,
        specs,
        experts=experts,
        num_experts=num_experts,
        table=table,
        table_facts=made.table and made.table.facts,
    )
    with _bar("convert", weight_bytes, progress) as bar:
        for tensor, spec in zip(made.tensors, specs, strict=True):
            _count(report, tensor, tensor.source.shape, spec.nbytes)
            for part, rows, offset in _pieces(tensor, spec, report):
                writer.write(tensor.name, part, rows, offset=offset)
                bar.update(rows.nbytes)
        for position, (matrices, layer) in enumerate(zip(made.experts, experts, strict=True)):
            for matrix, spec in zip(matrices, layer, strict=True):
                _count(report, matrix.parts[0], matrix.shape, spec.nbytes * num_experts)
            # An expert's matrices one after the other, so that its blob is written in one run.
            for number in range(num_experts):
                for matrix, spec in zip(matrices, layer, strict=True):
                    for part, rows, offset in _pieces(matrix.parts[number], spec, report):
                        writer.write_expert(position, number, matrix.tensor, part, rows, offset=offset)
                        bar.update(rows.nbytes)
        if table:
            _count(report, made.table.parts[0], made.table.shape, table.nbytes)
            for row, records in _records(made.table.parts, report):
                writer.write_table(row, records)
                bar.update(records.nbytes)
    for name, data in source.side_files.items():
        writer.add_side_file(name, data)
    arch, extension = source.config.to_manifest()
    with _bar("hash", weight_bytes, progress) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        writer.finish(
            arch=arch,
            extension=extension,
            elder_assumption=source.config.elder_assumption(),
            model_id=source.model_id,
            progress=advance,
        )
    return writer


def _bar(description: str, total: int, progress: bool) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc=description, disable=None if progress else True)


def _count(report: ConversionReport, tensor: PlannedTensor, shape: tuple[int, ...], nbytes: int) -> None:
    report.roles.setdefault(tensor.role, RoleReport()).add(shape, tensor.target, nbytes)
    report.packed += isinstance(tensor.target, PackedFormat)
    if tensor.target != tensor.source.format:
        report.quantized += isinstance(tensor.target, AffineFormat)
        report.narrowed += not isinstance(tensor.target, AffineFormat)


def _pieces(tensor: PlannedTensor, spec: TensorSpec, report: ConversionReport) -> Iterator[tuple[str, np.ndarray, int]]:
    """``(part, rows, offset in the part)`` of a converted tensor, a tile at a time."""
    for start, stop in tiles(tensor.source):
        for part, rows in _parts(_convert(tensor, start, stop, report.roles[tensor.role], report)).items():
            yield part, rows, start * (spec.parts[part] // tensor.source.rows)


def _records(parts: tuple[PlannedTensor, ...], report: ConversionReport) -> Iterator[tuple[int, np.ndarray]]:
    """``(first row, records)`` of a converted table, a tile at a time."""
    first = 0
    for tensor in parts:
        for start, stop in tiles(tensor.source):
            stored = _parts(_convert(tensor, start, stop, report.roles[tensor.role], report))
            whole = (np.ascontiguousarray(part).view(np.uint8).reshape(stop - start, -1) for part in stored.values())
            yield first + start, np.concatenate(list(whole), axis=1)
        first += tensor.source.rows


def _parts(stored: Rows) -> dict[str, np.ndarray]:
    if isinstance(stored, AffineRows):
        return {"data": stored.words, "scales": stored.scales, "biases": stored.biases}
    if isinstance(stored, Mxfp4Rows):
        return {"data": stored.words, "scales": stored.scales}
    return {"data": stored}


def _convert(tensor: PlannedTensor, start: int, stop: int, role: RoleReport, report: ConversionReport) -> Rows:
    """Rows of a tensor in the format they get: the stored rows themselves where that is the one they have."""
    source, target = tensor.source, tensor.target
    stored = source.read(start, stop)
    if not _finite(stored, source.format):
        raise ConvertError(f"{source.where}: holds NaN or infinite values. Download the file again.")
    if target == source.format:
        return stored
    weights = values(stored, source.format)
    if isinstance(target, AffineFormat):
        try:
            rows = AffineRows(
                *quantize_affine(
                    weights,
                    bits=target.bits,
                    group_size=target.group_size,
                    companion_dtype=target.companion_dtype,
                )
            )
        except OverflowError as error:
            raise ConvertError(f"{source.where}: {error}. Choose another companion dtype.") from None
        difference = values(rows, target) - weights
        role.squared_error += float(np.vdot(difference, difference))
        role.squared_weights += float(np.vdot(weights, weights))
        return rows
    narrowed = from_float32(weights, target)
    if not all_finite(narrowed, target):
        raise ConvertError(f"{source.where}: holds values that exceed the range of {target}.")
    report.lossy_values += int(np.count_nonzero(to_float32(narrowed, target) != weights))
    return narrowed


def _finite(stored: Rows, form: str | PackedFormat) -> bool:
    if isinstance(form, Mxfp4Format):
        return not np.any(stored.scales == 255)
    if isinstance(form, AffineFormat):
        return all_finite(stored.scales, form.companion_dtype) and all_finite(stored.biases, form.companion_dtype)
    return all_finite(stored, form)
