"""Writes block-based tables as RocksDB's own writer for ingestion does, as a stream of bytes.

Rows come as Arrow columns or as pages of RawScan. Kernels fill blocks from them, many per call; then each block is compressed
and gets its checksum. The order is data, index, properties, metaindex, footer. There is no filter block: stores build one when
they compact.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tikv_br.formats import columns
from tikv_br.formats.checksum import FoldedRows
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys, UnsupportedFormat
from tikv_br.formats.kernels.addresses import Int
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.keys.text import show_key
from tikv_br.formats.rawscan import RawPage
from tikv_br.formats.sst import encode
from tikv_br.formats.sst import table as names
from tikv_br.formats.sst.block import TRAILER_SIZE, ChecksumType, Footer, encode_entries
from tikv_br.formats.sst.coding import BlockHandle, Readable, encode_varint
from tikv_br.formats.sst.compression import MAX_BLOCK_SIZE, Compression, compressor
from tikv_br.formats.sst.encode import encode_page, largest_key, page_encoding

_BLOCKS = 16
"""Blocks in the arena: 1 MiB at the default block size, which stays in the processor's cache until it is compressed."""
_MAX_SEALED = 512
"""Maximum number of blocks per kernel call."""
_SMALLEST_ROW = 11
"""Bytes that a row takes in a block at least: three lengths and the end of the key."""
_SEPARATORS = 16 << 10
"""Bytes for separators, unless keys are longer."""


