"""Parquet files: ours read by Arrow's own reader, anyone's read by us."""

from __future__ import annotations

import contextlib
import io
import itertools
import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats import columns, parquet
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys, UnsupportedFormat
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.parquet import (
    ParquetOptions,
    ParquetReader,
    ParquetWriter,
    bounded_batches,
    page_headers,
)
from tikv_br.formats.sst.compression import Compression
from tikv_br.formats.sst.source import MemorySource

Row = tuple[bytes, bytes, int, int, bool]
TIMES = st.integers(0, 2**64 - 1)
ROWS = st.dictionaries(
    st.binary(max_size=12), st.tuples(st.binary(max_size=20), TIMES, TIMES, st.booleans()), min_size=1, max_size=40
).map(lambda table: [(key, *table[key]) for key in sorted(table)])
SMALL = ParquetOptions(group_rows=100)


def batch(rows: list[Row]) -> pa.RecordBatch:
    """Rows as records."""
    keys, values, expire_ts, ts, deleted = zip(*rows, strict=True)
    return columns.records(
        columns.from_list(keys),
        columns.from_list(values),
        expire_ts=np.array(expire_ts, np.uint64),
        ts=np.array(ts, np.uint64),
        deleted=np.array(deleted),
    )


def written(rows: list[Row], options: ParquetOptions = SMALL, size: int = 7) -> bytes:
    """The file of rows that come in batches of a size."""
    pieces: list[bytes] = []
    writer = ParquetWriter(pieces.append, options)
    for at in range(0, len(rows), size):
        writer.append(batch(rows[at : at + size]))
    writer.finish({"api_version": "v2"})
    return b"".join(pieces)


def many(count: int = 1000) -> list[Row]:
    """Rows with keys that ascend and values that differ."""
    chance = random.Random(5)
    return [(b"key%06d" % number, chance.randbytes(30), number, number * 2, False) for number in range(count)]


def read(data: bytes, start: bytes = b"", end: bytes = b"") -> list[Row]:
    """Rows of a file according to our reader."""
    found: list[Row] = []
    for part in ParquetReader(MemorySource(data)).records(KeyRange(start, end)):
        assert part.schema == SCHEMA
        assert part.num_rows
        found += [tuple(row.values()) for row in part.to_pylist()]
    return found


@given(ROWS, st.sampled_from(Compression), st.integers(1, 9), st.binary(max_size=3), st.binary(max_size=3))
def test_any_rows_are_read_by_arrow_and_by_us(
    rows: list[Row], compression: Compression, size: int, start: bytes, end: bytes
) -> None:
    """All columns, in order, in any compression and cut; of a range exactly its rows."""
    data = written(rows, ParquetOptions(compression, group_rows=5), size)
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(SCHEMA)
    assert [tuple(row.values()) for row in table.to_pylist()] == rows
    assert read(data) == rows
    assert read(data, start, end) == [row for row in rows if start <= row[0] and (not end or row[0] < end)]


def test_the_footer_says_what_the_file_is() -> None:
    """Sorted by key, zstd, statistics of all columns but values, a page index, and our own words."""
    meta = pq.ParquetFile(io.BytesIO(written(many()))).metadata
    assert meta.num_row_groups > 5
    assert meta.metadata[b"tikv-br.api_version"] == b"v2"
    group = meta.row_group(1)
    assert group.sorting_columns == (pq.SortingColumn(0),)
    by_name = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    assert {name for name, column in by_name.items() if column.statistics} == {"key", "expire_ts", "ts"}
    assert by_name["key"].compression == "ZSTD"
    assert by_name["key"].has_column_index
    rows = meta.row_group(0).num_rows
    assert by_name["key"].statistics.min == b"key%06d" % rows


def test_readers_skip_what_statistics_exclude() -> None:
    """Arrow's dataset reads one row group of many for a range of keys; so do we, in one read of its bytes."""
    rows = many(10_000)
    data = written(rows, ParquetOptions(group_rows=1000), 500)
    fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(data))
    wanted = (pc.field("key") >= pa.scalar(b"key005000", pa.large_binary())) & (
        pc.field("key") < pa.scalar(b"key005003", pa.large_binary())
    )
    assert fragment.subset(wanted).num_row_groups == 1 < fragment.num_row_groups
    source = Counting(data)
    reader = ParquetReader(source)
    source.reads.clear()
    found = [row for part in reader.records(KeyRange(b"key005000", b"key005003")) for row in part.to_pylist()]
    assert [row["key"] for row in found] == [row[0] for row in rows[5000:5003]]
    assert len(source.reads) == 1
    assert source.reads[0][1] < len(data) / 5


