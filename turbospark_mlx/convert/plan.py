"""What becomes of each tensor, decided before the first byte is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turbospark_mlx.convert.cut import cut, stacked_shape
from turbospark_mlx.convert.floats import STORAGE
from turbospark_mlx.convert.report import describe
from turbospark_mlx.convert.source import Rows, Source, SourceTensor, is_head, tiles
from turbospark_mlx.errors import ConvertError, OptionError
from turbospark_mlx.families.routed import parameter
from turbospark_mlx.protocols import AffineFormat, Dropped, ModelConfig, Mxfp4Format, PackedFormat, Placement, Role

KEEP_BITS = 16
"""The value of ``bits`` that keeps an unquantized checkpoint as it is."""
_CHOICES = {
    "bits": (4, 8, KEEP_BITS),
    "group_size": (32, 64, 128),
    "companion_dtype": ("bfloat16", "float16"),
}
_DEFAULT = AffineFormat(4, 64, "bfloat16")
# A router decides between experts by small differences, and is small itself.
_ROUTER_BITS = 8
_ELDER_GROUP_SIZE, _ELDER_COMPANION_DTYPE = 64, "bfloat16"
_LEAST_GROUP = 32
_ELDER_TABLE = AffineFormat(4, _LEAST_GROUP, _ELDER_COMPANION_DTYPE)
# What the elder engines' manifests may say of a role; other roles have 4 bits.
_ELDER_BITS = {"router": (8,), "shared_expert": (4, 8)}


@dataclass(frozen=True)
class Options:
    """What the user asked for; None leaves the choice to the checkpoint. Raises OptionError naming the option."""

    bits: int | None = None
    group_size: int | None = None
    companion_dtype: str | None = None
    elder_compatible: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise OptionError(f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}.")
        if self.bits == KEEP_BITS and (self.group_size or self.companion_dtype or self.elder_compatible):
            raise OptionError(
                f"bits {KEEP_BITS} keeps the weights unquantized, so that group_size, companion_dtype and"
                " elder_compatible do not apply. Leave them out, or choose bits 4 or 8."
            )
        if self.elder_compatible and (
            self.group_size not in (None, _ELDER_GROUP_SIZE)
            or self.companion_dtype not in (None, _ELDER_COMPANION_DTYPE)
        ):
            raise OptionError(
                f"elder_compatible needs group_size {_ELDER_GROUP_SIZE} and companion_dtype {_ELDER_COMPANION_DTYPE};"
                f" asked for {self.group_size} and {self.companion_dtype}. Leave them out."
            )


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the install: what it is read from, and the format it gets."""

    name: str
    role: Role
    source: SourceTensor
    target: str | PackedFormat


@dataclass(frozen=True)
class PlannedExperts:
    """One matrix of a layer's routed experts, ``name`` in the install and ``tensor`` in an expert's blob: what each
    expert's is read from, and the format that all of them get."""

    name: str
    tensor: str
    parts: tuple[PlannedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].source.shape)

    @property
    def target(self) -> str | PackedFormat:
        return self.parts[0].target


@dataclass(frozen=True)
class PlannedTable:
    """The table of the install: its parts in order, all of which get one format, and what its header says."""

    parts: tuple[PlannedTensor, ...]
    facts: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.source.rows for part in self.parts), self.parts[0].source.columns

    @property
    def target(self) -> str | PackedFormat:
        return self.parts[0].target


@dataclass
class Plan:
    """``tensors`` in writing order, ``experts`` the matrices of each layer that has routed ones; ``dropped`` maps names
    to the reason, ``exceptions`` names of tensors whose format is not the one that was asked for."""

    tensors: list[PlannedTensor] = field(default_factory=list)
    experts: list[list[PlannedExperts]] = field(default_factory=list)
    table: PlannedTable | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)


