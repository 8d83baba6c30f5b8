"""Mixtures of experts on every back end against float64, straight from the bytes of an install."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.experts import layers
from tests.kernels import oracle
from turbospark_mlx.custom_kernels import ExpertArena, Mixture, emulate, expert_mixture
from turbospark_mlx.custom_kernels.backends import Backend, compiler, select
from turbospark_mlx.custom_kernels.experts import expert_mixture_reference
from turbospark_mlx.errors import OptionError
from turbospark_mlx.experts import open_experts

SPECS = {
    "silu": layers.SPEC,
    "gelu": replace(layers.SPEC, activation="gelu_tanh", top_k=1),
    # Random experts reach far past a limit of 1.5, from both sides.
    "clamped": replace(layers.SPEC, activation="clamped_swiglu", alpha=1.4, limit=1.5, biases=True, top_k=3),
    "wide": replace(layers.SPEC, intermediate=128),
}
# The mlx path of GPUs is the same on any device.
BACKENDS = ["host", "reference", "gpu"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "gpu":
        return Backend("reference", "gpu", "MLX's own operations")
    if request.param == "host" and not compiler.candidates():
        pytest.skip("no C++ compiler on this machine")
    return select(request.param)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def write(spec, formats):
        if (spec, formats) not in made:
            directory = tmp_path_factory.mktemp("experts") / f"{spec}-{formats}.gturbo"
            made[spec, formats] = layers.write(directory, SPECS[spec], layers=1, formats=formats, seed=3)
        return made[spec, formats]

    return write


ONE_BY_ONE = ("mixed", "plain")
"""Formats that the kernels of a decode step do not read."""
CASES = [("silu", "int4"), ("gelu", "mixed"), ("clamped", "int4"), ("clamped", "plain"), ("silu", "mixed")]
CASES += [("clamped", "mxfp4"), ("wide", "mxfp4")]


@pytest.mark.parametrize(("spec", "formats"), CASES)
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_a_mixture_is_its_equation(written, backend, spec, formats, rows):
    made, rng = written(spec, formats), np.random.default_rng(rows)
    indices, (x, weights) = layers.route(rng, made.spec, rows), layers.inputs(rng, made.spec, rows)
    expected = made.mixture(0, np.array(indices), oracle.float64(x), oracle.float64(weights))
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        experts = store(0, made.spec)
        y = experts.finish(experts.begin(indices), x, weights)
        assert y.dtype == x.dtype
        if backend.name == "host" and rows == 1 and formats not in ONE_BY_ONE:
            assert {way for _, way in backend.counters} == {"kernel"}
            assert {op for op, _ in backend.counters} == {"moe_phase1_gate_up_act", "moe_phase2_down_reduce"}
        assert oracle.relative_error(y, expected) < 2e-5
        reference = expert_mixture_reference(experts.arena, indices, x, weights)
        assert oracle.relative_error(reference, expected) < 2e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_stays_what_it_is(written, dtype):
    made, rng = written("wide", "int4"), np.random.default_rng(1)
    backend = Backend("reference", "gpu", "MLX's own operations")
    indices, (x, weights) = layers.route(rng, made.spec, 5), layers.inputs(rng, made.spec, 5)
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        experts = store(0, made.spec)
        y = experts.finish(experts.begin(indices), x.astype(dtype), weights)
        assert y.dtype == dtype
        expected = made.mixture(0, np.array(indices), oracle.float64(x), oracle.float64(weights))
        # MLX's CPU products sum in half precision; this only shows that nothing else is wrong.
        assert oracle.relative_error(y, expected) < 0.1


def test_parts_of_a_mixture_are_the_whole(written, backend):
    made, rng, rows = written("silu", "int4"), np.random.default_rng(4), 20
    indices, (x, weights) = layers.route(rng, made.spec, rows), layers.inputs(rng, made.spec, rows)
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        arena = store(0, made.spec).arena
        whole = expert_mixture(arena, indices, x, weights, backend=backend)
        mixture, flat = Mixture(x, weights, blob=arena.blob, backend=backend), np.array(indices).ravel()
        for chosen in (flat % 3 == 1, flat % 3 == 0, flat % 3 == 2):
            pairs = np.flatnonzero(chosen)
            mixture.add(arena, pairs, flat[pairs])
        assert np.array_equal(mixture.result(), whole)


def test_no_rows(written, backend):
    made = written("silu", "int4")
    nothing = mx.zeros((0, made.spec.top_k), mx.uint32)
    with made.open() as install:
        for residency in ("resident", "streamed", "mapped"):
            with open_experts(install, backend=backend, residency=residency) as store:
                experts = store(0, made.spec)
                y = experts.finish(experts.begin(nothing), mx.zeros((0, 128)), nothing.astype(mx.float32))
                assert y.shape == (0, 128)


def test_shapes_and_slots_that_do_not_fit_are_refused(written):
    made, backend = written("silu", "int4"), select("reference")
    x, weights = layers.inputs(np.random.default_rng(0), made.spec, 2)
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        arena = store(0, made.spec).arena
        good = mx.zeros((2, 4), mx.uint32)
        for arrays in [(good[:1], x, weights), (good, x[:, :64], weights), (good, x, weights[:, :3])]:
            with pytest.raises(OptionError, match=r"needed are \[rows, 128\]"):
                expert_mixture(arena, *arrays, backend=backend)
        with pytest.raises(OptionError, match="slots run from 0 to 16"):
            expert_mixture(arena, mx.array([[0, 1, 2, 16]] * 2), x, weights, backend=backend)


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
def test_a_row_is_the_same_wherever_its_experts_lie(written):
    """In an order of their own inside other memory, as a mapped file may have them, and added in parts."""
    made, rng, backend = written("silu", "int4"), np.random.default_rng(6), select("host")
    indices, (x, weights) = layers.route(rng, made.spec, 1), layers.inputs(rng, made.spec, 1)
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        arena = store(0, made.spec).arena
        options = {"residual": x, "backend": backend}
        whole = expert_mixture(arena, indices, x, weights, **options)
        rows = np.array(arena.array)
        places = rng.permutation(2 * len(rows))[: len(rows)]
        memory = np.full((2 * len(rows), rows.shape[1]), 0xFFFFFFFF, np.uint32)
        memory[places] = rows
        moved = ExpertArena(arena.blob, arena.blobs, memory, places)
        assert np.array_equal(expert_mixture(moved, indices, x, weights, **options), whole)
        mixture, flat = Mixture(x, weights, blob=arena.blob, **options), np.array(indices).ravel()
        for pairs in (np.array([2]), np.array([3, 0]), np.array([1])):
            mixture.add(moved, pairs, flat[pairs])
        assert np.array_equal(mixture.result(), whole)
        assert {op for op, _ in backend.counters} == {"moe_phase1_gate_up_act", "moe_phase2_down_reduce"}


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
@pytest.mark.parametrize(("spec", "formats"), [("silu", "int4"), ("clamped", "mxfp4")])
def test_rows_in_the_order_of_their_experts(written, spec, formats):
    """As they run with CUDA: all at once, and in parts whose tiles are others."""
    made, rng, rows = written(spec, formats), np.random.default_rng(8), 40
    backend = Backend("cuda", "gpu", "emulated", launch=emulate)
    indices, (x, weights) = layers.route(rng, made.spec, rows), layers.inputs(rng, made.spec, rows)
    expected = made.mixture(0, np.array(indices), oracle.float64(x), oracle.float64(weights))
    with made.open() as install, open_experts(install, backend=backend, residency="resident") as store:
        arena = store(0, made.spec).arena
        whole = expert_mixture(arena, indices, x, weights, backend=backend)
        assert oracle.relative_error(whole, expected) < 2e-5
        mixture, flat = Mixture(x, weights, blob=arena.blob, backend=backend), np.array(indices).ravel()
        for chosen in (flat % 3 == 1, flat % 3 != 1):
            pairs = np.flatnonzero(chosen)
            mixture.add(arena, pairs, flat[pairs])
        assert np.array_equal(mixture.result(), whole)
        assert set(backend.counters) == {("grouped_experts", "kernel")}
