"""Reads Parquet, CSV and JSON lines on threads of this process, in a directory or a cloud, as Spark reads them.

An input that Spark would read in another way, or refuse, raises `NeedsSpark`: so its rows do not depend on who reads it.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from tikv_br.errors import StorageObjectMissing, UsageError
from tikv_br.formats.parquet import SourceFile
from tikv_br.formats.sst.source import TailCache
from tikv_br.storage.base import ObjectSource, ObjectStore
from tikv_br.storage.cloud_options import CloudFlags
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.tasks.frames import Input

PART_BYTES = 64 << 20
"""About how much of an input one task reads, before compression."""
BLOCK_BYTES = 16 << 20
"""Size of text that is parsed in one piece."""
BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 4 << 20
_FIRST_LINES = 1000
"""Number of lines that determine the columns of JSON lines."""
_CLOUD = re.compile(r"(s3|gcs|gs|azure|azblob)://")
_CSV_OPTIONS = {"header": {"true"}, "enforceschema": {"false"}, "inferschema": {"false"}}
"""Options whose values leave an input to us; others are for Spark, but the separator and the text of null."""
_QUOTE, _NEWLINE = ord('"'), ord("\n")


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
    def lines(self) -> Iterator[IO[bytes]]:
        """Open it for reading lines; decompressed according to its suffix."""
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


class InputPart(Protocol):
    """A part of an input that one task reads."""

    @property
    def file(self) -> InputFile:
        """The file that it is in."""

    def read(self) -> Iterator[pa.Table]:
        """Yield its rows, with the columns that are used.

        Raises `NeedsSpark`, `StorageError`, `pyarrow.ArrowException`.
        """


@dataclass(frozen=True, slots=True)
class FileInput:
    """An input that this process can read."""

    parts: tuple[InputPart, ...]
    schema: pa.Schema
    """Schema of the columns that are used."""
    columns: tuple[str, ...]
    """All known columns."""


def open_files(source: Input, clouds: CloudFlags, most_bytes: int, *, reason: str = "") -> FileInput:
    """Look at an input, without its rows. Raises `NeedsSpark`, also for more than ``most_bytes`` or a ``reason``, `StorageError`."""
    if reason:
        raise NeedsSpark(reason)
    if source.value_encoding == "avro":
        raise NeedsSpark("--value-encoding avro needs Spark's module")
    openers = {"parquet": _parquet, "csv": _csv, "json": _json}
    if source.spark_format not in openers:
        raise NeedsSpark(f"only Spark reads the format {source.spark_format}")
    files = _files(source.path, clouds)
    size = sum(file.size for file in files)
    if size >= most_bytes:
        raise NeedsSpark(f"the input has {size >> 20:,} MiB; Spark pays off from {most_bytes >> 20:,} MiB")
    if not all(file.size for file in files):
        raise NeedsSpark("the input has an empty file")
    names = [source.key_column, source.value_column, source.ttl_column, source.order_column]
    with _for_spark():
        return openers[source.spark_format](source, files, list(dict.fromkeys(filter(None, names))))


class _for_spark:  # noqa: N801 - used as a function
    """Leaves to Spark what Arrow refuses: its message is the one that the documents describe."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error)):
            raise NeedsSpark(f"pyarrow cannot read it: {str(error).splitlines()[0]}") from None


# ---------------------------------------------------------------------------------------------------------------- the files


def _files(path: str, clouds: CloudFlags) -> list[InputFile]:
    """The files of a path, folder or glob, by name."""
    is_cloud = bool(_CLOUD.match(path))
    place, _, parameters = path.partition("?") if is_cloud else (path, "", "")
    if re.search(r"[\[\]{}\\=%]", place) or (not is_cloud and ":" in place):
        raise NeedsSpark("its path has characters that Spark interprets")
    found = _cloud_files(place, parameters, clouds) if is_cloud else _local_files(place)
    if not found:
        raise NeedsSpark("no file was found")
    return sorted(found, key=lambda file: file.name)


def _local_files(path: str) -> list[InputFile]:
    base = Path(path)
    literal = next((each for each in (base, *base.parents) if not re.search(r"[*?]", str(each))), Path())
    found: list[Path] = []
    for each in [base] if literal == base else literal.glob(str(base.relative_to(literal))):
        if each.is_dir():
            found += _visible(list(each.iterdir()))
        elif each.is_file():
            found += _visible([each])
    if any(not each.is_file() for each in found):
        raise NeedsSpark("it has folders in a folder")
    return [InputFile(None, str(each), each.stat().st_size) for each in found]


def _visible(paths: Sequence[Path]) -> list[Path]:
    _check_names([each.name for each in paths])
    return [each for each in paths if not each.name.startswith(("_", "."))]


