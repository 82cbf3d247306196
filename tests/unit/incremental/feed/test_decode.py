"""Messages with errors in them, and messages that are none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.incremental.feed.fakes import CODEC, Request, failure, not_leader, resolved, rows
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.errors import RequestRefused
from tikv_br.incremental.feed.feed import FeedMessage, decode, decode_all

ASKED = Request(region_id=3, request_id=9)
SPAN = CODEC.rpc_range()
LogType, OpType = cdcpb_pb2.Event.LogType, cdcpb_pb2.Event.Row.OpType


def mixed() -> cdcpb_pb2.ChangeDataEvent:
    """An error between rows, and a resolved-ts."""
    message = rows(ASKED, (b"a", 1))
    message.MergeFrom(failure(ASKED, not_leader(2)))
    message.MergeFrom(rows(Request(region_id=4, request_id=9), (b"b", 2), initialized=True))
    message.MergeFrom(resolved(ASKED, 7))
    return message


def test_rows_beside_an_error_are_kept() -> None:
    """Messages that the kernel leaves to protobuf are complete: rows by region, the resolved-ts, and the error."""
    found = decode(mixed().SerializeToString())
    assert [(each.region_id, each.request_id, each.error) for each in found.failures] == [(3, 9, not_leader(2))]
    assert found.changes.records(CODEC, SPAN)["key"].to_pylist() == [b"a", b"b"]
    assert found.changes.region_ids.tolist() == [3, 4]
    assert found.changes.initialized.tolist() == [False, True]
    assert found.changes.resolved_regions.tolist() == [3]


def test_fields_without_meaning_here_are_ignored() -> None:
    """Old values, generations and future fields do not hide a row."""
    message = rows(ASKED, (b"a", 1))
    row = message.events[0].entries.entries[0]
    row.old_value, row.generation, row.txn_source = b"before", 3, 4
    found = decode(message.SerializeToString() + b"\xf8\x07\x01")
    assert found.changes.records(CODEC, SPAN)["key"].to_pylist() == [b"a"]


@pytest.mark.parametrize("kind", [LogType.PREWRITE, LogType.COMMIT, LogType.ROLLBACK, LogType.UNKNOWN])
def test_rows_of_transactions_are_refused(kind: cdcpb_pb2.Event.LogType) -> None:
    """A row that is no change of RawKV is an error, not a row."""
    message = rows(ASKED, (b"a", 1))
    message.events[0].entries.entries[0].type = kind  # type: ignore[assignment]
    with pytest.raises(RequestRefused, match="rows other than RawKV puts and deletes"):
        decode(message.SerializeToString())


def _events(*names: bytes) -> bytes:
    return rows(ASKED, *[(name, 1) for name in names]).SerializeToString()


def test_neighbours_come_out_as_one() -> None:
    """Messages of events are put together; each resolved-ts and each error stays where it was, and nothing is lost."""
    reported = [resolved(ASKED, ms).SerializeToString() for ms in (7, 9)]
    data = [_events(b"a"), _events(b"b", b"c"), *reported, _events(b"d"), mixed().SerializeToString(), _events(b"e")]
    found = list(decode_all(data))
    assert [each.changes.records(CODEC, SPAN)["key"].to_pylist() for each in found] == [
        [b"a", b"b", b"c"],
        [],
        [],
        [b"d"],
        [b"a", b"b"],
        [b"e"],
    ]
    assert [each.changes.resolved_ts for each in found] == [
        0,
        *(cdcpb_pb2.ChangeDataEvent.FromString(each).resolved_ts.ts for each in reported),
        0,
        mixed().resolved_ts.ts,
        0,
    ]
    assert [len(each.failures) for each in found] == [0, 0, 0, 0, 1, 0]


@given(st.lists(st.sampled_from(["one", "two", "end", "resolved", "error", "mixed"]), max_size=12))
def test_messages_give_the_same_together_and_one_by_one(kinds: list[str]) -> None:
    """Rows, ends of scans, errors and resolved-ts are those of the single messages, in order."""
    made = {
        "one": rows(ASKED, (b"a", 1)),
        "two": rows(Request(region_id=4, request_id=9), (b"b", 2), (b"c", 3)),
        "end": rows(ASKED, initialized=True),
        "resolved": resolved(ASKED, 7),
        "error": failure(ASKED, not_leader(2)),
        "mixed": mixed(),
    }
    data = [made[kind].SerializeToString() for kind in kinds]

    def reported(messages: Iterable[FeedMessage]) -> list[object]:
        found = list(messages)
        changes = [each.changes for each in found]
        return [
            [row for each in changes for row in each.records(CODEC, SPAN).to_pylist()],
            [pair for each in changes for pair in zip(each.region_ids, each.initialized, strict=True)],
            [(each.resolved_ts, each.resolved_regions.tolist()) for each in changes if each.resolved_ts],
            [failed for each in found for failed in each.failures],
        ]

    assert reported(decode_all(data)) == reported(map(decode, data))


def test_two_resolved_timestamps_are_never_made_one() -> None:
    """A resolved-ts in a message with events counts for its own regions only."""
    other = Request(region_id=8, request_id=9)
    messages = [rows(ASKED, (b"a", 1)), rows(ASKED, (b"b", 2))]
    messages[0].MergeFrom(resolved(ASKED, 7))
    messages[1].MergeFrom(resolved(other, 9))
    found = list(decode_all([each.SerializeToString() for each in messages]))
    assert [each.changes.resolved_regions.tolist() for each in found] == [[3], [8]]
    assert found[0].changes.resolved_ts < found[1].changes.resolved_ts


@given(st.data())
def test_damaged_messages_end_in_clean_errors(draw: st.DataObject) -> None:
    """With some bytes replaced, a message decodes or is refused; nothing else happens."""
    data = mixed().SerializeToString()
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    altered = data[:start] + draw.draw(st.binary(max_size=6)) + data[min(stop, start + 6) :]
    try:
        found = decode(altered)
    except RequestRefused:
        return
    found.changes.records(CODEC, SPAN).validate(full=True)
