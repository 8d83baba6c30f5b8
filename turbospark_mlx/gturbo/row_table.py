"""``ngram_table/``: a matrix of which a token needs a few rows, each whole in one place of ``rows.bin``.

Row ``r`` is the record at ``r * recordBytes``: the packed words, then scales, then biases; or the plain values, with
``bits`` 16 or 32 and no groups. ``header.json`` says how, as the Rust engine writes it, and which hash leads to a row.
That engine's manifests do not list the two files; those of this package do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark_mlx.gturbo import formats
from turbospark_mlx.gturbo.files import OpenFile
from turbospark_mlx.gturbo.formats import TensorSpec
from turbospark_mlx.gturbo.strict_json import Record, parse
from turbospark_mlx.protocols import AffineFormat

DIRECTORY = "ngram_table"
HEADER, ROWS = f"{DIRECTORY}/header.json", f"{DIRECTORY}/rows.bin"
MAX_HEADER_BYTES = 1 << 20
VERSION = 1
ELDER_FORMAT = AffineFormat(4, 32, "bfloat16")
"""What the Rust engine reads, beside ggml blocks."""
_SPELLING = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_DTYPES = {short: dtype for dtype, short in _SPELLING.items()}
_MOST_ROWS, _MOST_COLUMNS = (1 << 31) - 1, 1 << 16
FACTS = ("layerIndex", "shards", "multipliers", "headVocabSizes", "headOffsets")
"""What the header says of the model."""


@dataclass(frozen=True)
class TableLayout:
    """A table as it lies on disk. ``format`` is None for plain values of ``dtype``; ``blocks`` is the ggml type of one
    that this package does not read, whose ``parts`` are not known."""

    shape: tuple[int, int]
    format: AffineFormat | None
    dtype: str
    record_bytes: int
    facts: Mapping[str, Any]
    blocks: str | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of a record, in order."""
        return _parts(self.shape[1], self.format or self.dtype)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.record_bytes


def _parts(columns: int, dtype: str | AffineFormat) -> dict[str, int]:
    return TensorSpec("row", (1, columns), dtype).parts


def read(data: bytes, label: str, rows: OpenFile) -> TableLayout:
    """Parse and validate the bytes of a header, and the size of its rows' file. Raises InstallError."""
    root = Record(parse(data, label), label)
    if root.integer("version") != VERSION:
        root.fail("version", f"is {root.integer('version')}; this version reads {VERSION}")
    shape = root.integer("rows", 1, _MOST_ROWS), root.integer("headDim", 1, _MOST_COLUMNS)
    shards, record = root.integer("shards", 1, _MOST_ROWS), root.integer("recordBytes", 1, 1 << 24)
    if root.integer("rowsPerShard") * shards != shape[0]:
        root.fail("rowsPerShard", f"is {root.integer('rowsPerShard')}; {shape[0]} rows are in {shards} shards")
    facts: dict[str, Any] = {"layerIndex": root.integer("layerIndex"), "shards": shards}
    facts |= {key: root.integers(key) for key in FACTS[2:]}
    form, dtype, blocks = None, "float32", root.text("ggmlType", default=None)
    if blocks is None:
        form, dtype = _format(root)
        if form and shape[1] % form.group_size:
            root.fail("groupSize", f"is {form.group_size}; rows have {shape[1]} columns")
        parts = _parts(shape[1], form or dtype)
        declared = {"data": "weightBytes", "scales": "scaleBytes", "biases": "biasBytes"}
        for part, key in declared.items():
            if root.integer(key) != parts.get(part, 0):
                root.fail(key, f"is {root.integer(key)}; the format has {parts.get(part, 0)}")
        if record != sum(parts.values()):
            root.fail("recordBytes", f"is {record}; the parts have {sum(parts.values())}")
    layout = TableLayout(shape, form, dtype, record, facts, blocks)
    rows.expect_size(layout.nbytes, by=HEADER)
    return layout


def _format(root: Record) -> tuple[AffineFormat | None, str]:
    bits, group, companion = root.integer("bits"), root.integer("groupSize"), root.text("companionDtype")
    dtype = _DTYPES.get(companion)
    if dtype is None:
        root.fail("companionDtype", f"is {companion!r}; possible are {', '.join(_DTYPES)}")
    if group == 0:
        if bits != 8 * formats.RAW_BYTES[dtype]:
            root.fail("bits", f"is {bits}; plain values of {companion} have {8 * formats.RAW_BYTES[dtype]}")
        return None, dtype
    affine = AffineFormat(bits, group, dtype)
    try:
        formats.check_affine(affine)
    except ValueError as error:
        root.fail("bits", f"and groupSize declare {error}")
    return affine, "uint32"


def build(spec: TensorSpec, facts: Mapping[str, Any]) -> bytes:
    """The bytes of a header; ``facts`` are those of `FACTS`."""
    (rows, columns), form, parts = spec.shape, spec.dtype, _parts(spec.shape[1], spec.dtype)
    affine = isinstance(form, AffineFormat)
    document = {
        "version": VERSION,
        "rows": rows,
        "rowsPerShard": rows // facts["shards"],
        "headDim": columns,
        "groupSize": form.group_size if affine else 0,
        "bits": form.bits if affine else 8 * formats.RAW_BYTES[form],
        "recordBytes": sum(parts.values()),
        "weightBytes": parts["data"],
        "scaleBytes": parts.get("scales", 0),
        "biasBytes": parts.get("biases", 0),
        "companionDtype": _SPELLING[form.companion_dtype if affine else form],
        **{key: facts[key] for key in FACTS},
    }
    return json.dumps(document, indent=2).encode()
