"""How tensors are stored: dtype tags, packed sizes, and what a writer is told about each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from turbospark_mlx.errors import InstallError
from turbospark_mlx.protocols import AffineFormat, Mxfp4Format, PackedFormat, Role

PAGE = 16384
"""Alignment of the resident payload and of expert blobs, whatever the page size of the machine."""
SUB_ALIGNMENT = 16
"""Alignment of every sub-tensor that this package writes. Elder installs promise none."""

RAW_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)

TAG_WORDS = 0
"""Affine-packed uint32 words whose bits and group the tag does not say."""
RAW_TAGS = {1: "bfloat16", 2: "float16", 3: "float32"}
AFFINE_TAGS = {
    4: AffineFormat(4, 64, "bfloat16"),
    5: AffineFormat(8, 64, "bfloat16"),
    15: AffineFormat(1, 128, "float16"),
    16: AffineFormat(2, 128, "float16"),
}
_TAG_OF_RAW = {dtype: tag for tag, dtype in RAW_TAGS.items()}
_TAG_OF_AFFINE = {affine: tag for tag, affine in AFFINE_TAGS.items()}


@dataclass(frozen=True)
class BlockType:
    """A ggml block type: ``bytes`` for every ``elements`` of a row. Both are 0 where the layout is not known."""

    name: str
    elements: int
    bytes: int


BLOCK_TAGS = {
    6: BlockType("Q8_0", 32, 34),
    7: BlockType("Q4_K", 256, 144),
    8: BlockType("Q6_K", 256, 210),
    9: BlockType("Q4_0", 32, 18),
    10: BlockType("IQ3_XXS", 256, 98),
    11: BlockType("IQ4_NL", 32, 18),
    12: BlockType("IQ4_XS", 256, 136),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("MXFP4", 32, 17),
    17: BlockType("Q2_K", 256, 84),
    18: BlockType("IQ2_XXS", 256, 66),
    19: BlockType("IQ2_XS", 256, 74),
    20: BlockType("IQ1_S", 256, 50),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ1_M", 256, 56),
    24: BlockType("Q3_K", 256, 110),
    25: BlockType("Q2_0", 0, 0),
}
BLOCK_TYPES = {block.name: block for block in BLOCK_TAGS.values()}

RUNNABLE_BLOCK_TYPES: frozenset[str] = frozenset()
"""The ggml block types that an engine of this package computes with."""
CONVERTIBLE_BLOCK_TYPES = frozenset(("Q8_0", "Q4_0", "MXFP4"))
"""Those that `turbospark_mlx.convert` makes packed words of, bit for bit."""


def check_affine(affine: AffineFormat) -> None:
    """Raise ValueError for a combination that is not an affine format of MLX."""
    if affine.bits not in AFFINE_BITS:
        raise ValueError(f"{affine.bits} bits; possible are {', '.join(map(str, AFFINE_BITS))}")
    if affine.group_size not in AFFINE_GROUPS:
        raise ValueError(f"group size {affine.group_size}; possible are {', '.join(map(str, AFFINE_GROUPS))}")
    if affine.companion_dtype not in RAW_BYTES:
        raise ValueError(f"companions of dtype {affine.companion_dtype!r}; possible are {', '.join(RAW_BYTES)}")


def spell(dtype: str, affine: PackedFormat | None) -> str:
    """A storage format in words."""
    if affine is None:
        return dtype
    if isinstance(affine, Mxfp4Format):
        return "MXFP4, words and exponents apart"
    return f"{affine.bits} bits, groups of {affine.group_size}, {affine.companion_dtype} scales"


def affine_sizes(shape: tuple[int, ...], affine: AffineFormat) -> tuple[int, int]:
    """Bytes of the packed words and of each companion for a matrix ``[rows, columns]``. Raises ValueError."""
    if len(shape) != 2:
        raise ValueError(f"shape {list(shape)}; packed tensors are matrices [rows, columns]")
    rows, columns = shape
    if columns % affine.group_size:
        raise ValueError(f"{columns} columns, which is no multiple of the group size {affine.group_size}")
    return (
        rows * columns * affine.bits // 8,
        rows * (columns // affine.group_size) * RAW_BYTES[affine.companion_dtype],
    )


def mxfp4_sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of the packed words and of the exponents for a matrix ``[rows, columns]``. Raises ValueError."""
    if len(shape) != 2 or shape[1] % Mxfp4Format.group_size:
        raise ValueError(f"shape {list(shape)}; MXFP4 has matrices of rows in blocks of {Mxfp4Format.group_size}")
    return prod(shape) * Mxfp4Format.bits // 8, prod(shape) // Mxfp4Format.group_size


