"""The Metal text that MLX generates for our kernels, recorded on any machine. test_emulator_parity.py runs it."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from tests.kernels.variants import variants
from turbospark_mlx.custom_kernels.backends import Backend, metal

BACKEND = Backend("metal", "gpu", "recorded, not run", metal.launch)
MAX_BUFFERS = 31


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
