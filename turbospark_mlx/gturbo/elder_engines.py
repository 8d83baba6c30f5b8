"""Whether the two elder engines, turbo-fieldfare (Swift) and turbospark (Rust), can run an install, and why not.

The rules are those that an install's own files answer: dialect, storage types, families, the ``quant`` block. What an
engine finds out only while it runs a family is not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from turbospark_mlx.gturbo import experts_layout, formats, manifest, resident_index
from turbospark_mlx.gturbo.install import TOKENIZER_DIRECTORY, Install
from turbospark_mlx.gturbo.quant_summary import elder_runs_expert, elder_runs_resident

SWIFT, RUST = "turbo-fieldfare (Swift)", "turbospark (Rust)"

_RUST_FAMILIES = (
    *("gemma4", "qwen36", "qwen35", "qwen4exp", "museGlimmer", "qwen2", "qwen3_vl", "llama", "qwen3", "qwen3moe"),
    *("gptOss", "deepseek2", "spark2_5", "minimax_m2"),
)
_RUST_BLOCKS = frozenset(block.name for tag, block in formats.BLOCK_TAGS.items() if tag not in (9, 14, 25))
_RUST_EXPERT_BLOCKS = _RUST_BLOCKS | {"MXFP4", "Q2_0"}
_RUST_SLOT_BITS = {"embedding": (4,), "attention": (4,), "router": (8,), "sharedExpert": (4, 8), "routedExpert": (2, 4)}

_SWIFT_SLOT_BITS = {**_RUST_SLOT_BITS, "routedExpert": (4,)}
_SWIFT_LAYOUT_BYTES = 16 << 20
_SWIFT_ARCH = {
    "hiddenSize": 2816,
    "ffnIntermediate": 2112,
    "moeIntermediateSize": 704,
    "numHeads": 16,
    "numKVHeads": 8,
    "numFullKVHeads": 2,
    "headDim": 256,
    "fullHeadDim": 512,
    "vocabSize": 262144,
    "slidingWindow": 1024,
    "numLayers": 30,
    "numExperts": 128,
    "topKExperts": 8,
    "finalLogitSoftcap": 30,
    "ropeTheta": 1e4,
    "fullRopeTheta": 1e6,
    "partialRotaryFactor": 0.25,
    "tieWordEmbeddings": True,
    "attentionKEqV": True,
    "hiddenActivation": "gelu_pytorch_tanh",
    "fullAttentionLayerMask": [int(layer % 6 == 5) for layer in range(30)],
}
"""The one model of the Swift engine, Gemma 4 26B-A4B."""


def refusals(install: Install) -> dict[str, list[str]]:
    """For each elder engine the reasons why it does not run this install, in sentences; an empty list where it
    does."""
    return {SWIFT: list(_swift(install)), RUST: list(_rust(install))}


def _flagged(install: Install) -> Iterable[str]:
    if install.manifest.flags.get(manifest.EXTENSION_FLAG):
        yield "The install needs turbospark-mlx's extension of the format."


def _swift(install: Install) -> Iterable[str]:
    yield from _flagged(install)
    differing = [key for key, value in _SWIFT_ARCH.items() if install.arch[key] != value]
    if differing:
        yield f"It runs Gemma 4 26B-A4B only; arch.{differing[0]} is {install.arch[differing[0]]!r}."
    tags = sorted({entry.tag for entry in install.tensors.values()} - {formats.TAG_WORDS, *formats.RAW_TAGS})
    if tags:
        yield f"It does not know the dtype tags {', '.join(map(str, tags))}."
    for entry in install.tensors.values():
        if entry.format and entry.format not in (formats.AFFINE_TAGS[4], formats.AFFINE_TAGS[5]):
            stored = formats.spell(entry.dtype, entry.format)
            yield f"Its matrices have 4 or 8 bits and groups of 64; {entry.name!r} has {stored}."
            break
    strides = {layer.stride for layer in install.experts.layers}
    if len(strides) > 1 or install.experts.stride % formats.PAGE:
        yield "It needs one expert stride, a multiple of 16384, for all layers."
    if install.manifest.files[experts_layout.FILE].size > _SWIFT_LAYOUT_BYTES:
        yield f"{experts_layout.FILE} is larger than {_SWIFT_LAYOUT_BYTES} bytes."
    if (min(entry.offset for entry in install.tensors.values()) if install.tensors else 0) % formats.PAGE:
        yield f"The payload of {resident_index.FILE} does not begin at a multiple of {formats.PAGE}."
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if f"{TOKENIZER_DIRECTORY}/{name}" not in install.manifest.files:
            yield f"It needs {TOKENIZER_DIRECTORY}/{name}, listed in manifest.json."
    yield from _quant(install.manifest.quant, _SWIFT_SLOT_BITS, rust=False)


def _rust(install: Install) -> Iterable[str]:
    yield from _flagged(install)
    family = install.manifest.family
    if family not in _RUST_FAMILIES:
        yield f"It does not know the family {family!r}."
    for entry in install.tensors.values():
        runs = (
            entry.dtype in _RUST_BLOCKS
            if entry.dtype in formats.BLOCK_TYPES
            else (family == "minimax_m2" and entry.dtype == "float32")
            or elder_runs_resident(entry.name, entry.tag, entry.dtype)
        )
        if not runs:
            stored = formats.spell(entry.dtype, entry.format)
            yield f"It does not run {entry.name!r} stored as {stored} (dtype tag {entry.tag})."
            break
    for layer in install.experts.layers:
        affine = "gate_scales" in layer.tensors
        for role in experts_layout.MATRICES:
            tensor = layer.tensors[role]
            if tensor.dtype not in _RUST_EXPERT_BLOCKS and not (affine and elder_runs_expert(role, tensor.format)):
                stored = formats.spell(tensor.dtype, tensor.format)
                yield f"It does not run experts stored as {stored} ({layer.file}: {role})."
                return
    yield from _quant(install.manifest.quant, _RUST_SLOT_BITS, rust=True)


def _quant(quant: Mapping[str, Any], bits: Mapping[str, tuple[int, ...]], *, rust: bool) -> Iterable[str]:
    if not quant:
        yield "manifest.json has no quant block."
        return
    for slot, possible in bits.items():
        entry = quant[slot]
        if rust and (_is_rust_special(slot, entry) or (slot != "attention" and entry == quant["attention"])):
            continue
        kinds = (entry["scheme"].lower(), entry["scaleType"].lower(), entry["biasType"].lower(), entry["groupSize"])
        if kinds != ("affine", "bf16", "bf16", 64) or entry["weightBits"] not in possible:
            yield (
                f"It does not accept quant.{slot}: {entry['weightBits']} bits, {entry['scheme']}, scales"
                f" {entry['scaleType']}, groups of {entry['groupSize']}."
            )
            return


def _is_rust_special(slot: str, entry: Mapping[str, Any]) -> bool:
    """The quantization slots that only the Rust engine accepts: 1 and 2 bits, ggml blocks, an unpacked router."""
    scheme, scale, group = entry["scheme"].lower(), entry["scaleType"].lower(), entry["groupSize"]
    if scheme == "affine":
        return entry["weightBits"] in (1, 2) and (scale, entry["biasType"].lower(), group) == ("fp16", "fp16", 128)
    if scheme == "gguf":
        names = {str(name).upper() for name in [entry.get("ggmlType"), *(entry.get("ggmlTypes") or [])] if name}
        return bool(names) and names <= _RUST_EXPERT_BLOCKS
    return slot == "router" and (scheme, entry["weightBits"]) == ("raw", 32)
