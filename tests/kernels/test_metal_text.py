"""The Metal text that MLX generates for our kernels, recorded on any machine by tracing."""

import re
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from tests.kernels.variants import variants
from turbospark_mlx.custom_kernels.backends import Backend, compiler, metal

BACKEND = Backend("metal", "gpu", "recorded, not run", metal.launch)
MAX_BUFFERS, MAX_THREADGROUP_BYTES = 31, 32768


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The text of every kernel that the variants use, by its name."""
    file = tmp_path_factory.mktemp("traced") / "call.mlxfn"
    found = {}
    for function, arrays in variants(BACKEND):
        mx.export_function(str(file), function, *arrays)
        for part in file.read_bytes().split(b"// What every kernel may rely on")[1:]:
            text = "// What every kernel may rely on" + part.split(b"\x00")[0].decode("latin-1")
            text = text[: text.rindex(";") + 1]
            found[re.search(r"\[\[kernel\]\] void (\w+)\(", text)[1]] = text
    return found


def test_every_kernel_was_recorded(texts):
    files = {path.stem for path in Path(metal.METAL).glob("*.metal")}
    assert {name for name in files if any(f"custom_kernel_{name}_" in kernel for kernel in texts)} == files


def test_buffers_stay_within_metals_limit(texts):
    for name, text in texts.items():
        slots = [int(slot) for slot in re.findall(r"\[\[buffer\((\d+)\)\]\]", text)]
        assert slots == list(range(len(slots))), name
        assert 0 < len(slots) <= MAX_BUFFERS, name


def test_inputs_that_a_variant_does_not_read_are_no_arguments(texts):
    signatures = {name: text[text.index(f"void {name}(") :].split("{")[0] for name, text in texts.items()}
    products = [s for name, s in signatures.items() if "dequant_gemv_simd" in name]
    named = {tuple(n for n in ("norm_weight", "bias", "residual") if f" {n} [[" in s) for s in products}
    assert named == {(), ("bias",), ("residual",), ("norm_weight",), ("norm_weight", "bias", "residual")}


THREADGROUP_ARRAY = re.compile(r"^ *threadgroup ([\w<>]+) (\w+)\[(.+)\];$", re.MULTILINE)


def checkable(text: str) -> str:
    """The text with threadgroup arrays as clang takes them, and an assertion about their size."""
    text = re.sub(r"template \[\[host_name\(.*\)\]\] \[\[kernel\]\]", "template", text)
    arrays = THREADGROUP_ARRAY.findall(text)
    text = THREADGROUP_ARRAY.sub(r"extern threadgroup \1 \2[\3];", text)
    if arrays:
        total = " + ".join(f"sizeof({kind}) * ({count})" for kind, _, count in arrays)
        last = f"extern threadgroup {arrays[-1][0]} {arrays[-1][1]}[{arrays[-1][2]}];"
        text = text.replace(last, f'{last} static_assert({total} <= {MAX_THREADGROUP_BYTES}, "threadgroup memory");')
    return text


def check(texts, tmp_path) -> str:
    """What clang says about the texts; empty if nothing."""
    clang = next((c for c in compiler.candidates() if c.name in ("ziglang", "clang++")), None)
    if clang is None:
        pytest.skip("needs clang: pip install ziglang")
    source = tmp_path / "kernels.cpp"
    parts = [f"namespace kernel_{i} {{\n{checkable(text)}\n}}" for i, text in enumerate(texts)]
    source.write_text("\n".join([f'#include "{Path(__file__).parent / "strict_metal.h"}"', *parts]))
    command = [
        *clang.command,
        "-std=c++17",
        "-c",
        "-O0",
        "-Wno-everything",
        str(source),
        "-o",
        str(tmp_path / "kernels.o"),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_text_compiles_with_real_address_spaces_and_fits_threadgroup_memory(texts, tmp_path):
    assert check(texts.values(), tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("const device uint* from", "thread const uint* from", "no matching function"),
        ("threadgroup const Chunk<T>& x", "thread const Chunk<T>& x", "no matching function"),
        ("staged[M * LANES * 4]", "staged[M * LANES * 4 + 4096]", "threadgroup memory"),
    ],
)
def test_the_check_finds_faults_that_metal_would(texts, tmp_path, old, new, complaint):
    text = next(text for name, text in texts.items() if "dequant_gemv_simd" in name and "_14336_" in name)
    assert old in text
    assert complaint in check([text.replace(old, new)], tmp_path)
