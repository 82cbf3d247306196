"""Reads CSV (RFC 4180) and JSON lines.

A file is cut into blocks that end with a row, and these are parsed by Arrow. Only blocks that have something wrong are read by Python's
csv or msgspec too, which tell the lines.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from tikv_br import records
from tikv_br.bulk_load.inputs import PART_BYTES, BadRow, FileInput, InputFile, InputPart, Rows, reading
from tikv_br.errors import UsageError
from tikv_br.tasks.inputs import (
    NOT_JSON,
    NOT_TEXT,
    OTHER_FIELDS,
    OTHER_TYPE,
    REPEATED_NAME,
    CsvDialect,
    Input,
    missing_column,
    unmapped_type,
)

BLOCK_BYTES = 16 << 20
"""Size of text that is parsed in one piece."""
MAX_ROW_BYTES = 1 << 30
"""Largest row: what a quote that is never closed may collect."""
_BOM = codecs.BOM_UTF8
_INVALID = "tikv_br.invalid"
codecs.register_error(_INVALID, lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]
_INTEGER = re.compile(rb"-?[0-9]+")
_MAX_INTEGER = 1 << 63


class _Utf8:
    """Text in another encoding, as UTF-8; what is not valid in it becomes bytes that are not valid in UTF-8."""

    def __init__(self, opened: IO[bytes], encoding: str) -> None:
        self._opened = opened
        self._decoder = codecs.getincrementaldecoder(encoding)(_INVALID)

    def read(self, size: int) -> bytes:
        """Return ``b""`` at the end only."""
        while data := self._opened.read(size):
            if text := self._decoder.decode(data):
                return text.encode("utf-8", "surrogatepass")
        return self._decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class _Block:
    file: InputFile
    line: int
    """Number of its first line."""
    data: bytes


Parse = Callable[[_Block], Rows]


@dataclass(frozen=True, slots=True)
class _Text:
    """The rows of a file."""

    file: InputFile
    dialect: CsvDialect
    parse: Parse
    header: bool = False
    """True if the first row is no data."""

    @property
    def tasks(self) -> int:
        return max(self.file.size // PART_BYTES, 1)

    def blocks(self) -> Iterator[Callable[[], Rows]]:
        skip = self.header
        for block in _blocks(self.file, self.dialect):
            rest = block
            if skip:
                first = next(_records(block.data, self.dialect), None)
                if first is None:
                    continue
                rest, skip = _Block(block.file, block.line + first.lines, block.data[first.end :]), False
            yield partial(self.parse, rest)


def _blocks(file: InputFile, dialect: CsvDialect, size: int = 0) -> Iterator[_Block]:
    """Blocks of whole rows, as UTF-8 and without a byte order mark. Raises `UsageError` for a quote that is out of place."""
    with reading(file), file.stream() as opened:
        text = opened if dialect.is_utf8 else _Utf8(opened, dialect.encoding)
        kept, line, wanted = b"", 1, size or BLOCK_BYTES
        is_first, is_last = True, False
        while not is_last:
            read = text.read(wanted)
            data, is_last = kept + read, not read
            if is_first and (len(data) >= len(_BOM) or is_last):
                data, is_first = data.removeprefix(_BOM), False
            plain = dialect.without_escapes(data)
            cut = 0 if is_first else len(data) if is_last else _last_row_end(plain, dialect.quote.encode())
            if cut:
                _check_quotes(file, line, plain[:cut], dialect)
                yield _Block(file, line, data[:cut])
                line += _lines(data[:cut])
            elif len(data) > MAX_ROW_BYTES:
                raise UsageError(f"{file.name}, line {line:,}: a row has more than {MAX_ROW_BYTES >> 20:,} MiB")
            kept = data[cut:]
            wanted = max(size or BLOCK_BYTES, len(kept))


def _lines(data: bytes) -> int:
    breaks = data.count(b"\n")
    return breaks + data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else breaks


def _last_row_end(data: bytes, quote: bytes) -> int:
    """Where the last whole row ends; 0 = nowhere. The data begin outside of quotes."""
    inside = bool(quote) and data.count(quote) % 2 == 1
    end = len(data)
    while True:
        place = data.rfind(b"\n", 0, end)
        place = max(place, data.rfind(b"\r", place + 1, min(end, len(data) - 1)))
        if place < 0:
            return 0
        inside ^= bool(quote) and data.count(quote, place, end) % 2 == 1
        if not inside:
            return place + 1
        end = place


def _check_quotes(file: InputFile, line: int, data: bytes, dialect: CsvDialect) -> None:
    """Refuse a quote within a field that does not begin with one, text behind a closing one, and one that is not closed."""
    if not dialect.quote or dialect.quote.encode() not in data:
        return
    signs = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(signs == ord(dialect.quote))
    opening, closing = quotes[::2], quotes[1::2]
    ends = np.zeros(256, np.bool_)
    ends[[ord(dialect.delimiter), ord("\r"), ord("\n")]] = True
    opens = (opening == 0) | ends[signs[opening - 1]]
    closes = (closing == len(signs) - 1) | ends[signs[np.minimum(closing + 1, len(signs) - 1)]]
    doubled = opening[1:] == closing[: len(opening) - 1] + 1
    opens[1:] |= doubled
    closes[: len(doubled)] |= doubled
    wrong = [places[~good][0] for places, good in ((opening, opens), (closing, closes)) if not good.all()]
    if len(opening) > len(closing):
        wrong.append(opening[-1])
    if wrong:
        raise UsageError(
            f"{file.name}, line {line + _lines(data[: min(wrong)]):,}: a quote ({dialect.quote}) that is not closed, or out of place: "
            "a field with a quote in it must be in quotes, and the quote doubled",
            hint="Correct the file, or pass its dialect: --csv-quote '' if quotes are plain text, --csv-escape, --csv-delimiter.",
        )


@dataclass(frozen=True, slots=True)
class _Record:
    """A row of CSV as Python's csv reads it."""

    line: int
    """Lines of the block before it."""
    lines: int
    """Lines of the block up to its end."""
    start: int
    end: int
    fields: list[bytes]


