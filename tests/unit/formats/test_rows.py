from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stored_values import encode_value
from tests.unit.formats.examples import MAX_U64, Row, keyspaces, many, pairs, records
from tikv_br.formats import columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA, STORAGE_SCHEMA
from tikv_br.formats.errors import DamagedBytes, FormatError, UnsortedKeys, UnsupportedFormat
from tikv_br.formats.keys.codec import DATA_PREFIX, KeyCodec
from tikv_br.formats.rows import LiveFilter, from_storage, live, to_storage
from tikv_br.formats.values import StoredValue, decode_value

V1, V1TTL, V2 = (KeyCodec(api_version) for api_version in ApiVersion)
codecs = st.sampled_from([V1, V1TTL]) | keyspaces.map(lambda keyspace: KeyCodec(ApiVersion.V2, keyspace))


def batch(rows: list[Row]) -> pa.RecordBatch:
    """A batch of `SCHEMA` that is a slice of a larger one: its offsets begin anywhere."""
    padded = [(b"before", b"x", 1, 1, True), *rows, (b"after", b"y", 1, 1, True)]
    column = [list(values) for values in zip(*padded, strict=True)]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(column, SCHEMA, strict=True)], schema=SCHEMA
    ).slice(1, len(rows))


def rows_of(batch: pa.RecordBatch) -> list[tuple[object, ...]]:
    """The rows as tuples."""
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def fit(codec: KeyCodec, row: Row) -> Row:
    """The row without what this API version cannot hold."""
    key, value, expire_ts, ts, deleted = row
    return Row(key, value, expire_ts * codec.api_version.has_ttl, ts * codec.is_v2, deleted and codec.is_v2)


def stored(codec: KeyCodec, row: Row, default_ts: int) -> tuple[bytes, bytes]:
    """The row in storage, made by the codecs of single keys and values."""
    key, value, expire_ts, ts, deleted = row
    storage_key = codec.storage_key(codec.rpc_key(key), ts or default_ts)
    return DATA_PREFIX + storage_key, encode_value(codec.api_version, StoredValue(value, expire_ts, deleted))


def unstored(codec: KeyCodec, key: bytes, value: bytes) -> Row:
    """The record of a storage row, made by the codecs of single keys and values; raises `DamagedBytes`."""
    if not key.startswith(DATA_PREFIX):
        raise DamagedBytes("no z")
    rpc, ts = codec.parse_storage_key(key[1:])
    if codec.is_v2 and not ts:
        raise DamagedBytes("no ts")
    user_value, expire_ts, deleted = decode_value(codec.api_version, value)
    return Row(codec.user_key(rpc), user_value, expire_ts, ts, deleted)


@many(1)
@given(codecs, records, st.integers(1, MAX_U64))
def test_batches_are_stored_as_their_rows_are(codec: KeyCodec, rows: list[Row], default_ts: int) -> None:
    """`to_storage` equals the conversion of each single key and value, and `from_storage` inverts it."""
    fitting = [fit(codec, row) for row in rows]
    storage = to_storage(batch(fitting), codec, default_ts)
    assert storage.schema == STORAGE_SCHEMA
    assert rows_of(storage) == [stored(codec, row, default_ts) for row in fitting]
    back = from_storage(storage, codec)
    assert back.schema == SCHEMA
    assert rows_of(back) == [row._replace(ts=row.ts or default_ts * codec.is_v2) for row in fitting]


@many(1)
@given(codecs, records.filter(bool), st.data())
def test_damaged_rows_are_seen(codec: KeyCodec, rows: list[Row], draw: st.DataObject) -> None:
    """A batch with a changed row is refused exactly if the row alone is; else both read alike."""
    storage = [list(stored(codec, fit(codec, row), 1)) for row in rows]
    row, column = draw.draw(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 1)))
    data = storage[row][column]
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(max(0, len(data) - 24), len(data))] * 2)))
    storage[row][column] = data[:start] + draw.draw(st.binary(max_size=3)) + data[stop:]
    damaged = columns.storage_rows(*(columns.from_list(values) for values in zip(*storage, strict=True)))
    try:
        expected = [unstored(codec, key, value) for key, value in storage]
    except DamagedBytes:
        with pytest.raises(DamagedBytes, match="row "):
            from_storage(damaged, codec)
    else:
        assert rows_of(from_storage(damaged, codec)) == expected


@many(1)
@given(codecs, pairs)
def test_any_bytes_are_read_or_refused(codec: KeyCodec, rows: list[tuple[bytes, bytes]]) -> None:
    """Bytes that never were rows are refused with `DamagedBytes`, or are what the single codecs read in them."""
    prefixed = [(DATA_PREFIX + key, value) for key, value in rows]
    storage = columns.storage_rows(*(columns.from_list([row[column] for row in prefixed]) for column in range(2)))
    try:
        expected = [unstored(codec, key, value) for key, value in prefixed]
    except DamagedBytes:
        with pytest.raises(DamagedBytes, match="row "):
            from_storage(storage, codec)
    else:
        assert rows_of(from_storage(storage, codec)) == expected


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("", "00", "does not begin with z"),
        ("79", "00", "does not begin with z"),
        ("7a", "00", "length"),
        ("7a7200000061000000fcfffffffffffffe", "00", "length"),
        ("7a7200000061000000f0fffffffffffffffe", "00", "marker"),
        ("7a7200000061000000fffffffffffffffffe", "00", "marker"),
        ("7a7200000061000001fcfffffffffffffffe", "00", "padded"),
        ("7a7200000161000000fcfffffffffffffffe", "00", "not of keyspace 0"),
        ("7a7200000000000000f9fffffffffffffffe", "00", "not of keyspace 0"),
        ("7a7200000061000000fcffffffffffffffff", "00", "timestamp is 0"),
        ("7a7200000061000000fcfffffffffffffffe", "", "no flags"),
        ("7a7200000061000000fcfffffffffffffffe", "04", "unknown flags"),
        ("7a7200000061000000fcfffffffffffffffe", "0000000000000501", "too short for its expiry"),
        ("7a7200000061000000fcfffffffffffffffe", "000000000000000001", "an expiry of 0"),
    ],
)
def test_refusals_say_which_row_and_why(key: str, value: str, reason: str) -> None:
    """Each kind of damage in V2 is named, with the row and its key."""
    good = (bytes.fromhex("7a7200000061000000fcfffffffffffffffe"), b"\0")
    rows = [good, (bytes.fromhex(key), bytes.fromhex(value)), good]
    storage = columns.storage_rows(*(columns.from_list([row[column] for row in rows]) for column in range(2)))
    with pytest.raises(DamagedBytes, match=f"row 1, key {key}: .*{reason}"):
        from_storage(storage, V2)


