"""``model_weights.bin``, byte for byte."""

import struct

import numpy as np
import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install, InstallWriter, TensorSpec
from turbospark_mlx.protocols import AffineFormat

from . import handmade
from .handmade import ROOT, Bytes, Handmade

INT4 = AffineFormat(4, 64, "bfloat16")
INT8 = AffineFormat(8, 64, "bfloat16")
FINISH = {"arch": handmade.arch(family="llama"), "extension": {}, "elder_assumption": {}, "model_id": "m"}


def one_tensor(tmp_path, entry, **options):
    """An install with one tensor, opened without hashing."""
    files = {
        "model_weights.bin": handmade.index([entry], **options),
        "packed_experts/layout.json": handmade.EMPTY_LAYOUT,
    }
    made = Handmade(handmade.manifest(handmade.arch(family="llama")), files).seal()
    return Install.open(made.write(tmp_path / "i.gturbo"), verify="off", allow_unrunnable=True)


def test_the_worked_example_of_one_int4_tensor(tmp_path):
    words, scales, biases = bytes(range(64)), b"\x00\x3f\x80\x3f", b"\x80\xbf\x00\x00"
    directory = tmp_path / "i.gturbo"
    directory.mkdir()
    writer = InstallWriter(directory, [TensorSpec(ROOT + "embed_tokens.weight", (2, 64), INT4)])
    writer.write(ROOT + "embed_tokens.weight", "data", words)
    writer.write(ROOT + "embed_tokens.weight", "scales", scales)
    writer.write(ROOT + "embed_tokens.weight", "biases", biases)
    writer.finish(**FINISH)
    # 64 + 4 bytes of words and scales; the biases begin at the next multiple of 16.
    expected = bytes.fromhex(
        "0040000000000000 5400000000000000 0100000000000000 60000000 2800 04 00"
        "0040000000000000 4000000000000000 02000000 40000000 00000000 00000000"
        "4040000000000000 0400000000000000 5040000000000000 0400000000000000"
    )
    expected += (ROOT + "embed_tokens.weight").encode()
    expected = expected.ljust(16384, b"\0") + words + scales.ljust(16, b"\0") + biases
    assert (directory / "model_weights.bin").read_bytes() == expected
    with Install.open(directory) as install:
        entry = install.tensors[ROOT + "embed_tokens.weight"]
        assert (entry.tag, entry.shape, entry.dtype, entry.format) == (4, (2, 64), "affine", INT4)
        assert [install.read(entry, part) for part in ("data", "scales", "biases")] == [words, scales, biases]


def test_an_elder_entry_of_the_same_tensor_reads_the_same(tmp_path):
    entry = ("embed", 4, (2, 64), bytes(64), b"\x00\x3f\x80\x3f", b"\x80\xbf\x00\x00")
    with one_tensor(tmp_path, entry) as install:
        found = install.tensors["embed"]
        assert (found.offset, found.scales_offset, found.biases_offset) == (16384, 16448, 16452)
        assert install.read(found, "biases") == b"\x80\xbf\x00\x00"


def test_every_kind_of_tensor_reads_back(made, tmp_path):
    with Install.open(made.write(tmp_path / "i.gturbo")) as install:
        data = made.files["model_weights.bin"]
        count = struct.unpack_from("<Q", data, 16)[0]
        assert len(install.tensors) == count
        for number, entry in enumerate(install.tensors.values()):
            fields = struct.unpack_from("<IHBBQQ4IQQQQ", data, 24 + 72 * number)
            assert data[fields[0] : fields[0] + fields[1]].decode() == entry.name
            assert entry.tag == fields[2]
            assert list(entry.shape) == [axis for axis in fields[6:10] if axis]
            for part, (offset, size) in zip(
                ("data", "scales", "biases"), (fields[4:6], fields[10:12], fields[12:14]), strict=True
            ):
                assert entry.part(part) == (offset, size)
                assert install.read(entry, part) == data[offset : offset + size]


def test_tag_0_is_4_or_8_bits_by_size(tmp_path):
    with Install.open(handmade.swift_moe().write(tmp_path / "i.gturbo")) as install:
        assert install.tensors[ROOT + "embed_tokens.weight"].format == INT4
        assert install.tensors[ROOT + "layers.0.router.proj.weight"].format == INT8
        assert install.dialect == "swift"


