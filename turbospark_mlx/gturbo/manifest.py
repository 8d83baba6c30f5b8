"""``manifest.json``: what the model is, which files belong to it, and what they hash to.

Read as both elder engines write it. Written for the Rust engine, plus one block under ``turbosparkMlx`` for what its
dialect cannot say; an install that would run wrongly without that block carries a flag that elder engines refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import experts_layout, formats, resident_index
from turbospark_mlx.gturbo.files import fold, split_path
from turbospark_mlx.gturbo.strict_json import U32_MAX, Record, parse
from turbospark_mlx.protocols import AffineFormat

FILE = "manifest.json"
ELDER_RECEIPT = "verified-install.json"
MAX_BYTES = 4 << 20

EXTENSION = "turbosparkMlx"
EXTENSION_VERSION = 1
EXTENSION_FLAG = "turbosparkMlxExtension"
FLAGS = ("streamingPresent", "turboQuantKV", "aneSharedExpert", EXTENSION_FLAG)

QUANT_SLOTS = ("embedding", "attention", "router", "sharedExpert", "routedExpert")

# Axis sizes and counts: all of the required integers fit 31 bits in both engines.
_COUNT_MAX = (1 << 31) - 1
_REQUIRED_POSITIVE = ("hiddenSize", "numHeads", "numKVHeads", "numFullKVHeads", "headDim", "fullHeadDim", "vocabSize")
_REQUIRED_COUNTS = ("ffnIntermediate", "moeIntermediateSize", "slidingWindow", "numExperts", "topKExperts")
_REQUIRED_NUMBERS = ("finalLogitSoftcap", "ropeTheta", "fullRopeTheta", "partialRotaryFactor")
_REQUIRED_BOOLEANS = ("tieWordEmbeddings", "attentionKEqV")
_OPTIONAL_INTEGERS = (
    *("linearNumKHeads", "linearNumVHeads", "linearKeyHeadDim", "linearValueHeadDim", "linearConvKernelSize"),
    *("mlaKvLoraRank", "mlaQLoraRank", "mlaNopeHeadDim", "mlaRopeHeadDim", "mlaVHeadDim"),
    *("denseLeadIntermediateSize", "numDenseLeadingLayers"),
    *("caQLoraRank", "caOLoraRank", "caOGroups", "caRopeHeadDim", "caIndexNHeads", "caIndexHeadDim", "caIndexTopK"),
    *("caCSACompressRate", "caHCACompressRate", "caRopeScalingOriginalMax", "caIndexKvHeads", "caIndexBudget"),
    *("hcMult", "hcSinkhornIters", "hcLowrank"),
    *("pleNgramSize", "pleHeadsPerNgram", "pleNgramVocabSizeBase", "pleMakeDivisibleBy", "pleSplitNgramParts"),
    *("pleEmbedDim", "pleConvKernelSize", "pleSeed", "pleEosTokenId"),
    *("numHashRoutedLayers", "ropeScalingOriginalContext", "trainedContext"),
    *("visionDepth", "visionHiddenSize", "visionIntermediateSize", "visionNumHeads", "visionPatchSize"),
    *("visionTemporalPatchSize", "visionInChannels", "visionSpatialMergeSize", "visionNumPositionEmbeddings"),
    *("visionOutHiddenSize", "visionStartTokenId", "visionEndTokenId", "visionImageTokenId", "visionVideoTokenId"),
)
_OPTIONAL_NUMBERS = (
    *("attentionScale", "routedScalingFactor", "swigluLimit", "hcEps"),
    *("caCompressRopeTheta", "caRopeScalingFactor", "caRopeScalingBetaFast", "caRopeScalingBetaSlow"),
    *("ropeScalingFactor", "ropeScalingBetaFast", "ropeScalingBetaSlow", "ropeScalingMscale"),
)
_OPTIONAL_BOOLEANS = (
    *("attnOutputGate", "embeddingScaledBySqrtHidden", "routerScaled", "ffnSandwichNorms", "sharedExpertGated"),
    *("ropeNeoxSubdim", "linearOutputGateSigmoid"),
)
_OPTIONAL_ARRAYS = ("pleLayerIds", "visionMropeSection", "visionDeepstackVisualIndexes")
_MASK_MAX = 5

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes and its SHA-256 in lower-case hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A validated manifest. ``document`` is the whole JSON object as it was read."""

    model_id: str
    flags: Mapping[str, bool]
    arch: dict[str, Any]
    extension: dict[str, Any]
    tensor_formats: Mapping[str, AffineFormat]
    quant: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    num_layers: int
    experts_per_layer: int
    expert_stride: int
    document: dict[str, Any]

    @property
    def family(self) -> str:
        """``arch.family``; absent means Gemma 4."""
        return self.arch.get("family") or "gemma4"


