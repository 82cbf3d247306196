from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.formats.examples import MAX_U64, keys, many, u64
from tests.unit.formats.sst.tables import batch
from tikv_br.formats import columns, mvcc
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys
from tikv_br.formats.keys.codec import MAX_TS, encode
from tikv_br.formats.mvcc import WriteRecord

V2 = b"x\0\x10\x92"
PREFIXES = st.sampled_from([b"", V2])

write_records = st.builds(
    WriteRecord,
    kind=st.sampled_from([b"P", b"D", b"L", b"R"]),
    start_ts=u64,
    value=st.none() | st.binary(max_size=255),
    is_rolled_back=st.booleans(),
    fence=st.none() | u64,
    last_change=st.none() | st.tuples(u64, u64),
    source=u64,
    rest=st.just(b"") | st.binary(max_size=5).map(lambda data: b"\x01" + data),
)


@given(write_records)
@example(WriteRecord(b"P", 0, b""))
@example(WriteRecord(b"P", MAX_U64, b"v" * 255, True, MAX_U64, (MAX_U64, MAX_U64), MAX_U64))
@many(2)
def test_records_survive(record: WriteRecord) -> None:
    """A record with any of its fields is decoded from what it is encoded to; unknown fields at the end are kept."""
    assert WriteRecord.decode(record.encode()) == record


def test_the_encoding_of_every_field() -> None:
    """The bytes are those of TiKV's documentation of the record, in its order."""
    record = WriteRecord(b"P", 300, b"ab", True, 5, (1, 2), 128)
    assert (
        record.encode()
        == b"P\xac\x02" + b"v\x02ab" + b"R" + b"F" + bytes(7) + b"\5" + b"l" + bytes(7) + b"\1\2" + b"S\x80\1"
    )


@given(write_records, st.data())
@many(2)
def test_records_that_are_cut_off(record: WriteRecord, data: st.DataObject) -> None:
    """A record without its last bytes is damaged, or one with fewer fields; the kernel says the same of it."""
    stored = record.encode()
    stored = stored[: data.draw(st.integers(0, len(stored)))]
    try:
        found = WriteRecord.decode(stored)
    except DamagedBytes:
        assert fences_of(stored) is None
    else:
        assert found.encode() == stored
        assert fences_of(stored) == (found.fence or 0 if is_row(found) else None)


def is_row(record: WriteRecord) -> bool:
    """Return whether a backup may hold it."""
    return record.kind == b"P" or (record.kind == b"D" and not record.value)


def fences_of(stored: bytes) -> int | None:
    """The fence that the kernel finds; None if it refuses the record."""
    try:
        return int(mvcc.fences(batch([(b"z", stored)]))[0])
    except DamagedBytes:
        return None


@given(st.binary(max_size=30), st.sampled_from([b"", b"P", b"D", b"P\1v", b"P\1l", b"D\1S"]))
@many(4)
def test_any_bytes_as_a_record(tail: bytes, head: bytes) -> None:
    """Both decoders refuse the same bytes and find the same fences in the others, without reading beyond their end."""
    stored = head + tail
    try:
        record = WriteRecord.decode(stored)
    except DamagedBytes:
        assert fences_of(stored) is None
    else:
        assert fences_of(stored) == (record.fence or 0 if is_row(record) else None)


def rows_of(user_keys: list[bytes], seed: int) -> pa.RecordBatch:
    """Records with these keys, in order, and values, timestamps and deletes by a seed."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 20, 254, 255, 256, 257, 900]) for _ in user_keys]
    deleted = [not size and chance.random() < 0.3 for size in sizes]
    ts = [chance.choice([1, 127, 128, 1 << 50, MAX_TS]) for _ in user_keys]
    return pa.RecordBatch.from_arrays(
        [
            columns.from_list(user_keys),
            columns.from_list([chance.randbytes(size) for size in sizes]),
            pa.array([0] * len(sizes), pa.uint64()),
            pa.array(ts, pa.uint64()),
            pa.array(deleted, pa.bool_()),
        ],
        schema=columns.SCHEMA,
    )


def pieces(rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """A batch as several."""
    return (rows.slice(at, size) for at in range(0, rows.num_rows, size))


def joined(
    write: pa.RecordBatch, default: pa.RecordBatch, prefix: bytes = b"", cut: tuple[int, int] = (1000, 1000)
) -> pa.RecordBatch:
    """The rows of both, read in batches of some rows each."""
    found = list(mvcc.join(pieces(write, cut[0]), pieces(default, cut[1]), prefix))
    assert all(part.num_rows for part in found)
    return pa.Table.from_batches(found, columns.SCHEMA).combine_chunks().to_batches()[0]


@given(
    st.sets(keys(), min_size=1, max_size=30),
    st.integers(0, 99),
    PREFIXES,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@many(2)
def test_rows_survive_both_column_families(found: set[bytes], seed: int, prefix: bytes, cut: tuple[int, int]) -> None:
    """Joined are the rows that were split, however the batches of the two files lie to each other."""
    rows = rows_of(sorted(found), seed)
    default, write = mvcc.split(rows, prefix)
    assert joined(write, default, prefix, cut).equals(rows)


@given(st.sets(keys(), min_size=1, max_size=9), st.integers(0, 99), PREFIXES)
def test_rows_become_records(found: set[bytes], seed: int, prefix: bytes) -> None:
    """Keys, records and long values are as the record's own codec and the memcomparable one write them."""
    rows = rows_of(sorted(found), seed)
    default, write = mvcc.split(rows, prefix)
    expected, long = [], []
    for row in rows.to_pylist():
        place = b"z" + encode(prefix + row["key"]) + (MAX_TS - row["ts"]).to_bytes(8, "big")
        is_short = len(row["value"]) <= 255
        value = row["value"] if is_short and not row["deleted"] else None
        expected.append(
            {"key": place, "value": WriteRecord(b"D" if row["deleted"] else b"P", row["ts"], value).encode()}
        )
        long += [] if is_short else [{"key": place, "value": row["value"]}]
    assert (write.to_pylist(), default.to_pylist()) == (expected, long)


