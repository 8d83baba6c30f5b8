"""What config.json says about an MLX-quantized checkpoint, held against what the tensors themselves say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbospark_mlx.errors import ConvertError
from turbospark_mlx.protocols import AffineFormat, Family, ModelConfig, Placement

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
_SETTINGS = ("bits", "group_size", "mode")


class QuantizationConfig:
    """The ``quantization`` block: settings for all layers, and overrides for single ones.

    MLX keys an override by the module's name in whatever spelling the saving program had, so overrides are compared
    under their install name. ``False`` means that a layer is not quantized, ``True`` that it is like all others.
    """

    def __init__(self, block: Mapping[str, Any], family: Family, config: ModelConfig) -> None:
        self._default = {key: block[key] for key in _SETTINGS if key in block}
        self._overrides: dict[str, Any] = {}
        for key, value in block.items():
            if not isinstance(value, (bool, Mapping)):
                continue
            place = family.place(key.removesuffix(".weight") + ".weight", config)
            if not isinstance(place, Placement):
                continue
            if self._overrides.setdefault(place.name, value) != value:
                raise ConvertError(f"config.json: quantization names {place.checkpoint_name} twice and differently.")

    def settings(self, install_name: str, where: str, *, routed: bool) -> Mapping[str, Any]:
        """What is declared for a packed matrix. Raises ConvertError where that is neither affine quantization nor, for
        ``routed`` experts, MXFP4."""
        settings = self._overrides.get(install_name, True)
        if settings is False:
            raise ConvertError(f"{where}: is packed, but config.json says quantization false for it.")
        if settings is True:
            settings = self._default
        mode = settings.get("mode", "affine")
        if mode == "mxfp4" and routed:
            return settings
        if mode != "affine":
            raise ConvertError(
                f"{where}: is quantized in mode {mode!r}; only affine, and mxfp4 of routed experts, can be converted."
                " Convert the original weights."
            )
        if settings.get("bits") is None and settings.get("group_size") is None:
            return self._default
        return settings


def affine_format(
    settings: Mapping[str, Any], *, words: int, groups: int, companion_dtype: str, where: str
) -> AffineFormat:
    """The format of a packed matrix with ``words`` uint32 and ``groups`` groups in a row.

    The shapes fix bits times columns and columns over group size; one number has to be declared, and whatever else
    is declared has to agree. Raises ConvertError with both sides.
    """
    bits, group_size = settings.get("bits"), settings.get("group_size")
    if bits is None and group_size in GROUP_SIZES and groups:
        bits = 32 * words // (groups * group_size)
    columns = 32 * words // bits if bits in BITS else 0
    found = columns // groups if groups else 0
    if found not in GROUP_SIZES or found * groups * bits != 32 * words or group_size not in (None, found):
        raise ConvertError(
            f"{where}: config.json declares bits {bits}, group_size {group_size}; {words} words and {groups} groups"
            f" a row do not fit that. Supported are bits {BITS} and groups {GROUP_SIZES}."
        )
    return AffineFormat(bits, found, companion_dtype)


def quantization_block(config: Mapping[str, Any], *, blocks: bool) -> Mapping[str, Any] | None:
    """The MLX block of config.json, or None where the checkpoint is not quantized, or has ``blocks`` of MXFP4, which
    with their exponents say themselves what they are.

    Raises ConvertError for another program's quantization, by its name.
    """
    mlx, other = config.get("quantization"), config.get("quantization_config")
    for block in (mlx, other):
        if block is not None and not isinstance(block, Mapping):
            raise ConvertError(f"config.json: quantization is {block!r:.80}, not an object.")
    if mlx:
        return mlx
    if not other:
        return None
    if blocks and other.get("quant_method") == "mxfp4":
        return None
    if "quant_method" in other:
        raise ConvertError(
            f"config.json: quantization_config has quant_method {other['quant_method']!r}, which cannot be converted."
            " Convert the original weights, or an MLX or GGUF copy."
        )
    return other
