"""CUDA text as we compile it ourselves: what is in it, and that its code is kept. NVIDIA's compiler itself runs where
its package is installed; no GPU is needed for that."""

import logging
import os
import re

import mlx.core as mx
import pytest

from tests.kernels.test_cuda_text import launches
from tests.kernels.variants import affine, look_up
from turbospark_mlx.custom_kernels.backends import Backend, nvrtc
from turbospark_mlx.custom_kernels.backends.kernel import METAL, TYPES
from turbospark_mlx.errors import BackendError

try:
    nvrtc._library()
    MISSING = None
except BackendError as error:
    MISSING = str(error)


def launched(made, *sizes, **options):
    """The launches of one variant."""
    found = []

    def record(call, inputs):
        found.append(call)
        return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]

    function, arrays = made(Backend("cuda", "gpu", "recorded, not run", record), *sizes, **options)
    function(*arrays)
    return found


@pytest.fixture(scope="module")
def every():
    return launches()


@pytest.fixture(scope="module")
def product():
    (call,) = launched(affine, 1, 384, 45, 4, 32, mx.bfloat16, mx.float16, norm_weight=(384,), more={"eps": 1e-5})
    return call


def without_comments(text):
    return re.sub(r"//.*", "", text)


def test_arguments_are_those_that_a_graph_passes(product):
    text = nvrtc.source_text(product)
    (head,) = re.findall(r'extern "C" __global__ void (\w+)\((.*?)\) {', text)
    assert head[0] == "dequant_gemv_simd"
    assert head[1] == (
        "const uint* w, const half* scales, const half* biases, const bfloat16_t* x, "
        "const __grid_constant__ Numbers<int32_t> x_shape, const bfloat16_t* norm_weight, bfloat16_t* y"
    )
    for absent in ("bias", "residual", "row_gate"):
        assert re.search(rf"const float\* {absent} = nullptr;", text)


def test_template_parameters_are_constants_before_the_function(product):
    text = nvrtc.source_text(product)
    before = text[: text.index('extern "C" __global__')]
    for name, value in product.template:
        kind = "bool" if isinstance(value, bool) else "int"
        spelled = (
            f"using {name} = {TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr {kind} {name} = {int(value)};"
        )
        assert before.count(spelled) == 1


def test_every_kernel_waits_for_its_inputs_once(every):
    """At its first line, or where it says so."""
    early = set()
    for call in every:
        text = nvrtc.source_text(call)
        waits = re.findall(r"^ *WAIT_FOR_INPUTS *$", text, re.MULTILINE)
        assert len(waits) == 1, call.kernel.name
        body = text[text.index('extern "C" __global__') :].split("{\n", 1)[1]
        if nvrtc.WAIT in call.kernel.source:
            early.add(call.kernel.name)
        else:
            assert body.startswith("WAIT_FOR_INPUTS\n"), call.kernel.name
    assert early == {path.stem for path in METAL.glob("*.metal") if nvrtc.WAIT in path.read_text(encoding="utf-8")}
    assert early


def test_kernels_that_wait_later_read_only_weights_until_then(every):
    """And no thread ends before: the kernel after the next would not wait for what that one had to."""
    for kernel in {call.kernel for call in every}:
        before, found, _ = without_comments(kernel.source).partition(nvrtc.WAIT)
        assert bool(kernel.weights) is bool(found), kernel.name
        if found:
            assert "return" not in before
            assert set(kernel.weights) < set(kernel.inputs)
            read = {name for name in (*kernel.inputs, *kernel.outputs) if re.search(rf"(?<!\.)\b{name}\b", before)}
            assert read == set(kernel.weights), kernel.name


def test_names_tell_texts_apart(every):
    """A function is found by its kernel's name; a text is one variant's alone."""
    texts = {}
    for call in every:
        text = nvrtc.source_text(call)
        facts = (call.kernel.name, call.template, call.input_dtypes, call.names, call.simdgroups, call.output_dtypes)
        assert texts.setdefault(text, facts) == facts
        assert len(re.findall(rf"\b{call.kernel.name}\(", text)) == 1


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A home of its own, and what was compiled: a stand-in for the compiler gives the text's length as its code."""
    made = []

    def compiled(library, name, text, options):
        made.append((name, text, options))
        return f"{name} {len(text)}".encode()

    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(nvrtc, "_library", lambda: (object(), "13.0"))
    monkeypatch.setattr(nvrtc, "_compile", compiled)
    return made


