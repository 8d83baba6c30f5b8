"""A Hugging Face directory: config.json, safetensors, tokenizer; published weights or an MLX-quantized copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from turbospark_mlx.convert.floats import STORAGE, to_float32
from turbospark_mlx.convert.quantization import QuantizationConfig, affine_format, quantization_block
from turbospark_mlx.convert.safetensors_file import DTYPES, StoredTensor, open_shards
from turbospark_mlx.convert.source import (
    AffineRows,
    Mxfp4Rows,
    Source,
    SourceTensor,
    check_downloaded,
    parse_json,
    read_json,
    settle_tied_head,
)
from turbospark_mlx.errors import ConvertError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.protocols import Dropped, Family, ModelConfig, Mxfp4Format

SIDE_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
)


def open_huggingface(directory: Path, model_id: str | None) -> Source:
    """Open a checkpoint directory. Raises ConvertError naming the file, tensor or config field that is wrong."""
    with ExitStack() as files:
        hf_config = read_json(directory / "config.json")
        if not isinstance(hf_config.get("model_type"), str):
            raise ConvertError(f"{directory / 'config.json'}: has no model_type. Download the file again.")
        family = family_for_model_type(hf_config["model_type"])
        stored, ignored = open_shards(directory, files)
        names = [name for name in stored if not _is_companion(name, stored)]
        config = settle_tied_head(family.config_from_hf(hf_config), family, names)
        config = family.settle(
            config, {name: stored[name].shape for name in names}, lambda name: _small_values(name, stored)
        )
        # A packed head beside a tied embedding is read like any other matrix, to see whether it is the same one.
        untied = replace(config, tie_word_embeddings=False)
        block = quantization_block(hf_config, blocks=any(_is_blocks(name, stored) for name in names))
        quantization = QuantizationConfig(block, family, untied) if block else None
        return Source(
            kind="safetensors" if quantization is None else "MLX-quantized safetensors",
            model_id=model_id or directory.resolve().name,
            family=family,
            config=config,
            tensors={name: _tensor(name, stored, quantization, family, untied) for name in names},
            side_files=_side_files(directory),
            ignored=ignored,
            files=files.pop_all(),
        )


def _small_values(name: str, stored: Mapping[str, StoredTensor]) -> np.ndarray:
    """The values of a tensor that is not packed, in the shape that it is stored in."""
    tensor = stored[name]
    if tensor.dtype != "I64" and tensor.dtype not in DTYPES:
        raise ConvertError(f"{tensor.file.path}: {name} is {tensor.dtype}, where plain values are expected.")
    rows = prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else prod(tensor.shape)
    if tensor.dtype == "I64":
        return tensor.read_rows(0, rows, np.dtype("<i8")).reshape(tensor.shape)
    form = DTYPES[tensor.dtype]
    return to_float32(tensor.read_rows(0, rows, STORAGE[form]), form).reshape(tensor.shape)


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _is_companion(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    if _is_blocks(f"{name.removesuffix('_scales')}_blocks", stored):
        return name.endswith("_scales")
    stem, _, last = name.rpartition(".")
    weight = stored.get(f"{stem}.weight")
    return last in ("scales", "biases") and weight is not None and weight.dtype == "U32"


def _is_blocks(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether this is MXFP4 as gpt-oss was published: 16 bytes a block, its exponent in a tensor of its own."""
    return name.endswith("_blocks") and name in stored and stored[name].dtype == "U8"


def _tensor(
    name: str,
    stored: Mapping[str, StoredTensor],
    quantization: QuantizationConfig | None,
    family: Family,
    config: ModelConfig,
) -> SourceTensor:
    tensor = stored[name]
    where = f"{tensor.file.path}: {name}"
    if tensor.dtype == "U32" and not isinstance(family.place(name, config), Dropped):
        return _packed_tensor(name, stored, quantization, family, config, where)
    if _is_blocks(name, stored):
        return _blocks_tensor(tensor, stored.get(f"{name.removesuffix('_blocks')}_scales"), where)
    form = DTYPES.get(tensor.dtype, tensor.dtype)

    def read(start: int, stop: int) -> np.ndarray:
        return tensor.read_rows(start, stop, STORAGE[form])

    return SourceTensor(tensor.shape or (1,), form, where, read)


