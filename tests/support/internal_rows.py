"""Rows of an SST as the storage engine sees them, read block by block without the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tikv_br.formats.sst.block import entries
from tikv_br.formats.sst.reader import SstReader
from tikv_br.formats.sst.table import GLOBAL_SEQNO, fixed_number


class InternalRow(NamedTuple):
    """A row. Type 1 is a put; 0, 2, 7 and others are what `SstReader.batches` refuses."""

    key: bytes
    value: bytes
    sequence: int
    type: int


def internal_rows(reader: SstReader) -> Iterator[InternalRow]:
    """Yield all rows of any type with sequence numbers, the global one applied. Raises `FormatError`."""
    table = reader.table
    of_all_rows = fixed_number(table.properties, GLOBAL_SEQNO)  # given at ingestion
    for handle in table.index.handles:
        for key, value in entries(table.blocks.read(handle)):
            trailer = int.from_bytes(key[-8:], "little")
            yield InternalRow(key[:-8], value, of_all_rows or trailer >> 8, trailer & 0xFF)