def plan(source: Source, options: Options) -> Plan:
    """Place and check every tensor of a source and choose its format.

    Raises ConvertError for a tensor that is missing, unknown, twice there, of the wrong shape, or of a dtype that
    cannot be converted, and for a configuration that ``elder_compatible`` cannot express; OptionError for options that
    do not go with the source.
    """
    if options.elder_compatible:
        _check_elder_config(source)
    made = Plan(dropped=dict(source.dropped))
    placed: dict[str, PlannedTensor] = {}
    pieces: dict[str, dict[int, SourceTensor]] = {}
    shards: dict[str, dict[int, SourceTensor]] = {}
    expected = source.family.expected(source.config)
    for name, tensor in source.tensors.items():
        place = source.family.place(name, source.config)
        if isinstance(place, Dropped):
            made.dropped[name] = place.reason
            continue
        if place.routed:
            _check_format(tensor)
            _cut(tensor, place, source, pieces)
            continue
        if place.table:
            _check_format(tensor)
            _add_shard(tensor, place, expected[place.name], shards.setdefault(place.name, {}))
            continue
        if place.name in placed:
            raise ConvertError(f"{tensor.where}: {placed[place.name].source.where} has the same place, {place.name}.")
        _check_format(tensor)
        tensor = _reshaped(tensor, expected.get(place.name))
        placed[place.name] = PlannedTensor(place.name, place.role, tensor, tensor.format)
    _check_complete(placed, pieces, shards, source)
    _check_tied_head(placed, source, made.dropped)

    formats = [tensor.target for tensor in placed.values()] + [
        parts[0].format for parts in (*pieces.values(), *shards.values())
    ]
    asked = _asked_format(options, any(isinstance(form, PackedFormat) for form in formats))
    made.experts = [[] for _ in source.family.experts(source.config)]
    for name in expected:
        place = source.family.place(name, source.config)
        if place.table:
            parts = [part for _, part in sorted(shards[name].items())]
            target, reason = _table_target(parts[0], asked, options.elder_compatible)
            facts = source.family.table_facts(source.config)
            made.table = PlannedTable(tuple(PlannedTensor(name, place.role, part, target) for part in parts), facts)
            if reason:
                made.exceptions[name] = reason
            continue
        first = placed[name].source if place.routed is None else pieces[name][0]
        target, reason = _target(place.role, first, asked, options.elder_compatible)
        if place.routed is None:
            made.tensors.append(replace(placed[name], target=target))
        else:
            parts = (PlannedTensor(name, place.role, part, target) for _, part in sorted(pieces[name].items()))
            made.experts[place.routed.position].append(PlannedExperts(name, place.routed.tensors[0], tuple(parts)))
        if reason:
            made.exceptions[name] = reason
    return made


def _reshaped(tensor: SourceTensor, shape: tuple[int, ...] | None) -> SourceTensor:
    """A tensor of three axes as the matrix that an install has, where both are the same values in the same order: a
    stack of matrices as all their rows, or a convolution's axes, of which the second or third is 1. A stack of one
    matrix is in no published checkpoint, and stays what it is."""
    if len(tensor.shape) != 3 or tensor.shape[0] == 1 or shape is None or len(shape) != 2:
        return tensor
    if shape == (tensor.rows, tensor.columns):
        return replace(tensor, shape=shape)
    if 1 not in tensor.shape or shape != tuple(size for size in tensor.shape if size != 1):
        return tensor
    each = shape[1] // tensor.columns

    def read(start: int, stop: int) -> Rows:
        return tensor.read(start * each, stop * each).reshape(stop - start, -1)

    return replace(tensor, shape=shape, read=read) if isinstance(tensor.format, str) else tensor