def test_hostile_keys_make_short_messages() -> None:
    """A wrong key of a megabyte is not printed in full."""
    storage = columns.storage_rows(columns.from_list([b"y" * (1 << 20)]), columns.from_list([b""]))
    with pytest.raises(DamagedBytes) as refused:
        from_storage(storage, V2)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("codec", [V1, V1TTL, V2, KeyCodec(ApiVersion.V2, 4242)])
def test_large_and_empty_rows_round_trip(codec: KeyCodec) -> None:
    """Empty batches, empty keys and values, values of 1 MiB and keys of 64 KiB come back as they were."""
    for rows in (
        [],
        [Row(b"", b"", ts=1)],
        [Row(b"k" * 65536, b"v" * (1 << 20), ts=1), Row(b"l", b"", ts=1)],
    ):
        back = from_storage(to_storage(batch(rows), codec), codec)
        assert [row[:2] for row in rows_of(back)] == [row[:2] for row in rows]


def test_values_of_v1_are_not_copied() -> None:
    """V1 stores values as they are: both ways the column is the same memory."""
    records = batch([Row(b"k", b"value")])
    storage = to_storage(records, V1)
    assert storage["value"].buffers()[2].address == records["value"].buffers()[2].address
    assert from_storage(storage, V1)["value"].buffers()[2].address == records["value"].buffers()[2].address


def test_fields_that_a_version_lacks_are_refused() -> None:
    """An expiry in V1 and a tombstone in V1 or V1TTL are errors that name the row, never dropped."""
    plain = Row(b"a", b"")
    for codec, row in (
        (V1, Row(b"b", b"", expire_ts=9)),
        (V1, Row(b"b", b"", deleted=True)),
        (V1TTL, Row(b"b", b"", deleted=True)),
    ):
        with pytest.raises(UnsupportedFormat, match=f"row 1: API {codec.api_version.label} stores no"):
            to_storage(batch([plain, row]), codec)


def test_a_timestamp_of_zero_is_never_written() -> None:
    """V2 rows with ts 0 would be invisible to every reader, so 0 cannot be asked for either."""
    for ts in (0, -1, MAX_U64 + 1):
        with pytest.raises(FormatError, match="timestamp"):
            to_storage(batch([]), V2, default_ts=ts)


def versions_in(data: bytes) -> list[Row]:
    """A sorted run of versions of few keys, from three drawn bytes a version."""
    names = (b"", b"\0", b"a", b"a\0", b"ab")
    found = {
        (names[key % 5], 1 + ts % 5): Row(names[key % 5], b"%d" % ts, shape & 3, 1 + ts % 5, bool(shape & 4))
        for key, ts, shape in zip(*[iter(data)] * 3, strict=False)
    }
    return sorted(found.values(), key=lambda row: (row.key, -row.ts))


@many(1)
@given(st.binary(min_size=6, max_size=48).map(versions_in), st.integers(0, 4), st.binary(max_size=3))
def test_live_rows_are_what_a_reader_sees(rows: list[Row], now: int, cuts: bytes) -> None:
    """Only a key's newest version counts, and not if dead or expired, wherever the run is cut into batches."""
    newest: dict[bytes, Row] = {}
    for row in rows:
        newest[row.key] = max(row, newest.get(row.key, row), key=lambda version: version.ts)
    expected = [row for row in newest.values() if StoredValue(row.value, row.expire_ts, row.deleted).is_live(now)]
    assert rows_of(live(batch(rows), now)) == expected
    edges = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    reader = LiveFilter(now)
    parts = [reader.apply(batch(rows[start:stop])) for start, stop in pairwise(edges)]
    assert [row for part in parts for row in rows_of(part)] == expected


def test_live_rows_of_unsorted_versions_are_refused() -> None:
    """Older before newer, twice the same version, or descending keys could hide a row: each is refused, in any batch."""
    first = Row(b"b", b"", ts=5)
    for wrong in (Row(b"b", b"", ts=6), Row(b"b", b"", ts=5), Row(b"a", b"", ts=1)):
        with pytest.raises(UnsortedKeys, match="row 1"):
            live(batch([first, wrong]), 0)
        reader = LiveFilter(0)
        reader.apply(batch([first]))
        with pytest.raises(UnsortedKeys, match="row 0"):
            reader.apply(batch([wrong]))


def test_rows_that_are_all_live_are_not_copied() -> None:
    """The common case, nothing to drop, returns the very batch."""
    rows = columns.records(
        columns.from_list([b"a", b"b"]), columns.from_list([b"", b""]), ts=np.array([2, 1], np.uint64)
    )
    assert live(rows, 0) is rows
