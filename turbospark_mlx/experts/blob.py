"""From an install's layout to the description that the ops read experts by."""

from __future__ import annotations

import mlx.core as mx

from turbospark_mlx.custom_kernels import BlobMatrix, ExpertBlob
from turbospark_mlx.custom_kernels.affine import BITS
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.families.layers import DTYPES
from turbospark_mlx.gturbo import ExpertLayer
from turbospark_mlx.gturbo.experts_layout import MATRICES
from turbospark_mlx.protocols import ExpertSpec, Mxfp4Format


def describe(place: ExpertLayer, spec: ExpertSpec, label: str) -> ExpertBlob:
    """The blob of a layer's experts, whose names and shapes are ``spec``'s (see ``loader.check_tensors``). Raises
    InstallError, naming the file ``label``, for what nothing here computes with."""
    where = f"{label}: the experts of layer {place.layer}"
    try:
        return ExpertBlob(
            *(_matrix(place, name, where) for name in MATRICES),
            activation=spec.activation,
            alpha=spec.alpha,
            limit=spec.limit,
        )
    except OptionError as error:
        raise InstallError(f"{where} cannot be read in place: {error}. Convert the model again.") from None


def _matrix(place: ExpertLayer, name: str, where: str) -> BlobMatrix:
    tensor, bias = place.tensors[name], place.tensors.get(f"{name}_bias")
    rows, columns = tensor.shape
    added = {} if bias is None else {"bias": bias.offset, "bias_dtype": DTYPES[bias.dtype]}
    stored = tensor.format
    if stored is None:
        if tensor.dtype not in DTYPES:
            raise InstallError(f"{where} have {name} in {tensor.dtype}, which this package does not compute with.")
        return BlobMatrix(rows, columns, tensor.offset, DTYPES[tensor.dtype], **added)
    if isinstance(stored, Mxfp4Format):
        exponents = place.tensors[f"{name}_scales"].offset
        packing = {"bits": stored.bits, "group_size": stored.group_size, "scales": exponents, "mode": "mxfp4"}
        return BlobMatrix(rows, columns, tensor.offset, mx.uint8, **packing, **added)
    if stored.bits not in BITS:
        raise InstallError(
            f"{where} have {name} in {stored.bits} bits; {', '.join(map(str, BITS))} can be run. Convert it again."
        )
    return BlobMatrix(
        rows,
        columns,
        tensor.offset,
        DTYPES[stored.companion_dtype],
        bits=stored.bits,
        group_size=stored.group_size,
        scales=place.tensors[f"{name}_scales"].offset,
        biases=place.tensors[f"{name}_biases"].offset,
        **added,
    )


def used_bytes(place: ExpertLayer) -> int:
    """Bytes of a blob up to the end of its last tensor: what has to be read of it."""
    return max(tensor.offset + tensor.size for tensor in place.tensors.values())
