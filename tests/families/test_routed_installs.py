"""Installs with routed experts, of every family that has them: converter, packed files, loader, logits."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families.oracles import FAMILIES, PROMPT, assert_close, assert_exact, slow_without_switches
from turbospark_mlx import families, loader
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import InstallError
from turbospark_mlx.families.routed import parameter
from turbospark_mlx.gturbo import Install
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, tiny_config

ROUTED = [
    ("llama", "mixtral"),
    ("llama", "qwen3-moe-sums"),
    ("gemma4", "gemma4-moe"),
    ("gpt_oss", "gpt-oss"),
    ("deepseek2", "deepseek-v3"),
    ("qwen", "qwen3.5-moe"),
    ("qwen4", "qwen4"),
]
EVERY = [*ROUTED, ("gemma4", "gemma4-dense"), ("gemma4", "gemma4-small"), ("gemma4", "gemma4-untied")]
EVERY += [
    ("deepseek2", "deepseek-v2-lite"),
    ("deepseek2", "deepseek-v2"),
    ("qwen", "qwen3.5"),
    ("qwen", "qwen3.5-tied"),
    ("qwen4", "qwen4-plain"),
    ("muse", "muse-glimmer"),
    ("muse", "muse-glimmer-three-heads"),
    ("muse", "muse-glimmer-tied"),
]
NUMPY = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


def load(path, **options):
    with Install.open(path, verify="off") as install:
        return loader.load_model(install, backend=backends.select("reference"), **options)


def as_bytes(array):
    mx.eval(array)
    return bytes(memoryview(array).cast("B"))


def wide(data, dtype, shape):
    array = mx.array(np.frombuffer(data, NUMPY[dtype]))
    return (array.view(mx.bfloat16) if dtype == "bfloat16" else array).astype(mx.float32).reshape(shape)


def value(read, tensor):
    """float32 of a stored tensor, of which ``read(part)`` gives the bytes of a part."""
    if tensor.format is None:
        return np.array(wide(read("data"), tensor.dtype, tensor.shape))
    rows, form = tensor.shape[0], tensor.format
    words = mx.array(np.frombuffer(read("data"), np.uint32)).reshape(rows, -1)
    scales, biases = (wide(read(part), form.companion_dtype, (rows, -1)) for part in ("scales", "biases"))
    return np.array(mx.dequantize(words, scales, biases, group_size=form.group_size, bits=form.bits))


def dequantized(path):
    """What the bytes of an install stand for, float32 by parameter name."""
    weights = {}
    with Install.open(path, verify="off") as install:
        family = families.family_for_manifest(install.manifest.family)
        config = family.config_from_manifest(install.arch, install.extension)
        for name, entry in install.tensors.items():
            found = value(lambda part, entry=entry: install.read(entry, part), entry)
            weights[family.place(name, config).checkpoint_name] = found
        for position, (parameters, spec) in enumerate(family.experts(config).items()):
            layer = install.experts.layers[position]
            for name in spec.tensors:
                matrices = []
                for expert in range(spec.num_experts):
                    blob = bytearray(layer.size)
                    install.read_expert_into(position, expert, blob)

                    def read(part, blob=blob, layer=layer, name=name):
                        tensor = layer.tensors[name if part == "data" else f"{name}_{part}"]
                        return bytes(blob[tensor.offset : tensor.offset + tensor.size])

                    matrices.append(value(read, layer.tensors[name]))
                weights[parameter(parameters, name)] = np.stack(matrices)
        for place in (family.place(name, config) for name in family.expected(config)):
            if place.table:
                weights[place.checkpoint_name] = table_values(install)
    return weights


def table_values(install):
    """float32 of the table's rows, from its bytes."""
    layout, records = install.table, bytearray(install.table.nbytes)
    install.read_table_into(0, records)
    parts = np.split(
        np.frombuffer(records, np.uint8).reshape(layout.shape[0], -1), np.cumsum([*layout.parts.values()]), 1
    )
    named = dict(zip(layout.parts, parts, strict=False))
    return value(lambda part: np.ascontiguousarray(named[part]).tobytes(), layout)


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    made = {}

    def of(family, variant, bits):
        key = variant, bits
        if key not in made:
            path = tmp_path_factory.mktemp("installs") / f"{variant}-{bits}.gturbo"
            made[key] = make_tiny_install(family, path, variant=variant, bits=bits)
        return made[key]

    return of


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("family", "variant"), slow_without_switches(EVERY), ids=[v for _, v in EVERY])
def test_logits_are_those_of_the_installs_bytes(install, family, variant, bits):
    """Close, to the float64 reference: at once, in chunks across the window's edge, decoding, and plain modules."""
    path = install(family, variant, bits)
    oracle = FAMILIES[family].reference(tiny_config(family, variant), dequantized(path), PROMPT[:30])
    model = load(path)
    assert_close(model(mx.array([PROMPT[:30]]))[0], oracle, f"{variant}, {bits} bits")
    with Runner(model, prefill_chunk=5) as runner:
        assert_close(runner.prefill(PROMPT[:28]), oracle[27], f"{variant}, {bits} bits, chunks")
        assert_close(runner.decode(PROMPT[28]), oracle[28], f"{variant}, {bits} bits, decode")
    assert_close(load(path, fused=False)(mx.array([PROMPT[:30]]))[0], oracle, f"{variant}, {bits} bits, plain")


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize(("family", "variant"), ROUTED, ids=[v for _, v in ROUTED])
def test_stacks_are_the_packed_files_bytes(install, family, variant, bits):
    """Exact: each expert's slice of each stack is that part of its blob."""
    path = install(family, variant, bits)
    parameters = dict(tree_flatten(load(path).parameters()))
    with Install.open(path, verify="off") as opened:
        registered = families.family_for_manifest(opened.manifest.family)
        config = registered.config_from_manifest(opened.arch, opened.extension)
        for position, (where, spec) in enumerate(registered.experts(config).items()):
            layer = opened.experts.layers[position]
            for expert in range(spec.num_experts):
                blob = bytearray(layer.size)
                opened.read_expert_into(position, expert, blob)
                for role, tensor in layer.tensors.items():
                    matrix, _, kind = role.partition("_")
                    stack = parameters[f"{where}.{matrix}_proj.{kind or 'weight'}"]
                    stored = bytes(blob[tensor.offset : tensor.offset + tensor.size])
                    assert as_bytes(stack[expert]) == stored, (where, role, expert)