def test_small_neighbours_are_read_at_once() -> None:
    """The row groups of a range cost one read, and each byte is read once."""
    source = Counting(written(many(10_000), ParquetOptions(group_rows=500), 500))
    reader = ParquetReader(source)
    source.reads.clear()
    found = [row["key"] for part in reader.records(KeyRange(b"key002000", b"key006000")) for row in part.to_pylist()]
    assert found == [b"key%06d" % number for number in range(2000, 6000)]
    assert len(source.reads) == 1
    assert source.reads[0][1] < len(source.data) / 2


def test_a_whole_file_is_read_in_one_pass() -> None:
    """Row groups come one after the other, from the first byte on, so that a hash can be taken on the way."""
    source = Counting(written(many(20_000), ParquetOptions(group_rows=5000), 1000))
    reader = ParquetReader(source)
    source.reads.clear()
    assert sum(part.num_rows for part in reader.records()) == 20_000
    starts, lengths = zip(*source.reads, strict=True)
    assert starts == (0, *itertools.accumulate(lengths[:-1]))
    assert sum(lengths) > len(source.data) // 2, "the rest is the tail, which is read before"


class Counting:
    """Bytes that remember what was read of them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range."""
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string()])
def test_foreign_files_need_a_key_and_a_value(kind: pa.DataType) -> None:
    """Columns go by name, in any order and width; what is not there is 0 or false, other columns are ignored."""
    table = pa.table(
        {
            "note": ["x", "y"],
            "value": pa.array(["1", "2"], pa.string()).cast(kind),
            "expire_ts": pa.array([7, 0], pa.int32()),
            "key": pa.array(["a", "b"], pa.string()).cast(kind),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file)
    assert read(file.getvalue()) == [(b"a", b"1", 7, 0, False), (b"b", b"2", 0, 0, False)]


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({"key": [b"a"]}, "no column value"),
        ({"key": [b"a"], "value": [None]}, "nulls"),
        ({"key": [b"a"], "value": [b""], "ts": [-1]}, "column ts"),
    ],
)
def test_columns_that_are_no_records_are_refused(table: dict[str, list[object]], cause: str) -> None:
    """Missing columns, nulls and numbers that do not fit are named."""
    file = io.BytesIO()
    pq.write_table(pa.table(table), file)
    with pytest.raises(UnsupportedFormat, match=cause):
        read(file.getvalue())


