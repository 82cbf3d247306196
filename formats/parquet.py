"""Parquet files of records: reads any with the right column names, writes files that any tool reads."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsupportedFormat
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.rows import RowOrder, within
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.source import RandomAccess, TailCache, read_exactly

Sink = Callable[[bytes], object]
METADATA_PREFIX = "tikv-br."
"""Prefix of the names of our key-value metadata."""
_SMALL_COLUMNS = ["expire_ts", "ts"]
"""Columns that mostly have few different values."""


@dataclass(frozen=True, slots=True)
class ParquetOptions:
    """Options of a writer. Raises `UnsupportedFormat` for a level that the compression does not have."""

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

    One thread at a time. After an error the file is incomplete and must be discarded.
    """

    def __init__(self, sink: Sink, options: ParquetOptions = ParquetOptions()) -> None:
        self._options = options
        self._order = RowOrder()
        self._group: list[pa.RecordBatch] = []
        self._group_rows = self._group_bytes = self._rows = 0
        self._stream = SinkFile(sink)
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
        """Write nothing more to the sink: Arrow would end the file when the writer is collected."""
        self._stream.sink = None
        self._writer.close()

    def _end_group(self) -> None:
        if self._group_rows:
            self._writer.write_table(pa.Table.from_batches(self._group, SCHEMA), row_group_size=self._group_rows)
            self._rows += self._group_rows
        self._group, self._group_rows, self._group_bytes = [], 0, 0


def write_rows(sink: Sink, rows: pa.RecordBatch, group_rows: int) -> None:
    """Write sorted rows as one file, in row groups of `group_rows`. Raises as `ParquetWriter`."""
    writer = ParquetWriter(sink, ParquetOptions(group_rows=group_rows))
    try:
        for first in range(0, rows.num_rows, group_rows):
            writer.append(rows.slice(first, group_rows))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


class SinkFile(io.RawIOBase):
    """The sink as Arrow wants it: a file that can only be written."""

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink
        """None: what is written is dropped."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        if self.sink is not None:
            self.sink(bytes(data))
        return len(data)


BATCH_ROWS = 65_536
_MAGIC = b"PAR1"
_READ_BYTES = 8 << 20
"""Bytes asked of the source at once, unless a row group is larger."""


class RowGroup(NamedTuple):
    """Metadata of a row group in the footer."""

    first_key: bytes
    """Empty, like `last_key`, if it is not recorded."""
    last_key: bytes
    size: int
    """Size before compression, in bytes."""


class ParquetReader:
    """Reader of one file, by rows or by row groups.

    Any use raises `DamagedBytes` where the bytes contradict themselves, `UnsupportedFormat` for columns that are no
    records, and what the source raises. One thread at a time.
    """

    def __init__(self, source: RandomAccess) -> None:
        self._window = SourceFile(TailCache(source))
        with _Explained():
            self._file = pq.ParquetFile(self._window, page_checksum_verification=True)
        meta = self._file.metadata
        if sum(meta.row_group(number).num_rows for number in range(meta.num_row_groups)) != meta.num_rows:
            raise DamagedBytes("the row groups do not add up to the rows of the file")
        missing = {"key", "value"} - set(self._file.schema_arrow.names)
        if missing:
            raise UnsupportedFormat(f"no column {', '.join(sorted(missing))}")

    @property
    def rows(self) -> int:
        """Number of rows according to the footer."""
        return int(self._file.metadata.num_rows)

    @property
    def metadata(self) -> dict[str, str]:
        """The file's key-value metadata."""
        pairs = self._file.metadata.metadata or {}
        return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs.items()}

    def records(self, span: KeyRange = EVERY_KEY) -> Iterator[pa.RecordBatch]:
        """The rows with user keys in a range, in file order as batches of ``SCHEMA``.

        Row groups whose statistics exclude the range are not read; of the others, small neighbours are read at once.
        """
        with _Explained():
            numbers = range(self._file.metadata.num_row_groups)
            extents = {at: _extent(self._file.metadata.row_group(at)) for at in numbers if self._may_hold(at, span)}
        held = -1
        for group, (offset, _) in extents.items():
            if group > held:
                held = group
                while held + 1 in extents and sum(extents[held + 1]) - offset <= _READ_BYTES:
                    held += 1
                with _Explained():
                    self._window.load(offset, sum(extents[held]) - offset)
            yield from self._group(group, span)

    def groups(self) -> list[RowGroup]:
        """The row groups, in file order."""
        column = self._file.schema_arrow.names.index("key")
        found = [self._file.metadata.row_group(number) for number in range(self._file.metadata.num_row_groups)]
        keys = [group.column(column).statistics for group in found]
        return [
            RowGroup(each.min, each.max, group.total_byte_size)
            if each is not None and each.has_min_max
            else RowGroup(b"", b"", group.total_byte_size)
            for each, group in zip(keys, found, strict=True)
        ]

    def _group(self, group: int, span: KeyRange) -> Iterator[pa.RecordBatch]:
        names = [name for name in SCHEMA.names if name in self._file.schema_arrow.names]
        batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=names, use_threads=False)
        left = self._file.metadata.row_group(group).num_rows
        while True:
            with _Explained():
                batch = next(batches, None)
            if batch is None:
                break
            left -= batch.num_rows
            wanted = within(_as_records(batch), span)
            if wanted.num_rows:
                yield wanted
        if left:
            raise DamagedBytes(f"row group {group} has {left} rows fewer than the footer says")

    def _may_hold(self, group: int, span: KeyRange) -> bool:
        column = self._file.schema_arrow.names.index("key")
        statistics = self._file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            return True
        least, most = (value if isinstance(value, bytes) else None for value in (statistics.min, statistics.max))
        return (most is None or most >= span.start) and (least is None or not span.end or least < span.end)


def _extent(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Offset and length of the bytes of a row group."""
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in columns]
    ends = [start + each.total_compressed_size for start, each in zip(starts, columns, strict=True)]
    return min(starts), max(ends) - min(starts)


def _as_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns in the types of ``SCHEMA``; what is not there is 0 or false. Raises `UnsupportedFormat`."""
    columns = []
    for field in SCHEMA:
        if field.name not in batch.schema.names:
            columns.append(pa.repeat(pa.scalar(0, pa.uint8()).cast(field.type), batch.num_rows))
            continue
        column = batch.column(field.name)
        if column.null_count:
            raise UnsupportedFormat(f"column {field.name} has nulls")
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException as error:
            raise UnsupportedFormat(f"column {field.name} of {column.type}: {error}") from None
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class _Explained:
    """Turns what Arrow says of bytes into what is wrong with them; errors of the source pass."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | OSError):
            raise DamagedBytes(f"not a valid Parquet file: {error}") from None


class SourceFile(io.RawIOBase):
    """A source as a file, as Arrow expects. One range of it is prefetched."""

    def __init__(self, source: TailCache) -> None:
        self._source = source
        self._at = self._start = 0
        self._held = memoryview(b"")

    def load(self, start: int, length: int) -> None:
        """Read a stretch in one go; from the very beginning where only the file's magic lies before it."""
        first = 0 if start == len(_MAGIC) else start
        self._start, self._held = first, memoryview(read_exactly(self._source, first, start - first + length))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        length = min(len(buffer), max(self._source.size - self._at, 0))
        held = self._at - self._start
        if 0 <= held <= len(self._held) - length:
            buffer[:length] = self._held[held : held + length]
        else:
            buffer[:length] = read_exactly(self._source, self._at, length)
        self._at += length
        return int(length)
