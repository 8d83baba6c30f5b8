"""What ``turbospark-mlx info --kernels`` shows: how each op runs on each back end, and what this machine takes."""

from __future__ import annotations

from typing import Any


def describe() -> dict[str, Any]:
    """The table as one JSON object. ``here`` is what ``auto`` takes; ``why`` says why an op has no kernel there."""
    from turbospark_mlx.custom_kernels import OPS, backends
    from turbospark_mlx.loader import resolve_dtype

    chosen, found = backends.select(), backends.survey()
    dtype = resolve_dtype(None, chosen)
    return {
        "here": {"name": chosen.name, "reason": chosen.reason, "dtype": str(dtype).removeprefix("mlx.core.")},
        "backends": {
            name: {"available": False, "reason": there}
            if isinstance(there, str)
            else {"available": True, "reason": there.reason}
            for name, there in found.items()
        },
        "ops": [
            {
                "op": op.name,
                "kernels": [kernel.name for kernel in op.kernels],
                "rows": op.rows,
                "condition": op.only or None,
                "ways": {
                    name: op.ways(backends.DEVICES.get(name, chosen.device), compiled=name in backends.DEVICES)
                    for name in found
                },
                "why": op.refusal(chosen, dtype),
            }
            for op in OPS
        ],
    }


def text(document: dict[str, Any]) -> list[str]:
    """``describe`` for people."""
    from turbospark_mlx.cli.info import table

    here, found = document["here"], document["backends"]
    rows = [
        (row["op"], ", ".join(row["kernels"]), *(", ".join(ways) for ways in row["ways"].values()))
        for row in document["ops"]
    ]
    lines = table(("op", "kernels", *found), rows, left=2 + len(found))
    lines += ["", "  kernel: ours; mlx: MLX's own operations; blas: numpy's. Where there are two, the first is for:"]
    for row in document["ops"]:
        limits = {None: [], 1: ["one row"]}.get(row["rows"], [f"up to {row['rows']} rows"])
        limits += [row["condition"]] if row["condition"] else []
        if limits:
            lines.append(f"    {row['op']:20} {', '.join(limits)}")
    lines.append("")
    for name, there in found.items():
        state = "taken here" if name == here["name"] else "could be taken" if there["available"] else "not here"
        reason = here["reason"] if name == here["name"] else there["reason"]
        lines.append(f"  {name:10} {state}: {reason}")
    lines.append(f"  activations are {here['dtype']} on {here['name']}")
    without: dict[str, list[str]] = {}
    for row in document["ops"]:
        if row["why"]:
            without.setdefault(row["why"], []).append(row["op"])
    lines += [f"  without a kernel here, because {why}: {', '.join(ops)}" for why, ops in without.items()]
    return lines
