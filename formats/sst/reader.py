"""Reads block-based tables into Arrow columns, no Python object per row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.sst import decode
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.block import TRAILER_SIZE
from tikv_br.formats.sst.coding import BlockHandle, Readable
from tikv_br.formats.sst.source import RandomAccess, read_exactly
from tikv_br.formats.sst.table import Table

_READ_SIZE = 4 << 20
"""Bytes asked of the source at once, unless a block is larger."""
_LEAST_BYTES = 64 << 10
_ROW_BYTES = 1 << 10
_BATCH_BYTES = 8 << 20
"""Bytes of keys and of values in a batch, unless a row is larger."""
_NO_TRAILERS = np.empty(0, np.int64)


class SstReader:
    """A table of format version 2 to 6, as TiKV 5 to 9 and RocksDB write them.

    Footer, properties and index are read when first needed; rows by consecutive reads of a few MiB. Any use raises
    `DamagedBytes` where the bytes contradict themselves and `UnsupportedFormat` for what is not handled. One thread at
    a time; checksums, decompression and row decoding run without the GIL.
    """

    def __init__(self, source: RandomAccess) -> None:
        self.table = Table(source)

    def batches(self, max_rows: int = 65_536, start: bytes = b"", end: bytes = b"") -> Iterator[pa.RecordBatch]:
        """All rows in file order as batches of ``STORAGE_SCHEMA``, of at most `max_rows` rows and some MiB each.

        Blocks without keys in [start, end), where an empty end is no end, are not read; other rows beside them are there.
        Raises `UnsupportedFormat` for rows that are no puts, besides what any use raises.
        """
        self.table.require_plain_rows()
        index = self.table.index
        last = bisect_left(index.separators, end) if end else len(index.handles)
        handles = index.handles[bisect_left(index.separators, start) : last + 1]
        for rows in self._columns(handles, max_rows):
            yield rows.batch()

    def _columns(self, handles: list[BlockHandle], max_rows: int) -> Iterator[_Columns]:
        if max_rows < 1:
            raise ValueError("a batch takes at least one row")
        room = _Room(max_rows, self._room(names.RAW_KEY_SIZE, max_rows), self._room(names.RAW_VALUE_SIZE, max_rows))
        rows = _Columns(room)
        cursor = _Cursor()
        for block in self._blocks(handles):
            cursor.enter(block)
            while not cursor.decode_into(rows):
                if rows.count:
                    yield rows
                rows = _Columns(room.fitting(cursor))
        if rows.count:
            yield rows

    def _room(self, total: str, max_rows: int) -> int:
        """Bytes to keep ready for a column of which a property says the total; it need not be true."""
        return max(_LEAST_BYTES, min(_BATCH_BYTES, max_rows * _ROW_BYTES, names.number(self.table.properties, total)))

    def _blocks(self, handles: list[BlockHandle]) -> Iterator[Readable]:
        for run in _runs(handles):
            start, end = run[0].offset, run[-1].offset + run[-1].size + TRAILER_SIZE
            stored = memoryview(read_exactly(self.table.source, start, end - start))
            for handle in run:
                at = handle.offset - start
                yield self.table.blocks.unpack(stored[at : at + handle.size + TRAILER_SIZE], handle)


@dataclass(frozen=True, slots=True)
class _Room:
    """Free capacity of a batch."""

    rows: int
    key_bytes: int
    value_bytes: int

    def fitting(self, cursor: _Cursor) -> _Room:
        """Room for at least the row at which the cursor stopped."""
        key_bytes, value_bytes = cursor.need
        return _Room(self.rows, max(self.key_bytes, key_bytes), max(self.value_bytes, value_bytes))


class _Columns:
    """Buffers that a batch grows in."""

    def __init__(self, room: _Room) -> None:
        self.key_offsets = np.empty(room.rows + 1, np.int64)
        self.value_offsets = np.empty(room.rows + 1, np.int64)
        self.key_offsets[0] = self.value_offsets[0] = 0
        # Arrow's pool hands out the memory of batches that are gone; malloc would map fresh pages for each.
        self.keys = np.frombuffer(pa.allocate_buffer(room.key_bytes + decode.SLACK), np.uint8)
        self.values = np.frombuffer(pa.allocate_buffer(room.value_bytes), np.uint8)
        self.count = 0

    def batch(self) -> pa.RecordBatch:
        """Return the rows added so far, without a copy."""
        key_offsets, value_offsets = self.key_offsets[: self.count + 1], self.value_offsets[: self.count + 1]
        return columns.storage_rows(
            columns.build(key_offsets, self.keys[: key_offsets[-1]]),
            columns.build(value_offsets, self.values[: value_offsets[-1]]),
        )


class _Cursor:
    """Position in a block at which decoding continues."""

    def __init__(self) -> None:
        self._fields = np.zeros(decode.CURSOR_SIZE, np.int64)
        self._block = np.empty(0, np.uint8)
        self._last_key = np.empty(1 << 16, np.uint8)

    @property
    def need(self) -> tuple[int, int]:
        """Bytes of key and of value that the next row needs."""
        return int(self._fields[decode.NEED_KEY]), int(self._fields[decode.NEED_VALUE])

    def enter(self, block: Readable) -> None:
        self._block = np.frombuffer(block, np.uint8)
        self._block.flags.writeable = False
        if self._last_key.size < self._block.size:
            self._last_key = np.empty(self._block.size, np.uint8)
        self._fields[decode.POSITION] = -1

    def decode_into(self, rows: _Columns) -> bool:
        """Append rows until the block ends (True) or the columns are full (False). Raises `DamagedBytes`."""
        fields = self._fields
        fields[decode.ROWS] = rows.count
        result = decode.decode_rows(
            self._block,
            fields,
            self._last_key,
            rows.key_offsets,
            rows.keys,
            rows.value_offsets,
            rows.values,
            _NO_TRAILERS,
        )
        rows.count = int(fields[decode.ROWS])
        if result == decode.DAMAGED:
            raise DamagedBytes(f"entry at byte {fields[decode.POSITION]} of a data block reaches beyond it")
        if result == decode.NO_PUT:
            raise UnsupportedFormat(f"row of type {fields[decode.TRAILER] & 0xFF}: only puts are read")
        return result == decode.DONE


def _runs(handles: list[BlockHandle]) -> Iterator[list[BlockHandle]]:
    """Neighbouring blocks that one read fetches."""
    run: list[BlockHandle] = []
    for handle in handles:
        if run and handle.offset + handle.size + TRAILER_SIZE - run[0].offset > _READ_SIZE:
            yield run
            run = []
        run.append(handle)
    if run:
        yield run
