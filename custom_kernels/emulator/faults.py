"""Faults of a running kernel in words that name kernel, line and thread."""

from __future__ import annotations

import signal as signals

from turbospark_mlx.custom_kernels.emulator.instrument import Place
from turbospark_mlx.errors import KernelFault

WORDS = {
    "stray": "uses an address that belongs to no buffer ({address:#x}): a wild index, or an input that was not given",
    "input": "writes to the input {name} (byte {offset}), which is read only",
    "alignment": "touches {name} at byte {offset}, but an access of {size} bytes has to be aligned to {alignment}",
    "index": "takes element {index} of {array}",
    "overflow": "an int overflows, which has no defined result: use uint, long or smaller factors",
    "division": "divides by zero",
    "shift": "shifts by {by}, which is not below the width of the type: back ends differ about the result",
    "conversion": "turns a float into an integer that cannot hold it (or NaN)",
    "missing_return": "comes to the end of a function that has to return a value",
    "timeout": "has not finished after {seconds} seconds; it was here",
    "stack": "needs more than {bytes} bytes of private memory: a recursion, or a huge array",
    "memory": "the machine has no {bytes} bytes for it",
    "threadgroup_memory": "with {name}, threadgroup memory comes to {bytes:,} bytes; Metal has 32,768",
}
AT = {
    "barrier": "waits at a threadgroup barrier",
    "simd": "waits in a simdgroup function",
    "simd_barrier": "waits at a simdgroup barrier",
    "done": "has finished",
}


def place(chain: tuple[Place, ...]) -> str:
    """Where something happened: the line, and the lines that called it."""
    if not chain:
        return "an unknown line"
    (file, line), *callers = chain
    words = f"{file} line {line}"
    return words + "".join(f", called from {file} line {line}" for file, line in callers)


def thread(found: list[list[int]] | None) -> str:
    """A thread by its position in its threadgroup."""
    if found is None:
        return "an unknown thread"
    (x, y, z), (gx, gy, gz) = found
    return f"thread ({x}, {y}, {z}) of threadgroup ({gx}, {gy}, {gz})"


def ended(code: int) -> str:
    """How a process ended that said nothing itself."""
    if code >= 0:
        return f"ended with {code}"
    hint = ", often for lack of memory" if -code == signals.SIGKILL else ""
    return f"was killed ({_signal(-code)}{hint})"


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fault(name: str, report: dict, places: list[tuple[Place, ...]]) -> KernelFault:
    """The exception for what the runtime reported."""
    kind, at, who = report["fault"], place(places[report["site"]]), thread(report["thread"])
    there = place(places[report["other_site"]]) if report.get("other_site") else None
    if kind == "bounds":
        offset, size, whole = report["offset"], report["size"], report["bytes"]
        where = f"{-offset} bytes before" if offset < 0 else f"at byte {offset} of"
        what = f"touches {size} bytes {where} {report['name']}, which has {whole} bytes"
    elif kind == "race":
        doing = ["reads", "writes"]
        memory = f"{report['name']} (byte {report['offset']})"
        what = (
            f"{doing[report['is_write']]} {memory}, which {thread(report['other'])} {doing[report['was_write']]} at "
            f"{there}, with no barrier between that orders {'threadgroup' if report['local'] else 'device'} memory"
        )
        if not report["local"] and report["other"] and report["other"][1] != report["thread"][1]:
            what += "; nothing orders two threadgroups"
    elif kind == "divergence":
        what = f"{AT[report['at']]}, which {thread(report['other'])} does not reach: it {AT[report['other_at']]}"
        if there:
            what += f" at {there}"
    elif kind == "signal":
        what = f"crashes ({_signal(report['signal'])}) near there"
    else:
        what = WORDS[kind].format(**report)
    return KernelFault(kind, f"kernel {name}, {at}, {who}: {what}")