def key(name: bytes, ts: int) -> bytes:
    """A data key."""
    return b"z" + encode(name) + (MAX_TS - ts).to_bytes(8, "big")


def put(
    name: bytes, start_ts: int = 5, commit_ts: int = 9, value: bytes | None = None, **fields: int
) -> tuple[bytes, bytes]:
    """A row of ``write``."""
    return key(name, commit_ts), WriteRecord(b"P", start_ts, value, **fields).encode()  # type: ignore[arg-type]


LONG = bytes(300)


@pytest.mark.parametrize(
    ("write", "default", "what"),
    [
        ([put(b"a"), put(b"b")], [(key(b"a", 5), LONG)], f"a record without its value.*{key(b'b', 9).hex()}"),
        ([put(b"a"), put(b"b")], [(key(b"b", 5), LONG)], f"a record without its value.*{key(b'a', 9).hex()}"),
        ([put(b"a")], [], f"a record without its value.*{key(b'a', 9).hex()}"),
        ([put(b"a")], [(key(b"a", 6), LONG)], f"a value without its record.*{key(b'a', 6).hex()}"),
        ([put(b"a")], [(key(b"a", 4), LONG)], f"a record without its value.*{key(b'a', 9).hex()}"),
        ([put(b"b")], [(key(b"a", 5), LONG), (key(b"b", 5), LONG)], f"a value without its record.*{key(b'a', 5).hex()}"),
        ([put(b"a")], [(key(b"a", 5), LONG), (key(b"b", 5), LONG)], f"a value without its record.*{key(b'b', 5).hex()}"),
        ([put(b"a", value=b"v")], [(key(b"a", 5), LONG)], f"a value without its record.*{key(b'a', 5).hex()}"),
        ([], [(key(b"a", 5), LONG)], f"a value without its record.*{key(b'a', 5).hex()}"),
        ([put(b"a", commit_ts=9, value=b"v"), put(b"a", commit_ts=7, value=b"v")], [], "two versions of key 61"),
        ([(key(b"a", 9), b"")], [], "row 0.*no known type"),
        ([(key(b"a", 9), b"L\5")], [], "row 0.*neither a put nor a delete"),
        ([(key(b"a", 9), b"P\xff")], [], "row 0.*no start ts"),
        ([put(b"a", value=b"v"), (key(b"b", 9), b"P\5v\2a")], [], f"row 1, key {key(b'b', 9).hex()}: .*cut off"),
        ([(key(b"a", 9), b"D\5v\1a")], [], "delete with a value"),
        ([(b"z" + encode(b"a"), b"P\5v\0")], [], "does not have the length of a memcomparable key"),
        ([(key(b"a", 0), b"P\5v\0")], [], "timestamp is 0"),
        ([put(b"a")], [(b"y" + key(b"a", 5)[1:], LONG)], "row 0.*does not begin with z"),
    ],
)  # fmt: skip
def test_records_that_no_store_writes_are_refused(
    write: list[tuple[bytes, bytes]], default: list[tuple[bytes, bytes]], what: str
) -> None:
    """Files that do not belong together and rows of no backup are damaged; the message has the key."""
    with pytest.raises(DamagedBytes, match=what):
        joined(batch(write), batch(default))


def test_order() -> None:
    """Keys out of order are damage."""
    with pytest.raises(UnsortedKeys):
        joined(batch([put(b"b", value=b""), put(b"a", value=b"")]), batch([]))


def test_keys_of_another_keyspace() -> None:
    """A key of another keyspace is damage, and the message names the one that was expected."""
    default, write = mvcc.split(rows_of([b"a"], 1), b"x\0\0\1")
    with pytest.raises(DamagedBytes, match="not of keyspace 2"):
        joined(write, default, b"x\0\0\2")


def test_fences() -> None:
    """The fences of records, 0 for those without."""
    rows = [put(b"a", value=b"v"), put(b"b", fence=7), put(b"c", fence=0)]
    assert mvcc.fences(batch(rows)).tolist() == [0, 7, 0]


@given(st.binary(max_size=40), st.binary(max_size=40), PREFIXES)
@many(4)
def test_any_bytes(stored_key: bytes, value: bytes, prefix: bytes) -> None:
    """Any bytes as a row of either file are rows or damage."""
    for write, default in (([(stored_key, value)], []), ([put(b"a")], [(stored_key, value)])):
        try:
            found = joined(batch(write), batch(default), prefix)
        except FormatError:
            continue
        assert found.num_rows == 1