class Arena:
    """The memory that kernels fill: sealed blocks, then the open one; beside them keys, restarts and separators."""

    def __init__(self, block_size: int, restart_interval: int) -> None:
        self.state = np.zeros(encode.STATE_SIZE, np.int64)
        self.state[encode.LAST_LENGTH] = -1
        self.memory = np.empty(_BLOCKS * block_size + encode.SLACK, np.uint8)
        self._block_size = block_size
        self._restart_interval = restart_interval
        self._restarts = np.empty(block_size // _SMALLEST_ROW + 2, np.uint32)
        self._ends = np.zeros((2, _MAX_SEALED), np.int64)
        self.reserve(0)

    @property
    def last_key(self) -> bytes:
        """The key of the last row; there is one."""
        return self._key(int(self.state[encode.SLOT]), encode.LAST_LENGTH)

    @property
    def next_key(self) -> bytes:
        """The key of the next row, which a kernel has written."""
        return self._key(1 - int(self.state[encode.SLOT]), encode.LENGTH)

    def sealed(self) -> tuple[list[int], bytes, list[int]]:
        """Return the end offset of each sealed block, and the internal keys that separate it from the next with their end offsets."""
        count = self.state[encode.SEALED]
        separators = self._separators[: self.state[encode.SEPARATED]].tobytes()
        return self._ends[0, :count].tolist(), separators, self._ends[1, :count].tolist()

    def reserve(self, longest_key: int) -> None:
        """Make room for keys of this length; there are no sealed blocks."""
        last, slot = b"" if self.state[encode.LAST_LENGTH] < 0 else self.last_key, int(self.state[encode.SLOT])
        self._keys = np.zeros((2, longest_key + encode.SLACK), np.uint8)
        self._keys[slot, : len(last)] = np.frombuffer(last, np.uint8)
        self._separators = np.empty(max(_SEPARATORS, longest_key + encode.KEY_TRAILER), np.uint8)
        self._point()

    def has_slots_for(self, longest_key: int) -> bool:
        """Return whether `reserve` was called for keys of that length."""
        return longest_key + encode.SLACK <= self._keys.shape[1]

    def grow(self, size: int) -> None:
        """Make room for a block of this size; the arena is empty."""
        self.memory = np.empty(size + encode.SLACK, np.uint8)
        self._point()

    def restart(self, start: int) -> None:
        """Drop the sealed blocks: the open one, at `start`, moves to the beginning."""
        size = int(self.state[encode.SIZE])
        self.memory[:size] = self.memory[start : start + size]
        self.state[encode.START] = self.state[encode.SEALED] = self.state[encode.SEPARATED] = 0

    def _point(self) -> None:
        self.blocks = encode.Blocks(
            state=_address(self.state),
            arena=_address(self.memory),
            arena_size=self.memory.size - encode.SLACK,
            restarts=_address(self._restarts),
            ends=_address(self._ends[0]),
            separator_ends=_address(self._ends[1]),
            most_sealed=_MAX_SEALED,
            keys=_address(self._keys),
            slot_size=self._keys.shape[1],
            separators=_address(self._separators),
            separators_size=self._separators.size,
            block_size=self._block_size,
            restart_interval=self._restart_interval,
        )

    def _key(self, slot: int, length: int) -> bytes:
        return self._keys[slot, : self.state[length]].tobytes()


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


_VERSIONS = range(2, 6)


@dataclass(frozen=True, slots=True)
class SstOptions:
    """Options of a writer. Raises `UnsupportedFormat` for combinations that no reader accepts.

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


Kernel = Callable[[encode.Blocks], Int]
Sink = Callable[[bytes], object]
_MAX_SKIPPED = 15
"""Maximum number of blocks that are stored as they are after one that did not shrink: compressing noise costs most."""
_TRAILER = struct.Struct("<BI")
_NO_COLUMN_FAMILY = 0x7FFFFFFF


class SstWriter:
    """Writes one table to `sink`, which gets its bytes in order and is neither flushed nor closed.

    For one thread. After an error the file is incomplete and must be discarded.
    """

    def __init__(self, sink: Sink, options: SstOptions = SstOptions()) -> None:
        self._sink = sink
        self._options = options
        self._checksum = ChecksumType[options.checksum.upper()]
        self._sum = self._checksum.compute
        self._compress = compressor(options.compression, options.level)
        self._arena = Arena(options.block_size, options.restart_interval)
        self._index = IndexBuilder(options.format_version)
        self._first_key: bytes | None = None
        self._offset = 0
        self._pieces: list[bytes] = []
        self._misses = self._skip = 0

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of ``STORAGE_SCHEMA``, sorted by key and all after those before.

        Raises `UnsortedKeys`, `UnsupportedFormat` for a row larger than any store takes, and what the sink raises.
        """
        if not rows.num_rows:
            return
        keys, values = columns.view(rows["key"]), columns.view(rows["value"])
        if self._first_key is None:
            self._first_key = rows["key"][0].as_py()
        self._run(lambda blocks: encode.encode_rows(blocks, *keys, *values), int(np.diff(keys[0]).max()))

    def append_page(self, page: RawPage, source: KeyCodec, target: KeyCodec, ts: int = 1) -> FoldedRows:
        """Add the rows of a page, which do not expire, as `tikv_br.formats.rows.to_storage` would encode them.

        The page has RPC keys of ``source``; ``ts`` is the timestamp of each row if ``target`` is API V2, never 0. Returns what their
        checksum is computed from, over user keys and user values. Raises as `append` does, and `DamagedBytes` for a key
        outside the keyspace.
        """
        if self._first_key is None and page.rows:
            self._first_key = DATA_PREFIX + target.storage_key(target.rpc_key(source.user_key(page.first_key)), ts)
        form = page_encoding(source, target, ts)
        folded, odd = np.zeros(page.longest, np.uint8), np.zeros(page.longest + 1, np.bool_)
        self._run(
            lambda blocks: encode_page(blocks, page.data, form, folded, odd),
            int(largest_key(page.longest_key)),
        )
        return FoldedRows(folded, odd, page.rows, page.key_bytes + page.value_bytes - page.rows * len(source.prefix))

    def finish(self) -> names.EndKeys:
        """Write the rest of the file. Raises `FormatError` if there are no rows: no store takes such a file."""
        if self._first_key is None:
            raise FormatError("a table without rows")
        arena = self._arena
        while not encode.seal(arena.blocks, 0, 0, 0):
            self._write_sealed()
        self._write_sealed()
        data_end = self._offset
        entries, value_bytes = int(arena.state[encode.ROWS]), int(arena.state[encode.VALUE_BYTES])
        raw_key_size = int(arena.state[encode.KEY_BYTES]) + encode.KEY_TRAILER * entries
        index_block = self._index.encode()
        index = self._write(index_block)
        properties = encode_properties(
            {
                names.DATA_SIZE: data_end,
                names.INDEX_SIZE: len(index_block) + TRAILER_SIZE,
                names.NUM_DATA_BLOCKS: self._index.blocks,
                names.NUM_ENTRIES: entries,
                names.RAW_KEY_SIZE: raw_key_size,
                names.RAW_VALUE_SIZE: value_bytes,
                names.TAIL_START: data_end,
            },
            compression=self._options.compression.property_name,
            index_of_user_keys=self._index.user_keys,
            index_of_deltas=self._index.deltas,
        )
        metaindex = self._write(encode_entries([(names.BLOCK_NAME.encode(), self._write(properties).encode())]))
        footer = Footer(self._options.format_version, self._checksum, metaindex, index).encode()
        self._pieces.append(footer)
        self._flush()
        return names.EndKeys(self._first_key, arena.last_key)

    def _run(self, kernel: Kernel, longest_key: int) -> None:
        """Append rows whose storage keys have at most `longest_key` bytes, by the kernel; raises as `append_page`."""
        arena = self._arena
        if not arena.has_slots_for(longest_key):
            self._write_sealed()
            arena.reserve(longest_key)
        arena.state[encode.CURSOR] = 0
        while result := kernel(arena.blocks):
            if result == encode.OUTSIDE:
                raise DamagedBytes("the cluster answered with a key outside of the keyspace")
            if result == encode.DAMAGED:
                raise DamagedBytes("the page is not the one that was measured")
            if result == encode.UNSORTED:
                raise UnsortedKeys(f"key {show_key(arena.next_key)} does not sort after {show_key(arena.last_key)}")
            need = int(arena.state[encode.NEED])
            arena.state[encode.NEED] = 0
            if need > MAX_BLOCK_SIZE:
                raise UnsupportedFormat(f"row that makes a block of {need} bytes")
            self._write_sealed()
            # A row is tried in a block of its own before it asks for room, so the open block is empty here.
            if need > arena.blocks.arena_size:
                arena.grow(need)

    def _write_sealed(self) -> None:
        """Write all sealed blocks; the open one moves to the arena's beginning."""
        arena = self._arena
        blocks = arena.memory.data
        ends, separators, separator_ends = arena.sealed()
        sizes = [self._write_data(blocks[start:end]) for start, end in pairwise([0, *ends])]
        self._index.add(separators, separator_ends, sizes)
        arena.restart(sum(ends[-1:]))
        self._flush()

    def _write_data(self, block: Readable) -> int:
        """Write a block, compressed if that saves at least an eighth; returns its size without the trailer."""
        if self._compress is not None and not self._skip:
            prefix, body = self._compress(block)
            if len(prefix) + len(body) < len(block) - len(block) // 8:
                self._misses = 0
                return self._seal(prefix, body, self._options.compression.value)
            self._misses = self._skip = min(2 * self._misses + 1, _MAX_SKIPPED)
        elif self._skip:
            self._skip -= 1
        return self._seal(b"", bytes(block), 0)

    def _write(self, block: bytes) -> BlockHandle:
        return BlockHandle(self._offset, self._seal(b"", block, 0))

    def _seal(self, prefix: bytes, body: bytes, method: int) -> int:
        self._pieces += prefix, body, _TRAILER.pack(method, self._sum((prefix, body), method))
        size = len(prefix) + len(body)
        self._offset += size + TRAILER_SIZE
        return size

    def _flush(self) -> None:
        if self._pieces:
            self._sink(b"".join(self._pieces))
            self._pieces.clear()


def encode_properties(
    varints: Mapping[str, int], *, compression: str, index_of_user_keys: bool, index_of_deltas: bool
) -> bytes:
    """The block of an ingestible table without a filter; `varints` are the sizes and counts.

    Session, file number and host are left out on purpose: stores derive cache keys from them, and two files must never
    share one.
    """
    properties = {name: encode_varint(count) for name, count in varints.items()} | {
        names.COMPARATOR: names.BYTEWISE,
        names.EXTERNAL_VERSION: struct.pack("<I", 2),
        names.GLOBAL_SEQNO: bytes(8),
        names.INDEX_KEYS_ARE_USER_KEYS: encode_varint(index_of_user_keys),
        names.INDEX_TYPE: struct.pack("<I", 0),
        names.INDEX_VALUES_ARE_DELTAS: encode_varint(index_of_deltas),
        "rocksdb.block.based.table.prefix.filtering": b"0",
        "rocksdb.block.based.table.whole.key.filtering": b"1",
        "rocksdb.column.family.id": encode_varint(_NO_COLUMN_FAMILY),
        "rocksdb.compression": compression.encode(),
        "rocksdb.creation.time": encode_varint(0),
        "rocksdb.filter.size": encode_varint(0),
        "rocksdb.fixed.key.length": encode_varint(0),
        "rocksdb.format.version": encode_varint(0),
        "rocksdb.merge.operator": b"nullptr",
        "rocksdb.oldest.key.time": encode_varint(0),
        "rocksdb.prefix.extractor.name": b"nullptr",
        "rocksdb.property.collectors": b"[]",
        names.DELETED_KEYS: encode_varint(0),
        names.MERGE_OPERANDS: encode_varint(0),
        names.NUM_RANGE_DELETIONS: encode_varint(0),
    }
    return encode_entries((name.encode(), value) for name, value in sorted(properties.items()))


_ENTRY_BESIDE_KEY = 1 + 5 + 1 + 10 + 10 + 4
"""Maximum bytes of an index entry beside its key: three lengths, offset, size, and its place among the restarts."""
_COUNT = 4


class IndexBuilder:
    """Collects data blocks, and builds the index block of format version 2 to 5 at the end; every entry is a restart."""

    def __init__(self, format_version: int) -> None:
        self.user_keys = format_version >= 3
        self.deltas = format_version >= 4
        self._separators = bytearray()
        self._ends: list[int] = []
        self._sizes: list[int] = []

    @property
    def blocks(self) -> int:
        """Data blocks so far."""
        return len(self._sizes)

    def add(self, separators: bytes, ends: Iterable[int], sizes: Iterable[int]) -> None:
        """Add data blocks of these sizes, without their trailers, that follow the last one.

        `separators` has for each an internal key at or after its last one and before the next block's first, up to
        its end among `ends`.
        """
        before = len(self._separators)
        self._separators += separators
        self._ends += [before + end for end in ends]
        self._sizes += sizes

    def encode(self) -> bytes:
        """The block's contents; there is at least one entry."""
        out = np.empty(len(self._separators) + self.blocks * _ENTRY_BESIDE_KEY + _COUNT, np.uint8)
        separators = columns.from_bytes(bytes(self._separators))
        ends, sizes = np.array(self._ends, np.int64), np.array(self._sizes, np.int64)
        return out[: encode.encode_index(out, separators, ends, sizes, self.user_keys, self.deltas)].tobytes()
