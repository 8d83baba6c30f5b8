"""GGUF files of this family are not converted: they are known here so that they are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from turbospark_mlx.errors import ConvertError


def hf_config_from_gguf(metadata: Mapping[str, Any]) -> NoReturn:
    """Raises ConvertError."""
    raise ConvertError(
        f"GGUF: general.architecture is {metadata.get('general.architecture')!r}, whose GGUF files this version does"
        " not convert. Take the published safetensors checkpoint, or an MLX-quantized copy of it."
    )


gguf_name = gguf_rows = hf_config_from_gguf