def test_loading_takes_the_weights_and_no_more(tmp_path):
    path = make_tiny_install("llama", tmp_path / "x.gturbo", variant="mixtral", bits=16)
    size = sum(array.nbytes for _, array in tree_flatten(load(path).parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    seen = []
    model = load(path, progress=lambda done, total: seen.append((done, total)))
    assert mx.get_peak_memory() - before < 1.1 * size
    assert seen[-1] == (size, size)
    del model


@pytest.mark.parametrize(("family", "variant"), ROUTED, ids=[v for _, v in ROUTED])
def test_a_factory_takes_the_place_of_the_stacks(install, family, variant):
    """It is asked for each layer that has experts, in order, and the stacks are not read."""
    asked = []

    class Elsewhere:
        def begin(self, indices):
            return indices

        def finish(self, pending, x, weights, *, meanwhile=(), residual=None):
            return mx.zeros_like(x)

    def factory(position, spec):
        asked.append((position, spec.num_experts, spec.top_k, spec.activation))
        return Elsewhere()

    path = install(family, variant, 4)
    model = load(path, experts=factory)
    assert not [name for name, _ in tree_flatten(model.parameters()) if "switch" in name]
    with Install.open(path, verify="off") as opened:
        layers = len(opened.experts.layers)
    activation = {"gemma4": "gelu_tanh", "gpt_oss": "clamped_swiglu"}.get(family, "silu")
    spec = {"mixtral": (4, 2), "gpt-oss": (6, 3)}.get(variant, (8, 3))
    assert asked == [(position, *spec, activation) for position in range(layers)]
    assert np.isfinite(np.array(model(mx.array([PROMPT[:5]])))).all()


def test_an_install_of_the_swift_engine(tmp_path, install):
    """Without family, behaviour flags and extension, Gemma 4 means the same."""
    path = tmp_path / "swift.gturbo"
    shutil.copytree(install("gemma4", "gemma4-moe", 4), path)
    manifest = json.loads((path / "manifest.json").read_text())
    for key in ("family", "attentionScale", "attnOutputGate", "embeddingScaledBySqrtHidden", "routerScaled"):
        del manifest["arch"][key]
    for key in ("ffnSandwichNorms", "sharedExpertGated", "ropeNeoxSubdim", "trainedContext"):
        del manifest["arch"][key]
    del manifest["turbosparkMlx"]
    manifest["flags"] = {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False}
    (path / "manifest.json").write_text(json.dumps(manifest))
    tokens = mx.array([PROMPT[:20]])
    model = load(path)
    assert_exact(model(tokens), load(install("gemma4", "gemma4-moe", 4))(tokens))
    assert model.args.max_position_embeddings == 262144


class TestRefusals:
    def changed(self, tmp_path, install, change):
        path = tmp_path / "x.gturbo"
        shutil.copytree(install("llama", "qwen3-moe-sums", 16), path)
        layout, manifest = path / "packed_experts" / "layout.json", path / "manifest.json"
        documents = json.loads(layout.read_text()), json.loads(manifest.read_text())
        change(*documents)
        layout.write_text(json.dumps(documents[0]))
        size = layout.stat().st_size
        documents[1]["files"]["packed_experts/layout.json"]["size"] = size
        manifest.write_text(json.dumps(documents[1]))
        return path

    def test_a_wrong_shape_is_named(self, tmp_path, install):
        def change(layout, manifest):
            for expert in layout["layers"][0]["experts"]:
                expert["tensors"]["down"]["shape"] = [32, 128]

        path = self.changed(tmp_path, install, change)
        with pytest.raises(
            InstallError, match=r"layer_00\.bin: 'down' of an expert is \[32, 128\].*calls for \[64, 64\]"
        ):
            load(path)

    def test_a_tensor_too_many_is_named(self, tmp_path, install):
        def change(layout, manifest):
            for expert in layout["layers"][0]["experts"]:
                # Behind the three matrices of 64 x 64, in what is padding otherwise.
                tensor = {"offset": 3 * 64 * 64 * 2, "size": 128, "dtype": "bf16", "shape": [64]}
                expert["tensors"]["gate_bias"] = tensor

        path = self.changed(tmp_path, install, change)
        with pytest.raises(InstallError, match="has a tensor that the model does not use: 'gate_bias'"):
            load(path)

    def test_another_number_of_layers(self, tmp_path, install):
        def change(layout, manifest):
            manifest["turbosparkMlx"]["arch"]["dense_layers"] = [0]

        path = self.changed(tmp_path, install, change)
        with pytest.raises(InstallError, match=r"lacks tensor|has 1 layer of experts; manifest\.json calls for 2"):
            load(path)
