"""From installs to models: parameters are the install's bytes, and the logits are those of its dequantized weights."""

import dataclasses
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.families.oracles import FAMILIES, PROMPT, assert_close, assert_exact, mlx_lm_model
from turbospark_mlx import loader
from turbospark_mlx.custom_kernels import backends
from turbospark_mlx.errors import ConvertError, InstallError, OptionError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.families.layers import AffineLinear, Linear
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.protocols import AffineFormat
from turbospark_mlx.runner import Runner
from turbospark_mlx.testing import make_tiny_install, tiny_config, tiny_weights

Q4, Q8 = AffineFormat(4, 64, "bfloat16"), AffineFormat(8, 64, "bfloat16")
Q4_HALF = AffineFormat(4, 32, "float16")


def as_bytes(array):
    mx.eval(array)
    return bytes(memoryview(array).cast("B"))


def write_install(path, variant, formats, changed=None, without=(), extra=()):
    """An install whose matrices are stored as ``formats(name)`` says, packed by MLX itself; vectors are float32.

    ``changed`` maps install names to other weights. Returns ``(path, dequantized weights by checkpoint name)``.
    """
    hf = tiny_config("llama", variant)
    family = family_for_model_type(hf["model_type"])
    config = family.config_from_hf(hf)
    weights = {**tiny_weights(hf), **(changed or {})}
    specs, parts, dequantized = [], {}, {}
    for checkpoint_name, array in weights.items():
        name, array = f"language_model.{checkpoint_name}", mx.array(array)
        stored = formats(checkpoint_name) if array.ndim == 2 else "float32"
        if isinstance(stored, AffineFormat):
            array = array.astype(getattr(mx, stored.companion_dtype))
            w, s, b = mx.quantize(array, group_size=stored.group_size, bits=stored.bits)
            parts[name] = {"data": w, "scales": s, "biases": b}
            wide = (a.astype(mx.float32) for a in (s, b))
            value = mx.dequantize(w, *wide, group_size=stored.group_size, bits=stored.bits)
        else:
            parts[name] = {"data": array.astype(getattr(mx, stored))}
            value = parts[name]["data"].astype(mx.float32)
        dequantized[checkpoint_name] = np.array(value)
        specs.append(TensorSpec(name, array.shape, stored))
    specs = [spec for spec in specs if spec.name not in without] + list(extra)
    path.mkdir()
    writer = InstallWriter(path, specs)
    for spec in specs:
        for part, array in parts.get(spec.name, {"data": mx.zeros(spec.shape)}).items():
            writer.write(spec.name, part, as_bytes(array))
    arch, extension = config.to_manifest()
    writer.finish(
        arch=arch, extension=extension, elder_assumption=config.elder_assumption(), model_id=f"tiny/{variant}"
    )
    return path, dequantized


def load(path, **options):
    with Install.open(path, verify="off") as install:
        return loader.load_model(install, backend=backends.select("reference"), **options)


def one_format(stored):
    return lambda name: stored


def mixed(name):
    """Parts of joint projections stored differently, an embedding in 8 bits, one matrix left in half precision."""
    return {
        "model.embed_tokens.weight": Q8,
        "model.layers.0.self_attn.k_proj.weight": Q8,
        "model.layers.1.self_attn.v_proj.weight": "bfloat16",
        "model.layers.1.mlp.up_proj.weight": Q4_HALF,
    }.get(name, Q4)


FORMATS = {
    "int4": one_format(Q4),
    "int8": one_format(Q8),
    "int4-group32-float16": one_format(Q4_HALF),
    "3-bits": one_format(AffineFormat(3, 64, "float32")),
    "bfloat16": one_format("bfloat16"),
    "float16": one_format("float16"),
    "mixed": mixed,
}


@pytest.mark.parametrize(
    ("variant", "stored"),
    [
        *((variant, stored) for variant in ("llama-biases", "qwen3") for stored in FORMATS),
        *((variant, "int4") for variant in ("llama-tied", "llama-three-heads", "mistral", "qwen2")),
        ("llama-tied", "mixed"),
    ],
)
def test_logits_are_those_of_the_dequantized_weights(variant, stored, tmp_path):
    """Close, to the float64 reference, in prefill, chunks and decoding; fused equals plain."""
    path, dequantized = write_install(tmp_path / "x.gturbo", variant, FORMATS[stored])
    oracle = FAMILIES["llama"].reference(tiny_config("llama", variant), dequantized, PROMPT[:30])
    model = load(path)
    assert_close(model(mx.array([PROMPT[:30]]))[0], oracle, f"{variant}, {stored}")
    with Runner(model, prefill_chunk=5) as runner:
        assert_close(runner.prefill(PROMPT[:28]), oracle[27], f"{variant}, {stored}")
        assert_close(runner.decode(PROMPT[28]), oracle[28], f"{variant}, {stored}")
    plain = load(path, fused=False)
    assert_close(plain(mx.array([PROMPT[:30]]))[0], oracle, f"{variant}, {stored}, plain")


