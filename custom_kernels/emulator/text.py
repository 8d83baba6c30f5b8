"""The text that MLX generates, made ready for clang with as few changes as possible, and what Metal forbids in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from turbospark_mlx.errors import KernelFault

TOKEN = re.compile(
    r"""(?P<blank>//[^\n]*|/\*.*?\*/|\s+|\\\n)
      | (?P<directive>\#[ \t]*(?:line|pragma|include|if|ifdef|ifndef|else|elif|endif|undef)\b(?:[^\n\\]|\\.|\\\n)*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<mark>::|->|\+\+|--|<<=?|>>=?|[<>=!+\-*/%&|^]=|&&|\|\||\#\#?|.)""",
    re.VERBOSE | re.DOTALL,
)
FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(bf|[hH])?")
FORBIDDEN = {
    "double": "Metal has no double: use float",
    "goto": "Metal has no goto",
    "new": "Metal has no dynamic memory",
    "delete": "Metal has no dynamic memory",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no run-time type information",
    "typeid": "Metal has no run-time type information",
    "thread_local": "Metal has no thread_local",
    "register": "Metal has no register",
    "asm": "Metal has no assembler",
    "std": "Metal has no C++ standard library: its functions are in namespace metal",
}
SPACES = {"device", "constant", "threadgroup", "thread"}
SCALARS = "bool char uchar short ushort int uint long ulong half bfloat float "
SCALARS += "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t float16_t bfloat16_t"
TYPES = {
    "void",
    *SCALARS.split(),
    *(f"{name}{n}" for name in SCALARS.split()[:12] for n in (2, 3, 4)),
}
SPECIFIERS = ("const", "volatile", "constexpr", "static", "inline", "struct", "typename", "metal", "::")
TEMPLATES = {"atomic", "vec", "array"}
SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{\n", re.DOTALL)
PARAMETER = re.compile(r"^(.*?)(\w+) \[\[(?:buffer\((\d+)\)|(\w+))\]\]$", re.DOTALL)
INSTANCE = re.compile(r"template \[\[host_name\(\"[^\"]*\"\)\]\] \[\[kernel\]\] decltype\((\w+<[^;]*>)\) [^;]*;")
BLOCKING = re.compile(r"\b(?:simd|quad)_\w+ *\(|_barrier *\(")


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel: its type as written, and its buffer slot or None where it is an attribute."""

    type: str
    name: str
    slot: int | None


@dataclass(frozen=True)
class Prepared:
    """A text that clang takes, with what has to be known to call it."""

    text: str
    files: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    blocking: bool


@lru_cache(maxsize=256)
def tokens(text: str) -> tuple[Token, ...]:
    found, line = [], 1
    for match in TOKEN.finditer(text):
        found.append(Token(match.lastgroup, match[0], line))
        line += match[0].count("\n")
    return tuple(found)


def float_literals(text: str) -> str:
    """Metal reads 1.0 as a float and 1.0h as a half; clang does neither."""
    parts = []
    for token in tokens(text):
        piece = token.text
        if token.kind == "number" and (literal := FLOAT.fullmatch(piece)):
            kind = {"bf": "bfloat", "h": "half", "H": "half", None: None}[literal[2]]
            piece = f"{literal[1]}f" if kind is None else f"{kind}({literal[1]}f)"
        parts.append(piece)
    return "".join(parts)


def threadgroup_variables(body: str) -> str:
    """Variables in threadgroup memory as references to memory that the emulator guards."""
    found = tokens(body)
    code = [i for i, token in enumerate(found) if token.kind not in ("blank", "directive")]
    pieces = [token.text for token in found]
    slot = 0
    for at, i in enumerate(code):
        if found[i].text != "threadgroup" or (at and found[code[at - 1]].text not in "{};)"):
            continue
        end = at
        while end < len(code) and found[code[end]].text not in (";", "="):
            end += 1
        if end == len(code) or found[code[end]].text == "=":
            continue
        declaration = [found[code[k]].text for k in range(at + 1, end)]
        depth, name_at = 0, None
        for k, word in enumerate(declaration):
            depth += word.count("<") - word.count(">") if word in ("<", ">", ">>") else 0
            if depth == 0 and (word in ("[", ",") or k == len(declaration) - 1):
                name_at = k if k == len(declaration) - 1 and word not in ("[", ",") else k - 1
                break
        if name_at is None or name_at == 0 or {"*", "&"} & set(declaration[:name_at]):
            continue
        kind, rest = " ".join(declaration[:name_at]), declaration[name_at:]
        variables, depth = [[]], 0
        for word in rest:
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(word, 0)
            if word == "," and depth == 0:
                variables.append([])
            else:
                variables[-1].append(word)
        made = []
        for name, *extent in variables:
            alias = f"emu_type_{slot}"
            made.append(
                f"typedef {kind} {alias} {' '.join(extent)}; threadgroup {alias}& {name} = *(threadgroup {alias}*)"
                f"emu_threadgroup({slot}, sizeof({alias}), alignof({alias}), "
                f'emu::granule<typename emu::innermost<{alias}>::type>(), "{name}");'
            )
            slot += 1
        newlines = "".join(pieces[code[at] : code[end] + 1]).count("\n")
        pieces[code[at]] = " ".join(made) + "\n" * newlines
        for k in range(code[at] + 1, code[end] + 1):
            pieces[k] = ""
    return "".join(pieces)


def check_words(name: str, file: str, text: str, parameters: set[str]) -> None:
    """Refuse what Metal forbids and clang allows. ``parameters`` are types that the kernel's template names.

    Raises KernelFault.
    """
    every = tokens(text)
    own = set(re.findall(r"\b(?:struct|class|union|enum)\s+(\w+)", text))
    code = [token for token in every if token.kind not in ("blank", "directive")]

    def refuse(token: Token, why: str) -> None:
        raise KernelFault("language", f"kernel {name}, {file} line {token.line}: {why}")

    for token in every:
        included = token.kind == "directive" and re.match(r"# *include *[<\"]([^>\"]*)", token.text)
        if included and not included[1].startswith("metal_"):
            refuse(token, f"{included[1]} is not there: Metal has its own headers only, whose names begin with metal_")
    for i, token in enumerate(code):
        word = token.text
        following = code[i + 1].text if i + 1 < len(code) else ""
        before = code[i - 1].text if i else ""
        if word in FORBIDDEN and before not in (".", "->", "::"):
            refuse(token, FORBIDDEN[word])
        if word == "long" and following in ("long", "double"):
            refuse(token, f"Metal has no {word} {following}; its long has 64 bits")
        end = i + 1
        if following == "<" and word in TEMPLATES | own:
            end = next((k + 1 for k in range(i, len(code)) if code[k].text in (">", ">>")), len(code))
        while end < len(code) and code[end].text in ("const", "volatile", *SPACES):
            end += 1
        after = code[end].text if end < len(code) else ""
        if word in TYPES | TEMPLATES | parameters | own and after in ("*", "&") and before != "operator":
            # The whole specifier: everything back to where the declaration, argument or cast begins.
            back = i
            while back and code[back - 1].text in (*SPECIFIERS, *SPACES):
                back -= 1
            words = {token.text for token in (*code[back:i], *code[i + 1 : end])}
            if not words & SPACES:
                refuse(
                    token,
                    f"the {'pointer' if after == '*' else 'reference'} to {word} has no address space: write device, "
                    "constant, threadgroup or thread",
                )


def check_globals(name: str, file: str, text: str) -> None:
    """Refuse variables outside functions that are not in constant memory. Raises KernelFault."""
    depth, statement = 0, []
    for token in tokens(re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: "\n" * m[0].count("\n"), text, flags=re.M)):
        if token.kind == "blank":
            continue
        if token.text == "{":
            depth += 1
        elif token.text == "}":
            depth -= 1
            if depth == 0:
                statement = []
                continue
        if depth == 0 or (depth == 1 and token.text == "{"):
            statement.append(token)
        if token.text == ";" and depth == 0:
            words = [part.text for part in statement]
            skip = {
                "typedef",
                "using",
                "template",
                "struct",
                "class",
                "enum",
                "union",
                "static_assert",
                "namespace",
                "extern",
            }
            equals = words.index("=") if "=" in words else None
            head = words if equals is None else words[:equals]
            if words and not skip & set(words) and "(" not in head and len(words) > 2 and "constant" not in words:
                raise KernelFault(
                    "language",
                    f"kernel {name}, {file} line {statement[0].line}: {' '.join(words[:4])}... is a variable outside "
                    "functions, which Metal keeps in constant memory only: add constant",
                )
            statement = []
        elif depth == 1 and token.text == "{" and "namespace" in [part.text for part in statement]:
            depth, statement = 0, []


def prepare(name: str, text: str, pieces: tuple[tuple[str, str], ...]) -> Prepared:
    """Make the generated ``text`` ready for clang.

    ``pieces`` are (file, text) of what the kernel's author wrote, as far as known; faults name these files and their
    lines. Raises KernelFault for what Metal forbids.
    """
    signature = SIGNATURE.search(text)
    if signature is None or "[[buffer(" in text[signature.end() :]:
        raise KernelFault(
            "signature",
            f"kernel {name}: MLX generated no complete signature. With two or more outputs and a _shape, _strides or "
            "_ndim, the body must name a thread attribute",
        )
    function, instance = signature[1], INSTANCE.search(text)
    start, end = signature.end(), instance.start() if instance else len(text)
    head, body = text[: signature.start()], text[start:end]
    body = body[: body.rindex("}")]
    parameters = []
    for declared in signature[2].split(",\n"):
        kind, argument, slot, _ = PARAMETER.match(declared.strip()).groups()
        parameters.append(Parameter(kind.strip(), argument, None if slot is None else int(slot)))
    template = head[head.rindex("template <") :] if instance else ""
    known = [(file, part) for file, part in pieces if part.strip() and (part in head or part in body)]
    files = [file for file, _ in known]
    if not any(part in body for _, part in known):
        files.append(f"{name}.metal")
        known.append((f"{name}.metal", body))
    header = head[: len(head) - len(template)]
    if header.strip() and not any(part in header for _, part in known):
        files.append(f"{name}.h")
        known.append((f"{name}.h", header))
    types = set(re.findall(r"typename (\w+)", template))
    for file, part in known:
        inside = part in body
        check_words(name, file, part, types if inside else set())
        if not inside:
            check_globals(name, file, part)
    for file, part in known:
        where, marked = (body, True) if part in body else (head, False)
        where = where.replace(part, f'\n#line 1 "{file}"\n{part}\n#line 1 "generated"\n', 1)
        head, body = (head, where) if marked else (where, body)
    body = threadgroup_variables(body)
    called = instance[1] if instance else function
    arguments = ", ".join(_argument(parameter) for parameter in parameters)
    driver = (
        f'\n}}\n#line 1 "driver"\nextern "C" void emu_kernel(const emu_thread* self) {{\n{called}({arguments});\n}}\n'
    )
    whole = float_literals(f'#line 1 "generated"\n{head}[[kernel]] void {function}({signature[2]}) {{\n{body}') + driver
    written = "\n".join(part for _, part in known)
    code = "".join(token.text for token in tokens(written) if not token.text.startswith(("//", "/*")))
    return Prepared(whole, tuple(files), tuple(parameters), BLOCKING.search(code) is not None)


def _argument(parameter: Parameter) -> str:
    if parameter.slot is None:
        if parameter.name in ("threads_per_simdgroup", "thread_execution_width"):
            return "32u"
        quads = {
            "quadgroup_index_in_threadgroup": "self->thread_index_in_threadgroup / 4",
            "thread_index_in_quadgroup": "self->thread_index_in_threadgroup % 4",
            "quadgroups_per_threadgroup": "self->simdgroups_per_threadgroup * 8",
            "dispatch_quadgroups_per_threadgroup": "self->dispatch_simdgroups_per_threadgroup * 8",
        }
        if parameter.name in quads:
            return quads[parameter.name]
        if parameter.name == "grid_size":
            return "emu::place(self->threads_per_grid)"
        if parameter.type == "uint3":
            return f"emu::place(self->{parameter.name})"
        return f"self->{parameter.name}"
    if parameter.type.endswith("&"):
        return f"*({parameter.type[:-1]}*)self->buffers[{parameter.slot}]"
    return f"({parameter.type})self->buffers[{parameter.slot}]"