def _packed_tensor(
    name: str,
    stored: Mapping[str, StoredTensor],
    quantization: QuantizationConfig | None,
    family: Family,
    config: ModelConfig,
    where: str,
) -> SourceTensor:
    words = stored[name]
    scales, biases = (stored.get(f"{_stem(name)}.{part}") for part in ("scales", "biases"))
    if quantization is None:
        raise ConvertError(f"{where}: is packed, but config.json has no quantization block to say how.")
    place = family.place(name, config)
    settings = quantization.settings(place.name, where, routed=place.routed is not None)
    if settings.get("mode") == "mxfp4":
        return _mxfp4_tensor(words, scales, biases, where)
    if scales is None or biases is None:
        missing = "scales" if scales is None else "biases"
        raise ConvertError(f"{where}: is packed, but has no {missing}; only affine packing can be converted.")
    if scales.shape != biases.shape or scales.dtype != biases.dtype or scales.dtype not in DTYPES:
        raise ConvertError(
            f"{where}: scales are {scales.dtype} {list(scales.shape)}, biases {biases.dtype} {list(biases.shape)};"
            " they have to be alike, and floats."
        )
    if len(words.shape) < 2 or scales.shape[:-1] != words.shape[:-1]:
        raise ConvertError(f"{where}: words are {list(words.shape)}, scales {list(scales.shape)}; rows differ.")
    companion = DTYPES[scales.dtype]
    form = affine_format(
        settings, words=words.shape[-1], groups=scales.shape[-1], companion_dtype=companion, where=where
    )

    def read(start: int, stop: int) -> AffineRows:
        return AffineRows(
            words.read_rows(start, stop, np.dtype("<u4")),
            scales.read_rows(start, stop, STORAGE[companion]),
            biases.read_rows(start, stop, STORAGE[companion]),
        )

    return SourceTensor((*words.shape[:-1], scales.shape[-1] * form.group_size), form, where, read)


def _blocks_tensor(blocks: StoredTensor, scales: StoredTensor | None, where: str) -> SourceTensor:
    if scales is None or scales.dtype != "U8" or blocks.shape != (*scales.shape, Mxfp4Format.group_size // 2):
        found = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ConvertError(
            f"{where}: blocks are {list(blocks.shape)}, but their scales are {found}. Download it again."
        )
    count = scales.shape[-1]

    def read(start: int, stop: int) -> Mxfp4Rows:
        codes = blocks.read_rows(start * count, stop * count, np.dtype("u1"))
        return Mxfp4Rows(codes.view("<u4").reshape(stop - start, -1), scales.read_rows(start, stop, np.dtype("u1")))

    return SourceTensor((*scales.shape[:-1], count * Mxfp4Format.group_size), Mxfp4Format(), where, read)


def _mxfp4_tensor(
    words: StoredTensor, scales: StoredTensor | None, biases: StoredTensor | None, where: str
) -> SourceTensor:
    each = Mxfp4Format.group_size * Mxfp4Format.bits // 32
    columns = words.shape[-1] // each * Mxfp4Format.group_size if words.shape else 0
    if (
        scales is None
        or biases is not None
        or scales.dtype != "U8"
        or words.shape != (*scales.shape[:-1], scales.shape[-1] * each)
    ):
        found = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ConvertError(
            f"{where}: config.json says mode mxfp4; words are {list(words.shape)}, scales {found}"
            f"{', and there are biases' if biases is not None else ''}. Download it again."
        )

    def read(start: int, stop: int) -> Mxfp4Rows:
        return Mxfp4Rows(words.read_rows(start, stop, np.dtype("<u4")), scales.read_rows(start, stop, np.dtype("u1")))

    return SourceTensor((*words.shape[:-1], columns), Mxfp4Format(), where, read)


def _side_files(directory: Path) -> dict[str, bytes]:
    if not (directory / "tokenizer.json").exists():
        if (directory / "tokenizer.model").exists():
            raise ConvertError(
                f"{directory / 'tokenizer.json'}: is missing; tokenizer.model alone is not enough. Write one with"
                f" transformers: AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})."
            )
        raise ConvertError(f"{directory / 'tokenizer.json'}: is missing. Download the model's tokenizer.json there.")
    return {name: _side_file(directory / name) for name in SIDE_FILES if (directory / name).exists()}


def _side_file(path: Path) -> bytes:
    check_downloaded(path)
    data = path.read_bytes()
    if path.suffix == ".json":
        parse_json(data, str(path))
    return data
