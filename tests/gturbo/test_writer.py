"""The writer: completeness, order of writing, the ``quant`` block and the flag that elder engines refuse."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.gturbo.formats import role_of
from turbospark_mlx.protocols import AffineFormat

from . import handmade
from .handmade import ROOT

INT4, INT8 = AffineFormat(4, 64, "bfloat16"), AffineFormat(8, 64, "bfloat16")
EMBED = TensorSpec(ROOT + "embed_tokens.weight", (10, 64), INT4)
NORM = TensorSpec(ROOT + "norm.weight", (64,), "bfloat16")
FINISH = {"arch": handmade.arch(family="llama"), "extension": {}, "elder_assumption": {}, "model_id": "m"}


def fill(writer, specs):
    for spec in specs:
        for part, size in spec.parts.items():
            writer.write(spec.name, part, bytes(size))


def written(directory, specs=(EMBED, NORM), **finish):
    """A finished install of zeros."""
    directory.mkdir()
    writer = InstallWriter(directory, specs)
    fill(writer, specs)
    writer.finish(**{**FINISH, **finish})
    return writer


def test_pieces_come_in_any_order_and_any_size(tmp_path):
    spec = TensorSpec("w.weight", (8, 128), AffineFormat(3, 32, "float16"))
    rng = np.random.default_rng(0)
    data = {part: rng.integers(0, 256, size, np.uint8) for part, size in spec.parts.items()}
    pieces = []
    for part, array in data.items():
        cuts = [0, *sorted(rng.choice(np.arange(1, array.size), 20, replace=False)), array.size]
        pieces += [(part, start, array[start:end]) for start, end in pairwise(cuts)]
    writer = InstallWriter(tmp_path, [spec])
    for number in rng.permutation(len(pieces)):
        part, start, piece = pieces[number]
        writer.write("w.weight", part, piece, offset=int(start))
    writer.finish(**FINISH)
    with Install.open(tmp_path) as install:
        entry = install.tensors["w.weight"]
        assert all(install.read(entry, part) == array.tobytes() for part, array in data.items())


def test_any_contiguous_buffer_is_written_as_it_lies_in_memory(tmp_path):
    writer = InstallWriter(tmp_path, [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "bfloat16")])
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.write("a", "data", array)
    writer.write("b", "data", np.uint16([1, 2]))
    writer.write("b", "data", b"", offset=4)
    writer.write("b", "data", memoryview(b"xyzw"), offset=4)
    writer.finish(**FINISH)
    with Install.open(tmp_path) as install:
        assert install.read(install.tensors["a"], "data") == array.tobytes()
        assert install.read(install.tensors["b"], "data") == b"\1\0\2\0xyzw"


@pytest.mark.parametrize("offset", [0, 1, 1277, 1279])
def test_one_unwritten_byte_is_named(offset, tmp_path):
    spec = TensorSpec("w", (10, 64), "bfloat16")
    writer = InstallWriter(tmp_path, [NORM, spec])
    writer.write(NORM.name, "data", bytes(128))
    writer.write("w", "data", bytes(offset))
    writer.write("w", "data", bytes(1280 - offset - 1), offset=offset + 1)
    with pytest.raises(InstallError, match=f"data of tensor 'w': byte {offset} of 1280 was never written"):
        writer.finish(**FINISH)
    assert not (tmp_path / "manifest.json").exists()


def test_a_part_that_was_not_written_at_all_is_named(tmp_path):
    writer = InstallWriter(tmp_path, [EMBED])
    writer.write(EMBED.name, "data", bytes(320))
    writer.write(EMBED.name, "biases", bytes(20))
    with pytest.raises(InstallError, match=r"scales of tensor '.*': byte 0 of 20"):
        writer.finish(**FINISH)


def test_writes_outside_a_part_and_over_written_bytes_are_refused(tmp_path):
    writer = InstallWriter(tmp_path, [EMBED])
    writer.write(EMBED.name, "scales", bytes(10), offset=5)
    for data, offset in ((bytes(21), 0), (bytes(1), 20), (bytes(1), -1)):
        with pytest.raises(InstallError, match="has 20 bytes"):
            writer.write(EMBED.name, "scales", data, offset=offset)
    for size, offset in ((6, 0), (1, 5), (1, 14), (20, 0), (3, 12)):
        with pytest.raises(InstallError, match="were written before"):
            writer.write(EMBED.name, "scales", bytes(size), offset=offset)
    with pytest.raises(InstallError, match="'other' was not declared"):
        writer.write("other", "data", b"")
    with pytest.raises(InstallError, match="has 0 bytes"):
        InstallWriter(_fresh(tmp_path / "b"), [NORM]).write(NORM.name, "scales", b"x")


def _fresh(path):
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("", (4,), "bfloat16", "a name of 0"),
        ("n" * 65536, (4,), "bfloat16", "65535"),
        ("w", (), "bfloat16", "one to four axes"),
        ("w", (1, 1, 1, 1, 1), "bfloat16", "one to four axes"),
        ("w", (4, 0), "bfloat16", "at least 1"),
        ("w", (1 << 32,), "bfloat16", "at least 1"),
        ("w", (4,), "int8", "dtype 'int8'"),
        ("w", (64,), INT4, "matrices"),
        ("w", (2, 96), INT4, "no multiple of the group size 64"),
        ("w", (2, 64), AffineFormat(7, 64, "bfloat16"), "7 bits"),
        ("w", (2, 64), AffineFormat(4, 16, "bfloat16"), "group size 16"),
        ("w", (2, 64), AffineFormat(4, 64, "fp16"), "companions of dtype 'fp16'"),
    ],
)
def test_what_the_format_cannot_hold(name, shape, dtype, message):
    with pytest.raises(InstallError, match=message):
        TensorSpec(name, shape, dtype)


def test_names_that_fall_together(tmp_path):
    with pytest.raises(InstallError, match="given twice"):
        InstallWriter(tmp_path, [NORM, TensorSpec(NORM.name.upper(), (4,), "bfloat16")])


def test_only_an_empty_directory_is_written_to(tmp_path):
    (tmp_path / "old").write_text("")
    with pytest.raises(InstallError, match="is not empty"):
        InstallWriter(tmp_path, [NORM])


def test_side_files_are_listed_and_hashed(tmp_path):
    writer = InstallWriter(tmp_path, [NORM])
    fill(writer, [NORM])
    writer.add_side_file("tokenizer.json", b'{"a": 1}')
    for name in (
        "tokenizer.json",
        "Tokenizer.json",
        "manifest.json",
        "model_weights.bin",
        "tokenizer",
        "a/b",
        "../c",
        "",
    ):
        with pytest.raises(InstallError):
            writer.add_side_file(name, b"x")
    writer.finish(**FINISH)
    assert sorted(handmade.snapshot(tmp_path)) == [
        "manifest.json",
        "model_weights.bin",
        "packed_experts/layout.json",
        "tokenizer.json",
    ]
    with Install.open(tmp_path, verify="full") as install:
        assert install.read_side_file("tokenizer.json") == b'{"a": 1}'
        assert "tokenizer.json" in install.manifest.files
        assert install.verify().unhashed == ()


def test_an_install_of_the_elder_dialect_says_nothing_else(tmp_path):
    written(tmp_path / "i.gturbo", extension={"rms_norm_eps": 1e-5}, elder_assumption={"rms_norm_eps": 1e-5})
    document = json.loads((tmp_path / "i.gturbo/manifest.json").read_text())
    assert document["flags"] == {}
    assert document["turbosparkMlx"] == {"version": 1, "arch": {"rms_norm_eps": 1e-5}, "tensors": {}}
    assert (tmp_path / "i.gturbo/packed_experts/layout.json").read_bytes() == handmade.EMPTY_LAYOUT
    written(tmp_path / "j.gturbo")
    assert "turbosparkMlx" not in json.loads((tmp_path / "j.gturbo/manifest.json").read_text())


@pytest.mark.parametrize(
    ("spec", "tag", "flagged"),
    [
        (TensorSpec("w.weight", (2, 128), INT4), 4, False),
        (TensorSpec("w.weight", (2, 128), INT8), 5, False),
        (TensorSpec("w.weight", (2, 128), AffineFormat(1, 128, "float16")), 15, False),
        (TensorSpec("w.weight", (2, 128), AffineFormat(2, 128, "float16")), 16, False),
        (TensorSpec("w.weight", (2, 128), AffineFormat(2, 64, "bfloat16")), 0, True),
        (TensorSpec("w.weight", (2, 128), AffineFormat(4, 32, "bfloat16")), 0, True),
        (TensorSpec("w.weight", (2, 128), AffineFormat(4, 64, "float16")), 0, True),
        (TensorSpec("w.weight", (2, 128), AffineFormat(8, 64, "float32")), 0, True),
        (TensorSpec("w.weight", (2, 128), AffineFormat(6, 64, "bfloat16")), 0, True),
        (TensorSpec("w.weight", (2, 128), "bfloat16"), 1, False),
        (TensorSpec("w.weight", (2, 128), "float16"), 2, True),
        (TensorSpec("vision.w.weight", (2, 128), "float16"), 2, False),
        (TensorSpec("w.weight", (2, 128), "float32"), 3, True),
    ],
)
def test_storage_and_the_flag(spec, tag, flagged, tmp_path):
    written(tmp_path / "i.gturbo", [spec])
    with Install.open(tmp_path / "i.gturbo") as install:
        entry = install.tensors[spec.name]
        assert entry.tag == tag
        assert (entry.format or entry.dtype) == spec.dtype
        assert install.manifest.flags == ({"turbosparkMlxExtension": True} if flagged else {})
        assert dict(install.manifest.tensor_formats) == ({spec.name: spec.dtype} if tag == 0 else {})


@pytest.mark.parametrize(
    ("extension", "assumed", "flagged"),
    [
        ({"eps": 1e-5, "scaling": None}, {"eps": 1e-5, "scaling": None}, False),
        ({"eps": 1e-6}, {"eps": 1e-5}, True),
        ({"scaling": {"rope_type": "linear"}}, {"scaling": None}, True),
        ({"new": None}, {}, True),
        ({}, {"eps": 1e-5}, False),
    ],
)
def test_what_elder_engines_would_assume_decides_the_flag(extension, assumed, flagged, tmp_path):
    written(tmp_path / "i.gturbo", extension=extension, elder_assumption=assumed)
    with Install.open(tmp_path / "i.gturbo") as install:
        assert install.manifest.flags.get("turbosparkMlxExtension", False) is flagged
        assert install.extension == extension


def test_an_architecture_that_no_reader_accepts_is_not_written(tmp_path):
    with pytest.raises(InstallError, match="vocabSize"):
        written(tmp_path / "i.gturbo", arch=handmade.arch(vocabSize=0))
    assert not (tmp_path / "i.gturbo/manifest.json").exists()
    with pytest.raises(InstallError, match="JSON compliant"):
        written(tmp_path / "j.gturbo", extension={"eps": float("nan")})


def test_the_manifest_is_the_last_thing_that_appears(tmp_path, monkeypatch):
    """Whatever the writer was doing when it died, there is no manifest, or everything else is on disk."""
    durable, manifest_at = set(), []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd):
        real_fsync(fd)
        durable.add(os.path.basename(handmade.path_of(fd)))

    def rename(source, target):
        manifest_at.append((set(durable), os.path.basename(target)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    written(tmp_path / "i.gturbo")
    ((before, name),) = manifest_at
    assert name == "manifest.json"
    assert before >= {"model_weights.bin", "layout.json", "packed_experts", "manifest.json.tmp", "i.gturbo"}


def test_the_receipt_of_the_writer_spares_the_first_open_its_hashing(tmp_path):
    writer = written(tmp_path / "i.partial")
    (tmp_path / "i.partial").rename(tmp_path / "i.gturbo")
    assert writer.write_receipt(tmp_path / "i.gturbo")
    Install.open(tmp_path / "i.gturbo", progress=lambda *_: pytest.fail("hashed")).close()


@pytest.mark.parametrize("name", ["manifest.json", "model_weights.bin"])
def test_no_receipt_for_files_that_the_writer_did_not_hash(name, tmp_path):
    writer = written(tmp_path / "i.gturbo")
    data = bytearray((tmp_path / "i.gturbo" / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / "i.gturbo" / name).write_bytes(data)
    assert not writer.write_receipt(tmp_path / "i.gturbo")


def test_progress_of_hashing(tmp_path):
    seen = []
    written(tmp_path / "i.gturbo", progress=lambda done, total: seen.append((done, total)))
    total = sum(len(data) for name, data in handmade.snapshot(tmp_path / "i.gturbo").items() if name != "manifest.json")
    assert seen[-1] == (total, total)


RAW_SLOT = {"weightBits": 16, "scheme": "raw", "scaleType": "none", "biasType": "none", "groupSize": 0}

QUANT = {
    "dense": (
        [
            EMBED,
            TensorSpec(ROOT + "layers.0.self_attn.q_proj.weight", (64, 64), INT8),
            TensorSpec(ROOT + "layers.0.mlp.gate_proj.weight", (64, 64), AffineFormat(3, 32, "float16")),
            TensorSpec(ROOT + "layers.0.input_layernorm.weight", (64,), "bfloat16"),
        ],
        {
            "embedding": handmade.slot(4),
            "attention": handmade.slot(8),
            "router": handmade.slot(8),
            "sharedExpert": handmade.slot(3, "fp16", 32),
            "routedExpert": handmade.slot(8),
        },
    ),
    "most weights win": (
        [
            TensorSpec(ROOT + "layers.0.self_attn.q_proj.weight", (8, 64), INT8),
            TensorSpec(ROOT + "layers.1.self_attn.q_proj.weight", (64, 64), INT4),
            TensorSpec(ROOT + "layers.0.mlp.gate.weight", (3, 64), INT8),
        ],
        {
            "embedding": handmade.slot(4),
            "attention": handmade.slot(4),
            "router": handmade.slot(8),
            "sharedExpert": handmade.slot(4),
            "routedExpert": handmade.slot(4),
        },
    ),
    "not quantized": (
        [TensorSpec(ROOT + "layers.0.self_attn.q_proj.weight", (8, 64), "bfloat16")],
        dict.fromkeys(("embedding", "attention", "router", "sharedExpert", "routedExpert"), RAW_SLOT),
    ),
}


@pytest.mark.parametrize("case", QUANT)
def test_the_quant_block_sums_up_what_was_written(case, tmp_path):
    specs, expected = QUANT[case]
    written(tmp_path / "i.gturbo", specs)
    with Install.open(tmp_path / "i.gturbo") as install:
        assert install.manifest.quant == expected


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("embed_tokens.weight", "embedding"),
        ("layers.0.self_attn.q_proj.weight", "attention"),
        ("layers.0.linear_attn.in_proj_qkv.weight", "attention"),
        ("layers.0.router.proj.weight", "router"),
        ("layers.0.mlp.gate.weight", "router"),
        ("layers.0.mlp.shared_expert_gate.weight", "router"),
        ("layers.0.mlp.gate_proj.weight", "shared_expert"),
        ("layers.0.mlp.shared_expert.down_proj.weight", "shared_expert"),
        ("layers.0.ple.key_proj.weight", "other"),
    ],
)
def test_roles_by_name(name, role):
    assert role_of(ROOT + name, (4, 64)) == role
    assert role_of(ROOT + name, (64,)) == "vector"


def test_roles_outside_the_layers():
    assert role_of("language_model.lm_head.weight", (4, 64)) == "head"
    assert role_of("vision.pos_embed.weight", (4, 64)) == "vision"
    assert role_of("mtp.layers.0.self_attn.q_proj.weight", (4, 64)) == "drafter"
    assert role_of(ROOT + "layers.0.layer_scalar", (1,)) == "vector"
