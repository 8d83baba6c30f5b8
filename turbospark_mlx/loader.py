"""From an install to a model with its weights read in place.

Every parameter is allocated once, in the dtype that it is stored in, and the file is read straight into its memory, so
that loading takes the weights' size and no more. On the way the install must hold exactly the tensors that its
configuration calls for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from turbospark_mlx import families
from turbospark_mlx.custom_kernels.backends import Backend
from turbospark_mlx.errors import InstallError, OptionError, counted
from turbospark_mlx.families.layers import DTYPES
from turbospark_mlx.families.routed import parameter
from turbospark_mlx.gturbo import Install, TensorEntry, experts_layout, row_table
from turbospark_mlx.gturbo.experts_layout import ExpertTensor
from turbospark_mlx.protocols import ExpertFactory, ExpertSpec, Family, ModelConfig, Mxfp4Format
from turbospark_mlx.readers import start_readers
from turbospark_mlx.table import DiskTable

Progress = Callable[[int, int], None]

READERS = 2
"""Threads that read parameters."""
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
    experts: ExpertFactory | None = None,
) -> nn.Module:
    """The model of an open install, every array evaluated.

    ``experts`` makes the routed experts of each layer; without it they are read into stacks, all of them.
    ``fused=False`` gives plain ``mlx.nn`` modules, whose companions, norms and biases are widened to float32 where
    activations have another dtype than they. ``progress`` is called with the bytes read so far and in all. Raises
    InstallError where the tensors, or their values, do not fit the configuration.
    """
    family, config = read_config(install)
    check_tensors(install, family, config)
    places = {family.place(name, config).checkpoint_name: entry for name, entry in install.tensors.items()}
    stacks = {} if experts is not None else _stacks(install, family, config)
    stored = {**places, **{name: tensor for name, (_, tensor) in stacks.items()}}
    model = families.package(family.name).Model(
        config,
        formats={name: tensor.format or tensor.dtype for name, tensor in stored.items()},
        backend=backend,
        dtype=resolve_dtype(dtype, backend),
        fused=fused,
        max_context=max_context,
        experts=experts,
        table=None if install.table is None else DiskTable(install),
    )
    _read(install, places, stacks, model, progress)
    model.check()
    if not fused:
        model.update(tree_map(lambda array: _widened(array, model.dtype), model.parameters()))
        mx.eval(model.parameters())
    return model


def check_tensors(install: Install, family: Family, config: ModelConfig) -> None:
    """Raise InstallError unless the install holds exactly the tensors that the configuration calls for."""
    places = {name: family.place(name, config) for name in family.expected(config)}
    every = family.expected(config)
    expected = {name: every[name] for name, place in places.items() if place.routed is None and place.table is None}
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

    _check_experts(install, list(family.experts(config).values()))
    _check_table(install, family.table_facts(config), [every[name] for name, place in places.items() if place.table])


def _check_table(install: Install, facts: Mapping[str, Any] | None, shapes: list[tuple[int, ...]]) -> None:
    where, found = f"{install.path}: {row_table.HEADER}", install.table
    if found is None and not shapes:
        return
    if found is None or not shapes:
        state = "is missing, but manifest.json calls for" if found is None else "is there, but manifest.json has no"
        raise InstallError(f"{where} {state} n-grams. Convert the model again.")
    if found.shape != shapes[0]:
        raise InstallError(
            f"{where}: the table is {list(found.shape)}; manifest.json calls for {list(shapes[0])}. Convert the model"
            " again."
        )
    for key, value in facts.items():
        if found.facts[key] != value:
            raise InstallError(
                f"{where}: {key} is {found.facts[key]!r:.200}; manifest.json calls for {value!r:.200}. Convert the"
                " model again."
            )


def _check_experts(install: Install, specs: list[ExpertSpec]) -> None:
    layers = install.experts.layers
    if len(layers) != len(specs):
        raise InstallError(
            f"{install.path}: {experts_layout.FILE} has {counted(len(layers), 'layer')} of experts; manifest.json"
            f" calls for {len(specs)}. Convert the model again."
        )
    for layer, spec in zip(layers, specs, strict=True):
        where = f"{install.path}: {layer.file}"
        if len(layer.offsets) != spec.num_experts:
            raise InstallError(
                f"{where} has {counted(len(layer.offsets), 'expert')}; manifest.json calls for {spec.num_experts}."
            )
        companions = {
            f"{name}_{kind}"
            for name, tensor in layer.tensors.items()
            for kind in (("scales",) if isinstance(tensor.format, Mxfp4Format) else _COMPANIONS)
            if tensor.format
        }
        if differing := sorted(spec.tensors.keys() ^ (layer.tensors.keys() - companions)):
            state = "lacks" if differing[0] in spec.tensors else "has a tensor that the model does not use:"
            raise InstallError(f"{where} {state} {differing[0]!r} of every expert. Convert the model again.")
        for name, shape in spec.tensors.items():
            if layer.tensors[name].shape != shape:
                raise InstallError(
                    f"{where}: {name!r} of an expert is {list(layer.tensors[name].shape)}; manifest.json calls for"
                    f" {list(shape)}."
                )


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _stacks(install: Install, family: Family, config: ModelConfig) -> dict[str, tuple[int, ExpertTensor]]:
    """Parameter name -> layer and tensor of the routed experts."""
    return {
        parameter(path, name): (position, install.experts.layers[position].tensors[name])
        for position, (path, spec) in enumerate(family.experts(config).items())
        for name in spec.tensors
    }


def _read(
    install: Install,
    places: Mapping[str, TensorEntry],
    stacks: Mapping[str, tuple[int, ExpertTensor]],
    model: nn.Module,
    progress: Progress | None,
) -> None:
    """Read every parameter into its memory. MLX clears memory when it allocates it, which takes as long as reading what
    the page cache has, so that readers are busy with one array while the next is allocated."""

    def fill(name: str, array: mx.array, memory: memoryview) -> int:
        stem, _, kind = name.rpartition(".")
        stored = f"{stem}.weight" if kind in _COMPANIONS else name
        if stored in places:
            install.read_into(places[stored], kind if kind in _COMPANIONS else "data", memory)
        else:
            position, tensor = stacks[stored]
            role = f"{tensor.role}_{kind}" if kind in _COMPANIONS else tensor.role
            size = memory.nbytes // array.shape[0]
            for expert in range(array.shape[0]):
                buffer = memory[expert * size : (expert + 1) * size]
                install.read_expert_part_into(position, expert, role, buffer)
        return memory.nbytes

    arrays = tree_flatten(model.parameters())
    total, done = sum(array.nbytes for _, array in arrays), 0
    reads: deque[Future[int]] = deque()
    pool = start_readers(READERS)
    try:
        for name, array in arrays:
            mx.eval(array)
            reads.append(pool.submit(fill, name, array, memoryview(array).cast("B")))
            while reads and (reads[0].done() or len(reads) > READERS):
                done += reads.popleft().result()
                if progress is not None:
                    progress(done, total)
        for read in reads:
            done += read.result()
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _widened(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Plain modules mix dtypes by promotion, and MLX's CPU products sum in the narrower one."""
    return array if array.dtype in (mx.uint32, mx.uint8, dtype) else array.astype(mx.float32)
