"""The Metal text that MLX generates for our kernels, recorded on any machine by tracing."""

import re
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.custom_kernels.backends import Backend, compiler, metal

BACKEND = Backend("metal", "gpu", "recorded, not run", metal.launch)
MAX_BUFFERS, MAX_THREADGROUP_BYTES = 31, 32768
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def affine(rows, columns, out, bits, group_size, dtype, companions, *, gated=False, **options):
    """One product as (function, example arrays)."""
    options = {name: mx.zeros(shape, dtype) for name, shape in options.items()}
    arrays = [
        mx.zeros((rows, columns), dtype),
        mx.zeros((out, columns * bits // 32), mx.uint32),
        mx.zeros((out, columns // group_size), companions),
        mx.zeros((out, columns // group_size), companions),
        *options.values(),
    ]
    function = ck.gated_affine_matmul if gated else ck.affine_matmul
    more = {"eps": 1e-5} if "norm_weight" in options else {}

    def call(x, weight, scales, biases, *rest):
        named = dict(zip(options, rest, strict=True)) | more
        return function(x, weight, scales, biases, bits=bits, group_size=group_size, **named, backend=BACKEND)

    return call, arrays


def attend(heads, kv_heads, length, keys, head_dim, value_dim, dtype, kv_dtype, *, sinks=False, **options):
    arrays = [
        mx.zeros((1, heads, length, head_dim), dtype),
        mx.zeros((1, kv_heads, keys, head_dim), kv_dtype),
        mx.zeros((1, kv_heads, keys, value_dim), kv_dtype),
        *([mx.zeros((heads,), dtype)] if sinks else []),
    ]

    def call(q, k, v, logits=None):
        return ck.attention(q, k, v, scale=0.125, sinks=logits, **options, backend=BACKEND)

    return call, arrays


def look_up(count, bits, group_size, dtype):
    arrays = [
        mx.zeros((1, count), mx.uint32),
        mx.zeros((500, 128 * bits // 32), mx.uint32),
        mx.zeros((500, 128 // group_size), mx.bfloat16),
        mx.zeros((500, 128 // group_size), mx.bfloat16),
    ]

    def call(ids, *matrix):
        options = {"bits": bits, "group_size": group_size, "dtype": dtype}
        return ck.affine_embedding(ids, *matrix, **options, backend=BACKEND)

    return call, arrays


def epilogue(length, heads, kv_heads, head_dim, dtype, *, normed):
    norms = [mx.zeros((head_dim,), dtype)] * (2 if normed else 0)
    arrays = [
        mx.zeros((1, length, (heads + 2 * kv_heads) * head_dim), dtype),
        mx.zeros((length, head_dim // 2, 2)),
        *norms,
    ]

    def call(qkv, rotation, *weights):
        named = dict(zip(("q_norm", "k_norm"), weights, strict=False)) | ({"eps": 1e-6} if normed else {})
        return ck.qkv_epilogue(qkv, rotation, heads=heads, kv_heads=kv_heads, **named, backend=BACKEND)

    return call, arrays


def variants():
    for bits in (2, 3, 4, 5, 6, 8):
        for dtype in DTYPES:
            yield affine(1, 384, 45, bits, 32, dtype, mx.float16)
    for rows in (1, 3, 8):
        yield affine(rows, 14336, 4096, 4, 64, mx.bfloat16, mx.bfloat16)
        yield affine(rows, 28672, 8192, 8, 128, mx.float32, mx.float32, residual=(rows, 8192))
        yield affine(rows, 4096, 28672, 4, 64, mx.bfloat16, mx.bfloat16, norm_weight=(4096,), gated=True)
    yield affine(1, 576, 960, 4, 32, mx.float16, mx.float16, norm_weight=(576,), bias=(960,), residual=(1, 960))
    for head_dim, value_dim in ((16, 16), (64, 64), (80, 80), (128, 128), (256, 256), (512, 512), (576, 512)):
        yield attend(9, 3, 1, 100, head_dim, value_dim, mx.bfloat16, mx.float16)
    for bits in (3, 4, 8):
        yield look_up(1, bits, 64, mx.bfloat16)
        yield look_up(9, bits, 64, mx.float32)
    for dtype in DTYPES:
        yield epilogue(1, 32, 8, 128, dtype, normed=False)
        yield epilogue(3, 4, 2, 64, dtype, normed=True)
    for dtype in DTYPES:
        yield attend(8, 1, 8, 5000, 128, 128, dtype, dtype, sinks=True, mask="causal", window=4096)
        yield attend(8, 2, 1, 30, 128, 128, dtype, mx.float16, sinks=True, window=7)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The text of every kernel that the variants use, by its name."""
    file = tmp_path_factory.mktemp("traced") / "call.mlxfn"
    found = {}
    for function, arrays in variants():
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