def _records(data: bytes, dialect: CsvDialect) -> Iterator[_Record]:
    """The rows of a block with their places, without empty lines. A Python object for each: only for headers and bad rows."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the process
    lines = data.splitlines(keepends=True)
    reader = csv.reader(
        (line.decode("latin-1") for line in lines),
        delimiter=dialect.delimiter,
        quotechar=dialect.quote or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        escapechar=dialect.escape or None,
    )
    before = start = 0
    for fields in reader:
        end = start + sum(map(len, lines[before : reader.line_num]))
        if fields:
            yield _Record(before, reader.line_num, start, end, [text.encode("latin-1") for text in fields])
        before, start = reader.line_num, end


def open_csv(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    """Look at headers of CSV files. Raises `UsageError`."""
    _check_codec(files)
    dialect = source.csv
    parts: list[InputPart] = []
    names: tuple[str, ...] = ()
    for file in files:
        block = next(_blocks(file, dialect, size=1 << 16), None)
        record = next(_records(block.data, dialect), None) if block else None
        if record is None:
            raise UsageError(
                f"{file.name} of the input is empty: a CSV file begins with the names of its columns",
                hint="Write it again, or remove it from the folder.",
            )
        header = tuple(name.decode("utf-8", "backslashreplace") for name in record.fields)
        for name in columns:
            if header.count(name) != 1:
                flag = next(flag for flag, used in source.used_columns if used == name)
                raise missing_column(flag, name, header, file.name)
        parts.append(
            _Text(file, dialect, partial(_parse_csv, header, tuple(columns), dialect, source.key_column), header=True)
        )
        names = names or header
    return FileInput(tuple(parts), pa.schema([(name, pa.large_binary()) for name in columns]), names)


def _check_codec(files: Sequence[InputFile]) -> None:
    """Spark decompresses by the suffix."""
    if any(Path(file.name).suffix.lower() in {".bz2", ".zst", ".lz4", ".snappy", ".deflate", ".xz"} for file in files):
        raise UsageError("files with CSV or JSON lines may be compressed with gzip only", hint="Decompress the input.")


def _parse_csv(header: tuple[str, ...], columns: tuple[str, ...], dialect: CsvDialect, key: str, block: _Block) -> Rows:
    bad: list[BadRow] = []
    key_at = header.index(key)

    def bad_row(record: _Record, problem: str) -> BadRow:
        found = record.fields[key_at] if key_at < len(record.fields) else None
        return BadRow(
            block.file.name,
            block.line + record.line,
            problem,
            found,
            block.data[record.start : record.end].rstrip(b"\r\n"),
        )

    def records() -> Iterator[_Record]:
        return _records(block.data, dialect)

    try:
        table = _csv_table(header, columns, dialect, block.data)
    except pa.ArrowInvalid as error:
        ragged = [record for record in records() if len(record.fields) != len(header)]
        if not ragged:
            raise UsageError(f"{block.file.name}, from line {block.line:,}: cannot be parsed as CSV: {error}") from None
        bad = [bad_row(record, OTHER_FIELDS) for record in ragged]
        ends = [0, *(record.end for record in ragged)]
        starts = [*(record.start for record in ragged), len(block.data)]
        kept = b"".join(block.data[end:start] for end, start in zip(ends, starts, strict=True))
        table = _csv_table(header, columns, dialect, kept)

    def locate(places: Sequence[int], problem: str) -> list[BadRow]:
        good = (record for record in records() if len(record.fields) == len(header))
        wanted = set(places)
        return [bad_row(record, problem) for at, record in enumerate(islice(good, max(places) + 1)) if at in wanted]

    return Rows(table, bad, locate)


def _csv_table(header: tuple[str, ...], columns: tuple[str, ...], dialect: CsvDialect, data: bytes) -> pa.Table:
    if not data:
        return pa.schema([(name, pa.large_binary()) for name in columns]).empty_table()
    if data.startswith(_BOM):  # Arrow would take it away
        data = b"\n" + data
    # Other columns get names of their own: those of the file may be repeated.
    names = [name if name in columns else f"\0{at}" for at, name in enumerate(header)]
    return pa_csv.read_csv(
        pa.BufferReader(data),
        pa_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        pa_csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=dialect.quote or False,
            escape_char=dialect.escape or False,
            newlines_in_values=True,
        ),
        pa_csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.large_binary()),
            include_columns=columns,
            null_values=[dialect.null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


_JSON = CsvDialect(quote="")
"""Lines without quotes: in JSON a line break always ends a row."""


def open_json(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    """Find the types of columns: those of the first values that are not null. Raises `UsageError`."""
    _check_codec(files)
    kinds: dict[str, pa.DataType] = {}
    names: dict[str, None] = {}
    for block in (block for file in files for block in _blocks(file, _JSON, size=1 << 16)):
        for line in block.data.splitlines():
            found = _fields_of(line, columns)
            if isinstance(found, str):
                continue
            if not names:
                names.update(dict.fromkeys(json.loads(line)))
            names.update(dict.fromkeys(name for name, raw in zip(columns, found, strict=True) if raw))
            kinds.update(
                {
                    name: _kind(source, name, raw)
                    for name, raw in zip(columns, found, strict=True)
                    if name not in kinds and raw not in {b"", b"null"}
                }
            )
        if len(kinds) == len(columns):
            break
    for flag, name in source.used_columns:
        if names and name not in names:
            raise missing_column(flag, name, tuple(names))
    schema = pa.schema([(name, kinds.get(name, pa.large_string())) for name in columns])
    parse = partial(_parse_json, schema, source.key_column, source.value_column)
    parts: list[InputPart] = [_Text(file, _JSON, parse) for file in files]
    return FileInput(tuple(parts), schema, tuple(names))


def _kind(source: Input, name: str, raw: bytes) -> pa.DataType:
    """The type that a value gives its column. Raises `UsageError` for one that has no mapping to bytes."""
    if raw[:1] == b'"' or (raw[:1] in {b"{", b"["} and name == source.value_column):
        return pa.large_string()
    if _INTEGER.fullmatch(raw):
        return pa.int64()
    is_number = raw not in {b"true", b"false"}
    if name == source.order_column and name not in {source.key_column, source.value_column} and is_number:
        return pa.float64()
    kind = "struct" if raw[:1] == b"{" else "array" if raw[:1] == b"[" else "double" if is_number else "boolean"
    flag = next(flag for flag, used in source.used_columns if used == name)
    raise unmapped_type(flag, name, kind, is_key=name != source.value_column)


def _parse_json(schema: pa.Schema, key: str, value: str, block: _Block) -> Rows:
    data = block.data
    lines: list[bytes] | None = None
    places: list[int] = []
    """The lines of the table's rows, if they are not simply all."""

    def bad_row(at: int, problem: str) -> BadRow:
        line = (lines or data.splitlines())[at]
        found = _fields_of(line, [key])
        raw = None if isinstance(found, str) else found[0]
        text = raw if raw is None or raw[:1] != b'"' else json.loads(raw.decode("utf-8", "replace")).encode()
        return BadRow(block.file.name, block.line + at, problem, text, line)

    def locate(rows: Sequence[int], problem: str) -> list[BadRow]:
        return [bad_row(places[row] if places else row, problem) for row in rows]

    try:
        table = pa_json.read_json(
            pa.BufferReader(data),
            pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        pass
    else:
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows == count == data.count(b"\n{") + data.startswith(b"{"):
            return Rows(table.select(schema.names), (), locate)
    lines = data.splitlines()
    columns: list[list[Any]] = [[] for _ in schema]
    bad = []
    for at, line in enumerate(lines):
        if not line.strip():
            continue
        found = _fields_of(line, schema.names)
        row = found if isinstance(found, str) else _row(found, schema, value)
        if isinstance(row, str):
            bad.append(bad_row(at, row))
            continue
        places.append(at)
        for column, cell in zip(columns, row, strict=True):
            column.append(cell)
    kinds = [pa.large_binary() if pa.types.is_large_string(kind) else kind for kind in schema.types]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return Rows(pa.table(arrays, schema.names), bad, locate)


def _fields_of(line: bytes, names: Sequence[str]) -> list[bytes] | str:
    """The values of these fields as they are in the line, ``b""`` for one that it does not have; or what is wrong with the line."""
    import msgspec

    try:
        found = records.member_decoder(tuple(names)).decode(line)
    except msgspec.MsgspecError:
        return NOT_JSON
    if b"\\" in line or any(line.count(f'"{name}"'.encode()) > 1 for name in names) or not all(map(str.isalnum, names)):
        pairs: list[tuple[str, Any]] = json.loads(line.decode("utf-8", "replace"), object_pairs_hook=list)
        given = [name for name, _ in pairs]
        if any(given.count(name) > 1 for name in names):
            return REPEATED_NAME
    return [bytes(each) for each in msgspec.structs.astuple(found)]


def _row(found: Sequence[bytes], schema: pa.Schema, value: str) -> list[Any] | str:
    """The values of a line's fields, or what is wrong with them."""
    row: list[Any] = []
    for raw, field in zip(found, schema, strict=True):
        if raw in {b"", b"null"}:
            row.append(None)
        elif pa.types.is_large_string(field.type):
            if raw[:1] == b'"':
                try:
                    row.append(json.loads(raw).encode())
                except UnicodeError:
                    return NOT_TEXT
            elif raw[:1] in {b"{", b"["} and field.name == value:
                row.append(raw)
            else:
                return OTHER_TYPE
        elif pa.types.is_int64(field.type):
            number = int(raw) if _INTEGER.fullmatch(raw) and len(raw) <= len(str(-_MAX_INTEGER)) else _MAX_INTEGER
            if not -_MAX_INTEGER <= number < _MAX_INTEGER:
                return OTHER_TYPE
            row.append(number)
        elif raw[:1] in b"-0123456789":
            row.append(float(raw))
        else:
            return OTHER_TYPE
    return row