def test_code_is_kept_and_read_again(cache, monkeypatch, tmp_path):
    assert nvrtc.machine_code("a", "text", "sm_90") == b"a 4"
    assert len(cache) == 1
    assert "--gpu-architecture=sm_90" in cache[0][2]
    (kept,) = (tmp_path / "home" / "cache" / "kernels").glob("a-*.cubin")
    assert kept.read_bytes() == b"a 4"
    kept.write_bytes(b"from the disk")
    assert nvrtc.machine_code("a", "text", "sm_90") == b"from the disk"
    assert len(cache) == 1
    for name, text, architecture in (("a", "other", "sm_90"), ("a", "text", "sm_80")):
        nvrtc.machine_code(name, text, architecture)
    monkeypatch.setattr(nvrtc, "_library", lambda: (object(), "13.1"))
    nvrtc.machine_code("a", "text", "sm_90")
    monkeypatch.setattr(nvrtc, "include_directories", lambda: ("/elsewhere",))
    nvrtc.machine_code("a", "text", "sm_90")
    assert len(cache) == 5


def test_a_directory_that_cannot_be_used_is_no_hindrance(cache, tmp_path):
    (tmp_path / "home").write_text("a file")
    for _ in range(2):
        assert nvrtc.machine_code("a", "text", "sm_90") == b"a 4"
    assert len(cache) == 2


def test_a_directory_of_others_is_not_trusted(cache, tmp_path):
    nvrtc.machine_code("a", "text", "sm_90")
    folder = tmp_path / "home" / "cache" / "kernels"
    os.chmod(folder, 0o777)
    (kept,) = folder.glob("*.cubin")
    kept.write_bytes(b"a stranger's")
    assert nvrtc.machine_code("a", "text", "sm_90") == b"a 4"


def test_a_full_disk_is_no_hindrance(cache, monkeypatch):
    def keep(path, content):
        raise OSError("no space left")

    monkeypatch.setattr(nvrtc.compiler, "keep", keep)
    for _ in range(2):
        assert nvrtc.machine_code("a", "text", "sm_90") == b"a 4"
    assert len(cache) == 2


def test_the_log_counts_kernels(cache, caplog):
    with caplog.at_level(logging.INFO, logger=nvrtc.__name__):
        assert nvrtc.compile_all({"one": "a", "other": "b"}, "sm_90") == {"one": b"a 3", "other": b"b 5"}
    assert [record.kernels for record in caplog.records] == [(1, 2), (2, 2)]


def test_an_error_names_the_kernel_and_is_not_kept(cache, monkeypatch, tmp_path):
    def refuse(library, name, text, options):
        raise BackendError(f"the kernel {name} could not be compiled: no such luck")

    monkeypatch.setattr(nvrtc, "_compile", refuse)
    with pytest.raises(BackendError, match="the kernel b could not be compiled: no such luck"):
        nvrtc.compile_all({"text": "b"}, "sm_90")
    assert not list((tmp_path / "home" / "cache" / "kernels").iterdir())


def test_what_to_install_is_said_where_there_is_no_compiler(monkeypatch):
    def missing(name):
        raise OSError(name)

    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", missing)
    try:
        with pytest.raises(BackendError, match=r"libnvrtc\.so\.13.*pip install mlx\[cuda13\]"):
            nvrtc._library()
    finally:
        nvrtc._library.cache_clear()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvidias_compiler_takes_the_text(architecture, product, monkeypatch, tmp_path):
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    calls = [product, *launched(look_up, 1, 8, 64, mx.float16)]
    texts = {nvrtc.source_text(call): call.kernel.name for call in calls}
    for text, code in nvrtc.compile_all(texts, architecture).items():
        assert code.startswith(b"\x7fELF")
        assert texts[text].encode() + b"\x00" in code
    wrong = nvrtc.source_text(product).replace("nullptr;", "nowhere;", 1)
    with pytest.raises(BackendError, match=r"(?s)the kernel broken could not be compiled:.*nowhere"):
        nvrtc.machine_code("broken", wrong, architecture)
    with pytest.raises(BackendError, match="the kernel broken could not be compiled"):
        nvrtc.machine_code("broken", "", "sm_1")
