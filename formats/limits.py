"""The largest rows that stores accept from clients, of columns without an object per row.

Stores check keys and raft entries of puts and deletes, but not of an ingest: a row beyond the limits could be neither overwritten nor
deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from tikv_br.formats.keys.codec import GROUP, MAX_KEY_SIZE

if TYPE_CHECKING:
    import pyarrow as pa

ENTRY_OVERHEAD = 256
"""Bytes that a put has at most in its raft entry besides key, value, and the growth of the key by its encoding."""


class RowLimits(Struct, frozen=True):
    """Limits of one keyspace; the defaults are the default settings of stores."""

    key: int = MAX_KEY_SIZE
    """Bytes of a user key."""
    row: int = (8 << 20) - ENTRY_OVERHEAD
    """Bytes of key and value, and the growth of the key: an eighth."""

    def less(self, size: int) -> RowLimits:
        """The limits of rows whose keys will have so many bytes more, or less if it is negative."""
        return RowLimits(self.key - size, self.row - size - size // GROUP)

    def keys_beyond(self, rows: pa.RecordBatch) -> Iterator[bytes]:
        """The keys of rows that stores would refuse to put."""
        import pyarrow.compute as pc

        keys = rows["key"]
        beyond = pc.or_(self.long_keys(keys), self.large_rows(keys, rows["value"]))
        if pc.any(beyond).as_py():
            yield from (key.as_py() for key in keys.filter(beyond))

    def long_keys(self, keys: pa.LargeBinaryArray | pa.ChunkedArray) -> pa.BooleanArray | pa.ChunkedArray:
        """Which keys are too long; null for a null."""
        import pyarrow.compute as pc

        return pc.greater(pc.binary_length(keys), self.key)

    def large_rows(
        self, keys: pa.LargeBinaryArray | pa.ChunkedArray, values: pa.LargeBinaryArray | pa.ChunkedArray
    ) -> pa.BooleanArray | pa.ChunkedArray:
        """Which rows are too large; null for a null."""
        import pyarrow.compute as pc

        size = pc.binary_length(keys)
        grown = pc.add(size, pc.divide(size, GROUP))
        return pc.greater(pc.add(grown, pc.binary_length(values)), self.row)
