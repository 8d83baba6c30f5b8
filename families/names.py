"""What checkpoints have in common in how they call the tensors of a decoder."""

from __future__ import annotations

import re

from turbospark_mlx.errors import ConvertError, counted

PREFIX = "language_model."
"""What stands before every name of an install."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def canonical(name: str) -> str:
    """The module's name of a tensor of the decoder: as checkpoints of a text model have it, from the spelling of one
    inside a larger model, published or of mlx."""
    for prefix, plain in (("model.language_model.", "model."), (PREFIX, "")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def split_layer(name: str, checkpoint_name: str, family: str, layers: int) -> tuple[int, str]:
    """``(layer, name within it)`` of a canonical name. Raises ConvertError for one that is of no layer, or of one that
    a model of ``layers`` does not have."""
    found = _LAYER.fullmatch(name)
    if not found:
        raise ConvertError(f"checkpoint: tensor {checkpoint_name!r} is not one of the {family} family.")
    number = int(found[1])
    if number >= layers or str(number) != found[1]:
        raise ConvertError(
            f"checkpoint: tensor {checkpoint_name!r} is of layer {found[1]}; the configuration has"
            f" {counted(layers, 'layer')}."
        )
    return number, found[2]
