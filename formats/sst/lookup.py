"""Finding one row: through the index to its block, and no further. Plain Python, so that nothing is compiled for it."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from formats.errors import DamagedBytes, UnsupportedFormat
from formats.sst.block import entries
from formats.sst.table import Table

_TRAILER = 8
_PUT = 1


class FoundRow(NamedTuple):
    """A row as it lies in the table."""

    key: bytes
    value: bytes


def first_row_from(table: Table, key: bytes) -> FoundRow | None:
    """The first row whose key is not below ``key``; None when all are. Reads the tail and one block, rarely two.

    Raises `DamagedBytes`, and `UnsupportedFormat` for a row that is no put.
    """
    table.require_plain_rows()
    index = table.index
    for handle in index.handles[bisect_left(index.separators, key) :]:
        for internal, value in entries(table.blocks.read(handle)):
            if len(internal) < _TRAILER:
                raise DamagedBytes(f"row of the block at {handle.offset} has a key without sequence number")
            if internal[:-_TRAILER] >= key:
                if internal[-_TRAILER] != _PUT:
                    raise UnsupportedFormat(f"row of type {internal[-_TRAILER]}: only puts are read")
                return FoundRow(internal[:-_TRAILER], value)
    return None