def test_damage_is_found() -> None:
    """A flipped bit in a page is an error of ours or harmless to every row, as pages carry checksums; so is a cut."""
    rows = many(300)
    data = written(rows)
    groups = pq.ParquetFile(io.BytesIO(data)).metadata
    last = groups.row_group(groups.num_row_groups - 1)
    pages = last.column(0).file_offset or last.column(0).data_page_offset
    chance = random.Random(9)
    found = 0
    for _ in range(200):
        bad = bytearray(data)
        bad[chance.randrange(pages)] ^= 1 << chance.randrange(8)
        try:
            assert read(bytes(bad)) == rows
        except FormatError:
            found += 1
    assert found > 100
    for cut in (0, 3, 11, len(data) - 1, len(data) // 2):
        with pytest.raises(DamagedBytes):
            read(data[:cut])


def test_errors_of_source_and_sink_pass() -> None:
    """Storage that breaks is no damage: its own error comes out, from below Arrow."""

    class Broken(Exception):
        pass

    def broken(*_arguments: object) -> bytes:
        raise Broken

    data = written(many(10_000), ParquetOptions(group_rows=1000), 500)
    source = Counting(data)
    reader = ParquetReader(source)
    source.read_at = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(Broken):
        list(reader.records())
    writer = ParquetWriter(lambda data: broken() if len(data) > 8 else None, SMALL)
    with pytest.raises(Broken):
        writer.append(batch(many()))
    writer.abort()


def test_rows_come_in_order_or_not_at_all() -> None:
    """Keys that do not ascend, in one batch or over two, are refused; so is a file without rows."""
    one, other = many(2)
    for batches in ([[other, one]], [[other], [one]], [[one], [one]]):
        writer = ParquetWriter(lambda _data: None, SMALL)
        for part in batches[:-1]:
            writer.append(batch(part))
        with pytest.raises(UnsortedKeys):
            writer.append(batch(batches[-1]))
        writer.abort()
    writer = ParquetWriter(lambda _data: None, SMALL)
    with pytest.raises(FormatError, match="without rows"):
        writer.finish()
    writer.abort()


def test_an_aborted_file_stays_incomplete() -> None:
    """Nothing is written after the abort, also when the writer is forgotten: no half file looks whole."""
    pieces: list[bytes] = []
    writer = ParquetWriter(pieces.append, SMALL)
    writer.append(batch(many(150)))
    before = len(pieces)
    writer.abort()
    del writer
    assert len(pieces) == before
    with pytest.raises(DamagedBytes):
        read(b"".join(pieces))


def _bomb(kind: str, rows: int = 5000, size: int = 1 << 16) -> bytes:
    """A small file of which each row is large."""
    numbers = pa.array([b"%08d" % row for row in range(rows)], pa.binary())
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([bytes(size)], pa.binary()))
    sink = io.BytesIO()
    match kind:
        case "dictionary":
            pq.write_table(pa.table({"key": numbers, "value": same}), sink, compression="zstd")
        case "shared prefixes":
            keys = pa.array([bytes(size) + b"%08d" % row for row in range(rows // 10)], pa.binary())
            table = pa.table({"key": keys, "value": numbers[: rows // 10]})
            encodings = {"key": "DELTA_BYTE_ARRAY", "value": "PLAIN"}
            pq.write_table(table, sink, use_dictionary=False, column_encoding=encodings, compression="zstd")
        case "compression":
            table = pa.table({"key": numbers[: rows // 10], "value": same[: rows // 10].dictionary_decode()})
            pq.write_table(table, sink, use_dictionary=False, compression="zstd")
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["dictionary", "shared prefixes", "compression"])
def test_a_small_file_of_large_rows_is_read_by_small_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encodings of a page multiply, or its compression, does not get into memory at once; more than is recorded ends it."""
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 1 << 20)
    data = _bomb(kind)
    assert len(data) < 200_000
    first = list(itertools.islice(ParquetReader(MemorySource(data)).records(), 3))
    assert sum(each.num_rows for each in first)
    assert max(each.nbytes for each in first) < 3 << 20
    with pytest.raises(DamagedBytes, match="more than the 1,000,000 bytes of keys and values that are recorded"):
        list(ParquetReader(MemorySource(data), 1_000_000).records())


@pytest.mark.parametrize("kind", ["dictionary", "shared prefixes", "compression"])
@pytest.mark.parametrize("value", [pa.binary(), pa.large_binary(), pa.string()])
def test_foreign_files_are_read_by_batches_of_bounded_size(
    kind: str, value: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for inputs of a load: a value that a dictionary repeats is decoded for some rows at a time."""
    data = io.BytesIO(_bomb(kind, rows=500))
    if value is not pa.binary():
        table = pq.read_table(data)
        data = io.BytesIO()
        pq.write_table(table.set_column(1, "value", table["value"].cast(value)), data, compression="zstd")
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "_DECODED_BYTES", 1 << 20)
    batches = list(bounded_batches(data, pq.ParquetFile(data), ["value", "key"]))
    assert pa.Table.from_batches(batches).equals(pq.read_table(data).select(["value", "key"]))
    assert max(each.nbytes for each in batches) < 3 << 20


@pytest.mark.parametrize("dictionary", [True, False])
def test_groups_without_rows_are_read(dictionary: bool) -> None:
    """Arrow writes no page for them without a dictionary, at the end of a file and between others."""
    row = pa.table({"key": [b"k"], "value": [b"v"]})
    for tables in ([row[:0]], [row, row[:0], row], [row, row[:0]]):
        data = io.BytesIO()
        with pq.ParquetWriter(data, row.schema, use_dictionary=dictionary) as writer:
            for table in tables:
                writer.write_table(table)
        file = pq.ParquetFile(data)
        assert 0 in [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        batches = bounded_batches(data, file, ["key", "value"])
        assert pa.Table.from_batches(batches, row.schema).equals(pa.concat_tables(tables))


def test_a_page_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header says what Arrow would allocate, whatever the footer says."""
    monkeypatch.setattr(parquet, "MAX_BLOCK_SIZE", 1 << 15)
    with pytest.raises(DamagedBytes, match=r"a page of 60,000 bytes, of which a reader takes at most 32,768"):
        list(ParquetReader(MemorySource(_bomb("dictionary"))).records())


@given(st.binary(max_size=60))
def test_any_bytes_are_headers_of_pages_or_are_refused(data: bytes) -> None:
    """No other error, and no endless loop."""
    with contextlib.suppress(DamagedBytes):
        assert len(list(page_headers(memoryview(data)))) <= len(data)


def test_headers_of_pages_are_those_that_arrow_wrote() -> None:
    """Versions 1 and 2, with and without dictionary, with statistics and checksums: sizes add up to those of the footer."""
    rows = pa.table({"key": [b"%05d" % row for row in range(5000)], "value": [b"same"] * 5000})
    for version, dictionary in itertools.product(("1.0", "2.0"), (True, False)):
        sink = io.BytesIO()
        pq.write_table(
            rows,
            sink,
            data_page_version=version,
            use_dictionary=dictionary,
            data_page_size=4096,
            write_page_checksum=True,
            compression="zstd",
        )
        data, meta = memoryview(sink.getvalue()), pq.ParquetFile(sink).metadata.row_group(0)
        for column in map(meta.column, range(2)):
            start = column.dictionary_page_offset if dictionary else column.data_page_offset
            pages = list(page_headers(data[start : start + column.total_compressed_size]))
            assert [page.is_multiplied for page in pages] == [dictionary] + [False] * (len(pages) - 1)
            headers = column.total_uncompressed_size - sum(page.size for page in pages)
            assert 0 < headers < 200 * len(pages)
