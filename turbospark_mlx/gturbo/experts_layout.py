"""``packed_experts/layout.json``: where the routed experts lie in the per-layer files.

An expert is one blob, read with one positioned read; inside it lie its matrices and their companions. Every expert of
a layer has the same inner layout. Sub-tensor offsets count from the start of the blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import formats
from turbospark_mlx.gturbo.files import damaged, fold, split_path
from turbospark_mlx.gturbo.formats import PAGE, SUB_ALIGNMENT, TensorSpec
from turbospark_mlx.gturbo.resident_index import align
from turbospark_mlx.gturbo.strict_json import U32_MAX, Record, parse
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat

DIRECTORY = "packed_experts"
FILE = f"{DIRECTORY}/layout.json"
MAX_BYTES = 64 << 20
STRIDE_MULTIPLE = 4096

MATRICES = ("gate", "up", "down")

_RAW_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "f32": "float32", "fp32": "float32"}
_DTYPE_OF_RAW = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "uint8": "u8"}
_WORDS, _EXPONENTS = "u32", "u8"


@dataclass(frozen=True)
class ExpertTensor:
    """A sub-tensor of every expert of a layer. ``offset`` counts from the start of the blob, ``shape`` is logical,
    ``dtype`` is as in ``TensorEntry``, or ``"mxfp4"`` or, for its exponents, ``"uint8"``; ``format`` is set on packed
    matrices."""

    role: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    format: PackedFormat | None = None


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts: expert ``e`` is ``size`` bytes at ``offsets[e]`` of ``file`` (a path in the install)."""

    layer: int
    file: str
    stride: int
    size: int
    offsets: tuple[int, ...]
    tensors: Mapping[str, ExpertTensor]


