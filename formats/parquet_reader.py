"""Reads records from Parquet files, ours or anyone's: columns go by their names, and only `key` and `value` must be there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from formats.errors import DamagedBytes, UnsupportedFormat
from formats.records import SCHEMA
from formats.rows import within
from formats.sst.source import RandomAccess, TailCache, read_exactly

BATCH_ROWS = 65_536
_MAGIC = b"PAR1"


class ParquetReader:
    """A file opened; rows by one read a row group.

    Any use raises `DamagedBytes` where the bytes contradict themselves, `UnsupportedFormat` for columns that are no
    records, and what the source raises. One thread at a time.
    """

    def __init__(self, source: RandomAccess) -> None:
        self._window = _Window(TailCache(source))
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
        """How many rows the footer says there are."""
        return int(self._file.metadata.num_rows)

    @property
    def metadata(self) -> dict[str, str]:
        """The file's key-value metadata."""
        pairs = self._file.metadata.metadata or {}
        return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs.items()}

    def records(self, start: bytes = b"", end: bytes = b"") -> Iterator[pa.RecordBatch]:
        """The rows with keys in [start, end), where an empty end is no end, in file order as batches of ``SCHEMA``.

        Row groups whose statistics exclude the range are not read.
        """
        for group in range(self._file.metadata.num_row_groups):
            with _Explained():
                wanted = self._may_hold(group, start, end)
                if wanted:
                    self._window.load(*_extent(self._file.metadata.row_group(group)))
            if wanted:
                yield from self._group(group, start, end)

    def _group(self, group: int, start: bytes, end: bytes) -> Iterator[pa.RecordBatch]:
        names = [name for name in SCHEMA.names if name in self._file.schema_arrow.names]
        batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=names, use_threads=False)
        left = self._file.metadata.row_group(group).num_rows
        while True:
            with _Explained():
                batch = next(batches, None)
            if batch is None:
                break
            left -= batch.num_rows
            wanted = within(_as_records(batch), start, end)
            if wanted.num_rows:
                yield wanted
        if left:
            raise DamagedBytes(f"row group {group} has {left} rows less than the footer says")

    def _may_hold(self, group: int, start: bytes, end: bytes) -> bool:
        column = self._file.schema_arrow.names.index("key")
        statistics = self._file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            return True
        least, most = (value if isinstance(value, bytes) else None for value in (statistics.min, statistics.max))
        return (most is None or most >= start) and (least is None or not end or least < end)


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
            raise DamagedBytes(f"no sound Parquet file: {error}") from None


class _Window(io.RawIOBase):
    """A source as Arrow wants it: a file. One stretch of it at a time is held ready."""

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
