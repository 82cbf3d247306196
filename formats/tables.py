"""Tables of records for other tools: Parquet, CSV and JSON lines, written batch by batch.

In Parquet keys and values are bytes. In CSV and JSON lines they are text in one of the forms of `tikv_br.formats.keys.text`: a table
of 256 texts, one for each byte, is looked up for a whole column at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tikv_br.formats import columns
from tikv_br.formats.columns import Bytes, Offsets
from tikv_br.formats.errors import FormatError, UnsupportedFormat
from tikv_br.formats.keys.text import FORMS, format_key, show_key
from tikv_br.formats.parquet import SinkFile

Sink = Callable[[bytes], object]
GROUP_BYTES = 16 << 20
"""Approximate bytes of keys and values in a row group of Parquet."""
GROUP_ROWS = 1 << 18
SLICE_BYTES = 1 << 20
"""Approximate bytes of keys and values that become text at once: the text and what it is made of take some 20 times as much."""


class TableFormat(enum.StrEnum):
    """The format of a table's files."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"

    @property
    def suffix(self) -> str:
        return f".{self.value}"


class UnfitText(FormatError):
    """A key or value is not text in UTF-8."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options of a table. Raises `UnsupportedFormat` for an unknown form of text."""

    format: TableFormat = TableFormat.PARQUET
    form: str = "hex"
    """Text form of keys and values: ``raw`` (UTF-8), ``hex`` or ``escaped``. Not used by Parquet."""
    expire_ts: bool = False
    """Add a column for the expiry: seconds since the epoch, null = never."""
    ts: bool = False
    """Add a column for the timestamp."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UnsupportedFormat(f"unknown format of keys and values {self.form!r}: {', '.join(FORMS)}")

    @property
    def columns(self) -> tuple[str, ...]:
        chosen = (("expire_ts", self.expire_ts), ("ts", self.ts))
        return ("key", "value", *(name for name, wanted in chosen if wanted))


class TableWriter(Protocol):
    """Writes one table to a sink, which gets its bytes in order. One thread at a time.

    After an error the table is incomplete and must be discarded.
    """

    def append(self, records: pa.RecordBatch) -> None:
        """Add rows of ``tikv_br.formats.columns.SCHEMA``. Raises `UnfitText`, and what the sink raises."""

    def finish(self) -> None:
        """Write the rest. A table may have no rows."""

    def abort(self) -> None:
        """Write nothing more to the sink."""


def open_table(sink: Sink, options: TableOptions) -> TableWriter:
    return ParquetTable(sink, options) if options.format is TableFormat.PARQUET else TextTable(sink, options)


_TYPES = {
    "key": pa.field("key", pa.large_binary(), nullable=False),
    "value": pa.field("value", pa.large_binary(), nullable=False),
    "expire_ts": pa.field("expire_ts", pa.uint64()),
    "ts": pa.field("ts", pa.uint64(), nullable=False),
}


def _column(records: pa.RecordBatch, name: str) -> pa.Array:
    """A column; the expiry of a row that never expires is null."""
    if name != "expire_ts":
        return records[name]
    expire_ts = columns.numbers(records[name])
    return pa.array(expire_ts, mask=expire_ts == 0)


class ParquetTable(TableWriter):
    """A Parquet file."""

    def __init__(self, sink: Sink, options: TableOptions) -> None:
        self._names = options.columns
        self._schema = pa.schema([_TYPES[name] for name in self._names])
        self._group: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._file = SinkFile(sink)
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            use_dictionary=list(self._names[2:]),
            write_statistics=["key", *self._names[2:]],
            write_page_index=True,
        )

    def append(self, records: pa.RecordBatch) -> None:
        found = [_column(records, name) for name in self._names]
        self._group.append(pa.RecordBatch.from_arrays(found, schema=self._schema))
        self._rows += records.num_rows
        self._bytes += records.nbytes
        if self._bytes >= GROUP_BYTES or self._rows >= GROUP_ROWS:
            self._end_group()

    def finish(self) -> None:
        self._end_group()
        self._writer.close()

    def abort(self) -> None:
        """Write nothing more: Arrow would end the file when the writer is collected."""
        self._file.sink = None
        self._writer.close()

    def _end_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._group, self._schema), row_group_size=self._rows)
        self._group, self._rows, self._bytes = [], 0, 0


class ByteTexts:
    """Replaces each byte of a column by a text of its own."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """``texts``: 256 of them, none empty."""
        self._lengths = np.array([len(text) for text in texts], np.uint8)
        self._width = int(self._lengths.max())
        self._table = np.frombuffer(b"".join(text.ljust(self._width, b"\0") for text in texts), np.uint8)
        self._table = self._table.reshape(256, self._width)
        self._keeps_short = all(len(text) > 1 or text == bytes([byte]) for byte, text in enumerate(texts))
        """True if every byte with a text of one byte is that text."""

    def encode(self, column: pa.LargeBinaryArray) -> pa.LargeStringArray:
        """The texts of the column's rows. They must be valid UTF-8."""
        offsets, data = columns.view(column)
        data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
        if (self._lengths == self._width).all():
            return _strings(offsets * self._width, np.take(self._table, data, axis=0))
        lengths = np.take(self._lengths, data)
        if self._keeps_short and (not len(data) or lengths.max() == 1):
            return _strings(offsets, data)
        ends = np.zeros(len(data) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        texts = np.take(self._table, data, axis=0)
        return _strings(ends[offsets], texts[np.arange(self._width, dtype=np.uint8) < lengths[:, None]])


def _strings(offsets: Offsets, data: Bytes) -> pa.LargeStringArray:
    return columns.build(offsets, np.ascontiguousarray(data).reshape(-1)).cast(pa.large_string(), safe=False)


def _byte_texts(options: TableOptions) -> ByteTexts:
    """Return the text of each byte in a file: its form, with the format's escapes of quotes and control characters."""
    single = [bytes([byte]) for byte in range(256)]
    forms = single if options.form == "raw" else [format_key(byte, options.form).encode() for byte in single]
    if options.format is TableFormat.CSV:
        return ByteTexts([text.replace(b'"', b'""') for text in forms])
    return ByteTexts([b"".join(_json_byte(byte) for byte in text) for text in forms])


def _json_byte(byte: int) -> bytes:
    """A byte of UTF-8 inside a string of JSON."""
    if byte in b'"\\':
        return b"\\" + bytes([byte])
    return bytes([byte]) if byte >= 0x20 else f"\\u{byte:04x}".encode()


class TextTable(TableWriter):
    """CSV (RFC 4180: a header, quoted keys and values) or JSON lines, in UTF-8.

    A line is joined of columns and the constant text between them; the buffer of the joined column is the file's content.
    """

    def __init__(self, sink: Sink, options: TableOptions) -> None:
        self._sink: Sink | None = sink
        self._options = options
        self._texts = _byte_texts(options)
        self._null = "" if options.format is TableFormat.CSV else "null"
        self._between = _constants(options)
        if options.format is TableFormat.CSV:
            self._write((",".join(options.columns) + "\n").encode())

    def append(self, records: pa.RecordBatch) -> None:
        if not records.num_rows:
            return
        step = max(1, records.num_rows * SLICE_BYTES // max(records.nbytes, 1))
        for part in columns.slices(records, step):
            self._append(part)

    def finish(self) -> None:
        """All is written."""

    def abort(self) -> None:
        self._sink = None

    def _append(self, records: pa.RecordBatch) -> None:
        if self._options.form == "raw":
            _require_utf8(records)
        parts: list[pa.Array | pa.Scalar] = [_text(self._between[0])]
        for name, after in zip(self._options.columns, self._between[1:], strict=True):
            parts += [self._column(records, name), _text(after)]
        lines = pc.binary_join_element_wise(*parts, _text(""))
        offsets, data = columns.view(lines.cast(pa.large_binary()))
        self._write(data[offsets[0] : offsets[-1]].tobytes())

    def _column(self, records: pa.RecordBatch, name: str) -> pa.LargeStringArray:
        if name in {"key", "value"}:
            return self._texts.encode(records[name])
        return pc.fill_null(_column(records, name).cast(pa.large_string()), self._null)

    def _write(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink(data)


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _constants(options: TableOptions) -> list[str]:
    """Return the constant text before the first column, between columns, and after the last."""
    names = options.columns
    if options.format is TableFormat.CSV:
        return [
            '"',
            '","',
            *('",' if at == 2 else "," for at in range(2, len(names))),
            '"\n' if len(names) == 2 else "\n",
        ]
    numbers = [f'{"" if at > 2 else chr(34)},"{names[at]}":' for at in range(2, len(names))]
    return ['{"key":"', '","value":"', *numbers, '"}\n' if len(names) == 2 else "}\n"]


def _require_utf8(records: pa.RecordBatch) -> None:
    """Raise `UnfitText`, which names the key of the first row that is not UTF-8."""
    for name in ("key", "value"):
        try:
            records[name].cast(pa.large_string())
        except pa.ArrowInvalid:
            row = _first_unfit(records[name])
            key = show_key(records["key"][row].as_py(), "escaped")
            what = f"the key {key}" if name == "key" else f"the value of key {key}"
            raise UnfitText(f"{what} is not valid UTF-8") from None


def _first_unfit(column: pa.LargeBinaryArray) -> int:
    """The first row that is not UTF-8, by halves; there is one."""
    first, count = 0, len(column)
    while count > 1:
        half = count // 2
        try:
            column.slice(first, half).cast(pa.large_string())
        except pa.ArrowInvalid:
            count = half
        else:
            first, count = first + half, count - half
    return first
