"""Parquet files of records: reads any with the right column names, writes files that any tool reads."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tikv_br.formats.columns import SCHEMA, slices
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsupportedFormat
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.rows import RowOrder, within
from tikv_br.formats.sst.coding import decode_varint
from tikv_br.formats.sst.compression import MAX_BLOCK_SIZE, Compression
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
        for group in slices(rows, group_rows):
            writer.append(group)
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


_BATCH_BYTES = 64 << 20
"""Bytes of a batch of rows, about; a few pages more if their rows differ much in size."""
_OVERHEAD = 64
"""Bytes of a row in memory besides key and value, at most."""


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

    def __init__(self, source: RandomAccess, most: int | None = None) -> None:
        """``most`` are the bytes of keys and values that are recorded of the file: reading ends with `DamagedBytes` if it has more."""
        self._most, self._seen = most, 0
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
        self._seen = 0
        with _Explained():
            size = self._batch_rows(group)
        batches = self._file.iter_batches(size, row_groups=[group], columns=names, use_threads=False)
        left = self._file.metadata.row_group(group).num_rows
        while True:
            with _Explained():
                batch = next(batches, None)
            if batch is None:
                break
            left -= batch.num_rows
            self._seen += max(batch.nbytes - _OVERHEAD * batch.num_rows, 0)
            if self._most is not None and self._seen > self._most:
                raise DamagedBytes(
                    f"a row group has more than the {self._most:,} bytes of keys and values that are recorded of the file"
                )
            wanted = within(_as_records(batch), span)
            if wanted.num_rows:
                yield wanted
        if left:
            raise DamagedBytes(f"row group {group} has {left} rows fewer than the footer says")

    def _batch_rows(self, group: int) -> int:
        """Rows that need about `_BATCH_BYTES` together, by the headers of the pages: what the footer says of them may be wrong.

        A value that a page has once may be the value of every row (dictionaries), or begin every row (DELTA_BYTE_ARRAY). Then rows
        count with the size of the largest such page.
        """
        meta = self._file.metadata.row_group(group)
        plain = multiplied = 0
        for number in range(meta.num_columns):
            column = meta.column(number)
            if column.path_in_schema not in {"key", "value"}:
                continue
            start, length = _column_extent(column)
            largest = 0
            for page in page_headers(self._window.view(start, length)):
                if page.size > MAX_BLOCK_SIZE:
                    raise DamagedBytes(
                        f"a page of {page.size:,} bytes, of which a reader takes at most {MAX_BLOCK_SIZE:,}"
                    )
                plain += page.size
                largest = max(largest, page.size if page.is_multiplied else 0)
            multiplied += largest
        average = plain // max(meta.num_rows, 1) + multiplied
        return int(min(max(_BATCH_BYTES // max(average, 1), 1), BATCH_ROWS))

    def _may_hold(self, group: int, span: KeyRange) -> bool:
        column = self._file.schema_arrow.names.index("key")
        statistics = self._file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            return True
        least, most = (value if isinstance(value, bytes) else None for value in (statistics.min, statistics.max))
        return (most is None or most >= span.start) and (least is None or not span.end or least < span.end)


def _extent(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Offset and length of the bytes of a row group."""
    extents = [_column_extent(group.column(number)) for number in range(group.num_columns)]
    start = min(first for first, _ in extents)
    return start, max(map(sum, extents)) - start


