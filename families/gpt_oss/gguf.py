"""GGUF files of gpt-oss are not converted: they are known here so that they are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from turbospark_mlx.errors import ConvertError


def hf_config_from_gguf(metadata: Mapping[str, Any]) -> NoReturn:
    """Raises ConvertError."""
    raise ConvertError(
        "GGUF: general.architecture is 'gpt-oss', whose GGUF files this version does not convert. Take the published"
        " safetensors checkpoint, whose experts are MXFP4 as well, or an MLX-quantized copy of it."
    )


gguf_name = gguf_rows = hf_config_from_gguf