def read(data: bytes, label: str) -> Manifest:
    """Parse and validate the bytes of a manifest. Raises InstallError naming ``label`` and the field."""
    root = Record(parse(data, label), label)
    if root.value.get("magic") != "GTURBO":
        root.fail("magic", "is not 'GTURBO': this is no .gturbo install")
    major = root.integer("versionMajor")
    if major != 1:
        root.fail("versionMajor", f"is {major}; this version reads 1")
    root.integer("versionMinor", maximum=U32_MAX)
    flags = _flags(root.record("flags"))
    arch = root.record("arch")
    _check_arch(arch)
    extension, tensor_formats = _extension(root, flags)
    quant = root.record("quant", default={})
    _check_quant(quant)
    if root.text("modelID") == "":
        root.fail("modelID", "is empty")
    root.text("sourceSnapshotHash", default=None)
    root.integer("bitWidthOverridesHonored", default=0)
    root.text("capability", default=None)
    num_layers, experts_per_layer, stride = _expert_geometry(root, arch, flags)
    return Manifest(
        model_id=root.text("modelID"),
        flags=flags,
        arch=arch.value,
        extension=extension,
        tensor_formats=tensor_formats,
        quant=quant.value,
        files=_files(root.record("files")),
        num_layers=num_layers,
        experts_per_layer=experts_per_layer,
        expert_stride=stride,
        document=root.value,
    )


def _flags(flags: Record) -> dict[str, bool]:
    flags.only(*FLAGS)
    values = {key: flags.boolean(key) for key in flags}
    if values.get("turboQuantKV"):
        flags.fail("turboQuantKV", "is true; no engine runs such an install")
    return values


def _check_arch(arch: Record) -> None:
    layers = arch.integer("numLayers", maximum=_COUNT_MAX)
    if layers == 0:
        arch.fail("numLayers", "is 0: this is no language model (a vision sidecar is opened with its model)")
    for key in _REQUIRED_POSITIVE:
        arch.integer(key, 1, _COUNT_MAX)
    for key in _REQUIRED_COUNTS:
        arch.integer(key, 0, _COUNT_MAX)
    for key in _REQUIRED_NUMBERS:
        arch.number(key)
    for key in _REQUIRED_BOOLEANS:
        arch.boolean(key)
    if arch.text("hiddenActivation") == "":
        arch.fail("hiddenActivation", "is empty")
    mask = arch.integers("fullAttentionLayerMask", 0, _MASK_MAX)
    if len(mask) != layers:
        arch.fail("fullAttentionLayerMask", f"has {len(mask)} entries; numLayers is {layers}")
    experts, top_k = arch.integer("numExperts"), arch.integer("topKExperts")
    if top_k > experts or (experts > 0 and top_k == 0):
        arch.fail("topKExperts", f"is {top_k}; numExperts is {experts}")
    if arch.number("ropeTheta") < 0 or arch.number("fullRopeTheta") < 0:
        arch.fail("ropeTheta", "and fullRopeTheta may not be negative")
    if not 0 <= arch.number("partialRotaryFactor") <= 1:
        arch.fail("partialRotaryFactor", f"is {arch.number('partialRotaryFactor')}; it must be between 0 and 1")
    arch.text("family", default=None)
    arch.text("routerScoringFunc", default=None)
    for key in _OPTIONAL_INTEGERS:
        arch.integer(key, default=None)
    for key in _OPTIONAL_NUMBERS:
        arch.number(key, default=None)
    for key in _OPTIONAL_BOOLEANS:
        arch.boolean(key, default=None)
    for key in _OPTIONAL_ARRAYS:
        arch.integers(key, default=None)
    if arch.integer("numDenseLeadingLayers", default=0) > layers:
        arch.fail("numDenseLeadingLayers", f"is more than numLayers, {layers}")


def _extension(root: Record, flags: Mapping[str, bool]) -> tuple[dict[str, Any], dict[str, AffineFormat]]:
    if EXTENSION not in root:
        if flags.get(EXTENSION_FLAG):
            root.fail(EXTENSION, f"is missing, but flags.{EXTENSION_FLAG} is true")
        return {}, {}
    block = root.record(EXTENSION)
    version = block.integer("version")
    if version != EXTENSION_VERSION:
        block.fail("version", f"is {version}; this version reads {EXTENSION_VERSION}")
    block.only("version", "arch", "tensors")
    tensors = block.record("tensors", default={})
    declared = {}
    for name in tensors:
        entry = tensors.record(name)
        entry.only("bits", "groupSize", "companionDtype")
        affine = AffineFormat(entry.integer("bits"), entry.integer("groupSize"), entry.text("companionDtype"))
        try:
            formats.check_affine(affine)
        except ValueError as error:
            tensors.fail(name, f"declares {error}")
        declared[name] = affine
    if declared and not flags.get(EXTENSION_FLAG):
        block.fail("tensors", f"declares formats that elder engines lack; flags.{EXTENSION_FLAG} must be true")
    return block.record("arch", default={}).value, declared


