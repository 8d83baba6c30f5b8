"""Rows of an install's table, read as they are asked for: the table itself is never in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turbospark_mlx.convert.affine import dequantize_affine
from turbospark_mlx.convert.floats import STORAGE, to_float32
from turbospark_mlx.gturbo import Install
from turbospark_mlx.readers import start_readers

READERS = 8
"""Threads that read rows: each waits for the disk."""
_ROWS_PER_READER = 16


class DiskTable:
    """See ``protocols.RowTable``. It has a file of its own, so that it outlives the install that it was made from."""

    def __init__(self, install: Install) -> None:
        self._layout, self._file = install.table, install.open_table()
        self.shape = self._layout.shape
        self.rows_read = 0
        self._pool = start_readers(READERS)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows ``ids`` as float32 ``[*ids.shape, columns]``; each is read once. Raises IndexError, before anything is
        read, for an id that is none of the table's, and InstallError when the disk fails, or when the file was written
        to since it was opened."""
        unique, where = np.unique(ids, return_inverse=True)
        if unique.size and not (unique[0] >= 0 and unique[-1] < self.shape[0]):
            raise IndexError(f"rows {unique[0]} to {unique[-1]} are asked for; the table has {self.shape[0]}")
        records = np.empty((len(unique), self._layout.record_bytes), np.uint8)
        pieces = range(0, len(unique), max(_ROWS_PER_READER, -(-len(unique) // READERS)))
        if len(pieces) > 1:
            step = pieces.step
            list(self._pool.map(lambda at: self._read(unique[at : at + step], records[at : at + step]), pieces))
        else:
            self._read(unique, records)
        self._file.check_unchanged()
        self.rows_read += len(unique)
        return self._values(records)[where.reshape(-1)].reshape(*ids.shape, self.shape[1])

    def _read(self, ids: Sequence[int], records: np.ndarray) -> None:
        for row, record in zip(ids.tolist(), records, strict=True):
            self._file.read_into(row * self._layout.record_bytes, memoryview(record))

    def _values(self, records: np.ndarray) -> np.ndarray:
        form, ends = self._layout.format, np.cumsum(list(self._layout.parts.values())).tolist()
        parts = [np.ascontiguousarray(part) for part in np.split(records, ends[:-1], axis=1)]
        if form is None:
            return to_float32(parts[0].view(STORAGE[self._layout.dtype]), self._layout.dtype)
        companion = STORAGE[form.companion_dtype]
        return dequantize_affine(
            parts[0].view("<u4"),
            parts[1].view(companion),
            parts[2].view(companion),
            bits=form.bits,
            group_size=form.group_size,
            companion_dtype=form.companion_dtype,
        )
