"""Checkpoints of other formats into `.gturbo` installs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turbospark_mlx.convert.report import ConversionReport


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    companion_dtype: str | None = None,
    elder_compatible: bool = False,
    overwrite: bool = False,
    model_id: str | None = None,
    progress: bool = True,
) -> ConversionReport:
    """Write the install of a checkpoint to the directory ``dest``.

    ``source`` is a Hugging Face directory (safetensors, published or MLX-quantized), a GGUF file, an install, or a hub
    repository ``owner/name``. A quantized checkpoint is kept as it is, bit for bit; an unquantized one gets INT4
    matrices in groups of 64 with bfloat16 companions. ``bits`` 4 or 8, ``group_size`` 32, 64 or 128 and
    ``companion_dtype`` ``"bfloat16"`` or ``"float16"`` ask for one format everywhere; ``bits`` 16 keeps an unquantized
    checkpoint as it is. ``elder_compatible`` writes only what the elder engines read. ``overwrite`` replaces an
    install. ``model_id`` is the model's published name for the manifest, where the source does not say it. Memory stays
    bounded whatever the size, and ``dest`` is complete or untouched whenever the process ends.

    Raises ConvertError for what cannot be converted, InstallError for a damaged install as source, StoreError for a
    repository that cannot be fetched, OptionError for options that cannot work, and OSError when the disk fails.
    """
    from turbospark_mlx.convert.pipeline import run
    from turbospark_mlx.convert.plan import Options

    options = Options(bits, group_size, companion_dtype, elder_compatible)
    return run(source, dest, options, overwrite=overwrite, model_id=model_id, progress=progress)
