from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formats import by_protobuf
from tests.unit.formats.by_protobuf import taken
from tests.unit.formats.examples import MAX_U64, Row, many, records, u64
from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.cdc import parse
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

CODEC = KeyCodec(ApiVersion.V2, 5)
PREFIX = CODEC.prefix
WHOLE = CODEC.rpc_range()
LogType = cdcpb_pb2.Event.LogType
OpType = cdcpb_pb2.Event.Row.OpType


def message_of(groups: list[list[Row]], regions: list[int], numbers: tuple[int, int, int]) -> cdcpb_pb2.ChangeDataEvent:
    """One event a group of rows, every second one initialized, and the resolved-ts of these regions."""
    message = cdcpb_pb2.ChangeDataEvent()
    first, request, ts = numbers
    for index, rows in enumerate(groups):
        event = message.events.add(region_id=(first + index) & MAX_U64, index=index, request_id=request)
        event.entries.SetInParent()
        for row in rows:
            event.entries.entries.add(
                start_ts=row.ts,
                commit_ts=row.ts,
                type=LogType.COMMITTED,
                op_type=OpType.DELETE if row.deleted else OpType.PUT,
                key=PREFIX + row.key,
                value=row.value,
                expire_ts_unix_secs=row.expire_ts,
            )
        if index % 2:
            event.entries.entries.add(type=LogType.INITIALIZED)
    if regions:
        message.resolved_ts.regions.extend(regions)
        message.resolved_ts.ts, message.resolved_ts.request_id = ts, request
    return message


messages = st.builds(message_of, st.lists(records, max_size=3), st.lists(u64, max_size=3), st.tuples(u64, u64, u64))


@many(1)
@given(messages)
def test_messages_come_out_as_protobuf_reads_them(message: cdcpb_pb2.ChangeDataEvent) -> None:
    """Every message of rows and resolved-ts is taken whole, with each row under its event."""
    data = message.SerializeToString()
    found = parse(data)
    assert found is not None
    assert taken(found, CODEC) == by_protobuf.changes(data)
    counts = [sum(row.type == LogType.COMMITTED for row in event.entries.entries) for event in message.events]
    assert found.row_events.tolist() == [index for index, count in enumerate(counts) for _ in range(count)]
    assert found.records(CODEC, WHOLE).schema == SCHEMA


@many(2)
@given(messages, st.data())
def test_altered_bytes_never_read_otherwise_than_protobuf(
    message: cdcpb_pb2.ChangeDataEvent, draw: st.DataObject
) -> None:
    """With some bytes replaced, what is taken at all is what protobuf takes."""
    data = message.SerializeToString()
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    altered = data[:start] + draw.draw(st.binary(max_size=4)) + data[min(stop, start + 4) :]
    compare_if_taken(altered)


@many(1)
@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them_or_not_at_all(data: bytes) -> None:
    """Bytes of tags, lengths and nonsense give what protobuf finds in them, or None."""
    likely = b"\x0a\x12\x08\x10\x18\x1a\x20\x2a\x30\x32\x38\x40\0\1\2\3\4\5\6\x80\xff"
    compare_if_taken(bytes(likely[byte % len(likely)] for byte in data))


def compare_if_taken(data: bytes) -> None:
    """Compare the kernel with protobuf, on rows of keyspace 5 and on all the rest."""
    found = parse(data)
    if found is None:
        return
    expected = by_protobuf.changes(data)
    assert expected is not None
    assert taken(found, CODEC) == by_protobuf.inside(expected, WHOLE)


@many(1)
@given(records, st.binary(max_size=3), st.binary(min_size=1, max_size=3))
def test_the_filter_keeps_exactly_the_span(rows: list[Row], start: bytes, end: bytes) -> None:
    """Rows below the start, at or above the end, and of events left out do not come out."""
    found = parse(message_of([rows, rows], [], (1, 1, 1)).SerializeToString())
    assert found is not None
    span = CODEC.rpc_range(KeyRange(start, end))
    kept = [row.key for row in rows if start <= row.key < end]
    assert found.records(CODEC, span)["key"].to_pylist() == kept * 2
    assert found.records(CODEC, span, found.region_ids == 2)["key"].to_pylist() == kept


def one_event(**fields: object) -> bytes:
    """A message of one event."""
    return cdcpb_pb2.ChangeDataEvent(events=[cdcpb_pb2.Event(**fields)]).SerializeToString()  # type: ignore[arg-type]


def one_row(**fields: object) -> bytes:
    """A message of one row."""
    return one_event(entries=cdcpb_pb2.Event.Entries(entries=[cdcpb_pb2.Event.Row(**fields)]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        one_event(region_id=1, error=cdcpb_pb2.Error(not_leader=errorpb_pb2.NotLeader(region_id=1))),
        one_row(type=LogType.PREWRITE, op_type=OpType.PUT, key=b"k"),
        one_row(type=LogType.COMMIT, key=b"k"),
        one_row(type=LogType.ROLLBACK, key=b"k"),
        one_row(type=LogType.COMMITTED, key=b"k"),
        one_row(type=LogType.COMMITTED, op_type=OpType.PUT, key=b"k", old_value=b"o"),
        one_row(type=LogType.COMMITTED, op_type=OpType.PUT, key=b"k", generation=1),
        one_event(entries=cdcpb_pb2.Event.Entries()) + b"\x18\x01",
        b"\x0a",
        b"\x0a\x05\x08\x01",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
        b"\x0a\x04\x1a\x00\x1a\x00",
        b"\x12\x02\x10\x01\x12\x02\x10\x02",
        b"\x12\x03\x0a\x05\x01",
    ],
)
def test_the_unexpected_is_left_to_protobuf(data: bytes) -> None:
    """Errors, rows of transactions, unknown fields and damaged or hostile bytes give None."""
    assert parse(data) is None


def test_regions_of_a_resolved_ts_may_be_unpacked() -> None:
    """Old writers put a tag before each region; protobuf reads both forms, and so do we."""
    found = parse(b"\x12\x08\x08\x07\x08\x09\x10\x05\x18\x03")
    assert found is not None
    assert (found.resolved_regions.tolist(), found.resolved_ts, found.resolved_request) == ([7, 9], 5, 3)


def test_empty_and_large_messages() -> None:
    """An empty message has no events; a row of 1 MiB is complete, and outlives its message."""
    empty = parse(b"")
    assert empty is not None
    assert taken(empty, CODEC) == ([], [], ([], 0, 0))
    rows = [Row(b"", b"v" * (1 << 20), ts=1), Row(b"k", b"", MAX_U64, MAX_U64, deleted=True)]
    found = parse(message_of([rows], [], (1, 1, 1)).SerializeToString())
    assert found is not None
    assert [tuple(row.values()) for row in found.records(CODEC, WHOLE).to_pylist()] == [tuple(row) for row in rows]