def block_size(shape: tuple[int, ...], block: BlockType) -> int:
    """Bytes of a tensor in ggml blocks; the last axis is cut into blocks. Raises ValueError."""
    if shape[-1] % block.elements:
        raise ValueError(f"rows of {shape[-1]}, which is no multiple of {block.name}'s {block.elements}")
    return prod(shape) // block.elements * block.bytes


def raw_size(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an unpacked tensor."""
    return prod(shape) * RAW_BYTES[dtype]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written. ``shape`` is logical (unpacked); ``dtype`` is ``"bfloat16"``, ``"float16"``,
    ``"float32"`` or the packed format of a matrix. Raises InstallError for what the format cannot hold."""

    name: str
    shape: tuple[int, ...]
    dtype: str | PackedFormat

    def __post_init__(self) -> None:
        try:
            if not 1 <= len(self.shape) <= 4 or not all(0 < size < 1 << 32 for size in self.shape):
                raise ValueError(f"shape {list(self.shape)}; one to four axes of at least 1 can be stored")
            if not 0 < len(self.name.encode()) < 1 << 16:
                raise ValueError("a name of 0 or more than 65535 bytes")
            if isinstance(self.dtype, AffineFormat):
                check_affine(self.dtype)
                affine_sizes(self.shape, self.dtype)
            elif isinstance(self.dtype, Mxfp4Format):
                mxfp4_sizes(self.shape)
            elif self.dtype not in RAW_BYTES:
                raise ValueError(f"dtype {self.dtype!r}; possible are {', '.join(RAW_BYTES)} and affine formats")
        except ValueError as error:
            raise InstallError(f"Tensor {self.name!r} cannot be written: it has {error}.") from error

    @property
    def tag(self) -> int:
        """The dtype tag of the resident index. Raises InstallError for what only routed experts can be stored in."""
        if isinstance(self.dtype, Mxfp4Format):
            raise InstallError(f"Tensor {self.name!r} cannot be written: only routed experts can be MXFP4.")
        if isinstance(self.dtype, AffineFormat):
            return _TAG_OF_AFFINE.get(self.dtype, TAG_WORDS)
        return _TAG_OF_RAW[self.dtype]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part: ``data``, and the companions of packed matrices, in file order."""
        if isinstance(self.dtype, Mxfp4Format):
            return dict(zip(("data", "scales"), mxfp4_sizes(self.shape), strict=True))
        if isinstance(self.dtype, AffineFormat):
            data, companion = affine_sizes(self.shape, self.dtype)
            return {"data": data, "scales": companion, "biases": companion}
        return {"data": raw_size(self.shape, self.dtype)}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def role_of(name: str, shape: tuple[int, ...]) -> Role | str:
    """What a resident tensor is for, by its name: a role of ``protocols.Role``, or ``"vision"``, ``"drafter"``,
    ``"other"``."""
    if name.startswith("vision."):
        return "vision"
    if name.startswith(("mtp.", "dflash.")):
        return "drafter"
    if len(shape) != 2 or not name.endswith(".weight"):
        return "vector"
    modules = name.split(".")[:-1]
    if modules[-1] == "embed_tokens":
        return "embedding"
    if modules[-1] == "lm_head":
        return "head"
    if modules[-1] == "shared_expert_gate" or "router" in modules or modules[-2:] == ["mlp", "gate"]:
        return "router"
    if "self_attn" in modules or "linear_attn" in modules:
        return "attention"
    return "shared_expert" if "mlp" in modules else "other"