def _check_quant(quant: Record) -> None:
    if not quant.value:
        return
    for slot in QUANT_SLOTS:
        entry = quant.record(slot)
        entry.integer("weightBits", 0, 32)
        entry.integer("groupSize", 0, _COUNT_MAX)
        for key in ("scheme", "scaleType", "biasType"):
            if entry.text(key) == "":
                entry.fail(key, "is empty")
        entry.text("ggmlType", default=None)
        entry.array("ggmlTypes", default=None)
    quant.record("hadamard", default={})


def _expert_geometry(root: Record, arch: Record, flags: Mapping[str, bool]) -> tuple[int, int, int]:
    experts = arch.integer("numExperts")
    routed = arch.integer("numLayers") - arch.integer("numDenseLeadingLayers", default=0) if experts else 0
    if routed and flags.get(EXTENSION_FLAG):
        # The extension may name layers without experts anywhere, which only the family knows.
        routed = root.integer("numLayers", 1, routed)
    for key, expected in (("numLayers", routed), ("expertsPerLayer", experts)):
        if root.integer(key) != expected:
            root.fail(key, f"is {root.integer(key)}; arch gives {expected}")
    stride = root.integer("expertStride")
    if stride % experts_layout.STRIDE_MULTIPLE or bool(stride) != bool(routed):
        root.fail("expertStride", f"is {stride}; {routed} layers of experts need a multiple of 4096 (0 for none)")
    return routed, experts, stride


def _files(files: Record) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    folded: dict[str, str] = {}
    for name in files:
        parts = split_path(name, f"{files.label}: {files.path}")
        entry = files.record(name)
        digest = entry.text("sha256")
        if not _SHA256.fullmatch(digest):
            entry.fail("sha256", "is not 64 hexadecimal digits")
        records[name] = FileRecord(entry.integer("size"), digest.lower())
        if fold(parts[0]) in (FILE, ELDER_RECEIPT) or fold(name) == "tokenizer":
            files.fail(name, "may not be listed")
        same = folded.setdefault(fold(name), name)
        if same != name:
            files.fail(name, f"is the same file as {same!r} where case is ignored")
    for name in folded:
        for end, character in enumerate(name):
            if character == "/" and name[:end] in folded:
                files.fail(folded[name], f"lies below {folded[name[:end]]!r}, which is a file too")
    for name in (resident_index.FILE, experts_layout.FILE):
        if name not in records:
            files.fail(name, "is missing")
    return records


def build(
    *,
    model_id: str,
    arch: Mapping[str, Any],
    extension: Mapping[str, Any],
    tensor_formats: Mapping[str, AffineFormat],
    needs_extension: bool,
    quant: Mapping[str, Any],
    files: Mapping[str, FileRecord],
    num_layers: int,
    experts_per_layer: int,
    expert_stride: int,
) -> bytes:
    """The bytes of a manifest in the Rust engine's dialect. Raises InstallError for what ``read`` would refuse."""
    floats = {key: float(arch[key]) for key in (*_REQUIRED_NUMBERS, *_OPTIONAL_NUMBERS) if arch.get(key) is not None}
    document: dict[str, Any] = {
        "magic": "GTURBO",
        "versionMajor": 1,
        "versionMinor": 0,
        "flags": {EXTENSION_FLAG: True} if needs_extension else {},
        "modelID": model_id,
        "arch": {**arch, **floats},
        "quant": quant,
        "files": {name: {"size": record.size, "sha256": record.sha256} for name, record in sorted(files.items())},
        "numLayers": num_layers,
        "expertsPerLayer": experts_per_layer,
        "expertStride": expert_stride,
        "sourceSnapshotHash": None,
    }
    if needs_extension or extension:
        document[EXTENSION] = {
            "version": EXTENSION_VERSION,
            "arch": dict(extension),
            "tensors": {
                name: {"bits": f.bits, "groupSize": f.group_size, "companionDtype": f.companion_dtype}
                for name, f in tensor_formats.items()
            },
        }
    try:
        data = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InstallError(f"{FILE} cannot be written: {error}.") from error
    if len(data) > MAX_BYTES:
        raise InstallError(f"{FILE} cannot be written: it would have {len(data)} bytes, and {MAX_BYTES} are allowed.")
    read(data, FILE)
    return data
