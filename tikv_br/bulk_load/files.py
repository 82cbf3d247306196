"""Inputs that this process reads: finds their files, in a directory or a cloud, and reads Parquet, CSV (RFC 4180) and JSON lines.

A text is cut into blocks that end with a row, and these are parsed by Arrow. Only blocks that have something wrong are read by Python's
csv or msgspec too, which tell the lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from tikv_br import records
from tikv_br.backupset.layout import EXPORT_RECORD
from tikv_br.errors import StorageObjectMissing, UsageError
from tikv_br.formats.errors import FormatError
from tikv_br.formats.keys.text import show_both
from tikv_br.formats.parquet import SourceFile, bounded_batches
from tikv_br.formats.sst.source import TailCache
from tikv_br.storage.base import ObjectSource, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import CloudFlags, parse
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

PART_BYTES = 64 << 20
"""About how much of an input one task reads, before compression."""
BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 4 << 20


class NeedsSpark(UsageError):
    """Only Spark can read the input; the message has the reason."""

    default_hint = "Leave out --executor, or pass --executor spark."


@dataclass(frozen=True, slots=True)
class InputFile:
    """File of an input."""

    store: ObjectStore | None
    """None = a local file, whose path is its name."""
    name: str
    size: int

    def open(self) -> pa.NativeFile:
        """Open it for Arrow. Raises `StorageError`."""
        return pa.OSFile(self.name) if self.store is None else pa.PythonFile(self._source())

    @contextlib.contextmanager
    def stream(self) -> Iterator[IO[bytes]]:
        """Open it for reading from the start; decompressed according to its suffix."""
        raw: io.RawIOBase = io.FileIO(self.name) if self.store is None else self._source()
        with io.BufferedReader(raw, _BUFFER_BYTES) as opened:
            if not self.is_compressed:
                yield opened
                return
            with gzip.open(opened) as text:
                yield cast("IO[bytes]", text)

    @property
    def is_compressed(self) -> bool:
        """Return whether it can only be read from the start."""
        return self.name.lower().endswith(".gz")

    def _source(self) -> SourceFile:
        return SourceFile(TailCache(ObjectSource(cast("ObjectStore", self.store), self.name, b"")))


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be loaded, and where it is."""

    file: str
    line: int
    """Number of its first line, of the text inside a compressed file; 0 = ``row`` says why no line can be read."""
    problem: str
    key: bytes | None
    """None = it has none."""
    row: bytes
    """The row as it is in the file."""

    def __str__(self) -> str:
        if not self.line:
            return self.row.decode()
        key = f" with key {show_both(self.key)}" if self.key else ""
        return f"{self.file}, line {self.line:,}{key}: {self.problem}"


@dataclass
class BadRows:
    """Rows that cannot be loaded: how many of each problem, and the first ones."""

    most: float
    """Maximum number of examples."""
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    def add(self, rows: Sequence[BadRow]) -> None:
        """Count rows, and keep the first ones."""
        self.problems.update(row.problem for row in rows)
        self.examples += rows[: int(min(self.most - len(self.examples), len(rows)))]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a block, with the columns that are used."""

    table: pa.Table
    bad: Sequence[BadRow] = ()
    """Rows that are not in the table."""
    locate: Callable[[Sequence[int], str], list[BadRow]] | None = None
    """Finds rows of the table in the file, as bad rows with that problem; None = its rows have no lines."""


class InputPart(Protocol):
    """A part of an input that one task reads."""

    @property
    def file(self) -> InputFile:
        """The file that it is in."""

    @property
    def tasks(self) -> int:
        """How many threads may parse its blocks at once."""

    def blocks(self) -> Iterator[Callable[[], Rows]]:
        """Yield functions that parse one block each, in any thread.

        Raises `UsageError`, `StorageError`.
        """


@dataclass(frozen=True, slots=True)
class FileInput:
    """An input that this process can read."""

    parts: tuple[InputPart, ...]
    schema: pa.Schema
    """Schema of the columns that are used."""
    columns: tuple[str, ...]
    """All known columns."""
    files: tuple[InputFile, ...] = ()
    hidden: int = 0
    """Number of files that are left out, because a name on their path begins with ``_`` or ``.``."""
    encoding: str = "raw"
    """Notation of keys and values that are text."""


class reading:  # noqa: N801 - used as a function
    """Names the file of which something cannot be read. Raises `UsageError`."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, FormatError, OSError, EOFError, zlib.error)):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"cannot read {self._file.name} of the input: {reason}",
                hint="Check that the file is complete and has the format of the input, or remove it from the folder.",
            ) from None


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
    # Other columns get names of their own: the file's names may be repeated.
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
    """Find the types of columns, from the first values that are not null. Raises `UsageError`."""
    _check_codec(files)
    kinds: dict[str, pa.DataType] = {}
    names: dict[str, None] = {}
    for block in (block for file in files for block in _blocks(file, _JSON, size=1 << 16)):
        for line in block.data.splitlines():
            found = _fields_of(line, columns)
            if isinstance(found, str):
                continue
            if not names:
                names.update(dict.fromkeys(json.loads(line, parse_int=str)))  # Python refuses 5,000 digits
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
        if (
            b"\\" in line
            or any(line.count(f'"{name}"'.encode()) > 1 for name in names)
            or not all(map(str.isalnum, names))
        ):
            text = line.decode("utf-8", "replace")
            pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list, parse_int=str)
            given = [name for name, _ in pairs]
            if any(given.count(name) > 1 for name in names):
                return REPEATED_NAME
    except (msgspec.MsgspecError, RecursionError):
        return NOT_JSON
    return [bytes(each) for each in msgspec.structs.astuple(found)]


