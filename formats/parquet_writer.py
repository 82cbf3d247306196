"""Writes records as Parquet, as a stream of bytes, for any tool to read.

Rows are sorted by key and cut into row groups with statistics of the key, expiry and timestamp columns, so that readers of
a key range skip the rest.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from formats.errors import FormatError, UnsupportedFormat
from formats.records import SCHEMA
from formats.rows import RowOrder
from formats.sst.compression import Compression

Sink = Callable[[bytes], object]
METADATA_PREFIX = "tikv-br."
"""How the names of our key-value metadata begin."""
_SMALL_COLUMNS = ["expire_ts", "ts"]
"""Of few different values each, mostly."""


@dataclass(frozen=True, slots=True)
class ParquetOptions:
    """How to write. Raises `UnsupportedFormat` for a level that the compression does not have."""

    compression: Compression = Compression.ZSTD
    level: int = 0
    """0 = the compression's default."""
    group_bytes: int = 16 << 20
    """Keys and values of a row group, about: what a reader takes at once, and skips at once."""
    group_rows: int = 1 << 18

    def __post_init__(self) -> None:
        if self.level and self.level not in self.compression.levels:
            raise UnsupportedFormat(f"compression {self.compression.label} has no level {self.level}")


class ParquetWriter:
    """Writes one file to `sink`, which gets its bytes in order and is neither flushed nor closed.

    One thread at a time. After an error the file is incomplete and to be thrown away.
    """

    def __init__(self, sink: Sink, options: ParquetOptions = ParquetOptions()) -> None:
        self._options = options
        self._order = RowOrder()
        self._group: list[pa.RecordBatch] = []
        self._group_rows = self._group_bytes = self._rows = 0
        self._stream = _Stream(sink)
        self._writer = pq.ParquetWriter(
            self._stream,
            SCHEMA,
            compression=options.compression.label.upper(),
            compression_level=options.level or None,
            use_dictionary=_SMALL_COLUMNS,
            write_statistics=["key", *_SMALL_COLUMNS],
            write_page_index=True,
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(SCHEMA.get_field_index("key"))],
        )

    def append(self, records: pa.RecordBatch) -> None:
        """Add rows of ``SCHEMA``, sorted by key and all after those before. Raises `UnsortedKeys`, and what the sink raises."""
        self._order.signs(records)
        self._group.append(records)
        self._group_rows += records.num_rows
        self._group_bytes += records.nbytes
        if self._group_bytes >= self._options.group_bytes or self._group_rows >= self._options.group_rows:
            self._end_group()

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Write the rest of the file, with ``metadata`` under `METADATA_PREFIX`.

        Raises `FormatError` when there are no rows: a file is there for rows.
        """
        self._end_group()
        if not self._rows:
            raise FormatError("a file without rows")
        self._writer.add_key_value_metadata({METADATA_PREFIX + name: text for name, text in (metadata or {}).items()})
        self._writer.close()

    def abort(self) -> None:
        """Give nothing more to the sink: Arrow would end the file when it is forgotten."""
        self._stream.sink = None
        self._writer.close()

    def _end_group(self) -> None:
        if self._group_rows:
            self._writer.write_table(pa.Table.from_batches(self._group, SCHEMA), row_group_size=self._group_rows)
            self._rows += self._group_rows
        self._group, self._group_rows, self._group_bytes = [], 0, 0


class _Stream(io.RawIOBase):
    """The sink as Arrow wants it: a file that can only be written."""

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        if self.sink is not None:
            self.sink(bytes(data))
        return len(data)