def _add_shard(tensor: SourceTensor, place: Placement, shape: tuple[int, ...], found: dict[int, SourceTensor]) -> None:
    part = place.table
    if tensor.shape != (each := (shape[0] // part.parts, shape[1])):
        raise _wrong_shape(tensor, each)
    other = next(iter(found.values()), tensor)
    if part.number in found or other.shape != tensor.shape:
        raise ConvertError(f"{tensor.where}: has the same place as {found.get(part.number, other).where}.")
    if other.format != tensor.format:
        raise ConvertError(
            f"{tensor.where}: is stored as {describe(tensor.format)}, {other.where} as {describe(other.format)}; the"
            " parts of a table have to be stored alike. Take another copy of the checkpoint."
        )
    found[part.number] = tensor


def _table_target(
    source: SourceTensor, asked: AffineFormat | None, elder_compatible: bool
) -> tuple[str | PackedFormat, str | None]:
    """As `_target`: rows hold whole groups, so that where those asked for do not fit, the smallest are taken."""
    if elder_compatible:
        asked = _ELDER_TABLE
    elif asked is not None and source.columns % asked.group_size:
        asked = replace(asked, group_size=_LEAST_GROUP)
    return _target("embedding", source, asked, elder_compatible)


def _cut(tensor: SourceTensor, place: Placement, source: Source, pieces: dict[str, dict[int, SourceTensor]]) -> None:
    """Cut a tensor of routed experts into the matrices of single experts and add them to ``pieces``: install name ->
    expert -> matrix."""
    routed, (path, spec) = place.routed, list(source.family.experts(source.config).items())[place.routed.position]
    shape = spec.tensors[routed.tensors[0]]
    numbers = range(spec.num_experts) if routed.expert is None else (routed.expert,)
    stacked = stacked_shape(routed, shape, spec.num_experts)
    if tensor.shape != stacked:
        raise _wrong_shape(tensor, stacked)
    prefix = place.name.removesuffix(place.checkpoint_name)
    for at, number in enumerate(numbers):
        for share, name in enumerate(routed.tensors):
            found = pieces.setdefault(prefix + parameter(path, name), {})
            part = cut(tensor, routed, shape, at, share, f"{name} of expert {number}")
            if number in found:
                raise ConvertError(f"{part.where}: has the same place as {found[number].where}.")
            other = next(iter(found.values()), part)
            if other.format != part.format:
                raise ConvertError(
                    f"{part.where}: is stored as {describe(part.format)}, {other.where} as {describe(other.format)};"
                    " the experts of a layer have to be stored alike. Take another copy of the checkpoint."
                )
            found[number] = part


def _wrong_shape(tensor: SourceTensor, expected: tuple[int, ...]) -> ConvertError:
    return ConvertError(
        f"{tensor.where}: has shape {list(tensor.shape)}; config.json asks for {list(expected)}. Take both from the"
        " same checkpoint."
    )


def _check_format(tensor: SourceTensor) -> None:
    if not isinstance(tensor.format, PackedFormat) and tensor.format not in STORAGE:
        raise ConvertError(
            f"{tensor.where}: has dtype {tensor.format}, which cannot be converted. Supported are"
            f" {', '.join(STORAGE)} and affine packing: take another copy of the checkpoint."
        )


def _check_complete(
    placed: Mapping[str, PlannedTensor],
    pieces: Mapping[str, Mapping[int, SourceTensor]],
    shards: Mapping[str, Mapping[int, SourceTensor]],
    source: Source,
) -> None:
    expected = source.family.expected(source.config)
    missing = [name for name in expected if not any(name in found for found in (placed, pieces, shards))]
    if any(is_head(source.family.place(name, source.config)) for name in missing):
        raise ConvertError(
            "config.json: tie_word_embeddings is false, but the checkpoint has no output head. Set it to true if the"
            " embedding is the head; otherwise complete the download."
        )
    if missing:
        first = source.family.place(missing[0], source.config)
        raise ConvertError(
            f"{source.model_id}: lacks {len(missing)} of {len(expected)} tensors, the first of them"
            f" {getattr(first, 'checkpoint_name', missing[0])}. Complete the download, or check config.json."
        )
    for name, parts in pieces.items():
        if absent := [number for number in range(expected[name][0]) if number not in parts]:
            raise ConvertError(
                f"{source.model_id}: lacks {name} of expert {absent[0]}, and of {len(absent) - 1} more of"
                f" {expected[name][0]} experts. Complete the download, or check config.json."
            )
    for name, parts in shards.items():
        count = expected[name][0] // next(iter(parts.values())).rows
        if absent := [number for number in range(count) if number not in parts]:
            raise ConvertError(
                f"{source.model_id}: lacks part {absent[0]} of {name}, and {len(absent) - 1} more of {count}. Complete"
                " the download, or check config.json."
            )
    for name, tensor in placed.items():
        if name not in expected:
            raise ConvertError(f"{tensor.source.where}: has no place in a model of this config.json. Check the file.")
        if tensor.source.shape != tuple(expected[name]):
            raise _wrong_shape(tensor.source, expected[name])


def _check_tied_head(placed: Mapping[str, PlannedTensor], source: Source, dropped: Mapping[str, str]) -> None:
    """A head that is stored beside a tied embedding may be left out only if it is the same matrix."""
    if not source.config.tie_word_embeddings:
        return
    untied = replace(source.config, tie_word_embeddings=False)
    names = source.family.expected(source.config)
    embedding = next(placed[n].source for n in names if n in placed and placed[n].role == "embedding")
    for name in dropped:
        head = source.tensors.get(name)
        if head is None or not is_head(source.family.place(name, untied)):
            continue
        _check_format(head)
        if head.shape != embedding.shape or not _same_values(head, embedding):
            raise ConvertError(
                f"{head.where}: differs from the embedding, but config.json says tie_word_embeddings true. Set it to"
                " false if the head is its own matrix; otherwise remove the tensor."
            )


def _same_values(first: SourceTensor, second: SourceTensor) -> bool:
    return all(
        np.array_equal(first.read_float32(start, stop), second.read_float32(start, stop))
        for start, stop in tiles(first)
    )


def _asked_format(options: Options, quantized: bool) -> AffineFormat | None:
    """The format that every matrix gets, or None where the checkpoint is kept as it is."""
    if options.bits == KEEP_BITS:
        if quantized:
            raise OptionError(
                f"bits {KEEP_BITS} keeps unquantized weights, and this checkpoint is quantized. Leave bits out to keep"
                " it as it is."
            )
        return None
    if options.bits is None and quantized:
        if options.group_size or options.companion_dtype:
            raise OptionError("group_size and companion_dtype need bits where the checkpoint is already quantized.")
        return None
    return AffineFormat(
        options.bits or _DEFAULT.bits,
        options.group_size or _DEFAULT.group_size,
        options.companion_dtype or _DEFAULT.companion_dtype,
    )


def _target(
    role: Role, source: SourceTensor, asked: AffineFormat | None, elder_compatible: bool
) -> tuple[str | PackedFormat, str | None]:
    """The format of a tensor, and the reason where it is not the one that was asked for."""
    form = source.format
    if isinstance(form, Mxfp4Format):
        return form, asked and "MXFP4 is kept: another format of 4 bits would lose by it"
    kept = "bfloat16" if elder_compatible else form
    if role == "vector" or len(source.shape) == 1:
        return kept, None
    if asked is None and elder_compatible and isinstance(form, AffineFormat):
        asked = AffineFormat(4 if form.bits <= 4 else 8, _ELDER_GROUP_SIZE, _ELDER_COMPANION_DTYPE)
    if asked is None:
        return kept, None
    if source.columns % asked.group_size:
        return kept, _misfit(source.columns, asked.group_size, elder_compatible)
    bits = _ROUTER_BITS if role == "router" else asked.bits
    allowed = _ELDER_BITS.get(role, (4,))
    if elder_compatible and bits not in allowed:
        return replace(asked, bits=allowed[0]), f"the elder engines do not read {bits} bits there"
    return replace(asked, bits=bits), None


def _misfit(columns: int, group_size: int, elder_compatible: bool) -> str:
    fitting = [size for size in _CHOICES["group_size"] if columns % size == 0]
    if elder_compatible:
        instead = ""
    else:
        instead = f"; --group-size {max(fitting)} would quantize it" if fitting else ", nor of any other"
    return f"its input width {columns} is not a multiple of the group size {group_size}{instead}"


def _check_elder_config(source: Source) -> None:
    if any(spec.biases for spec in source.family.experts(source.config).values()):
        raise ConvertError(
            f"{source.model_id}: its experts have biases, which the elder engines read beside ggml blocks only. Convert"
            " without --elder-compatible."
        )
    config: ModelConfig = source.config
    extension, assumed = config.to_manifest()[1], config.elder_assumption()
    for key, value in extension.items():
        if value != assumed.get(key):
            raise ConvertError(
                f"config.json: {key} is {value!r}, where the elder engines assume {assumed.get(key)!r} and cannot be"
                " told otherwise. Convert without --elder-compatible."
            )