def _row(found: Sequence[bytes], schema: pa.Schema, value: str) -> list[Any] | str:
    """The values of a line's fields, or what is wrong with them."""
    row: list[Any] = []
    for raw, column in zip(found, schema, strict=True):
        if raw in {b"", b"null"}:
            row.append(None)
        elif pa.types.is_large_string(column.type):
            if raw[:1] == b'"':
                try:
                    row.append(json.loads(raw).encode())
                except UnicodeError:
                    return NOT_TEXT
            elif raw[:1] in {b"{", b"["} and column.name == value:
                row.append(raw)
            else:
                return OTHER_TYPE
        elif pa.types.is_int64(column.type):
            number = int(raw) if _INTEGER.fullmatch(raw) and len(raw) <= len(str(-_MAX_INTEGER)) else _MAX_INTEGER
            if not -_MAX_INTEGER <= number < _MAX_INTEGER:
                return OTHER_TYPE
            row.append(number)
        elif raw[:1] in b"-0123456789":
            row.append(float(raw))
        else:
            return OTHER_TYPE
    return row


_CLOUD = re.compile(r"(s3|gcs|gs|azure|azblob)://")


def open_files(source: Input, clouds: CloudFlags) -> FileInput:
    """Look at an input, without its rows. Raises `NeedsSpark`, `UsageError`, `StorageError`."""
    if source.value_encoding == "avro":
        raise NeedsSpark("--value-encoding avro needs Spark's module")
    if source.reader_options:
        raise NeedsSpark("--input-option is for Spark's reader")
    openers = {"parquet": _parquet, "csv": open_csv, "json": open_json}
    if source.spark_format not in openers:
        raise NeedsSpark(f"only Spark reads the format {source.spark_format}")
    files, hidden = _files(source.path, clouds)
    columns = list(dict.fromkeys(name for _, name in source.used_columns))
    opened = openers[source.spark_format](source, files, columns)
    encoding = source.encoding or (_export_encoding(files[0]) if source.is_text else "raw")
    return replace(opened, files=tuple(files), hidden=hidden, encoding=encoding)


def _files(path: str, clouds: CloudFlags) -> tuple[list[InputFile], int]:
    """The files of a path, folder or glob, at any depth, by name, and the number of hidden ones."""
    is_cloud = bool(_CLOUD.match(path))
    place, _, parameters = path.partition("?") if is_cloud else (path, "", "")
    if re.search(r"[\[\]{}\\]", place) or (not is_cloud and ":" in place):
        raise NeedsSpark("its path has characters that Spark interprets")
    found = list(_cloud_files(place, parameters, clouds) if is_cloud else _local_files(place))
    files = [file for file, is_hidden in found if not is_hidden]
    if not files:
        raise NeedsSpark("no file was found")
    return sorted(files, key=lambda file: file.name), len(found) - len(files)


def _is_hidden(names: Sequence[str]) -> bool:
    return any(name.startswith(("_", ".")) for name in names)


def _local_files(path: str) -> Iterator[tuple[InputFile, bool]]:
    """Yield files, and whether they are hidden. What the path itself names is not."""
    base = Path(path)
    literal = next((each for each in (base, *base.parents) if not re.search(r"[*?]", str(each))), Path())
    seen: set[str] = set()
    for each in [base] if literal == base else literal.glob(str(base.relative_to(literal))):
        beyond = each.relative_to(literal).parts
        if each.is_file():
            yield InputFile(None, str(each), each.stat().st_size), _is_hidden(beyond)
        for folder, folders, names in os.walk(each, followlinks=True) if each.is_dir() else ():
            if os.path.realpath(folder) in seen:  # a link to a folder above
                folders.clear()
                continue
            seen.add(os.path.realpath(folder))
            for file in (Path(folder, name) for name in names):
                if not file.is_file():  # to open a pipe would be to wait for its writer
                    raise UsageError(
                        f"--input: {file} is neither a file nor a folder", hint="Remove it, or pass a glob."
                    )
                yield InputFile(None, str(file), file.stat().st_size), _is_hidden(file.relative_to(literal).parts)