@pytest.mark.parametrize("variant", ["llama-llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_converted_checkpoint_answers_like_mlx_lm_on_its_weights(variant, bits, tmp_path):
    """Close, through our converter: mlx-lm is given what the install's own bytes dequantize to."""
    path = make_tiny_install("llama", tmp_path / "x.gturbo", variant=variant, bits=bits)
    weights = {}
    with Install.open(path, verify="off") as install:
        for name, entry in install.tensors.items():
            array = np.frombuffer(install.read(entry, "data"), np.uint32 if entry.format else np.uint16)
            if entry.format:
                companions = [
                    mx.array(np.frombuffer(install.read(entry, part), np.uint16)).view(mx.bfloat16)
                    for part in ("scales", "biases")
                ]
                rows = entry.shape[0]
                scales, zeros = (c.reshape(rows, -1).astype(mx.float32) for c in companions)
                packed = mx.array(array).reshape(rows, -1)
                value = mx.dequantize(packed, scales, zeros, group_size=entry.format.group_size, bits=entry.format.bits)
            else:
                value = mx.array(array).view(mx.bfloat16).reshape(entry.shape).astype(mx.float32)
            weights[name.removeprefix("language_model.")] = np.array(value)
        assert {entry.format.bits for entry in install.tensors.values() if entry.format} == ({bits} - {16})
    peer = mlx_lm_model(FAMILIES["llama"].mlx_lm[variant], tiny_config("llama", variant), weights)
    assert_close(load(path)(mx.array([PROMPT]))[0], peer(mx.array([PROMPT]))[0], variant)


def test_parameters_are_the_installs_bytes_and_joint_matrices_share_them(tmp_path):
    """Exact. Dtypes are kept: float16 companions stay float16."""
    path, _ = write_install(tmp_path / "x.gturbo", "qwen3-biases", one_format(Q4_HALF))
    model = load(path)
    with Install.open(path, verify="off") as install:
        for name, array in tree_flatten(model.parameters()):
            stem, _, kind = name.rpartition(".")
            part = kind if kind in ("scales", "biases") else "data"
            entry = install.tensors[f"language_model.{stem}.{'weight' if part != 'data' else kind}"]
            assert as_bytes(array) == install.read(entry, part), name
    attention = model.layers[0].self_attn
    assert attention.q_proj.scales.dtype == mx.float16
    assert isinstance(attention.q_proj, AffineLinear)
    joint = memoryview(attention._qkv._joint["weight"])
    address = np.array(attention._qkv._joint["weight"], copy=False).ctypes.data
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        start = np.array(projection.weight, copy=False).ctypes.data - address
        assert 0 <= start <= joint.nbytes - projection.weight.nbytes
        assert as_bytes(projection.weight) == bytes(joint.cast("B"))[start : start + projection.weight.nbytes]


def test_projections_that_are_stored_differently_are_not_joined(tmp_path):
    path, _ = write_install(tmp_path / "x.gturbo", "llama", mixed)
    model = load(path)
    assert model.layers[0].self_attn._qkv._joint is None
    assert model.layers[0].mlp._gate_up._joint is not None
    assert isinstance(model.layers[1].self_attn.v_proj, Linear)


def test_loading_takes_the_weights_and_no_more(tmp_path):
    path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format("float32"))
    size = sum(array.nbytes for _, array in tree_flatten(load(path).parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load(path)
    assert mx.get_peak_memory() - before < 1.1 * size
    assert mx.get_active_memory() - before < 1.1 * size
    del model


def test_every_tensor_of_an_install_moves_the_logits(tmp_path):
    path, _ = write_install(tmp_path / "x.gturbo", "qwen3-biases", one_format("float32"))
    before = load(path)(mx.array([PROMPT[:12]]))
    weights = tiny_weights(tiny_config("llama", "qwen3-biases"))
    for name, array in weights.items():
        other, _ = write_install(
            tmp_path / "y.gturbo", "qwen3-biases", one_format("float32"), changed={name: array * 1.5 + 0.1}
        )
        moved = mx.abs(load(other)(mx.array([PROMPT[:12]])) - before).max()
        assert moved > 1e-3 * before.std(), f"{name} is not read"
        shutil.rmtree(other)


class TestPlainModules:
    def test_types_dtypes_and_names(self, tmp_path):
        path, _ = write_install(tmp_path / "x.gturbo", "llama-biases", mixed)
        fused, plain = load(path), load(path, fused=False)
        names = [{name: array.shape for name, array in tree_flatten(m.parameters())} for m in (fused, plain)]
        assert names[0] == names[1]
        layer = plain.layers[0]
        assert type(layer.self_attn.q_proj) is nn.QuantizedLinear
        assert type(plain.layers[1].self_attn.v_proj) is nn.Linear
        assert type(plain.model.embed_tokens) is nn.QuantizedEmbedding
        assert type(layer.input_layernorm) is nn.RMSNorm
        dtypes = {array.dtype for _, array in tree_flatten(plain.parameters())}
        assert dtypes == {mx.uint32, mx.float32}

    @pytest.mark.parametrize("variant", ["mistral-mixed", "qwen3"])
    def test_gradients_reach_every_float_parameter(self, variant, tmp_path):
        path, _ = write_install(tmp_path / "x.gturbo", variant, one_format("bfloat16"))
        model = load(path, fused=False)
        tokens = mx.array([PROMPT[:20]])

        def loss(model):
            return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

        _, gradients = nn.value_and_grad(model, loss)(model)
        for name, gradient in tree_flatten(gradients):
            assert mx.abs(gradient).max() > 0, name

    def test_mlx_lms_lora_trains_on_packed_weights(self, tmp_path):
        from mlx_lm.tuner.utils import linear_to_lora_layers

        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4))
        model = load(path, fused=False)
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": 4.0, "dropout": 0.0})
        tokens = mx.array([PROMPT[:20]])

        def loss(model):
            return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

        before, gradients = nn.value_and_grad(model, loss)(model)
        trained = dict(tree_flatten(gradients))
        assert trained
        assert all("lora" in name for name in trained)
        model.update(dict(nn.utils.tree_map(lambda p, g: p - 0.05 * g, model.trainable_parameters(), gradients)))
        assert loss(model) < before

    def test_adapters_on_joint_projections_are_used(self, tmp_path):
        """A fused model has no gradient, but whoever replaces a projection must not be ignored."""
        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4))
        model, tokens = load(path), mx.array([PROMPT[:9]])
        before = model(tokens)
        q_proj = model.layers[0].self_attn.q_proj

        class Doubled(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = q_proj

            def __call__(self, x):
                return self.inner(x) * 2

        model.layers[0].self_attn.q_proj = Doubled()
        assert mx.abs(model(tokens) - before).max() > 1e-3
        model.layers[0].self_attn.q_proj = q_proj
        assert_exact(model(tokens), before)


class TestRefusals:
    NAME = "language_model.model.layers.1.mlp.up_proj.weight"

    def test_a_missing_tensor_is_named(self, tmp_path):
        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4), without=[self.NAME])
        with pytest.raises(InstallError, match=f"lacks tensor '{self.NAME}'\\. Convert"):
            load(path)

    def test_an_extra_tensor_is_named(self, tmp_path):
        extra = TensorSpec("language_model.model.layers.0.self_attn.sinks", (4,), "float32")
        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4), extra=[extra])
        with pytest.raises(InstallError, match=r"has tensor 'language_model\.model\.layers\.0\.self_attn\.sinks'"):
            load(path)

    def test_a_wrong_shape_is_named(self, tmp_path):
        path, _ = write_install(
            tmp_path / "x.gturbo",
            "llama",
            one_format("float32"),
            changed={self.NAME.removeprefix("language_model."): np.zeros((64, 128), np.float32)},
        )
        with pytest.raises(InstallError, match=rf"'{self.NAME}' is \[64, 128\]; manifest\.json calls for \[128, 64\]"):
            load(path)

    def test_a_family_that_nobody_runs(self, tmp_path):
        hf = tiny_config("llama")
        config = family_for_model_type("llama").config_from_hf(hf)
        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4))
        arch, extension = config.to_manifest()
        manifest = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest.replace('"family": "llama"', '"family": "unheardOf"'))
        with pytest.raises(InstallError, match=r"arch\.family is 'unheardOf'.*Supported: .*llama, .*qwen2, qwen3"):
            load(path)
        assert arch["family"] == "llama"
        assert extension

    def test_dtypes(self, tmp_path):
        path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4))
        assert load(path, dtype="float32").dtype == mx.float32
        with pytest.raises(OptionError, match="on a CPU everything runs in float32"):
            load(path, dtype="bfloat16")
        with pytest.raises(OptionError, match="dtype='int8'"):
            load(path, dtype="int8")

    def test_an_undecided_head(self):
        config = family_for_model_type("llama").config_from_hf(tiny_config("llama"))
        from turbospark_mlx.families.llama import Model

        with pytest.raises(ConvertError, match="tie_word_embeddings is not decided"):
            Model(dataclasses.replace(config, tie_word_embeddings=None))


def test_progress_counts_bytes(tmp_path):
    path, _ = write_install(tmp_path / "x.gturbo", "llama", one_format(Q4))
    seen = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    with Install.open(path, verify="off") as install:
        total = sum(entry.nbytes for entry in install.tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("fused", [True, False])
def test_everything_is_evaluated_so_that_another_thread_can_use_the_model(fused, tmp_path):
    """MLX's streams belong to threads; an array that is still lazy fails in another one."""
    import threading

    path, _ = write_install(tmp_path / "x.gturbo", "llama-yarn", one_format(Q4))
    model, result = load(path, fused=fused), []

    def work():
        try:
            mx.random.uniform()
            with Runner(model) as runner:
                result.append(np.array(runner.prefill(PROMPT[:9])))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_exact(result[0], Runner(model).prefill(PROMPT[:9]))
