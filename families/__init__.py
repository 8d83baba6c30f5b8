"""Model families, one package each, and the table that finds them.

A family package exposes ``FAMILY`` (see ``turbospark_mlx.protocols.Family``) and ``Model``. Adding a family means
adding its package and one line here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.protocols import Family

PACKAGES = ("deepseek2", "gemma4", "gpt_oss", "llama", "muse", "qwen", "qwen4", "spark")


def package(name: str) -> ModuleType:
    """The family package called ``name``."""
    return import_module(f"{__name__}.{name}")


def _families() -> list[Family]:
    return [package(name).FAMILY for name in PACKAGES]


def family_for_model_type(model_type: str) -> Family:
    """The family that runs config.json's ``model_type``. Raises ConvertError and lists what is supported."""
    for family in _families():
        if model_type in family.model_types:
            return family
    known = sorted(t for family in _families() for t in family.model_types)
    raise ConvertError(
        f"config.json: model_type is {model_type!r}, which no family of this version runs."
        f" Supported: {', '.join(known)}."
    )


def family_for_gguf(architecture: str) -> Family:
    """The family of a GGUF file's ``general.architecture``, which may refuse it with a reason of its own. Raises
    ConvertError and lists what is converted."""
    for family in _families():
        if architecture in family.gguf_architectures:
            return family
    known = sorted(t for family in _families() if family.converts_gguf for t in family.gguf_architectures)
    raise ConvertError(
        f"GGUF: general.architecture is {architecture!r}, which no family of this version converts."
        f" Supported: {', '.join(known)}."
    )


def family_for_manifest(manifest_family: str) -> Family:
    """The family that runs a manifest's ``arch.family``. Raises InstallError."""
    for family in _families():
        if manifest_family in family.manifest_families:
            return family
    known = sorted(t for family in _families() for t in family.manifest_families)
    raise InstallError(
        f"manifest.json: arch.family is {manifest_family!r}, which no family of this version runs."
        f" Supported: {', '.join(known)}."
    )
