"""Which elder engine runs an install, and the reasons that are given when one does not."""

import pytest

from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.gturbo.elder_engines import RUST, SWIFT, refusals
from turbospark_mlx.protocols import AffineFormat

from . import handmade
from .handmade import ROOT, Bytes, Handmade
from .test_experts import mxfp4_moe

GEMMA_26B = {
    "hiddenSize": 2816,
    "ffnIntermediate": 2112,
    "moeIntermediateSize": 704,
    "numHeads": 16,
    "numKVHeads": 8,
    "numFullKVHeads": 2,
    "headDim": 256,
    "fullHeadDim": 512,
    "vocabSize": 262144,
    "slidingWindow": 1024,
    "numLayers": 30,
    "numExperts": 128,
    "topKExperts": 8,
    "finalLogitSoftcap": 30,
    "ropeTheta": 10000,
    "fullRopeTheta": 1000000,
    "partialRotaryFactor": 0.25,
    "tieWordEmbeddings": True,
    "attentionKEqV": True,
    "hiddenActivation": "gelu_pytorch_tanh",
    "fullAttentionLayerMask": ([0] * 5 + [1]) * 5,
}


def reasons(made, tmp_path):
    directory = made.write(tmp_path / "i.gturbo")
    with Install.open(directory, verify="off", allow_unrunnable=True) as install:
        return refusals(install)


def dense(*entries, **changes):
    """A llama install of the Rust engine with these resident tensors."""
    files = {"model_weights.bin": handmade.index(list(entries)), "packed_experts/layout.json": handmade.EMPTY_LAYOUT}
    document = handmade.manifest(handmade.arch(family="llama"))
    return Handmade({**document, **changes}, files).seal()


NOISE = Bytes(0)
Q4 = (ROOT + "embed_tokens.weight", 4, (10, 64), *NOISE.affine(10, 64, 4))


def test_the_swift_engine_runs_gemma_4_26b_only(tmp_path):
    found = reasons(handmade.swift_moe(), tmp_path)
    assert found[SWIFT] == ["It runs Gemma 4 26B-A4B only; arch.hiddenSize is 64."]
    assert found[RUST] == [
        f"It does not run '{ROOT}embed_tokens.weight' stored as 4 bits, groups of 64, bfloat16 scales (dtype tag 0)."
    ]


def test_the_swift_engine_runs_the_published_geometry(tmp_path):
    """The geometry of the published model over a tiny install: nothing else stands in the way."""
    directory = handmade.swift_moe().write(tmp_path / "i.gturbo")
    with Install.open(directory, verify="off") as install:
        install.arch.update(GEMMA_26B)
        assert refusals(install)[SWIFT] == []
        install.arch["fullAttentionLayerMask"] = [0] * 30
        assert refusals(install)[SWIFT] == [
            f"It runs Gemma 4 26B-A4B only; arch.fullAttentionLayerMask is {[0] * 30!r}."
        ]


def test_the_rust_engine_runs_its_own_installs(tmp_path):
    found = reasons(handmade.rust_moe(), tmp_path)
    assert found[RUST] == []
    assert "It does not know the dtype tags 4." in found[SWIFT]
    assert "It needs one expert stride, a multiple of 16384, for all layers." in found[SWIFT]
    assert "It needs tokenizer/tokenizer.json, listed in manifest.json." in found[SWIFT]


