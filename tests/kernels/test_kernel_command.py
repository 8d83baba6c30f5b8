"""``turbospark-mlx kernel check`` and the example that shows how to use the emulator."""

import runpy
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark_mlx import cli
from turbospark_mlx.custom_kernels.backends import compiler

pytestmark = pytest.mark.skipif(
    not any(candidate.name in ("ziglang", "clang++") for candidate in compiler.candidates()), reason="needs clang"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_kernel.py"
SCALE = """// y = a * x + b
// check: --input x=float32:100:arange --input a=2.5 --input b=bfloat16:8:7
// check: --output y=float32:100 --grid 100 --threadgroup 32
const uint i = thread_position_in_grid.x;
y[i] = a * x[i] + float(b[i % 8]);
"""


@pytest.fixture(autouse=True)
def _device():
    device = mx.default_device()
    yield
    mx.set_default_device(device)


@pytest.fixture
def check(tmp_path, capsys):
    """``check(body, *options) -> (exit code, stdout, stderr)`` of a file with that body."""

    def check(body, *options):
        file = tmp_path / "scale.metal"
        file.write_text(body)
        code = cli.main(["kernel", "check", str(file), *options])
        return (code, *capsys.readouterr())

    return check


def test_a_file_says_how_it_is_run(check, tmp_path):
    code, out, err = check(SCALE, "--save", str(tmp_path / "found.npz"))
    assert (code, err) == (0, "")
    assert "y [100]" in out
    assert "nothing found" in out
    np.testing.assert_array_equal(np.load(tmp_path / "found.npz")["y"], np.arange(100) * 2.5 + 7)


def test_the_command_line_changes_what_it_names(check):
    assert "14" in check(SCALE, "--input", "x=float32:100:2", "--input", "a=3.5")[1]


def test_a_fault_is_one_line(check):
    code, out, err = check(SCALE.replace("x[i]", "x[i + 1]"))
    assert (code, out) == (1, "")
    assert err.startswith(
        "error: kernel scale, scale.metal line 5, thread (3, 0, 0) of threadgroup (3, 0, 0): touches 4"
    )
    assert err.count("\n") == 1


def test_an_answer_to_compare_with(check, tmp_path):
    np.save(tmp_path / "y.npy", (np.arange(100) * 2.5 + 7).astype(np.float32))
    assert check(SCALE, "--expect", f"y={tmp_path / 'y.npy'}")[0] == 0
    code, out, _ = check(SCALE.replace("i % 8", "0").replace("a *", "2 *"), "--expect", f"y={tmp_path / 'y.npy'}")
    assert code == 1
    assert "y[99] is 205.0, expected 254.5; 99 elements differ" in out
    assert "nothing found" not in out


def test_templates_headers_and_other_types(check, tmp_path):
    header = tmp_path / "twice.h"
    header.write_text("template <typename T>\nT twice(T x) {\n  return x + x;\n}\n")
    body = "const uint i = thread_position_in_grid.x;\ny[i] = FLIP ? twice(x[N - 1 - i]) : x[i];\n"
    sizes = ["--input", "x=float16:40:arange", "--output", "y=float16:40", "--grid", "40", "--threadgroup", "40"]
    names = ["--template", "N=40", "--template", "FLIP=true"]
    code, out, err = check(body, *sizes, *names, "--header", str(header))
    assert code == 0, err
    assert "[78." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "says nothing about --output"),
        (["--input", "y=float32:4"], "y is an input and an output"),
        (["--input", "x=float64:4"], "float64 is not a type of Metal"),
        (["--input", "x=float32:4000000000"], "arrays of 0 to"),
        (["--input", "x=uint8:4:300"], "uint8 cannot hold 300"),
        (["--template", "N=99999999999"], "template values of at most"),
        (["--input", "x=floaty:4"], "'floaty' is not a type of MLX"),
        (["--input", "x=float32:4y"], "expected TYPE:SHAPE"),
        (["--input", "x=float32:4:odd"], "'odd' is not normal, bits, arange or a number"),
    ],
)
def test_wrong_options_are_explained(check, options, message):
    more = ["--output", "y=float32:4", "--grid", "4", "--threadgroup", "4"] if options else []
    code, _, err = check("y[thread_position_in_grid.x] = 0;", *options, *more)
    assert code == 1
    assert message in err


@pytest.mark.parametrize("option", ["--orders=-1", "--seconds=0", "--grid=4000000000", "--seed=-1"])
def test_numbers_out_of_range_are_refused(check, option):
    with pytest.raises(SystemExit):
        check("y[thread_position_in_grid.x] = 0;", "--output", "y=float32:4", option)


def test_numbers_fill_inputs_in_their_own_type(check):
    sizes = ["--input", "n=uint32:1:4294967295", "--output", "y=uint32:4", "--grid", "4", "--threadgroup", "4"]
    code, out, err = check("y[thread_position_in_grid.x] = n[0];", *sizes)
    assert code == 0, err
    assert "[4294967295 4294967295" in out


def test_a_kernel_may_have_no_inputs(check):
    sizes = ["--output", "y=float32:4", "--grid", "4", "--threadgroup", "4"]
    code, out, err = check("y[thread_position_in_grid.x] = thread_position_in_grid.x;", *sizes)
    assert code == 0, err
    assert "[0. 1. 2. 3.]" in out


def test_files_that_are_not_text_or_not_arrays(check, tmp_path):
    strange = tmp_path / "strange.npy"
    strange.write_bytes(b"y[0] = 1; // \xff")
    sizes = ["--output", "y=float32:4", "--grid", "4", "--threadgroup", "4"]
    code, _, err = check("y[thread_position_in_grid.x] = 0;", *sizes, "--header", str(strange))
    assert code == 1
    assert "strange.npy: byte 13 is not UTF-8" in err
    code, _, err = check("y[thread_position_in_grid.x] = 0;", *sizes, "--input", f"x={strange}")
    assert code == 1
    assert "not an array of numbers" in err


def test_the_example_mends_a_kernel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    kinds = [line.split(":")[0].strip() for line in out.splitlines() if line.startswith("   ")]
    assert kinds[:3] == ["language", "race", "bounds"]
    assert kinds[4] == "uninitialized"
    assert out.split("\n5. ")[1].count("off by") == 2
