"""Tables of records, against the readers of pyarrow, of Python's csv and of Python's json."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats import columns, tables
from tikv_br.formats.errors import UnsupportedFormat
from tikv_br.formats.keys.text import parse_key
from tikv_br.formats.tables import TableFormat, TableOptions, UnfitText, open_table

U64 = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(str.encode)
Row = tuple[bytes, bytes, int, int]


def batch(rows: list[Row]) -> pa.RecordBatch:
    """Records of key, value, expire_ts and ts."""
    keys, values, expiries, stamps = zip(*rows, strict=True) if rows else ((), (), (), ())
    numbers = [np.array(column, np.uint64) for column in (expiries, stamps)]
    return columns.records(columns.from_list(keys), columns.from_list(values), expire_ts=numbers[0], ts=numbers[1])


def written(options: TableOptions, *batches: pa.RecordBatch) -> bytes:
    """The bytes of a table."""
    data: list[bytes] = []
    table = open_table(data.append, options)
    for each in batches:
        table.append(each)
    table.finish()
    return b"".join(data)


def expected(rows: list[Row], options: TableOptions) -> list[dict[str, Any]]:
    """Rows that a reader must find."""
    every = [
        {"key": key, "value": value, "expire_ts": expire_ts or None, "ts": ts} for key, value, expire_ts, ts in rows
    ]
    return [{name: row[name] for name in options.columns} for row in every]


def read(data: bytes, options: TableOptions) -> list[dict[str, Any]]:
    """The rows, by a reader that is not ours; only the form of keys and values is undone."""
    if options.format is TableFormat.PARQUET:
        found: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
        return found
    text = data.decode()
    if options.format is TableFormat.CSV:
        rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        numbers = [{name: int(row[name]) if row[name] else None for name in options.columns[2:]} for row in rows]
    else:
        rows = [json.loads(line) for line in text.split("\n")[:-1]]
        numbers = [{name: row[name] for name in options.columns[2:]} for row in rows]
    texts = [{name: parse_key(row[name], options.form) for name in ("key", "value")} for row in rows]
    return [one | other for one, other in zip(texts, numbers, strict=True)]


@pytest.mark.parametrize("kind", TableFormat)
@given(
    form=st.sampled_from(["hex", "escaped"]),
    ts=st.booleans(),
    expire_ts=st.booleans(),
    rows=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20), U64, U64)),
)
def test_any_bytes_come_back(kind: TableFormat, form: str, ts: bool, expire_ts: bool, rows: list[Row]) -> None:
    """All columns of all rows, in order, also of rows that come in several batches."""
    options = TableOptions(kind, form, expire_ts=expire_ts, ts=ts)
    half = len(rows) // 2
    assert read(written(options, batch(rows[:half]), batch(rows[half:])), options) == expected(rows, options)


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.JSONL])
@given(rows=st.lists(st.tuples(TEXTS, TEXTS, U64, U64)))
def test_any_text_comes_back_as_text(kind: TableFormat, rows: list[Row]) -> None:
    """Quotes, commas, line ends, control characters and all of Unicode."""
    options = TableOptions(kind, "raw", expire_ts=True)
    assert read(written(options, batch(rows)), options) == expected(rows, options)


@pytest.mark.parametrize("kind", TableFormat)
def test_slices_of_a_batch_are_written_alone(kind: TableFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows around a slice are not written; text is made in small steps, down to one large row."""
    monkeypatch.setattr(tables, "SLICE_BYTES", 100)
    rows = [(b"%03d" % number, b'"' * number, number, number) for number in range(200)]
    options = TableOptions(kind, "raw", expire_ts=True, ts=True)
    assert read(written(options, batch(rows).slice(20, 150)), options) == expected(rows[20:170], options)


@pytest.mark.parametrize("kind", TableFormat)
def test_table_without_rows(kind: TableFormat) -> None:
    """It has its columns: Spark and pyarrow need them."""
    options = TableOptions(kind, expire_ts=True, ts=True)
    data = written(options)
    assert read(data, options) == []
    if kind is TableFormat.PARQUET:
        assert pq.read_schema(pa.BufferReader(data)).names == list(options.columns)


def test_row_groups_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of Parquet, and its writer, keep only a part of the rows in memory."""
    monkeypatch.setattr(tables, "GROUP_ROWS", 100)
    rows = [(b"%03d" % number, b"", 0, 0) for number in range(250)]
    data = written(TableOptions(), *(batch(rows[first : first + 50]) for first in range(0, 250, 50)))
    meta = pq.read_metadata(pa.BufferReader(data))
    assert [meta.row_group(number).num_rows for number in range(meta.num_row_groups)] == [100, 100, 50]


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.JSONL])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((b"k\xff7", b"v", 0, 0), r"the key k\\xff7 is not valid UTF-8"),
        ((b"k7", b"\xed\xa0\x80", 0, 0), "the value of key k7 is not valid UTF-8"),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_key(kind: TableFormat, bad: Row, message: str) -> None:
    """The first such row of many is named, and nothing of its batch is written."""
    rows = [(b"a%d" % number, "é".encode(), 0, 0) for number in range(50)]
    data: list[bytes] = []
    table = open_table(data.append, TableOptions(kind, "raw"))
    before = list(data)
    with pytest.raises(UnfitText, match=message):
        table.append(batch([*rows[:33], bad, *rows[33:], (b"z", b"\xfe", 0, 0)]))
    assert data == before


@pytest.mark.parametrize("kind", TableFormat)
def test_after_abort_nothing_is_written(kind: TableFormat) -> None:
    """Not even when Arrow ends the file of a writer that is gone."""
    data: list[bytes] = []
    table = open_table(data.append, TableOptions(kind))
    table.append(batch([(b"k", b"v", 0, 0)]))
    before = len(data)
    table.abort()
    table.append(batch([(b"l", b"v", 0, 0)]))
    del table
    assert len(data) == before


def test_unknown_form() -> None:
    """There are three."""
    with pytest.raises(UnsupportedFormat, match="base64"):
        TableOptions(TableFormat.CSV, "base64")