def _cloud_files(place: str, parameters: str, clouds: CloudFlags) -> Iterator[tuple[InputFile, bool]]:
    scheme, _, rest = place.partition("://")
    segments = rest.rstrip("/").split("/")
    wild = next((at for at, each in enumerate(segments) if re.search(r"[*?]", each)), len(segments))
    at = max(min(wild, len(segments) - 1), 1)
    base, pattern = "/".join(segments[:at]), segments[at:]
    store = open_store(parse(f"{scheme}://{base}" + (f"?{parameters}" if parameters else ""), clouds))
    literal = len(pattern) if wild == len(segments) else 0
    if literal:
        try:
            yield InputFile(store, pattern[0], store.stat(pattern[0]).size), False
        except StorageObjectMissing:
            pass
        else:
            return
    for info in store.list(pattern[0] if literal else ""):
        names = info.name.split("/")
        if len(names) >= len(pattern) and all(map(fnmatchcase, names, pattern)) and names[-1]:
            yield InputFile(store, info.name, info.size), _is_hidden(names[literal:])


def _export_encoding(file: InputFile) -> str:
    """Notation of keys and values in a file of our exports, which describe themselves; raw for others."""
    folder, _, name = file.name.rpartition("/")
    record = f"{folder}/{EXPORT_RECORD}" if folder else EXPORT_RECORD
    if file.store is None and not Path(record).is_file():
        return "raw"
    try:
        data = Path(record).read_bytes() if file.store is None else file.store.get(record)
        found = json.loads(data)
        parts = {part["name"] for part in found["files"]}
        return str(found["encoding"]) if name in parts and found["encoding"] in {"hex", "escaped"} else "raw"
    except (OSError, StorageObjectMissing, ValueError, KeyError, TypeError, RecursionError):
        return "raw"


@dataclass(frozen=True, slots=True)
class _RowGroups:
    file: InputFile
    metadata: pq.FileMetaData
    groups: tuple[int, ...]
    columns: tuple[str, ...]

    tasks = 1

    def blocks(self) -> Iterator[Callable[[], Rows]]:
        with reading(self.file), self.file.open() as opened:
            file = pq.ParquetFile(opened, metadata=self.metadata, pre_buffer=self.file.store is not None)
            for batch in bounded_batches(opened, file, self.columns, self.groups):
                yield partial(Rows, _plain(pa.Table.from_batches([batch])))


def _plain(table: pa.Table) -> pa.Table:
    """Replace types of other tools that have the same values in another form."""
    return table.cast(pa.schema([field.with_type(_plain_type(field.type)) for field in table.schema]))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else views.get(kind, kind)


def _parquet(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    parts: list[InputPart] = []
    known: tuple[str, ...] = ()
    schema: pa.Schema | None = None
    for file in files:
        with reading(file), file.open() as opened:
            parquet = pq.ParquetFile(opened)
            whole, metadata = parquet.schema_arrow, parquet.metadata
        for flag, name in source.used_columns:
            if whole.names.count(name) != 1:
                if f"{name}=" in file.name:
                    raise NeedsSpark("it has partitions")
                raise missing_column(flag, name, whole.names, file.name if known else "")
        found = pa.schema([(name, _plain_type(whole.field(name).type)) for name in columns])
        if schema is not None and list(map(_family, found.types)) != list(map(_family, schema.types)):
            raise UsageError(
                f"{file.name} has columns of other types than {files[0].name}: "
                + ", ".join(f"{field.name} {field.type}" for field in found),
                hint="Load files with other types by a command of their own.",
            )
        schema, known = schema or found, known or tuple(whole.names)
        parts += [_RowGroups(file, metadata, groups, tuple(columns)) for groups in _group_rows(metadata, columns)]
    return FileInput(tuple(parts), schema, known)


def _family(kind: pa.DataType) -> object:
    """The same for types whose values become bytes in the same way."""
    if pa.types.is_integer(kind):
        return "integer"
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return "bytes" if any(is_one(kind) for is_one in texts) else kind


def _group_rows(metadata: pq.FileMetaData, columns: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Neighbouring row groups of about `PART_BYTES` together."""
    groups: list[int] = []
    size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(at) for at in range(group.num_columns)]
        groups.append(number)
        size += sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.partition(".")[0] in columns)
        if size >= PART_BYTES:
            yield tuple(groups)
            groups, size = [], 0
    if groups:
        yield tuple(groups)
