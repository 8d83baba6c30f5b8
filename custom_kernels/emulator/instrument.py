"""Checks in the LLVM text of a kernel: a call before each access to device, constant and threadgroup memory.

Clang keeps address spaces and source positions in its text, so that what to check, how many bytes and which line stand
beside each load and store. Private memory (address space 0) is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SCALARS = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "ptr": 8, "i128": 16}
LOAD = re.compile(r"  (?:%\S+) = load (?:volatile )?(.+), ptr addrspace\([123]\) (.+?), align (\d+)")
STORE = re.compile(r"  store (?:volatile )?(.+), ptr addrspace\([123]\) (.+?), align (\d+)")
MEMORY = re.compile(r"@llvm\.mem(cpy|move|set)\.\S+?\((.*)\)")
LABEL = re.compile(r"([\w.$-]+):(?:\s|$)")
TARGET = re.compile(r"label %([\w.$-]+)")
RUNTIME = re.compile(r"call .*@(emu_|__ubsan_|llvm\.ubsantrap)")
LOCATION = re.compile(
    r"!(\d+) = (?:distinct )?!DILocation\(line: (\d+), column: (\d+), scope: !(\d+)(?:, inlinedAt: !(\d+))?"
)
SCOPE = re.compile(r"!(\d+) = (?:distinct )?!DI(?:Subprogram|LexicalBlock|LexicalBlockFile)\((.*)\)")
AUTO = re.compile(r'^!(\d+) = !\{!"auto-init"\}', re.MULTILINE)
AUTO_STORE = re.compile(r"  store (<[^>]*>|\[[^\]]*\]|\w+) .*, ptr (%\S+), align")
AUTO_CALL = re.compile(r"  call void @llvm\.mem\w+\.\S*\(ptr .*?(%\S+), .*i64 (\d+), i1 false\)")
FILE = re.compile(r'!(\d+) = !DIFile\(filename: "((?:[^"\\]|\\.)*)"')


def byte_count(kind: str) -> int:
    """Bytes of a first-class LLVM type."""
    if vector := re.fullmatch(r"<(\d+) x (\w+)>", kind):
        count, element = int(vector[1]), vector[2]
        if element == "i1":
            return (count + 7) // 8
        return (4 if count == 3 else count) * SCALARS[element]
    if array := re.fullmatch(r"\[(\d+) x (.+)\]", kind):
        return int(array[1]) * byte_count(array[2])
    if whole := re.fullmatch(r"i(\d+)", kind):
        return (int(whole[1]) + 7) // 8
    return SCALARS[kind]


Place = tuple[str, int]
"""A file, as ``#line`` named it, and a line."""


@dataclass
class Sites:
    """The places that checks name by a number: each a chain of calls, innermost first."""

    own: tuple[str, ...]
    places: list[tuple[Place, ...]] = field(default_factory=lambda: [()])
    _numbers: dict[tuple, int] = field(default_factory=dict)

    def number(self, chain: tuple[tuple[str, int, int], ...]) -> int:
        kept = tuple(place for place in chain if place[0] in self.own) or chain[-1:]
        if kept not in self._numbers:
            self._numbers[kept] = len(self.places)
            self.places.append(tuple((file, line) for file, line, _ in kept))
        return self._numbers[kept]


class Locations:
    """Debug metadata of one module."""

    def __init__(self, text: str) -> None:
        files = {int(number): name for number, name in FILE.findall(text)}
        self._files: dict[int, str] = {}
        parents = {}
        for number, members in SCOPE.findall(text):
            if file := re.search(r"file: !(\d+)", members):
                self._files[int(number)] = files[int(file[1])]
            if scope := re.search(r"scope: !(\d+)", members):
                parents[int(number)] = int(scope[1])
        for number in parents:
            at = number
            while at not in self._files and at in parents:
                at = parents[at]
            self._files.setdefault(number, self._files.get(at, "?"))
        self._locations = {
            int(number): (int(line), int(column), int(scope), int(inlined) if inlined else None)
            for number, line, column, scope, inlined in LOCATION.findall(text)
        }

    def chain(self, number: int | None) -> tuple[tuple[str, int, int], ...]:
        found = []
        while number in self._locations:
            line, column, scope, number = self._locations[number]
            found.append((self._files.get(scope, "?"), line, column))
        return tuple(found) or (("?", 0, 0),)