def _check_names(names: Sequence[str]) -> None:
    if any(name.startswith(("_metadata", "_common_metadata")) or "=" in name for name in names):
        raise NeedsSpark("it has partitions or summaries")


def _cloud_files(place: str, parameters: str, clouds: CloudFlags) -> list[InputFile]:
    scheme, _, rest = place.partition("://")
    segments = rest.rstrip("/").split("/")
    wild = next((at for at, each in enumerate(segments) if re.search(r"[*?]", each)), len(segments))
    at = max(min(wild, len(segments) - 1), 1)
    base, pattern = "/".join(segments[:at]), segments[at:]
    store = open_store(parse(f"{scheme}://{base}" + (f"?{parameters}" if parameters else ""), clouds))
    if wild == len(segments) and pattern:
        try:
            return [InputFile(store, pattern[0], store.stat(pattern[0]).size)]
        except StorageObjectMissing:
            pass
    found = []
    for info in store.list(pattern[0] if wild == len(segments) and pattern else ""):
        names = info.name.split("/")
        if len(names) < len(pattern) or not all(map(fnmatchcase, names, pattern)):
            continue
        _check_names(names)
        if len(names) > len(pattern) + 1:
            raise NeedsSpark("it has folders in a folder")
        if not names[-1].startswith(("_", ".")):
            found.append(InputFile(store, info.name, info.size))
    return found


def _check_columns(all_names: Sequence[str]) -> None:
    """Spark takes names without regard to case."""
    if len({name.casefold() for name in all_names}) < len(all_names) or not all(all_names):
        raise NeedsSpark("names of its columns are empty or repeated")


# ---------------------------------------------------------------------------------------------------------------- Parquet


@dataclass(frozen=True, slots=True)
class _RowGroups:
    file: InputFile
    metadata: pq.FileMetaData
    groups: tuple[int, ...]
    columns: tuple[str, ...]

    def read(self) -> Iterator[pa.Table]:
        with self.file.open() as opened, _for_spark():
            file = pq.ParquetFile(opened, metadata=self.metadata, pre_buffer=self.file.store is not None)
            for batch in file.iter_batches(BATCH_ROWS, list(self.groups), list(self.columns), use_threads=False):
                yield pa.Table.from_batches([batch])