def test_the_rust_tags(tmp_path):
    with Install.open(handmade.rust_dense().write(tmp_path / "i.gturbo")) as install:
        stored = {entry.tag: entry.format or entry.dtype for entry in install.tensors.values()}
        assert stored == {
            1: "bfloat16",
            2: "float16",
            3: "float32",
            4: INT4,
            5: INT8,
            15: AffineFormat(1, 128, "float16"),
            16: AffineFormat(2, 128, "float16"),
        }
        assert install.dialect == "rust"


# Bits, the packed row, scale and bias and the weights they stand for, worked out by hand.
PACKED = {
    4: ("1032547698badcfe", 0.5, -1.0, [-1 + 0.5 * q for q in range(16)]),
    8: ("000102ff", 0.25, -2.0, [-2.0, -1.75, -1.5, 61.75]),
    2: ("93", 0.5, -0.5, [1.0, -0.5, 0.0, 0.5]),
    1: ("8d", 2.0, -1.0, [1, -1, 1, 1, -1, -1, -1, 1]),
    # Eight values 0..7 in 24 bits, least significant first, across the border of bytes.
    3: ("88c6fa", 1.0, 0.0, [0, 1, 2, 3, 4, 5, 6, 7]),
    # 16 values of 6 bits: 0, 4, 8, ..., 60; four of them fill three bytes.
    6: ("0081301085712089b2308df3", 1.0, 0.0, [4 * i for i in range(16)]),
    # Eight values of 5 bits, 0, 4, ..., 28, in five bytes.
    5: ("80200629e6", 1.0, 0.0, [4 * i for i in range(8)]),
}


@pytest.mark.parametrize("bits", PACKED)
def test_packed_bytes_mean_what_mlx_makes_of_them(bits, tmp_path):
    import mlx.core as mx

    row, scale, bias, weights = PACKED[bits]
    columns = 128
    row = (bytes.fromhex(row) * columns)[: columns * bits // 8]
    directory = tmp_path / "i.gturbo"
    directory.mkdir()
    affine = AffineFormat(bits, 128, "float32")
    writer = InstallWriter(directory, [TensorSpec("w.weight", (1, columns), affine)])
    writer.write("w.weight", "data", row)
    writer.write("w.weight", "scales", np.float32([scale]))
    writer.write("w.weight", "biases", np.float32([bias]))
    writer.finish(**FINISH)
    with Install.open(directory) as install:
        entry = install.tensors["w.weight"]
        assert entry.format == affine
        words = np.frombuffer(install.read(entry, "data"), np.uint32).reshape(1, -1)
        scales, biases = (
            np.frombuffer(install.read(entry, part), np.float32).reshape(1, 1) for part in ("scales", "biases")
        )
    got = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=128, bits=bits)
    assert np.array(got)[0].tolist() == (weights * columns)[:columns]


def test_raw_companion_bits_survive_mlx_quantization(tmp_path):
    """Every format that MLX packs, written by us and taken back, gives MLX's own dequantized values bit for bit."""
    import mlx.core as mx

    rng = np.random.default_rng(5)
    weights = mx.array(rng.normal(size=(6, 256)).astype(np.float32)).astype(mx.bfloat16)
    specs, parts = [], {}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            name = f"b{bits}g{group}.weight"
            specs.append(TensorSpec(name, (6, 256), AffineFormat(bits, group, "bfloat16")))
            parts[name] = mx.quantize(weights, group_size=group, bits=bits)
    directory = tmp_path / "i.gturbo"
    directory.mkdir()
    writer = InstallWriter(directory, specs)
    for name, (words, scales, biases) in parts.items():
        writer.write(name, "data", np.array(words))
        writer.write(name, "scales", np.array(scales.view(mx.uint16)))
        writer.write(name, "biases", np.array(biases.view(mx.uint16)))
    writer.finish(**FINISH)
    with Install.open(directory) as install:
        for name, original in parts.items():
            entry = install.tensors[name]
            raw = [install.read(entry, part) for part in ("data", "scales", "biases")]
            words = mx.array(np.frombuffer(raw[0], np.uint32).reshape(original[0].shape))
            companions = [
                mx.array(np.frombuffer(data, np.uint16).reshape(original[1].shape)).view(mx.bfloat16)
                for data in raw[1:]
            ]
            how = {"group_size": entry.format.group_size, "bits": entry.format.bits}
            same = mx.array_equal(mx.dequantize(words, *companions, **how), mx.dequantize(*original, **how))
            assert same.item(), name


