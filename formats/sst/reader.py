"""Reads block-based tables into Arrow columns, no Python object per row.

The kernel that turns a data block into columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.errors import DamagedBytes, UnsupportedFormat
from tikv_br.formats.jit import njit
from tikv_br.formats.kernels.addresses import Int, address, copy, load, store
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.coding import BlockHandle, Readable
from tikv_br.formats.sst.source import RandomAccess
from tikv_br.formats.sst.table import Table

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

DONE, FULL, DAMAGED, NO_PUT = 0, 1, 2, 3
"""Results of `decode_rows`: the block is through; the columns have no room for the next row; an entry is wrong; a row is
no put, and its trailer was not asked for."""

POSITION, END, KEY_LENGTH, TRAILER, ROWS, NEED_KEY, NEED_VALUE, CURSOR_SIZE = range(8)
"""Fields of the cursor: where to go on in the block (-1: enter it) and where its entries end; length of the user key before
and its eight bytes; rows in the columns; rows seen that are no puts; room that the next row needs when `FULL`."""

SLACK = 16
"""Bytes that a column of keys needs beyond its keys: a trailer, and a word written across its end."""

_PUT = np.uint64(1)
_LOW_BYTE = np.uint64(0xFF)


@njit(forceinline=True)
def _u32(block: Bytes, at: Int) -> np.int64:
    number = np.int64(0)
    for byte in range(4):
        number |= np.int64(block[at + byte]) << (8 * byte)
    return number


@njit(forceinline=True)
def _entries_end(block: Bytes) -> Int:
    """Return the start of the restarts, or -1 if it is invalid; as `block.entries_end`."""
    end = np.int64(block.size - 4)
    if end < 0:
        return np.int64(-1)
    packed = _u32(block, end)
    if packed >> 31:
        if end < 2:
            return np.int64(-1)
        end -= 2 + (np.int64(block[end - 2]) | np.int64(block[end - 1]) << 8)
    end -= 4 * (packed & 0x7FFFFFFF)
    return end if end >= 0 else np.int64(-1)


@njit(forceinline=True)
def _varint(block: Bytes, position: Int, end: Int) -> tuple[Int, Int]:
    """The varint32 at `position` and the position after it, which is -1 where there is none before `end`."""
    number = np.int64(0)
    for shift in range(0, 35, 7):
        if position >= end:
            break
        byte = np.int64(block[position])
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    return number, np.int64(-1)


@njit(forceinline=True)
def _lengths(block: Bytes, position: Int, end: Int) -> tuple[Int, Int, Int, Int]:
    """An entry's shared, unshared and value length, and the position after them, or -1."""
    start = position + 3
    # Nearly always all three are single bytes.
    if start <= end and (block[position] | block[position + 1] | block[position + 2]) < 0x80:
        return np.int64(block[position]), np.int64(block[position + 1]), np.int64(block[position + 2]), start
    unshared: Int = np.int64(0)
    length: Int = np.int64(0)
    shared, start = _varint(block, position, end)
    if start >= 0:
        unshared, start = _varint(block, start, end)
    if start >= 0:
        length, start = _varint(block, start, end)
    return shared, unshared, length, start


@njit
def decode_rows(
    block: Bytes,
    cursor: Numbers,
    last_key: Bytes,
    key_offsets: Numbers,
    keys: Bytes,
    value_offsets: Numbers,
    values: Bytes,
    trailers: Numbers,
) -> int:
    """Append rows of `block` to the columns, from where the cursor stands, until it ends or they are full.

    `last_key`, at least as long as the block, carries the user key from one call to the next. Offsets hold rows + 1
    numbers; `trailers` takes sequence number and type of every row, or has length 0: then only puts will do. Nothing
    outside of the arrays is touched whatever the block says.
    """
    if cursor[POSITION] < 0:
        cursor[POSITION] = cursor[KEY_LENGTH] = cursor[TRAILER] = 0
        cursor[END] = _entries_end(block)
        if cursor[END] < 0:
            return DAMAGED
    position, end, rows = cursor[POSITION], cursor[END], cursor[ROWS]
    key_at, key_length, trailer = address(last_key), cursor[KEY_LENGTH], np.uint64(cursor[TRAILER])
    block_at, keys_at, values_at = address(block), address(keys), address(values)
    key_end, value_end = key_offsets[rows], value_offsets[rows]
    result = DONE
    while position < end:
        shared, unshared, length, start = _lengths(block, position, end)
        size = shared + unshared - 8
        known = key_length + 8 if position else 0
        if start < 0 or shared > known or size < 0 or unshared + length > end - start:
            result = DAMAGED
            break
        if rows + 1 >= key_offsets.size or key_end + size + SLACK > keys.size or value_end + length > values.size:
            cursor[NEED_KEY], cursor[NEED_VALUE] = size + SLACK, length
            result = FULL
            break
        at = keys_at + key_end
        copy(at, key_at, min(shared, key_length))
        if shared > key_length:
            store(at + key_length, trailer)  # shared bytes reach into the trailer of the key before
        copy(at + shared, block_at + start, unshared)
        copy(values_at + value_end, block_at + start + unshared, length)
        key_at, key_length = at, size
        trailer = load(key_at + size)
        if trailers.size:
            trailers[rows] = trailer
        elif trailer & _LOW_BYTE != _PUT:
            result = NO_PUT
            break
        rows += 1
        key_end += size
        value_end += length
        key_offsets[rows], value_offsets[rows] = key_end, value_end
        position = start + unshared + length
    if result == FULL and key_at != address(last_key):
        copy(address(last_key), key_at, key_length)
    cursor[POSITION], cursor[ROWS], cursor[KEY_LENGTH], cursor[TRAILER] = position, rows, key_length, np.int64(trailer)
    return result


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
        for run in names.runs(handles):
            for handle, stored in zip(run, self.table.stored(run), strict=True):
                yield self.table.blocks.unpack(stored, handle)


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
        self.keys = np.frombuffer(pa.allocate_buffer(room.key_bytes + SLACK), np.uint8)
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
        self._fields = np.zeros(CURSOR_SIZE, np.int64)
        self._block = np.empty(0, np.uint8)
        self._last_key = np.empty(1 << 16, np.uint8)

    @property
    def need(self) -> tuple[int, int]:
        """Bytes of key and of value that the next row needs."""
        return int(self._fields[NEED_KEY]), int(self._fields[NEED_VALUE])

    def enter(self, block: Readable) -> None:
        self._block = np.frombuffer(block, np.uint8)
        self._block.flags.writeable = False
        if self._last_key.size < self._block.size:
            self._last_key = np.empty(self._block.size, np.uint8)
        self._fields[POSITION] = -1

    def decode_into(self, rows: _Columns) -> bool:
        """Append rows until the block ends (True) or the columns are full (False). Raises `DamagedBytes`."""
        fields = self._fields
        fields[ROWS] = rows.count
        result = decode_rows(
            self._block,
            fields,
            self._last_key,
            rows.key_offsets,
            rows.keys,
            rows.value_offsets,
            rows.values,
            _NO_TRAILERS,
        )
        rows.count = int(fields[ROWS])
        if result == DAMAGED:
            raise DamagedBytes(f"entry at byte {fields[POSITION]} of a data block reaches beyond it")
        if result == NO_PUT:
            raise UnsupportedFormat(f"row of type {fields[TRAILER] & 0xFF}: only puts are read")
        return result == DONE