def _parquet(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    if source.reader_options:
        raise NeedsSpark("--input-option is for Spark")
    schemas: list[pa.Schema] = []
    names: list[str] = []
    parts: list[InputPart] = []
    for file in files:
        with file.open() as opened:
            parquet = pq.ParquetFile(opened)
            whole, metadata = parquet.schema_arrow, parquet.metadata
        _check_columns(whole.names)
        schemas.append(pa.schema([whole.field(name).with_metadata(None) for name in columns if name in whole.names]))
        names = names or whole.names
        wanted = tuple(schemas[-1].names)
        parts += [_RowGroups(file, metadata, groups, wanted) for groups in _group_rows(metadata, wanted)]
    types = {tuple((field.name, field.type) for field in schema) for schema in schemas}
    if len(types) > 1:
        raise NeedsSpark("the columns of its files differ")
    return FileInput(tuple(parts), schemas[0], tuple(names))


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


# ------------------------------------------------------------------------------------------------------------- lines of text


class _Parse(Protocol):
    def __call__(self, block: bytes, /) -> pa.Table: ...


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines that begin in a range of a file, as Spark divides text: a line break always ends a row."""

    file: InputFile
    start: int
    end: int
    skip: int
    """Lines of the header, where the range begins with it."""
    parse: _Parse

    def read(self) -> Iterator[pa.Table]:
        with self.file.lines() as opened, _for_spark():
            if self.start:
                opened.seek(self.start - 1)
                opened.readline()
            for _ in range(self.skip):
                opened.readline()
            while True:
                left = self.end - (opened.tell() if self.end else 0)
                if self.end and left <= 0:
                    return
                block = opened.read(min(BLOCK_BYTES, left) if self.end else BLOCK_BYTES)
                if not block:
                    return
                if not block.endswith(b"\n"):
                    block += opened.readline()
                yield self.parse(block)


def _line_parts(file: InputFile, parse_block: _Parse, *, header: bool) -> list[InputPart]:
    if file.is_compressed:
        return [_Lines(file, 0, 0, int(header), parse_block)]
    starts = range(0, file.size, PART_BYTES)
    return [
        _Lines(file, start, min(start + PART_BYTES, file.size), int(header and not start), parse_block)
        for start in starts
    ]


def _check_codec(files: Sequence[InputFile]) -> None:
    """Spark decompresses by the suffix."""
    if any(Path(file.name).suffix.lower() in {".bz2", ".zst", ".lz4", ".snappy", ".deflate", ".xz"} for file in files):
        raise NeedsSpark("its compression is for Spark")


def _csv(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    _check_codec(files)
    separator, null = ",", ""
    for option, value in source.reader_options:
        name = option.lower()
        if name in {"sep", "delimiter"} and len(value) == 1 and value.isascii() and value not in '"\\\r\n\0':
            separator = value
        elif name == "nullvalue" and not re.search(r'["\\\r\n]', value.replace("\\N", "")):
            null = value
        elif value.lower() not in _CSV_OPTIONS.get(name, set()):
            raise NeedsSpark(f"--input-option {option} is for Spark")
    headers = []
    for file in files:
        with file.lines() as opened:
            line = opened.readline(1 << 20).rstrip(b"\r\n")
        if not line.strip() or line.startswith(b"\xef\xbb\xbf") or (b"\\" in line or b'""' in line):
            raise NeedsSpark("a header is empty or has signs that Spark interprets")
        headers.append(next(csv.reader([line.decode()], delimiter=separator)))
    if any(header != headers[0] for header in headers):
        raise NeedsSpark("the columns of its files differ")
    _check_columns(headers[0])
    found = [name for name in columns if name in headers[0]]
    parse_block = partial(_parse_csv, tuple(headers[0]), tuple(found), separator, null)
    parts = [part for file in files for part in _line_parts(file, parse_block, header=True)]
    return FileInput(tuple(parts), pa.schema([(name, pa.string()) for name in found]), tuple(headers[0]))


def _parse_csv(header: tuple[str, ...], columns: tuple[str, ...], separator: str, null: str, block: bytes) -> pa.Table:
    _check_csv(block, separator)
    table = pa_csv.read_csv(
        pa.BufferReader(block),
        pa_csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=header),
        pa_csv.ParseOptions(delimiter=separator),
        pa_csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=columns,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=not null,
        ),
    )
    if not null:
        return table
    nothing = pa.scalar(None, pa.string())
    columns_of = [pc.if_else(pc.equal(column, null), nothing, column) for column in table.columns]
    return pa.table(columns_of, table.schema)


def _check_csv(block: bytes, separator: str) -> None:
    """Refuse text that univocity, Spark's parser, reads in another way."""
    if b"\\" in block or b"\0" in block or block.count(b"\r") != block.count(b"\r\n"):
        raise NeedsSpark("it has a backslash, a zero byte or a line that ends with CR")
    if re.search(rb"(?:^|\n)[ \t]+\r?(?:\n|$)", block):
        raise NeedsSpark("it has a line of blanks")
    if b'"' not in block:
        return
    data = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(data == _QUOTE)
    opening, closing = quotes[::2], quotes[1::2]
    lines = np.flatnonzero(data == _NEWLINE)
    before = np.append(data, _NEWLINE)[opening - 1]
    after = np.append(data, _NEWLINE)[closing + 1]
    ends = (ord(separator), ord("\r"), _NEWLINE)
    if (
        len(opening) != len(closing)
        or not np.isin(before, (ord(separator), _NEWLINE)).all()
        or not np.isin(after, ends).all()
        or (np.searchsorted(lines, opening) != np.searchsorted(lines, closing)).any()
    ):
        raise NeedsSpark("it has quotes or line breaks within a field")


def _json(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    _check_codec(files)
    if source.reader_options:
        raise NeedsSpark("--input-option is for Spark")
    with files[0].lines() as opened:
        try:
            first = [json.loads(line) for line in islice(iter(partial(opened.readline, 1 << 24), b""), _FIRST_LINES)]
        except ValueError:
            raise NeedsSpark("it has a line that is not JSON") from None
    if not all(isinstance(row, dict) for row in first):
        raise NeedsSpark("it has a line that is not an object")
    names = list(dict.fromkeys(name for row in first for name in row))
    _check_columns(names)
    fields = []
    for name in columns:
        kinds = {type(row[name]) for row in first if row.get(name) is not None}
        if kinds not in ({str}, {int}):
            raise NeedsSpark(f"the type of its column {name!r} must be inferred from all lines")
        fields.append((name, pa.string() if str in kinds else pa.int64()))
    schema = pa.schema(fields)
    parts = [part for file in files for part in _line_parts(file, partial(_parse_json, schema), header=False)]
    return FileInput(tuple(parts), schema, tuple(names))


def _parse_json(schema: pa.Schema, block: bytes) -> pa.Table:
    table = pa_json.read_json(
        pa.BufferReader(block),
        pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    begins = block.count(b"\n{") + block.startswith(b"{")
    if not table.num_rows == lines == begins:
        raise NeedsSpark("it has lines that are not one JSON object each")
    return table.select(schema.names)
