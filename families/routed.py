"""Names and shapes of routed experts, for every family that has them. Needs no mlx.

A module holds the experts of a layer as stacks under one path, as mlx-lm does: ``<path>.gate_proj.weight [experts,
intermediate, hidden]``, ``up_proj`` alike, and ``down_proj [experts, hidden, intermediate]``. Checkpoints have them so,
or one by one (``<base>.3.gate_proj.weight``), or with gate and up joined (``<base>.gate_up_proj``, gate first).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turbospark_mlx.protocols import ExpertSpec, Placement, RoutedPart

_STACK = re.compile(r"(gate|up|down)_proj\.(weight|bias)")
_SINGLE = re.compile(r"(\d+)\.(?:(gate|up|down)_proj|(w[123]))\.weight")
_W = {"w1": "gate", "w3": "up", "w2": "down"}
"""Mixtral's names."""
_JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def parameter(path: str, tensor: str) -> str:
    """The parameter that stacks ``tensor``, a name of ``ExpertSpec.tensors``, below ``path``."""
    matrix, _, bias = tensor.partition("_")
    return f"{path}.{matrix}_proj.{bias or 'weight'}"


def shapes(experts: Mapping[str, ExpertSpec]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape of the stacks of all layers."""
    return {
        parameter(path, tensor): (spec.num_experts, *shape)
        for path, spec in experts.items()
        for tensor, shape in spec.tensors.items()
    }


def stack_of(stack: str, name: str, position: int, spec: ExpertSpec) -> tuple[str, RoutedPart] | None:
    """``(parameter name, part)`` of a stack below the path ``stack``; None where ``name`` is not one of these."""
    found = _STACK.fullmatch(name.removeprefix(f"{stack}.")) if name.startswith(f"{stack}.") else None
    if not found or (found[2] == "bias" and not spec.biases):
        return None
    return name, RoutedPart(position, (found[1] if found[2] == "weight" else f"{found[1]}_bias",))


def part_of(stack: str, base: str, name: str, position: int, spec: ExpertSpec) -> tuple[str, RoutedPart] | None:
    """``(parameter name, part)`` of a checkpoint tensor of routed experts; None where ``name`` is not one of these.

    ``stack`` is the path of the stacks, ``base`` that of experts which stand one by one or joined; ``name`` lies below
    one of them.
    """
    if whole := stack_of(stack, name, position, spec):
        return whole
    if not name.startswith(f"{base}."):
        return None
    rest = name.removeprefix(f"{base}.")
    if tensors := _JOINED.get(rest.removesuffix(".weight")):
        return parameter(stack, tensors[0]), RoutedPart(position, tensors)
    if (found := _SINGLE.fullmatch(rest)) and str(int(found[1])) == found[1] and int(found[1]) < spec.num_experts:
        tensor = found[2] or _W[found[3]]
        return parameter(stack, tensor), RoutedPart(position, (tensor,), int(found[1]))
    return None


def placement(prefix: str, found: tuple[str, RoutedPart]) -> Placement:
    """The placement of what ``part_of`` found, in an install whose names begin with ``prefix``."""
    return Placement(prefix + found[0], "routed_expert", found[0], found[1])
