"""An install as a source: rewritten into this package's dialect, or requantized."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path

import numpy as np

from turbospark_mlx.convert.blocks import AFFINE_BLOCKS, affine_format, affine_rows, mxfp4_rows
from turbospark_mlx.convert.floats import STORAGE
from turbospark_mlx.convert.huggingface import SIDE_FILES
from turbospark_mlx.convert.source import AffineRows, Mxfp4Rows, Rows, Source, SourceTensor
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import family_for_manifest
from turbospark_mlx.gturbo import Install, TensorEntry
from turbospark_mlx.gturbo.experts_layout import ExpertLayer, ExpertTensor
from turbospark_mlx.gturbo.formats import BLOCK_TYPES, CONVERTIBLE_BLOCK_TYPES
from turbospark_mlx.protocols import Family, ModelConfig, Mxfp4Format


def open_install(directory: Path, model_id: str | None) -> Source:
    """Open an install of either dialect. Raises InstallError where it is damaged, ConvertError without a tokenizer."""
    with ExitStack() as files:
        install = files.enter_context(Install.open(directory, readable_blocks=CONVERTIBLE_BLOCK_TYPES))
        family = family_for_manifest(install.manifest.family)
        config = family.config_from_manifest(install.arch, install.extension)
        side_files = {name: install.read_side_file(name, None) for name in SIDE_FILES}
        if side_files["tokenizer.json"] is None:
            raise ConvertError(f"{directory / 'tokenizer.json'}: is missing. Copy the model's tokenizer.json there.")
        return Source(
            kind=f"install ({install.dialect} dialect)",
            model_id=model_id or install.manifest.model_id,
            family=family,
            config=config,
            tensors={
                **{name: _tensor(install, entry) for name, entry in install.tensors.items()},
                **_stacks(install, family, config),
            },
            side_files={name: data for name, data in side_files.items() if data is not None},
            files=files.pop_all(),
        )


def _stacks(install: Install, family: Family, config: ModelConfig) -> dict[str, SourceTensor]:
    """The routed experts as stacks, as far as the install has them: what is missing is for the plan to say."""
    found = {}
    for name in family.expected(config) if install.experts else ():
        routed = family.place(name, config).routed
        if routed and routed.position < len(install.experts.layers):
            layer = install.experts.layers[routed.position]
            if tensor := layer.tensors.get(_role(layer, routed.tensors[0])):
                found[name] = _stack(install, routed.position, layer, tensor)
    return found


def _role(layer: ExpertLayer, name: str) -> str:
    """What a layer's blobs call tensor ``name``. Beside ggml blocks, additive biases have the name that companions have
    beside packed words."""
    matrix, _, kind = name.partition("_")
    return f"{matrix}_biases" if kind and layer.tensors[matrix].dtype in BLOCK_TYPES else name


def _stack(install: Install, position: int, layer: ExpertLayer, tensor: ExpertTensor) -> SourceTensor:
    rows = int(np.prod(tensor.shape[:-1]))

    def read_part(role: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        row_bytes = layer.tensors[role].size // rows
        data = np.empty((stop - start, row_bytes), np.uint8)
        for expert in range(start // rows, -(-stop // rows)):
            first, last = max(start, expert * rows), min(stop, (expert + 1) * rows)
            buffer = data[first - start : last - start]
            install.read_expert_part_into(position, expert, role, buffer, start=(first - expert * rows) * row_bytes)
        return data.view(dtype)

    def read_blocks(start: int, stop: int) -> np.ndarray:
        return read_part(tensor.role, np.dtype("u1"), start, stop)

    where = f"{install.path}: {layer.file}: {tensor.role}"
    shape = (len(layer.offsets), *tensor.shape)
    if tensor.dtype in BLOCK_TYPES:
        return _of_blocks(shape, tensor.dtype, where, read_blocks)

    def read(start: int, stop: int) -> Rows:
        if tensor.format is None:
            return read_part(tensor.role, STORAGE[tensor.dtype], start, stop)
        if isinstance(tensor.format, Mxfp4Format):
            words = read_part(tensor.role, np.dtype("<u4"), start, stop)
            return Mxfp4Rows(words, read_part(f"{tensor.role}_scales", np.dtype("u1"), start, stop))
        companion = STORAGE[tensor.format.companion_dtype]
        return AffineRows(
            read_part(tensor.role, np.dtype("<u4"), start, stop),
            read_part(f"{tensor.role}_scales", companion, start, stop),
            read_part(f"{tensor.role}_biases", companion, start, stop),
        )

    return SourceTensor(shape, tensor.format or tensor.dtype, where, read)


def _of_blocks(
    shape: tuple[int, ...], name: str, where: str, read_blocks: Callable[[int, int], np.ndarray]
) -> SourceTensor:
    """A tensor in ggml blocks, of which ``read_blocks(start, stop)`` gives the bytes of rows."""
    if name == "MXFP4":
        return SourceTensor(shape, Mxfp4Format(), where, lambda start, stop: mxfp4_rows(read_blocks(start, stop)))
    block = AFFINE_BLOCKS[name]
    form = affine_format(block, prod(shape[:-1]), shape[-1], read_blocks)

    def read(start: int, stop: int) -> AffineRows:
        return affine_rows(read_blocks(start, stop), block, form.companion_dtype)

    return SourceTensor(shape, form, where, read)


def _tensor(install: Install, entry: TensorEntry) -> SourceTensor:
    rows = int(np.prod(entry.shape[:-1])) if len(entry.shape) > 1 else entry.shape[0]

    def read_part(part: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        row_bytes = entry.part(part)[1] // rows
        data = np.empty((stop - start, row_bytes), np.uint8)
        install.read_range_into(entry, part, start * row_bytes, data)
        return data.view(dtype)

    where = f"{install.path}: {entry.name}"
    if entry.dtype == "MXFP4":
        raise ConvertError(f"{where}: is MXFP4, which only routed experts can be. Convert the model's source again.")
    if entry.dtype in BLOCK_TYPES:
        return _of_blocks(
            entry.shape, entry.dtype, where, lambda start, stop: read_part("data", np.dtype("u1"), start, stop)
        )

    def read(start: int, stop: int) -> np.ndarray | AffineRows:
        if entry.format is None:
            return read_part("data", STORAGE[entry.dtype], start, stop)
        companion = STORAGE[entry.format.companion_dtype]
        return AffineRows(
            read_part("data", np.dtype("<u4"), start, stop),
            read_part("scales", companion, start, stop),
            read_part("biases", companion, start, stop),
        )

    return SourceTensor(entry.shape, entry.format or entry.dtype, where, read)