def _arguments(text: str) -> list[str]:
    """The arguments of a call, split at its own commas."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def instrument(text: str, own: tuple[str, ...]) -> tuple[str, list[tuple[Place, ...]]]:
    """The text with its checks, and the places that they name. ``own`` are the files whose lines a reader knows."""
    sites, locations = Sites(own), Locations(text)
    result, temporaries = [], 0

    def check(what: str, pointer: str, size: str | int, alignment: str | int, site: int) -> None:
        nonlocal temporaries
        temporaries += 1
        name = f"%emu.{temporaries}"
        what += "_constant" if what == "read" and pointer.startswith("ptr addrspace(2)") else ""
        result.append(f"  {name} = ptrtoint {pointer} to i64")
        result.append(f"  call void @emu_{what}(i64 {name}, i32 {size}, i32 {alignment}, i32 {site})")

    def poison(pointer: str, size: int | str) -> None:
        nonlocal temporaries
        temporaries += 1
        result.append(f"  %emu.{temporaries} = load i8, ptr @emu_poison")
        result.append(f"  call void @llvm.memset.p0.i64(ptr {pointer}, i8 %emu.{temporaries}, i64 {size}, i1 false)")

    auto = {f"!annotation !{number}" for number in AUTO.findall(text)}
    # Unrolled, the checks would only make more code.
    labels: set[str] = set()
    for line in text.replace('"llvm.loop.unroll.full"', '"llvm.loop.unroll.disable"').splitlines():
        # What private memory holds before it is written: clang's own pattern, made to differ between runs.
        if auto and any(line.endswith(mark) for mark in auto):
            if store := AUTO_STORE.match(line):
                poison(store[2], byte_count(store[1]))
                continue
            if call := AUTO_CALL.match(line):
                poison(call[1], call[2])
                continue
        debug = re.search(r"!dbg !(\d+)", line)
        site = lambda debug=debug: sites.number(locations.chain(int(debug[1]) if debug else None))  # noqa: E731
        if load := LOAD.match(line):
            check("read", _pointer(line, load[2]), byte_count(load[1]), load[3], site())
        elif store := STORE.match(line):
            kind = re.match(r"<[^>]*>|\[[^\]]*\]|\w+", store[1])[0]
            check("write", _pointer(line, store[2]), byte_count(kind), store[3], site())
        elif "addrspace(" in line and " call " in line and (memory := MEMORY.search(line)):
            to, source, size, _ = _arguments(memory[2])
            bits = size.split()
            if bits[0] == "i64":
                temporaries += 1
                result.append(f"  %emu.{temporaries} = trunc i64 {bits[1]} to i32")
                bits[1] = f"%emu.{temporaries}"
            for what, argument in (("read", source), ("write", to)):
                if argument.startswith("ptr addrspace("):
                    aligned = re.search(r"align (\d+)", argument)
                    pointer = f"{argument.split(') ')[0]}) {argument.split()[-1]}"
                    check(what, pointer, bits[1], aligned[1] if aligned else 1, site())
        elif RUNTIME.search(line):
            result.append(f"  store i32 {site()}, ptr @emu_site")
        elif line.startswith("define "):
            labels.clear()
        elif label := LABEL.match(line):
            labels.add(label[1])
        elif line.startswith("  br ") and labels.intersection(TARGET.findall(line)):
            # Back to the beginning of a loop: without end, it may touch nothing but private memory.
            result.append(f"  store volatile i32 {site()}, ptr @emu_site")
        result.append(line)
    declarations = [f"declare void @emu_{what}(i64, i32, i32, i32)" for what in ("read", "read_constant", "write")]
    if "declare void @llvm.memset.p0.i64(" not in text:
        declarations.append("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
    declarations += ["@emu_site = external global i32", "@emu_poison = external global i8"]
    return "\n".join([*result, *declarations]) + "\n", sites.places


def _pointer(line: str, operand: str) -> str:
    space = re.search(rf"ptr addrspace\((\d)\) {re.escape(operand)}, align", line)[1]
    return f"ptr addrspace({space}) {operand}"
