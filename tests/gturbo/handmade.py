"""Tiny installs packed by hand: nothing here comes from the package under test.

``Handmade`` holds the files of one install as bytes and the manifest as a dictionary; ``seal`` makes the manifest's
sizes and hashes agree with the files, ``write`` puts everything into a directory.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = "language_model.model."


@dataclass
class Handmade:
    """An install: ``manifest`` without its ``files``, and every other file by its path."""

    manifest: dict
    files: dict[str, bytes]
    unlisted: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> Handmade:
        return Handmade(json.loads(dump(self.manifest)), dict(self.files), dict(self.unlisted))

    def seal(self) -> Handmade:
        """State the size and hash of every file in the manifest."""
        self.manifest["files"] = {
            name: {"size": len(data), "sha256": _digest(data)} for name, data in self.files.items()
        }
        return self

    def write(self, directory: Path) -> Path:
        """Write the install into a new directory; the manifest as it stands."""
        for name, data in {**self.files, **self.unlisted, "manifest.json": dump(self.manifest)}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return directory


@functools.lru_cache(64)
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def dump(document: object) -> bytes:
    return json.dumps(document).encode()


def index(entries: list[tuple], *, align: int = 1, page: int = 16384) -> bytes:
    """``model_weights.bin`` of entries (name, tag, shape, data, scales, biases)."""
    names = b"".join(entry[0].encode() for entry in entries)
    table_end = 24 + 72 * len(entries)
    index_size = -(-(table_end + len(names)) // page) * page
    table, payload, name_at = b"", b"", table_end
    for name, tag, shape, *parts in entries:
        payload += b"\0" * (-len(payload) % align)
        places = []
        for part in parts:
            places += [index_size + len(payload) if part else 0, len(part)]
            payload += part
        length = len(name.encode())
        table += struct.pack("<IHBB", name_at, length, tag, 0) + struct.pack("<QQ", *places[:2])
        table += struct.pack("<4I", *(list(shape) + [0] * 4)[:4]) + struct.pack("<QQQQ", *places[2:])
        name_at += length
    header = struct.pack("<QQQ", index_size, len(payload), len(entries))
    return (header + table + names).ljust(index_size, b"\0") + payload


class Bytes:
    """A source of reproducible noise."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, count: int) -> bytes:
        return self._random.integers(0, 256, count, dtype=np.uint8).tobytes()

    def affine(self, rows: int, columns: int, bits: int, group: int = 64) -> tuple[bytes, bytes, bytes]:
        """Words and two-byte companions."""
        companion = rows * (columns // group) * 2
        return self(rows * columns * bits // 8), self(companion), self(companion)


def arch(**changes) -> dict:
    """The 21 fields that every manifest has."""
    fields = {
        "hiddenSize": 64,
        "ffnIntermediate": 128,
        "moeIntermediateSize": 0,
        "numHeads": 2,
        "numKVHeads": 1,
        "numFullKVHeads": 1,
        "headDim": 32,
        "fullHeadDim": 32,
        "vocabSize": 10,
        "slidingWindow": 0,
        "numLayers": 2,
        "numExperts": 0,
        "topKExperts": 0,
        "finalLogitSoftcap": 0.0,
        "ropeTheta": 10000.0,
        "fullRopeTheta": 10000.0,
        "partialRotaryFactor": 1.0,
        "tieWordEmbeddings": True,
        "attentionKEqV": False,
        "hiddenActivation": "silu",
        "fullAttentionLayerMask": [1, 1],
    }
    return {**fields, **changes}


def slot(bits: int, companion: str = "bf16", group: int = 64) -> dict:
    return {
        "weightBits": bits,
        "scheme": "affine",
        "scaleType": companion,
        "biasType": companion,
        "groupSize": group,
    }


def manifest(arch_fields: dict, **changes) -> dict:
    document = {
        "magic": "GTURBO",
        "versionMajor": 1,
        "versionMinor": 0,
        "flags": {},
        "modelID": "tiny/model",
        "arch": arch_fields,
        "quant": {
            "embedding": slot(4),
            "attention": slot(4),
            "router": slot(8),
            "sharedExpert": slot(4),
            "routedExpert": slot(4),
        },
        "files": {},
        "numLayers": 0,
        "expertsPerLayer": 0,
        "expertStride": 0,
        "sourceSnapshotHash": None,
    }
    return {**document, **changes}


EMPTY_LAYOUT = b'{"expertStride":0,"numLayers":0,"expertsPerLayer":0,"layers":[]}'


def rust_dense(seed: int = 0) -> Handmade:
    """A dense install as the Rust engine writes it, with every affine tag of its own, the tokenizer unlisted."""
    noise = Bytes(seed)
    entries = [
        (ROOT + "embed_tokens.weight", 4, (10, 64), *noise.affine(10, 64, 4)),
        (ROOT + "norm.weight", 1, (64,), noise(128), b"", b""),
        (ROOT + "layers.0.mlp.gate.weight", 5, (3, 64), *noise.affine(3, 64, 8)),
        (ROOT + "layers.0.self_attn.q_proj.weight", 15, (8, 128), *noise.affine(8, 128, 1, 128)),
        (ROOT + "layers.0.self_attn.k_proj.weight", 16, (3, 128), *noise.affine(3, 128, 2, 128)),
        ("vision.pos_embed.weight", 2, (5, 7), noise(70), b"", b""),
        (ROOT + "layers.1.mlp.e_score_correction_bias", 3, (3,), noise(12), b"", b""),
    ]
    files = {"model_weights.bin": index(entries, align=4), "packed_experts/layout.json": EMPTY_LAYOUT}
    unlisted = {"tokenizer.json": b'{"model": {}}', "chat_template.jinja": b"{{ messages }}"}
    document = manifest(arch(family="llama", trainedContext=2048, routerScoringFunc=None))
    return Handmade(document, files, unlisted).seal()


def experts(noise: Bytes, hidden: int, inner: int, layers: list[int], *, swift: bool) -> tuple[dict, dict[str, bytes]]:
    """A layout and layer files of 3 affine 4-bit experts each; ``layers`` are the strides."""
    files, items = {}, []
    for number, stride in enumerate(layers):
        blobs, described = b"", []
        for expert in range(3):
            blob, tensors = b"", {}
            for role, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                for kind, part in zip(("", "_scales", "_biases"), noise.affine(rows, columns, 4), strict=True):
                    dtype = "bf16" if kind else "u32"
                    tensors[role + kind] = {
                        "offset": len(blob),
                        "size": len(part),
                        "dtype": dtype.upper() if swift else dtype,
                        "shape": [rows, columns // 64 if kind else columns],
                    }
                    if swift and not kind:
                        tensors[role]["bits"] = 4
                    blob += part
            item = {"offset": expert * stride, "size": stride, "tensors": tensors}
            described.append({"expert": expert, **item} if swift else item)
            blobs += blob.ljust(stride, b"\0")
        file = f"layer_{number:02d}.bin"
        files[f"packed_experts/{file}"] = blobs
        items.append({"layer": number, "file": file, "experts": described})
        if not swift:
            items[-1]["expertStride"] = stride
    layout = {"expertStride": max(layers), "numLayers": len(layers), "expertsPerLayer": 3, "layers": items}
    return layout, files


MOE_ARCH = {"hiddenSize": 64, "moeIntermediateSize": 64, "numExperts": 3, "topKExperts": 2}


def swift_moe(seed: int = 1) -> Handmade:
    """A mixture of experts as the Swift engine writes it: tag 0, no padding, upper-case dtypes, listed tokenizer."""
    noise = Bytes(seed)
    entries = [
        (ROOT + "embed_tokens.weight", 0, (10, 64), *noise.affine(10, 64, 4)),
        (ROOT + "layers.0.router.proj.weight", 0, (3, 64), *noise.affine(3, 64, 8)),
        (ROOT + "layers.0.layer_scalar", 1, (1,), noise(2), b"", b""),
        (ROOT + "layers.0.self_attn.q_proj.weight", 0, (64, 64), *noise.affine(64, 64, 4)),
        (ROOT + "norm.weight", 1, (64,), noise(128), b"", b""),
    ]
    layout, layer_files = experts(noise, 64, 64, [16384, 16384], swift=True)
    files = {
        "model_weights.bin": index(entries),
        "packed_experts/layout.json": dump(layout),
        **layer_files,
        "tokenizer/tokenizer.json": b'{"model": {"type": "BPE"}}',
        "tokenizer/tokenizer_config.json": b"{}",
    }
    document = manifest(
        arch(**MOE_ARCH, slidingWindow=8, fullAttentionLayerMask=[0, 1], finalLogitSoftcap=30),
        flags={"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False},
        sourceSnapshotHash="sha256:" + "0" * 64,
        bitWidthOverridesHonored=1,
        numLayers=2,
        expertsPerLayer=3,
        expertStride=16384,
    )
    return Handmade(document, files).seal()


def rust_moe(seed: int = 2) -> Handmade:
    """A mixture of experts as the Rust engine writes it: a dense lead layer, positional experts, strides by layer."""
    noise = Bytes(seed)
    entries = [
        (ROOT + "embed_tokens.weight", 4, (10, 64), *noise.affine(10, 64, 4)),
        (ROOT + "norm.weight", 1, (64,), noise(128), b"", b""),
    ]
    layout, layer_files = experts(noise, 64, 64, [8192, 20480], swift=False)
    files = {"model_weights.bin": index(entries, align=4), "packed_experts/layout.json": dump(layout), **layer_files}
    document = manifest(
        arch(**MOE_ARCH, family="deepseek2", numLayers=3, numDenseLeadingLayers=1, fullAttentionLayerMask=[5, 5, 5]),
        numLayers=2,
        expertsPerLayer=3,
        expertStride=20480,
    )
    return Handmade(document, files).seal()


ALL = {"rust-dense": rust_dense, "swift-moe": swift_moe, "rust-moe": rust_moe}


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by path."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found


def path_of(fd: int) -> str:
    """Where an open file lies."""
    if sys.platform == "linux":
        return os.readlink(f"/proc/self/fd/{fd}")
    return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
