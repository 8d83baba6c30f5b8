"""From an install to a model with its weights read in place.

Every parameter is allocated once, in the dtype that it is stored in, and the file is read straight into its memory, so
that loading takes the weights' size and no more. On the way the install must hold exactly the tensors that its
configuration calls for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from turbospark_mlx import families
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.errors import InstallError, OptionError
from turbospark_mlx.families.layers import DTYPES
from turbospark_mlx.gturbo import Install
from turbospark_mlx.protocols import Family, ModelConfig

Progress = Callable[[int, int], None]

_COMPANIONS = ("scales", "biases")


def resolve_dtype(dtype: str | mx.Dtype | None, backend: Backend) -> mx.Dtype:
    """The dtype of activations: as asked for, else float32 on a CPU and bfloat16 on a GPU.

    A CPU computes in float32 only, because MLX's CPU back end sums in the activations' dtype; asking it for another
    dtype raises OptionError.
    """
    default = mx.float32 if backend.device == "cpu" else mx.bfloat16
    if dtype is None:
        return default
    named = dtype if isinstance(dtype, str) else str(dtype).removeprefix("mlx.core.")
    if named not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: activations can be {', '.join(DTYPES)}.")
    if backend.device == "cpu" and named != "float32":
        raise OptionError(f"dtype={dtype!r}: on a CPU everything runs in float32. Leave dtype out, or use a GPU.")
    return DTYPES[named]


def read_config(install: Install) -> tuple[Family, ModelConfig]:
    """The family that runs an install, and the model's configuration. Raises InstallError."""
    family = families.family_for_manifest(install.manifest.family)
    return family, family.config_from_manifest(install.arch, install.extension)


def load_model(
    install: Install,
    *,
    backend: Backend,
    dtype: str | mx.Dtype | None = None,
    fused: bool = True,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """The model of an open install, every array evaluated.

    ``fused=False`` gives plain ``mlx.nn`` modules, whose companions, norms and biases are widened to float32 where
    activations have another dtype than they. ``progress`` is called with the bytes read so far and in all. Raises
    InstallError where the tensors do not fit the configuration.
    """
    family, config = read_config(install)
    check_tensors(install, family, config)
    places = {family.place(name, config).checkpoint_name: entry for name, entry in install.tensors.items()}
    model = families.package(family.name).Model(
        config,
        formats={name: entry.format or entry.dtype for name, entry in places.items()},
        backend=backend,
        dtype=resolve_dtype(dtype, backend),
        fused=fused,
        max_context=max_context,
    )
    mx.eval(model.parameters())
    _read(install, places, model, progress)
    if not fused:
        model.update(tree_map(lambda array: _widened(array, model.dtype), model.parameters()))
        mx.eval(model.parameters())
    return model


def check_tensors(install: Install, family: Family, config: ModelConfig) -> None:
    """Raise InstallError unless the install holds exactly the tensors that the configuration calls for."""
    expected = family.expected(config)
    found = install.tensors
    where = f"{install.path}: model_weights.bin"
    if missing := [name for name in expected if name not in found]:
        raise InstallError(f"{where} lacks tensor {missing[0]!r}{_others(missing)}. Convert the model again.")
    if extra := [name for name in found if name not in expected]:
        raise InstallError(
            f"{where} has tensor {extra[0]!r}{_others(extra)}, which manifest.json's {config.model_type} model does not"
            " use. Running without it could be another model; convert again."
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise InstallError(
                f"{where}: tensor {name!r} is {list(found[name].shape)}; manifest.json calls for {list(shape)}."
            )


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read(install: Install, places: dict[str, Any], model: nn.Module, progress: Progress | None) -> None:
    total, done = sum(entry.nbytes for entry in places.values()), 0
    for name, array in tree_flatten(model.parameters()):
        stem, _, kind = name.rpartition(".")
        entry = places[f"{stem}.weight"] if kind in _COMPANIONS else places[name]
        memory = memoryview(array).cast("B")
        install.read_into(entry, kind if kind in _COMPANIONS else "data", memory)
        done += memory.nbytes
        if progress is not None:
            progress(done, total)


def _widened(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Plain modules mix dtypes by promotion, and MLX's CPU products sum in the narrower one."""
    return array if array.dtype in (mx.uint32, dtype) else array.astype(mx.float32)
