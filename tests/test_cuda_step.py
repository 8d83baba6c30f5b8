"""A decode step on an NVIDIA GPU: its CUDA graph gives the bits of the compiled graph. test_graph_step.py has more, on
a stand-in for the driver."""

import mlx.core as mx
import pytest

from tests import graphs
from tests.test_step import Installs

pytestmark = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU")
FAMILIES = {
    "mistral": None,
    "gemma4-moe": 6,
    "deepseek-v3": 6,
    "gpt-oss": 4,
    "muse-glimmer": None,
    "qwen3.5-moe": 6,
    "qwen4-ten": 16,
    "spark": None,
}
"""A variant of each, and as few slots as leave some misses; None where there are no experts."""


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return Installs(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_graph_gives_the_bits_of_a_compiled_graph(install, variant, few, dtype):
    slots = FAMILIES[variant] if few else None
    if few and slots is None:
        pytest.skip("no experts")
    with graphs.both(install[variant], slots=slots, alike=True, kernels="cuda", dtype=dtype, max_context=90) as both:
        both.follow()
        assert both.runner.report().decode_step == graphs.GRAPH + graphs.WHILE * few
