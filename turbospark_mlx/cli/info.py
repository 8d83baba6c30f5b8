"""``turbospark-mlx info``: what an install is, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from turbospark_mlx.cli.options import slot_count
from turbospark_mlx.cli.verify import add_install_argument, install_path
from turbospark_mlx.errors import InstallError

if TYPE_CHECKING:
    from turbospark_mlx.gturbo import Install
    from turbospark_mlx.protocols import ModelConfig

HELP = "describe an install: architecture, sizes, quantization, who can read it, memory"

EPILOG = """\
Checks the structure of the install and hashes nothing. Memory is that of the weights as they are stored and of one
sequence's caches; with routed experts, all of them stay in memory unless --expert-slots says how many a layer may: a
number, or auto for what a run would take on this machine with the memory that is free. Roles are those of the install
format: shared_expert is the feed-forward part that every token takes, which in a dense model is all of it. --kernels
shows how each operation runs on each back end, and what this machine takes and why.

examples:
  turbospark-mlx info smollm2-135m
  turbospark-mlx info ./gemma-4-26b.gturbo --max-context 32768 --expert-slots 16
  turbospark-mlx info ./qwen3-0.6b.gturbo --json
  turbospark-mlx info --kernels
"""

_MASK_KINDS = ("sliding window", "full", "linear", "compressed sparse", "heavily compressed", "latent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_install_argument(parser, required=False)
    parser.add_argument("--kernels", action="store_true", help="show how each operation runs here; needs no MODEL")
    parser.add_argument("--max-context", type=int, metavar="N", help="context length to estimate memory for (4096)")
    parser.add_argument(
        "--expert-slots", type=slot_count, metavar="N", help="experts a layer that stay in memory, or auto (all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    from turbospark_mlx.cli import kernels
    from turbospark_mlx.gturbo import Install

    if args.install is None and not args.kernels:
        args.usage_error("MODEL is missing (only --kernels needs none)")
    document, lines = {}, []
    if args.install is not None:
        with Install.open(install_path(args.install), verify="off", allow_unrunnable=True) as install:
            document = describe(install, max_context=args.max_context, expert_slots=args.expert_slots)
        lines = _text(document)
    if args.kernels:
        found = kernels.describe()
        document["kernels"] = found
        lines += [*([""] if lines else []), *kernels.text(found)]
    print(json.dumps(document, indent=2) if args.json else "\n".join(lines))
    return 0


def describe(install: Install, *, max_context: int | None, expert_slots: int | str | None) -> dict[str, Any]:
    """Everything the command prints, as one JSON object. Sizes are in bytes. Raises OptionError."""
    config, unused, refusal = _config(install)
    return {
        "path": install.path,
        "modelID": install.manifest.model_id,
        "family": install.manifest.family,
        "dialect": install.dialect,
        "architecture": _architecture(install),
        "extension": install.extension,
        "bytes": sum(record.size for record in install.manifest.files.values()),
        "roles": _roles(install),
        "experts": _experts(install),
        "unused": dict(unused),
        "engines": _engines(install, refusal),
        "memory": _memory(install, config, max_context, expert_slots),
        "receipt": install.has_receipt,
    }


def _config(install: Install) -> tuple[ModelConfig | None, Mapping[str, str], str | None]:
    """The family's configuration where there is one, which tensors it does not use and why, and why this package does
    not run the install."""
    from turbospark_mlx.loader import check_tensors, read_config

    config, unused = None, {}
    try:
        family, config = read_config(install)
        unused = family.unused(config)
        check_tensors(install, family, config)
    except InstallError as error:
        return config, unused, str(error)
    return config, unused, None


def _architecture(install: Install) -> dict[str, Any]:
    arch = install.arch
    mask = arch["fullAttentionLayerMask"]
    return {
        "layers": arch["numLayers"],
        "attention": {kind: mask.count(value) for value, kind in enumerate(_MASK_KINDS) if value in mask},
        "slidingWindow": arch["slidingWindow"],
        "hiddenSize": arch["hiddenSize"],
        "intermediateSize": arch["ffnIntermediate"],
        "heads": arch["numHeads"],
        "keyValueHeads": arch["numKVHeads"],
        "headDim": arch["headDim"],
        "vocabSize": arch["vocabSize"],
        "tiedEmbeddings": arch["tieWordEmbeddings"],
        "trainedContext": arch.get("trainedContext"),
    }


def _roles(install: Install) -> list[dict[str, Any]]:
    """One row a role and storage format: tensors, weights, bytes."""
    from turbospark_mlx.gturbo.formats import role_of, spell

    rows: dict[tuple[str, str], list[int]] = {}

    def add(role: str, stored: str, *counts: int) -> None:
        row = rows.setdefault((role, stored), [0, 0, 0])
        row[:] = [before + more for before, more in zip(row, counts, strict=True)]

    for entry in install.tensors.values():
        add(role_of(entry.name, entry.shape), spell(entry.dtype, entry.format), 1, prod(entry.shape), entry.nbytes)
    if table := install.table:
        add("table", spell(table.blocks or table.dtype, table.format), 1, prod(table.shape), table.nbytes)
    for layer in install.experts.layers:
        experts = len(layer.offsets)
        for role, tensor in layer.tensors.items():
            matrix = layer.tensors.get(role.removesuffix("_scales").removesuffix("_biases"), tensor)
            if matrix.format and matrix is not tensor:
                add("routed_expert", spell(matrix.dtype, matrix.format), 0, 0, tensor.size * experts)
            else:
                weights = prod(tensor.shape) * experts
                add("routed_expert", spell(tensor.dtype, tensor.format), experts, weights, tensor.size * experts)
    return [
        {"role": role, "format": stored, "tensors": row[0], "weights": row[1], "bytes": row[2]}
        for (role, stored), row in rows.items()
    ]


def _experts(install: Install) -> dict[str, Any] | None:
    layout = install.experts
    if not layout:
        return None
    return {
        "layers": len(layout.layers),
        "expertsPerLayer": layout.experts_per_layer,
        "topK": install.arch["topKExperts"],
        "expertBytes": max(layer.size for layer in layout.layers),
        "stride": layout.stride,
        "bytes": layout.nbytes,
    }


def _engines(install: Install, refusal: str | None) -> dict[str, list[str]]:
    """For each engine the reasons why it does not run the install; empty where it does."""
    from turbospark_mlx.gturbo.elder_engines import refusals

    own = [*install.obstacles, *([refusal] if refusal else [])]
    return {"turbospark-mlx": own, **refusals(install)}


def _memory(
    install: Install, config: ModelConfig | None, max_context: int | None, expert_slots: int | str | None
) -> dict[str, Any]:
    from turbospark_mlx.admission import DEFAULT_CONTEXT, whole_number
    from turbospark_mlx.experts.chunks import products_bytes
    from turbospark_mlx.runner import PREFILL_CHUNK

    if max_context is not None:
        context = whole_number("--max-context", max_context)
    else:
        context = min(DEFAULT_CONTEXT, config.max_position_embeddings if config else DEFAULT_CONTEXT)
    layout = install.experts
    weights = sum(entry.nbytes for entry in install.tensors.values())
    slots, experts = layout.experts_per_layer, layout.nbytes
    if expert_slots is not None:
        caches = partial(config.kv_bytes, context) if config else lambda itemsize: 0
        slots, experts = _slots(install, expert_slots, weights, caches)
    memory: dict[str, Any] = {"maxContext": context, "weights": weights, "expertSlots": slots, "experts": experts}
    if config is None:
        return {**memory, "cache": None, "products": None, "total": None}
    cache = {"half": config.kv_bytes(context, 2), "float32": config.kv_bytes(context, 4)}
    products = dict.fromkeys(cache, 0)
    if experts:
        chunks = {"half": PREFILL_CHUNK["gpu"], "float32": PREFILL_CHUNK["cpu"]}
        products = {width: products_bytes(install.arch, min(context, rows)) for width, rows in chunks.items()}
    total = {width: weights + experts + cache[width] + products[width] for width in cache}
    return {**memory, "cache": cache, "products": products, "total": total}


def _slots(install: Install, asked: int | str, weights: int, caches: Callable[[int], int]) -> tuple[int, int]:
    """Experts a layer in memory, and what all of them take: as a run resolves the option, for ``auto`` with the memory
    that is free here beside ``weights`` and ``caches(bytes of an element)``. A number is for any machine."""
    from turbospark_mlx.custom_kernels import backends
    from turbospark_mlx.experts.resolve import least_bytes, resolve
    from turbospark_mlx.loader import resolve_dtype
    from turbospark_mlx.memory import available_bytes

    layout, top_k, room = install.experts, install.arch["topKExperts"], sys.maxsize
    least_bytes(install, residency="auto", slots=asked)
    if not layout:
        return 0, 0
    if asked == "auto":
        backend = backends.select()
        room = max(0, available_bytes(backend.device) - weights - caches(resolve_dtype(None, backend).size))
    found = resolve(layout, top_k, residency="auto", slots=asked, room=room)
    return found.slots or layout.experts_per_layer, found.nbytes


def _text(document: dict[str, Any]) -> list[str]:
    from turbospark_mlx.gturbo.files import printable, spell_bytes

    arch, experts, memory = document["architecture"], document["experts"], document["memory"]
    attention = ", ".join(f"{count} {kind}" for kind, count in arch["attention"].items())
    window = f", window {arch['slidingWindow']}" if arch["slidingWindow"] else ""
    lines = [
        f"{document['path']}",
        f"  model          {printable(document['modelID'])}",
        f"  family         {printable(document['family'])} ({document['dialect']} dialect)",
        f"  layers         {arch['layers']} ({attention}{window})",
        f"  attention      {arch['heads']} heads over {arch['keyValueHeads']}, head size {arch['headDim']}",
        f"  sizes          hidden {arch['hiddenSize']}, feed-forward {arch['intermediateSize']},"
        f" vocabulary {arch['vocabSize']}" + (", tied" if arch["tiedEmbeddings"] else ""),
        f"  context        {arch['trainedContext'] or 'not stated'}",
        f"  on disk        {spell_bytes(document['bytes'])}",
        "",
        *table(
            ("role", "format", "tensors", "weights", "size"),
            [
                (row["role"], row["format"], f"{row['tensors']:,}", f"{row['weights']:,}", spell_bytes(row["bytes"]))
                for row in document["roles"]
            ],
        ),
        "",
    ]
    if experts:
        lines += [
            f"  experts        {experts['layers']} layers of {experts['expertsPerLayer']}, {experts['topK']} a token;"
            f" {spell_bytes(experts['expertBytes'])} each, stride {experts['stride']:,}",
            "",
        ]
    if document["unused"]:
        lines += ["  without effect on any logit:"]
        lines += [f"    - {printable(name)}: {reason}" for name, reason in document["unused"].items()] + [""]
    for engine, reasons in document["engines"].items():
        lines.append(f"  {engine:24} {'cannot run it:' if reasons else 'can run it'}")
        lines += [f"    - {printable(reason)}" for reason in reasons]
    slots = f" + {memory['expertSlots']} experts a layer {spell_bytes(memory['experts'])}" if experts else ""
    lines += ["", f"  memory at {memory['maxContext']:,} tokens: weights {spell_bytes(memory['weights'])}{slots}"]
    if memory["total"] is None:
        lines.append("    + caches (unknown: no family of this version runs it)")
    else:
        for width, label in (("half", "half precision"), ("float32", "float32, on a CPU")):
            products = f" + products of a prompt {spell_bytes(memory['products'][width])}" if experts else ""
            lines.append(
                f"    + cache {spell_bytes(memory['cache'][width])} ({label}){products}"
                f" = {spell_bytes(memory['total'][width])}"
            )
    lines.append(f"  receipt        {'valid' if document['receipt'] else 'none: the next open hashes the files'}")
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 2) -> list[str]:
    """The rows under their header, the first ``left`` columns flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