def test_block_experts_run_in_the_rust_engine_only(tmp_path):
    assert reasons(mxfp4_moe(), tmp_path)[RUST] == []


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (dense(Q4, ("w.weight", 3, (4,), bytes(16), b"", b"")), "It does not run 'w.weight' stored as float32"),
        (dense(Q4, ("w.weight", 2, (4,), bytes(8), b"", b"")), "It does not run 'w.weight' stored as float16"),
        (dense(Q4, ("w.weight", 9, (2, 32), bytes(36), b"", b"")), "It does not run 'w.weight' stored as Q4_0"),
        (dense(Q4, ("w.weight", 14, (2, 32), bytes(34), b"", b"")), "It does not run 'w.weight' stored as MXFP4"),
        (
            dense(Q4, flags={"turbosparkMlxExtension": True}, turbosparkMlx={"version": 1}),
            "The install needs turbospark-mlx's extension",
        ),
        (dense(Q4, arch=handmade.arch(family="newFamily")), "It does not know the family 'newFamily'."),
        (dense(Q4, quant=None), "manifest.json has no quant block."),
    ],
)
def test_what_the_rust_engine_does_not_run(made, reason, tmp_path):
    (found,) = reasons(made, tmp_path)[RUST]
    assert found.startswith(reason)


@pytest.mark.parametrize(
    "entry",
    [
        ("w.weight", 6, (2, 32), bytes(68), b"", b""),
        ("w.weight", 24, (2, 256), bytes(220), b"", b""),
        ("vision.w", 2, (4,), bytes(8), b"", b""),
        ("w.weight", 15, (2, 128), *Bytes(1).affine(2, 128, 1, 128)),
    ],
)
def test_what_the_rust_engine_runs(entry, tmp_path):
    assert reasons(dense(Q4, entry), tmp_path)[RUST] == []


def test_float32_routers_are_for_one_family(tmp_path):
    router = (ROOT + "layers.0.mlp.gate.weight", 3, (3, 64), bytes(768), b"", b"")
    found = reasons(dense(Q4, router, arch=handmade.arch(family="minimax_m2")), tmp_path)
    assert found[RUST] == []


GGUF = {"weightBits": 0, "scheme": "gguf", "scaleType": "inline", "biasType": "inline", "groupSize": 0}


@pytest.mark.parametrize(
    ("slot", "value", "accepted"),
    [
        ("embedding", handmade.slot(8), False),
        ("sharedExpert", handmade.slot(8), True),
        ("routedExpert", handmade.slot(2), True),
        ("router", handmade.slot(4), True),  # equal to the attention slot, as in dense installs
        ("router", handmade.slot(2), False),
        ("attention", handmade.slot(4, group=32), False),
        ("attention", handmade.slot(1, "fp16", 128), True),
        ("attention", handmade.slot(2, "fp16", 128), True),
        ("attention", handmade.slot(4, "fp16", 128), False),
        ("attention", {**GGUF, "ggmlType": "Q8_0"}, True),
        ("attention", {**GGUF, "ggmlType": "Q8_0", "ggmlTypes": ["Q8_0", "Q4_1"]}, False),
        ("attention", GGUF, False),
        ("router", {**GGUF, "scheme": "raw", "weightBits": 32}, True),
        ("sharedExpert", {**GGUF, "scheme": "raw", "weightBits": 32}, False),
    ],
)
def test_the_quant_rules_of_the_rust_engine(slot, value, accepted, tmp_path):
    document = handmade.manifest({})["quant"]
    found = reasons(dense(Q4, quant={**document, slot: value}), tmp_path)[RUST]
    assert (found == []) is accepted
    assert all(f"quant.{slot}" in reason for reason in found)


def test_ours_with_the_extension_runs_in_neither(tmp_path):
    (tmp_path / "i.gturbo").mkdir()
    spec = TensorSpec("w.weight", (2, 64), AffineFormat(6, 32, "float16"))
    writer = InstallWriter(tmp_path / "i.gturbo", [spec])
    for part, size in spec.parts.items():
        writer.write("w.weight", part, bytes(size))
    writer.finish(arch=handmade.arch(family="llama"), extension={}, elder_assumption={}, model_id="m")
    with Install.open(tmp_path / "i.gturbo") as install:
        for found in refusals(install).values():
            assert "The install needs turbospark-mlx's extension of the format." in found
        assert any("6 bits, groups of 32, float16 scales" in reason for reason in refusals(install)[RUST])