def _column_extent(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
    return start, column.total_compressed_size


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


_DECODED_BYTES = 256 << 20
"""Bytes that the rows of a batch need at most while they are decoded, if each has the largest value of a dictionary."""


def bounded_batches(
    opened: IO[bytes] | pa.NativeFile, file: pq.ParquetFile, columns: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a foreign file in batches of bounded size, however often a page's value is repeated. Raises `DamagedBytes`, and as Arrow does.

    ``opened`` is what ``file`` reads. Sizes are those that footer and dictionaries say.
    """
    chosen = range(file.metadata.num_row_groups) if groups is None else groups
    # A group without rows may have no page whose header could be read.
    filled = [group for group in chosen if file.metadata.row_group(group).num_rows]
    for group, rows in [(group, _rows_at_once(opened, file.metadata.row_group(group), columns)) for group in filled]:
        held: list[pa.RecordBatch] = []
        room, left = _BATCH_BYTES, BATCH_ROWS
        for batch in file.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False):
            held.append(batch)
            room -= batch.nbytes
            left -= batch.num_rows
            if room <= 0 or left <= 0:
                yield _joined(held)
                held, room, left = [], _BATCH_BYTES, BATCH_ROWS
        if held:
            yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of several; a single one is not copied."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _rows_at_once(opened: IO[bytes] | pa.NativeFile, group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    plain = multiplied = 0
    for chunk in map(group.column, range(group.num_columns)):
        if chunk.path_in_schema.partition(".")[0] not in columns or chunk.physical_type != "BYTE_ARRAY":
            continue
        plain += chunk.total_uncompressed_size
        if "DELTA_BYTE_ARRAY" in chunk.encodings:
            multiplied += chunk.total_uncompressed_size
        begin = _column_extent(chunk)[0]
        opened.seek(begin)
        page, end = _page_header(memoryview(opened.read(_HEADER_BYTES)))
        if page.is_multiplied:
            opened.seek(begin + end)
            multiplied += _longest_value(opened, page, chunk.compression)
    average = max(plain // max(group.num_rows, 1), 1)
    return int(max(min(_BATCH_BYTES // average, _DECODED_BYTES // max(multiplied, 1), BATCH_ROWS), 1))


def _longest_value(opened: IO[bytes] | pa.NativeFile, page: Page, compression: str) -> int:
    """The longest value of a small dictionary, which ``opened`` is at, in bytes; of another page its size, which no value exceeds."""
    if not page.is_dictionary or max(page.size, page.stored) > _SMALL_DICTIONARY_BYTES:
        return page.size
    stored = opened.read(page.stored)
    if compression != "UNCOMPRESSED":
        try:
            stored = pa.decompress(stored, page.size, _CODECS.get(compression, compression.lower()), asbytes=True)
        except (pa.ArrowException, ValueError, OSError):
            return page.size
    at = longest = 0
    while at + 4 <= len(stored):
        length = int.from_bytes(stored[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(longest, page.size)


_SMALL_DICTIONARY_BYTES = 4 << 20
"""Writers stop filling a dictionary at 1 MiB by default."""
_CODECS = {"LZ4": "lz4_raw"}


class Page(NamedTuple):
    """Header of a page."""

    size: int
    """Size before compression, in bytes."""
    stored: int
    """Size in the file, without the header."""
    is_dictionary: bool
    is_multiplied: bool
    """True if rows may share its values: a dictionary, or a page of DELTA_BYTE_ARRAY."""


_DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 2, 7
_HEADER_BYTES = 1 << 10
"""Bytes of a dictionary's header, at most."""
_PAGE_FIELDS = {5: 2, 8: 4}
"""Fields of a header that describe data pages of version 1 and 2, and the field of theirs with the encoding."""


def page_headers(chunk: memoryview) -> Iterator[Page]:
    """The headers of a column chunk, as Arrow finds them. Raises `DamagedBytes`."""
    at = 0
    while at < len(chunk):
        page, end = _page_header(chunk[at:])
        at += end + page.stored
        if at > len(chunk):
            raise DamagedBytes("a page is longer than its column")
        yield page


def _page_header(data: memoryview) -> tuple[Page, int]:
    """The header at the beginning, and its length. Raises `DamagedBytes`."""
    try:
        header, end = _thrift_struct(data, 0)
        kind, size, stored = header[1], header[2], header[3]
        encodings = [header[field][inner] for field, inner in _PAGE_FIELDS.items() if field in header]
    except (IndexError, KeyError, TypeError, RecursionError, DamagedBytes):
        raise DamagedBytes("a page has no valid header") from None
    if stored < 0 or size < 0:
        raise DamagedBytes("a page has a negative length")
    is_dictionary = kind == _DICTIONARY_PAGE
    return Page(size, stored, is_dictionary, is_dictionary or _DELTA_BYTE_ARRAY in encodings), end


def _thrift_struct(data: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact protocol, by field: numbers and structs, others as None; and the position after it."""
    fields: dict[int, Any] = {}
    field = 0
    while (head := data[at]) != 0:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _thrift_number(data, at)
        fields[field], at = _thrift_value(data, at, head & 15)
    return fields, at + 1


def _thrift_value(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:  # a boolean: the kind is the value
            return kind == 1, at
        case 3:
            return data[at], at + 1
        case 4 | 5 | 6:
            return _thrift_number(data, at)
        case 7:
            return None, at + 8
        case 8:
            length, at = decode_varint(data, at, bits=32)
            return None, at + length
        case 12:
            return _thrift_struct(data, at)
    raise DamagedBytes(f"a field of kind {kind}")  # a list or map, which headers do not have


def _thrift_number(data: memoryview, at: int) -> tuple[int, int]:
    value, at = decode_varint(data, at)
    return value >> 1 ^ -(value & 1), at


class _Explained:
    """Turns what Arrow says of bytes into what is wrong with them; errors of the source pass."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | OSError | UnicodeDecodeError):
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

    def view(self, start: int, length: int) -> memoryview:
        held = start - self._start
        if 0 <= held <= len(self._held) - length:
            return self._held[held : held + length]
        return memoryview(read_exactly(self._source, start, length))

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
