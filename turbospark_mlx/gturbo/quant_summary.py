"""The manifest's ``quant`` block, and whether an install says something that the elder engines would not understand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from turbospark_mlx.gturbo import formats
from turbospark_mlx.gturbo.experts_layout import MATRICES
from turbospark_mlx.gturbo.formats import TensorSpec, role_of
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat

_SPELLING = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_ELDER_EXPERT_FORMATS = (
    AffineFormat(4, 64, "bfloat16"),
    AffineFormat(2, 64, "bfloat16"),
    AffineFormat(1, 128, "float16"),
    AffineFormat(2, 128, "float16"),
)
"""The formats of packed experts that the Rust engine runs."""


def summary(tensors: Sequence[TensorSpec], experts: Sequence[Sequence[TensorSpec]] = ()) -> dict[str, Any]:
    """One slot a component: the format that most of the component's weights have. Components that the model lacks
    repeat ``attention``, as the Rust engine expects of dense models."""
    counts: dict[str, Counter[str | PackedFormat]] = {}
    for spec in tensors:
        counts.setdefault(role_of(spec.name, spec.shape), Counter())[spec.dtype] += prod(spec.shape)
    for spec in (spec for layer in experts for spec in layer if spec.name in MATRICES):
        counts.setdefault("routed_expert", Counter())[spec.dtype] += prod(spec.shape)
    roles = ("embedding", "attention", "router", "shared_expert", "routed_expert")
    slots = {role: _slot(counts[role].most_common(1)[0][0]) for role in roles if role in counts}
    fallback = slots.get("attention") or next(iter(slots.values()), _slot("bfloat16"))
    names = ("embedding", "attention", "router", "sharedExpert", "routedExpert")
    return {name: slots.get(role, fallback) for name, role in zip(names, roles, strict=True)}


def _slot(dtype: str | PackedFormat) -> dict[str, Any]:
    if isinstance(dtype, Mxfp4Format):
        kind = {"scheme": "mxfp4", "scaleType": "e8m0", "biasType": "none"}
        return {"weightBits": dtype.bits, **kind, "groupSize": dtype.group_size}
    if isinstance(dtype, AffineFormat):
        companion = _SPELLING[dtype.companion_dtype]
        return {
            "weightBits": dtype.bits,
            "scheme": "affine",
            "scaleType": companion,
            "biasType": companion,
            "groupSize": dtype.group_size,
        }
    bits = 8 * formats.RAW_BYTES[dtype]
    return {"weightBits": bits, "scheme": "raw", "scaleType": "none", "biasType": "none", "groupSize": 0}


def needs_extension(
    tensors: Sequence[TensorSpec],
    experts: Sequence[Sequence[TensorSpec]],
    extension: Mapping[str, Any],
    elder_assumption: Mapping[str, Any],
) -> bool:
    """Whether the Rust engine would run the install wrongly, or fail in it, if it ignored the extension block."""
    missing = object()
    return (
        any(value != elder_assumption.get(key, missing) for key, value in extension.items())
        or any(not elder_runs_resident(spec.name, spec.tag, spec.dtype) for spec in tensors)
        or any(not elder_runs_expert(spec.name, spec.dtype) for layer in experts for spec in layer)
    )


def elder_runs_resident(name: str, tag: int, dtype: str | AffineFormat) -> bool:
    """Whether the Rust engine has a reader for a resident tensor that is not in ggml blocks. ``dtype`` matters for
    raw tensors only."""
    if tag == formats.TAG_WORDS or dtype == "float32":
        return False
    return dtype != "float16" or name.startswith("vision.")


def elder_runs_expert(role: str, dtype: str | PackedFormat | None) -> bool:
    """Whether the Rust engine has a reader for a routed expert's matrix that is not in ggml blocks."""
    return role in MATRICES and dtype in _ELDER_EXPERT_FORMATS
