"""Writes block-based tables from Arrow columns as RocksDB's own writer for ingestion does, as a stream of bytes.

Rows are encoded by a kernel; a block at a time passes through Python to be compressed and sealed with a checksum. The
order is data, index, properties, metaindex, footer. There is no filter block: stores build one when they compact.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from formats import columns
from formats.errors import FormatError, UnsortedKeys, UnsupportedFormat
from formats.sst import encode
from formats.sst import properties as names
from formats.sst.block import encode_entries
from formats.sst.block_checksum import ChecksumType
from formats.sst.coding import BlockHandle, Readable
from formats.sst.compression import MAX_BLOCK_SIZE, Compression, Compressor, compressor
from formats.sst.footer import TRAILER_SIZE, Footer
from formats.sst.index import IndexBuilder

Sink = Callable[[bytes], object]

_CHUNK = 1 << 20
"""Bytes given to the sink at once, about."""
_VERSIONS = range(2, 6)
_KEY_TRAILER = 8
_TRAILER = struct.Struct("<BI")
_MOST_SKIPPED = 15
"""Blocks stored as they are after several that did not shrink: compressing noise costs most."""
_TAIL_ESTIMATE = 1200
"""Bytes of properties, metaindex and footer, about."""
_SMALLEST_ROW = 11
"""Bytes that a row takes in a block at least: three lengths and the end of the key."""


@dataclass(frozen=True, slots=True)
class SstOptions:
    """How to write. Raises `UnsupportedFormat` for what no reader would take.

    Format version 2 with CRC32c is what every TiKV reads; `level` 0 is the compression's default (zstd: 1).
    """

    compression: Compression = Compression.ZSTD
    level: int = 0
    format_version: int = 2
    checksum: Literal["crc32c", "xxh3"] = "crc32c"
    block_size: int = 64 << 10
    """Bytes of a data block before compression, unless a row is larger."""
    restart_interval: int = 16
    """Rows from one full key to the next."""

    def __post_init__(self) -> None:
        if self.level and self.level not in self.compression.levels:
            raise UnsupportedFormat(f"compression {self.compression.label} has no level {self.level}")
        if self.format_version not in _VERSIONS:
            raise UnsupportedFormat(
                f"format version {self.format_version}: {_VERSIONS[0]} to {_VERSIONS[-1]} are written"
            )
        if self.checksum not in {"crc32c", "xxh3"}:
            raise UnsupportedFormat(f"checksum {self.checksum!r}: crc32c or xxh3")
        if not 1 << 10 <= self.block_size <= MAX_BLOCK_SIZE or self.restart_interval < 1:
            raise UnsupportedFormat(f"blocks of {self.block_size} bytes, restarts every {self.restart_interval} rows")


@dataclass(frozen=True, slots=True)
class SstSummary:
    """What was written."""

    size: int
    """Bytes of the file."""
    tail_offset: int
    """Where the last data block ends: see `formats.sst.tail_extent`."""
    entries: int
    data_blocks: int
    first_key: bytes
    last_key: bytes
    raw_key_size: int
    """Bytes of all keys before compression, as RocksDB counts: with eight bytes more a row."""
    raw_value_size: int


class SstWriter:
    """Writes one table to `sink`, which gets its bytes in order and is neither flushed nor closed.

    One thread at a time. After an error the file is incomplete and to be thrown away.
    """

    def __init__(self, sink: Sink, options: SstOptions = SstOptions()) -> None:
        self._out = _BlockSink(sink, options)
        self._options = options
        self._index = IndexBuilder(options.format_version)
        self._state = np.zeros(encode.STATE_SIZE, np.int64)
        self._state[encode.LAST_LENGTH] = -1
        self._block = np.empty(options.block_size, np.uint8)
        self._restarts = np.empty(options.block_size // _SMALLEST_ROW + 2, np.uint32)
        self._entries = self._key_bytes = self._value_bytes = 0
        self._first_key: bytes | None = None
        self._last_key = b""

    @property
    def size_estimate(self) -> int:
        """Bytes of the file if it ended now, the open block counted before compression."""
        return self._out.offset + int(self._state[encode.SIZE]) + self._index.size + _TAIL_ESTIMATE

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of ``STORAGE_SCHEMA``, sorted by key and all after those before.

        Raises `UnsortedKeys`, `UnsupportedFormat` for a row larger than any store takes, and what the sink raises.
        """
        if not rows.num_rows:
            return
        keys, values = columns.view(rows["key"]), columns.view(rows["value"])
        if self._first_key is None:
            self._first_key = _row(keys, 0)
        self._encode(keys, values)
        self._last_key = _row(keys, -1)
        self._state[encode.LAST_LENGTH] = len(self._last_key)
        self._entries += rows.num_rows
        self._key_bytes += int(keys[0][-1] - keys[0][0])
        self._value_bytes += int(values[0][-1] - values[0][0])

    def finish(self) -> SstSummary:
        """Write the rest of the file. Raises `FormatError` when there are no rows: no store takes such a file."""
        if self._first_key is None:
            raise FormatError("a table without rows")
        encode.seal(self._block, self._state, self._restarts)
        self._end_block(self._last_key, None)
        data_end = self._out.offset
        index = self._out.write(self._index.encode(), compress=False)
        properties = self._out.write(self._encode_properties(data_end), compress=False)
        metaindex = self._out.write(encode_entries([(names.BLOCK_NAME.encode(), properties.encode())]), compress=False)
        footer = Footer(self._options.format_version, self._out.checksum, metaindex, index)
        self._out.end(footer.encode())
        return SstSummary(
            size=self._out.offset,
            tail_offset=data_end,
            entries=self._entries,
            data_blocks=self._index.blocks,
            first_key=self._first_key,
            last_key=self._last_key,
            raw_key_size=self._key_bytes + _KEY_TRAILER * self._entries,
            raw_value_size=self._value_bytes,
        )

    def _encode(self, keys: _Column, values: _Column) -> None:
        state, last_key = self._state, np.frombuffer(self._last_key, np.uint8)
        state[encode.ROW] = 0
        options = self._options
        while result := encode.encode_rows(
            *keys, *values, last_key, state, self._block, self._restarts, options.block_size, options.restart_interval
        ):
            row = int(state[encode.ROW])
            before = _row(keys, row - 1) if row else self._last_key
            if result == encode.UNSORTED:
                raise UnsortedKeys(f"key {_row(keys, row).hex()} does not sort after {before.hex()}")
            if result == encode.BLOCK_FULL:
                self._end_block(before, _row(keys, row))
            else:
                self._make_room(int(state[encode.NEED]))

    def _make_room(self, size: int) -> None:
        if size > MAX_BLOCK_SIZE:
            raise UnsupportedFormat(f"row that makes a block of {size} bytes")
        self._block = np.empty(size, np.uint8)  # in place of an empty one: beside others the row would not be tried

    def _end_block(self, last: bytes, following: bytes | None) -> None:
        """Write the block that was sealed; `following` is the key after its last."""
        block = self._block.data[: self._state[encode.SEALED]]
        self._index.add(last, following, self._out.write(block))
        self._block = np.empty(self._options.block_size, np.uint8)  # the sink may hold the other for a while

    def _encode_properties(self, data_end: int) -> bytes:
        return names.encode_properties(
            {
                names.DATA_SIZE: data_end,
                names.INDEX_SIZE: self._index.size + TRAILER_SIZE,
                names.NUM_DATA_BLOCKS: self._index.blocks,
                names.NUM_ENTRIES: self._entries,
                names.RAW_KEY_SIZE: self._key_bytes + _KEY_TRAILER * self._entries,
                names.RAW_VALUE_SIZE: self._value_bytes,
                names.TAIL_START: data_end,
            },
            compression=self._options.compression.property_name,
            index_of_user_keys=self._index.user_keys,
            index_of_deltas=self._index.deltas,
        )


