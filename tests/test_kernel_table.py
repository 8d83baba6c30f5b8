"""``turbospark-mlx info --kernels``, and that it speaks of every op and every kernel that there is."""

import ast
import json
from pathlib import Path

import mlx.core as mx
import pytest

from tests.kernels.variants import variants
from turbospark_mlx import custom_kernels as ck
from turbospark_mlx.cli import kernels, main
from turbospark_mlx.custom_kernels import affine, backends, rotary
from turbospark_mlx.custom_kernels.backends import Backend, compiler
from turbospark_mlx.custom_kernels.backends.kernel import METAL
from turbospark_mlx.custom_kernels.backends.op import Op
from turbospark_mlx.testing import make_tiny_install

PACKAGE = Path(ck.__file__).parent


@pytest.fixture(autouse=True)
def _no_choice_from_outside(on_the_cpu, monkeypatch):
    monkeypatch.delenv("TURBOSPARK_KERNELS", raising=False)


def test_whatever_is_counted_is_an_op_of_the_table():
    """Ops count themselves by the name of their ``Op``, never by a text of their own."""
    calls = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("backend.count")
                and not ast.unparse(node.args[0]).endswith(".name")
            ):
                raise AssertionError(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Op":
                calls += 1
    assert calls == len(ck.OPS)
    assert len({op.name for op in ck.OPS}) == len(ck.OPS)


def test_every_kernel_belongs_to_an_op():
    files = {path.stem for path in METAL.glob("*.metal")}
    assert {kernel.name for op in ck.OPS for kernel in op.kernels} == files


def test_the_variants_of_models_take_the_kernels_that_the_table_names():
    launched = []

    def launch(call, inputs):
        launched.append(call.kernel.name)
        return [mx.zeros(shape, dtype) for _, shape, dtype in call.present_outputs]

    backend, seen = Backend("cuda", "gpu", "recorded, not run", launch), set()
    table = {op.name: op for op in ck.OPS}
    for function, arrays in variants(backend):
        backend.counters.clear()
        launched.clear()
        function(*arrays)
        names = {name for name, way in backend.counters if way == "kernel"}
        assert len(names) == len(backend.counters)
        assert set(launched) <= {kernel.name for name in names for kernel in table[name].kernels}
        seen |= names
    assert seen == {op.name for op in ck.OPS if op.device in (None, "gpu")}


def test_an_op_says_why_its_kernel_is_not_taken():
    cpu, gpu = (
        Backend(name, device, "", lambda call, inputs: []) for name, device in (("host", "cpu"), ("cuda", "gpu"))
    )
    reference = Backend("reference", "cpu", "")
    op = affine.AFFINE_MATMUL
    assert op.refusal(cpu, mx.float32, rows=8) is None
    assert op.refusal(gpu, mx.bfloat16, rows=8) is None
    assert op.refusal(cpu, mx.float32, rows=9) == "its kernel takes up to 8 rows"
    assert op.refusal(cpu, mx.float32, mx.float16) == "on a CPU kernels compute in float32"
    assert op.refusal(reference, mx.float32) == "reference has no kernels"
    assert op.ways("cpu", compiled=True) == ("kernel", "blas")
    assert op.ways("gpu", compiled=True) == ("kernel", "mlx")
    assert op.ways("gpu", compiled=False) == ("mlx",)
    assert Op("x", op.kernels).ways("cpu", compiled=True) == ("kernel",)
    assert rotary.QKV_APPEND.ways("cpu", compiled=False) == ("qkv_epilogue",)


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler")
def test_the_table_of_this_machine(capsys):
    assert main(["info", "--kernels"]) == 0
    out = capsys.readouterr().out
    for op in ck.OPS:
        assert f"  {op.name} " in out
    assert "host       taken here: compiled by" in out
    assert "metal      not here: kernels='metal' needs an Apple GPU" in out
    assert "attention            up to 8 rows, without a mask array" in out
    assert "activations are float32 on host" in out


def test_the_table_without_a_compiler(capsys, monkeypatch):
    def none(*_):
        raise backends.BackendError("there is no compiler: pip install one")

    monkeypatch.setattr(backends.host, "describe", none)
    assert main(["info", "--kernels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["kernels"]
    assert document["here"]["name"] == "reference"
    assert "pip install one" in document["here"]["reason"]
    assert document["backends"]["host"] == {"available": False, "reason": "there is no compiler: pip install one"}
    assert {row["why"] for row in document["ops"]} == {"reference has no kernels"}
    assert any("reference  taken here: " in line and "pip install one" in line for line in kernels.text(document))


def test_beside_an_install(capsys, tmp_path):
    path = make_tiny_install("llama", tmp_path / "tiny.gturbo")
    assert main(["info", str(path), "--kernels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "llama"
    assert [row["op"] for row in document["kernels"]["ops"]] == [op.name for op in ck.OPS]
    assert main(["info", str(path), "--json"]) == 0
    assert "kernels" not in json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["info"])
    assert "MODEL is missing" in capsys.readouterr().err