BLOCKS = {
    6: ("Q8_0", 32, 34),
    7: ("Q4_K", 256, 144),
    8: ("Q6_K", 256, 210),
    9: ("Q4_0", 32, 18),
    10: ("IQ3_XXS", 256, 98),
}
BLOCKS |= {11: ("IQ4_NL", 32, 18), 12: ("IQ4_XS", 256, 136), 13: ("Q5_K", 256, 176), 14: ("MXFP4", 32, 17)}
BLOCKS |= {17: ("Q2_K", 256, 84), 18: ("IQ2_XXS", 256, 66), 19: ("IQ2_XS", 256, 74), 20: ("IQ1_S", 256, 50)}
BLOCKS |= {21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ1_M", 256, 56), 24: ("Q3_K", 256, 110)}


@pytest.mark.parametrize("tag", BLOCKS)
def test_ggml_blocks_are_known_by_name_and_size_and_refused(tag, tmp_path):
    import gguf

    name, elements, size = BLOCKS[tag]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (elements, size)
    entry = ("w.weight", tag, (3, 512), bytes(3 * 512 // elements * size), b"", b"")
    with one_tensor(tmp_path, entry) as install:
        assert install.tensors["w.weight"].dtype == name
        assert name in install.obstacles[0]
        path = install.path
    with pytest.raises(
        InstallError, match=f"{name} blocks.*convert (it from its source again|this install to a new one)"
    ):
        Install.open(path, verify="off")


def test_a_ggml_tensor_of_another_size_is_refused(tmp_path):
    with pytest.raises(InstallError, match=r"model_weights.bin: tensor 'w.weight' .*data has 1632 bytes.*needs 1666"):
        one_tensor(tmp_path, ("w.weight", 6, (7, 224), bytes(1632), b"", b""))


def test_axes_beyond_the_fourth_show_in_the_size(tmp_path):
    with one_tensor(
        tmp_path, ("vision.patch_embed.proj.weight", 2, (3, 2, 5, 4), bytes(3 * 2 * 5 * 4 * 7 * 2), b"", b"")
    ) as i:
        assert i.tensors["vision.patch_embed.proj.weight"].shape == (3, 2, 5, 4, 7)


def test_elder_padding_of_4096_is_accepted(tmp_path):
    with one_tensor(tmp_path, ("w", 1, (4,), bytes(8), b"", b""), page=4096) as install:
        assert install.tensors["w"].offset == 4096


def test_an_empty_elder_index_of_24_bytes_is_accepted(tmp_path):
    files = {"model_weights.bin": struct.pack("<QQQ", 24, 0, 0), "packed_experts/layout.json": handmade.EMPTY_LAYOUT}
    made = Handmade(handmade.manifest(handmade.arch(family="llama")), files).seal()
    with Install.open(made.write(tmp_path / "i.gturbo")) as install:
        assert install.tensors == {}


def words(bits=4, rows=2, columns=64, group=64):
    return Bytes(3).affine(rows, columns, bits, group)


A, B = ("a", 1, (4,), bytes(8), b"", b""), ("b", 4, (2, 64), *words())


def patched(position, form, value):
    """The index of tensors a and b with one field of it replaced."""
    data = bytearray(handmade.index([A, B]))
    struct.pack_into(form, data, position, value)
    return bytes(data)


ENTRY_B = 24 + 72
FAULTS = {
    "no header": (b"\0" * 23, "has 23 bytes, but byte 24"),
    "index beyond the cap": (patched(0, "<Q", 1 << 25), "indexSize is 33554432"),
    "index not padded": (patched(0, "<Q", 16000), "indexSize is 16000"),
    "index beyond the file": (patched(0, "<Q", 32768), "residentSize"),
    "resident size": (patched(8, "<Q", 79), "residentSize 79"),
    "resident size that wraps": (patched(8, "<Q", (1 << 64) - 16384 + 80), "residentSize"),
    "entry count": (patched(16, "<Q", 1 << 60), "entryCount is 1152921504606846976"),
    "entry count past the index": (patched(16, "<Q", 228), "entryCount is 228"),
    "name before the table's end": (patched(24, "<I", 24), "entry 0: the name at 24"),
    "name past the index": (patched(24, "<I", 16384), "entry 0: the name at 16384"),
    "empty name": (patched(28, "<H", 0), "entry 0: the name"),
    "name twice": (patched(ENTRY_B, "<I", 24 + 144), "entry 1: the tensor name 'a' occurs twice"),
    "name of another case": (handmade.index([A, ("A", *B[1:])]), "entry 1: the tensor name 'A' occurs twice"),
    "name of another normal form": (
        handmade.index([("caf\u00e9", *A[1:]), ("cafe\u0301", *B[1:])]),
        "occurs twice",
    ),
    "name not UTF-8": (patched(24 + 144, "B", 0xFF), "entry 0: the name is not UTF-8"),
    "unknown tag": (patched(30, "B", 26), "dtype tag 26"),
    "reserved byte": (patched(31, "B", 1), "tensor 'a': the reserved byte"),
    "data before the payload": (patched(32, "<Q", 16383), "tensor 'a': data at 16383"),
    "data past the file": (patched(32, "<Q", 1 << 63), "tensor 'a': data at"),
    "data size 0": (patched(40, "<Q", 0), "tensor 'a': data size is 0"),
    "data size huge": (patched(40, "<Q", (1 << 64) - 1), "tensor 'a': data at"),
    "shape of nothing": (patched(48, "<I", 0), "tensor 'a': shape"),
    "shape with a hole": (patched(56, "<I", 3), "tensor 'a': shape"),
    "shape and size": (patched(48, "<I", 5), r"tensor 'a' .*data has 8 bytes; shape \[5\] needs 10"),
    "scales of an absent companion": (patched(64, "<Q", 16384), "tensor 'a': scales size is 0"),
    "companions of a raw tensor": (handmade.index([("a", 1, (4,), bytes(8), b"", bytes(8))]), "biases has 8 bytes"),
    "overlap of two tensors": (patched(ENTRY_B + 8, "<Q", 16386), "overlaps"),
    "overlap of words and scales": (patched(ENTRY_B + 40, "<Q", 16448), "overlaps"),
    "packed vector": (handmade.index([("v", 4, (64,), bytes(32), bytes(2), bytes(2))]), "packed tensors are matrices"),
    "packed tensor of rank 3": (
        handmade.index([("v", 4, (2, 2, 64), bytes(128), bytes(8), bytes(8))]),
        "packed tensors are matrices",
    ),
    "columns and group": (handmade.index([("v", 4, (2, 96), *words(columns=96))]), "no multiple of the group size 64"),
    "companion size": (handmade.index([("v", 4, (2, 64), words()[0], bytes(4), bytes(6))]), "biases has 6 bytes"),
    "tag 0 of 2 bits": (handmade.index([("v", 0, (2, 64), *words(bits=2))]), "neither 4 nor 8 bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_of_the_index(fault, tmp_path):
    data, message = FAULTS[fault]
    files = {"model_weights.bin": data, "packed_experts/layout.json": handmade.EMPTY_LAYOUT}
    made = Handmade(handmade.manifest(handmade.arch(family="llama")), files).seal()
    with pytest.raises(InstallError, match=r"model_weights\.bin: .*" + message):
        Install.open(made.write(tmp_path / "i.gturbo"), verify="off")


def test_the_index_without_a_fault_opens(tmp_path):
    files = {"model_weights.bin": handmade.index([A, B]), "packed_experts/layout.json": handmade.EMPTY_LAYOUT}
    made = Handmade(handmade.manifest(handmade.arch(family="llama")), files).seal()
    Install.open(made.write(tmp_path / "i.gturbo"), verify="off").close()
