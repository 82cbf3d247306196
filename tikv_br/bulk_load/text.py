"""Reads CSV and JSON lines as Spark reads them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from tikv_br.bulk_load.inputs import (
    BLOCK_BYTES,
    PART_BYTES,
    FileInput,
    InputFile,
    InputPart,
    NeedsSpark,
    check_column_names,
    for_spark,
)
from tikv_br.tasks.inputs import Input

_FIRST_LINES = 1000
"""Number of lines that determine the columns of JSON lines."""
_CSV_OPTIONS = {"header": {"true"}, "enforceschema": {"false"}, "inferschema": {"false"}}
"""Options whose values leave an input to us; others are for Spark, but the separator and the text of null."""
_QUOTE = ord('"')
_NEWLINE = ord("\n")


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
        with self.file.lines() as opened, for_spark():
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


def open_csv(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    """Look at headers and options of CSV files. Raises `NeedsSpark`."""
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
    check_column_names(headers[0])
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


def open_json(source: Input, files: Sequence[InputFile], columns: list[str]) -> FileInput:
    """Look at the first lines of files with JSON lines. Raises `NeedsSpark`."""
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
    check_column_names(names)
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