_Column = tuple[columns.Offsets, columns.Bytes]


def _row(column: _Column, row: int) -> bytes:
    offsets, data = column
    start, end = (offsets[row], offsets[row + 1]) if row >= 0 else (offsets[row - 1], offsets[row])
    return data[start:end].tobytes()


class _BlockSink:
    """Compresses blocks, adds their trailers and passes them on in chunks."""

    def __init__(self, sink: Sink, options: SstOptions) -> None:
        self.checksum = ChecksumType[options.checksum.upper()]
        self.offset = self._flushed = 0
        self._sink = sink
        self._method = options.compression.value
        self._compress = compressor(options.compression, options.level)
        self._misses = self._skip = 0
        self._pieces: list[Readable] = []

    def write(self, block: Readable, *, compress: bool = True) -> BlockHandle:
        """Write a block, compressed where that saves an eighth at least; its memory must not change any more."""
        pieces = self._packed(block, self._compress) if compress and self._compress else None
        method = self._method if pieces else 0
        prefix, body = pieces or (b"", block)
        handle = BlockHandle(self.offset, len(prefix) + len(body))
        checksum = self.checksum.compute((prefix, body), method)
        self._pieces += (prefix, body, _TRAILER.pack(method, checksum))
        self.offset += handle.size + TRAILER_SIZE
        if self.offset - self._flushed >= _CHUNK:
            self._flush()
        return handle

    def _packed(self, block: Readable, compress: Compressor) -> tuple[bytes, bytes] | None:
        """The block compressed, or None where that is not worth it: then the next ones are not even tried."""
        if self._skip:
            self._skip -= 1
            return None
        pieces = prefix, body = compress(block)
        if len(prefix) + len(body) < len(block) - len(block) // 8:
            self._misses = 0
            return pieces
        self._misses = self._skip = min(2 * self._misses + 1, _MOST_SKIPPED)
        return None

    def end(self, footer: bytes) -> None:
        """Write the footer and all that waits."""
        self._pieces.append(footer)
        self.offset += len(footer)
        self._flush()

    def _flush(self) -> None:
        chunk = b"".join(self._pieces)
        self._pieces.clear()
        self._flushed = self.offset
        self._sink(chunk)