@dataclass(frozen=True)
class ExpertsLayout:
    """The layout of all routed experts; ``layers`` is empty in dense installs and is in order of ``layer``."""

    stride: int
    experts_per_layer: int
    layers: tuple[ExpertLayer, ...]

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, alignment included."""
        return sum(layer.stride * len(layer.offsets) for layer in self.layers)


def read(data: bytes, label: str, *, num_layers: int, experts_per_layer: int, stride: int) -> ExpertsLayout:
    """Parse and validate a layout against what the manifest says. Raises InstallError."""
    root = Record(parse(data, label), label)
    declared = {"numLayers": num_layers, "expertsPerLayer": experts_per_layer, "expertStride": stride}
    for key, expected in declared.items():
        if root.integer(key) != expected:
            root.fail(key, f"is {root.integer(key)}; manifest.json declares {expected}")
    items = root.array("layers")
    if len(items) != num_layers:
        root.fail("layers", f"has {len(items)} entries; numLayers is {num_layers}")
    layers: dict[int, ExpertLayer] = {}
    folded: set[str] = set()
    for index, item in enumerate(items):
        record = Record(item, label, f"layers[{index}]")
        layer = _layer(record, num_layers, experts_per_layer, stride)
        if layer.layer in layers:
            record.fail("layer", f"is {layer.layer}, like an earlier entry's")
        if fold(layer.file) in folded:
            record.fail("file", f"is {layer.file!r}, like an earlier entry's where case is ignored")
        layers[layer.layer] = layer
        folded.add(fold(layer.file))
    return ExpertsLayout(stride, experts_per_layer, tuple(layers[number] for number in sorted(layers)))


def _layer(record: Record, num_layers: int, experts_per_layer: int, model_stride: int) -> ExpertLayer:
    number = record.integer("layer", 0, num_layers - 1)
    file = record.text("file")
    if len(split_path(file, f"{record.label}: {record.field('file')}")) != 1 or fold(file) == "layout.json":
        record.fail("file", f"is {file!r}; the plain name of a layer file is needed")
    stride = record.integer("expertStride", 1, model_stride, default=model_stride)
    if stride % STRIDE_MULTIPLE:
        record.fail("expertStride", f"is {stride}; a multiple of {STRIDE_MULTIPLE} is needed")
    items = record.array("experts")
    if len(items) != experts_per_layer:
        record.fail("experts", f"has {len(items)} entries; expertsPerLayer is {experts_per_layer}")
    experts = [Record(item, record.label, f"{record.path}.experts[{i}]") for i, item in enumerate(items)]
    explicit = sum("expert" in expert for expert in experts)
    if explicit not in (0, len(experts)):
        record.fail("experts", "gives numbers to some experts and not to others")
    offsets: dict[int, int] = {}
    ranks: set[int] = set()
    size = experts[0].integer("size", 1, stride)
    tensors = _tensors(experts[0].record("tensors"), size)
    for position, expert in enumerate(experts):
        identity = expert.integer("expert", 0, experts_per_layer - 1, default=position)
        rank = expert.integer("physicalRank", 0, experts_per_layer - 1, default=identity)
        if identity in offsets or rank in ranks:
            expert.fail("expert" if identity in offsets else "physicalRank", "is taken by an earlier expert")
        if expert.integer("size", 1, stride) != size:
            expert.fail("size", f"is {expert.integer('size')}; the first expert of the layer has {size}")
        if expert.value.get("tensors") != items[0].get("tensors"):
            expert.fail("tensors", "differ from those of the layer's first expert")
        offsets[identity] = expert.integer("offset")
        ranks.add(rank)
    for start, after in pairwise(sorted(offsets.values())):
        if start + size > after:
            record.fail("experts", f"overlap: one at {start} has {size} bytes, the next begins at {after}")
    return ExpertLayer(
        layer=number,
        file=f"{DIRECTORY}/{file}",
        stride=stride,
        size=size,
        offsets=tuple(offsets[expert] for expert in range(experts_per_layer)),
        tensors=tensors,
    )


def _tensors(record: Record, blob_size: int) -> dict[str, ExpertTensor]:
    tensors: dict[str, ExpertTensor] = {}
    for role in record:
        entry = record.record(role)
        shape = tuple(entry.integers("shape", 1, U32_MAX))
        if not 1 <= len(shape) <= 4:
            entry.fail("shape", f"has {len(shape)} axes; one to four are needed")
        offset, size = entry.integer("offset", 0, blob_size), entry.integer("size", 1, blob_size)
        if offset + size > blob_size:
            entry.fail("offset", f"{offset} and size {size} exceed the expert's {blob_size} bytes")
        name = entry.text("dtype").lower()
        dtype = _RAW_DTYPES.get(name, name if name in (_WORDS, _EXPONENTS) else name.upper())
        if dtype in formats.RAW_BYTES:
            _expect_size(entry, size, formats.raw_size(shape, dtype))
        elif dtype in formats.BLOCK_TYPES:
            _check_blocks(entry, size, shape, formats.BLOCK_TYPES[dtype])
        elif dtype == _EXPONENTS:
            _expect_size(entry, size, prod(shape))
            dtype = "uint8"
        elif dtype != _WORDS:
            entry.fail("dtype", f"is {entry.text('dtype')!r}, which is no known type")
        tensors[role] = ExpertTensor(role, offset, size, dtype, shape)
    for first, second in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if first.offset + first.size > second.offset:
            record.fail(second.role, f"overlaps {first.role}")
    for role in MATRICES:
        if role not in tensors:
            record.fail(role, "is missing")
    for role, tensor in list(tensors.items()):
        if tensor.dtype == _WORDS:
            scales = tensors.get(f"{role}_scales")
            pack = _mxfp4 if scales is not None and scales.dtype == "uint8" else _packed
            tensors[role] = pack(record, tensor, tensors)
    for role, tensor in tensors.items():
        owner = tensors.get(role.removesuffix("_scales"))
        if tensor.dtype == "uint8" and not (owner and isinstance(owner.format, Mxfp4Format)):
            record.fail(role, "has dtype u8, which only the scales of packed matrices have")
    return tensors


def _mxfp4(record: Record, tensor: ExpertTensor, tensors: Mapping[str, ExpertTensor]) -> ExpertTensor:
    """A matrix of packed words whose scales are exponents."""
    role, scales = tensor.role, tensors[f"{tensor.role}_scales"]
    if f"{role}_biases" in tensors:
        record.fail(f"{role}_biases", f"is there, but {role}_scales are exponents, which have none")
    try:
        data, exponents = formats.mxfp4_sizes(tensor.shape)
    except ValueError as error:
        record.fail(role, f"has {error}")
    entry = record.record(role)
    if entry.integer("bits", default=Mxfp4Format.bits) != Mxfp4Format.bits:
        entry.fail("bits", f"is {entry.integer('bits')}; MXFP4 has {Mxfp4Format.bits}")
    _expect_size(entry, tensor.size, data)
    _expect_size(record.record(f"{role}_scales"), scales.size, exponents)
    if scales.shape != (tensor.shape[0], tensor.shape[1] // Mxfp4Format.group_size):
        record.fail(f"{role}_scales", f"has shape {list(scales.shape)}, which does not fit {list(tensor.shape)}")
    return ExpertTensor(role, tensor.offset, tensor.size, "mxfp4", tensor.shape, Mxfp4Format())


def _packed(record: Record, tensor: ExpertTensor, tensors: Mapping[str, ExpertTensor]) -> ExpertTensor:
    """A matrix of packed words, with the format that its size and its companions give."""
    role, entry = tensor.role, record.record(tensor.role)
    bits, rest = divmod(8 * tensor.size, prod(tensor.shape))
    if rest or entry.integer("bits", default=bits) != bits:
        entry.fail("size", f"is {tensor.size}, which does not fit shape {list(tensor.shape)} and the bits")
    companions = [tensors.get(f"{role}_{kind}") for kind in ("scales", "biases")]
    if None in companions:
        record.fail(f"{role}_scales", f"or {role}_biases is missing, but {role} is packed")
    scales, biases = companions
    if (scales.dtype, scales.shape) != (biases.dtype, biases.shape):
        record.fail(f"{role}_biases", f"differs from {role}_scales in dtype or shape")
    affine = AffineFormat(bits, tensor.shape[-1] // scales.shape[-1], scales.dtype)
    try:
        formats.check_affine(affine)
        data, companion = formats.affine_sizes(tensor.shape, affine)
    except ValueError as error:
        record.fail(role, f"has {error}")
    _expect_size(entry, tensor.size, data)
    _expect_size(record.record(f"{role}_scales"), scales.size, companion)
    return ExpertTensor(role, tensor.offset, tensor.size, "affine", tensor.shape, affine)


def _check_blocks(entry: Record, size: int, shape: tuple[int, ...], block: formats.BlockType) -> None:
    if not block.elements:
        return
    try:
        _expect_size(entry, size, formats.block_size(shape, block))
    except ValueError as error:
        entry.fail("shape", f"has {error}")


def _expect_size(entry: Record, size: int, expected: int) -> None:
    if size != expected:
        entry.fail("size", f"is {size}; dtype and shape need {expected}")


def build(layers: Sequence[Sequence[TensorSpec]], num_experts: int) -> tuple[bytes, ExpertsLayout]:
    """Lay out experts: the bytes of ``layout.json`` and the layout. ``layers[i]`` holds the tensors of one expert of
    layer ``i``, in file order, named ``gate``, ``up``, ``down`` and, for additive biases, ``gate_bias`` and so on."""
    made: list[ExpertLayer] = []
    for number, specs in enumerate(layers):
        tensors, end = _place(specs)
        stride = align(end, PAGE)
        if stride > U32_MAX:
            raise InstallError(f"Layer {number}: one expert needs {stride} bytes; {U32_MAX} can be addressed.")
        offsets = tuple(range(0, num_experts * stride, stride))
        made.append(ExpertLayer(number, f"{DIRECTORY}/layer_{number:02d}.bin", stride, stride, offsets, tensors))
    layout = ExpertsLayout(max((layer.stride for layer in made), default=0), num_experts, tuple(made))
    document = {
        "expertStride": layout.stride,
        "numLayers": len(made),
        "expertsPerLayer": num_experts,
        "layers": [_layer_document(layer) for layer in made],
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise InstallError(f"{FILE} cannot be written: it would have {len(data)} bytes, and {MAX_BYTES} are allowed.")
    read(data, FILE, num_layers=len(made), experts_per_layer=num_experts, stride=layout.stride)
    return data, layout


def _place(specs: Sequence[TensorSpec]) -> tuple[dict[str, ExpertTensor], int]:
    tensors: dict[str, ExpertTensor] = {}
    end = 0
    for spec in specs:
        packed = None if isinstance(spec.dtype, str) else spec.dtype
        mxfp4 = isinstance(packed, Mxfp4Format)
        for part, size in spec.parts.items():
            role = spec.name if part == "data" else f"{spec.name}_{part}"
            if role in tensors:
                raise InstallError(f"Expert tensor {role!r} is given twice.")
            offset = align(end, SUB_ALIGNMENT)
            if packed is None:
                tensors[role] = ExpertTensor(role, offset, size, spec.dtype, spec.shape)
            elif part == "data":
                dtype = "mxfp4" if mxfp4 else "affine"
                tensors[role] = ExpertTensor(role, offset, size, dtype, spec.shape, packed)
            else:
                shape = (spec.shape[0], spec.shape[1] // packed.group_size)
                dtype = "uint8" if mxfp4 else packed.companion_dtype
                tensors[role] = ExpertTensor(role, offset, size, dtype, shape)
            end = offset + size
    return tensors, end


def _layer_document(layer: ExpertLayer) -> dict[str, Any]:
    tensors = {
        role: {
            "offset": tensor.offset,
            "size": tensor.size,
            "dtype": _WORDS if tensor.format else _DTYPE_OF_RAW[tensor.dtype],
            "shape": list(tensor.shape),
        }
        for role, tensor in layer.tensors.items()
    }
    return {
        "layer": layer.layer,
        "file": layer.file.removeprefix(f"{DIRECTORY}/"),
        "expertStride": layer.stride,
        "experts": [
            {"expert": expert, "offset": offset, "size": layer.size, "tensors": tensors}
            for expert, offset in enumerate(layer.offsets)
        ],
    }


def check_files(layout: ExpertsLayout, sizes: Mapping[str, int], label: str) -> None:
    """Raise InstallError unless the manifest lists every layer file and each holds its experts. ``sizes`` is the
    manifest's size of each file."""
    for layer in layout.layers:
        if layer.file not in sizes:
            raise damaged(label, f"names {layer.file}, which files in manifest.json does not list")
        if max(layer.offsets) + layer.size > sizes[layer.file]:
            raise damaged(
                label,
                f"puts an expert of {layer.size} bytes at {max(layer.offsets)} of {layer.file}, which has"
                f" {sizes[layer.file]} bytes",
            )
