"""Writes block-based tables as RocksDB's own writer for ingestion does, as a stream of bytes.

Rows come as Arrow columns or as pages of RawScan. Kernels make blocks of them, and where they can compress them and
seal them with checksums; elsewhere a block at a time passes through Python for that. The order is data, index, properties, metaindex, footer. There is no filter
block: stores build one when they compact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from formats import columns
from formats.checksum import Folded
from formats.errors import FormatError, UnsupportedFormat
from formats.rawscan import RawPage
from formats.sst import encode
from formats.sst import properties as names
from formats.sst.block import encode_entries
from formats.sst.block_builder import BlockBuilder
from formats.sst.block_checksum import ChecksumType
from formats.sst.block_sink import BlockSink, Sink
from formats.sst.compression import MAX_BLOCK_SIZE, Compression
from formats.sst.encode_rows import encode_rows
from formats.sst.footer import TRAILER_SIZE, Footer
from formats.sst.index_builder import ENTRY_ESTIMATE, IndexBuilder
from formats.sst.packer import packer
from formats.sst.page_form import PageForm

_VERSIONS = range(2, 6)
_TAIL_ESTIMATE = 1200
"""Bytes of properties, metaindex and footer, about."""


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
        checksum = ChecksumType[options.checksum.upper()]
        self._out = BlockSink(sink, options.compression, options.level, checksum)
        self._options = options
        self._index = IndexBuilder(options.format_version)
        blocks = packer(self._out, self._index, options.compression, options.level)
        self._builder = BlockBuilder(blocks, options.block_size, options.restart_interval)
        self._first_key: bytes | None = None

    @property
    def size_estimate(self) -> int:
        """Bytes of the file if it ended now, blocks that wait counted before compression."""
        index = self._index.separator_bytes + self._index.blocks * ENTRY_ESTIMATE
        return self._out.offset + self._builder.waiting_bytes + index + _TAIL_ESTIMATE

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of ``STORAGE_SCHEMA``, sorted by key and all after those before.

        Raises `UnsortedKeys`, `UnsupportedFormat` for a row larger than any store takes, and what the sink raises.
        """
        if not rows.num_rows:
            return
        keys, values = columns.view(rows["key"]), columns.view(rows["value"])
        if self._first_key is None:
            self._first_key = rows["key"][0].as_py()
        longest_key = int(np.diff(keys[0]).max())
        self._builder.run(lambda blocks, packing: encode_rows(blocks, packing, *keys, *values), longest_key)

    def append_page(self, page: RawPage, form: PageForm) -> Folded:
        """Add the rows of a page of RawScan; what their checksum is taken of, over user keys and user values.

        Raises as `append` does, and `DamagedBytes` for a key outside of the keyspace.
        """
        if self._first_key is None and page.rows:
            self._first_key = form.storage_key(page.first_key)
        folded, odd = np.zeros(page.longest, np.uint8), np.zeros(page.longest + 1, np.bool_)
        self._builder.run(
            lambda blocks, packing: form.encode(blocks, packing, page.data, folded, odd), form.longest_key(page)
        )
        return Folded(folded, odd, page.rows, page.key_bytes + page.value_bytes - page.rows * len(form.source.prefix))

    def finish(self) -> SstSummary:
        """Write the rest of the file. Raises `FormatError` when there are no rows: no store takes such a file."""
        if self._first_key is None:
            raise FormatError("a table without rows")
        self._builder.finish()
        data_end = self._out.offset
        index_block = self._index.encode()
        index = self._out.write(index_block)
        properties = self._out.write(self._encode_properties(data_end, len(index_block)))
        metaindex = self._out.write(encode_entries([(names.BLOCK_NAME.encode(), properties.encode())]))
        footer = Footer(self._options.format_version, self._out.checksum, metaindex, index)
        self._out.end(footer.encode())
        return SstSummary(
            size=self._out.offset,
            tail_offset=data_end,
            entries=self._builder.entries,
            data_blocks=self._index.blocks,
            first_key=self._first_key,
            last_key=self._builder.last_key,
            raw_key_size=self._raw_key_size,
            raw_value_size=self._builder.value_bytes,
        )

    @property
    def _raw_key_size(self) -> int:
        return self._builder.key_bytes + encode.TRAILER_SIZE * self._builder.entries

    def _encode_properties(self, data_end: int, index_size: int) -> bytes:
        return names.encode_properties(
            {
                names.DATA_SIZE: data_end,
                names.INDEX_SIZE: index_size + TRAILER_SIZE,
                names.NUM_DATA_BLOCKS: self._index.blocks,
                names.NUM_ENTRIES: self._builder.entries,
                names.RAW_KEY_SIZE: self._raw_key_size,
                names.RAW_VALUE_SIZE: self._builder.value_bytes,
                names.TAIL_START: data_end,
            },
            compression=self._options.compression.property_name,
            index_of_user_keys=self._index.user_keys,
            index_of_deltas=self._index.deltas,
        )
