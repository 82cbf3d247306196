"""Change events of real servers come out as protobuf reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.formats import cdc
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.incremental.feed.feed import decode

CODEC = KeyCodec(ApiVersion.V2)
COMMITTED, DELETE = cdcpb_pb2.Event.LogType.COMMITTED, cdcpb_pb2.Event.Row.OpType.DELETE


def frames(golden: Path) -> Iterator[tuple[str, bytes]]:
    """Every recorded message as it was on the wire, with where it is from."""
    for path in sorted(golden.glob("cdc/*/frames.bin")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            start = at + 4
            at = start + int.from_bytes(data[at:start], "big")
            yield f"{path.parent.name} at {start}", data[start:at]


def test_every_recorded_message_decodes(golden: Path) -> None:
    """Rows, ends of scans and resolved-ts by the kernel alone; messages with errors by way of protobuf, errors in hand."""
    rows = failures = 0
    for where, frame in frames(golden):
        message = cdcpb_pb2.ChangeDataEvent.FromString(frame)
        errors = [event for event in message.events if event.HasField("error")]
        assert (cdc.parse(frame) is None) == bool(errors), where
        found = decode(frame)
        assert [(each.region_id, each.request_id, each.error) for each in found.failures] == [
            (event.region_id, event.request_id, event.error) for event in errors
        ], where
        assert found.changes.resolved_regions.tolist() == list(message.resolved_ts.regions), where
        assert found.changes.resolved_ts == message.resolved_ts.ts, where
        assert found.changes.resolved_request == message.resolved_ts.request_id, where
        expected = [
            (CODEC.user_key(row.key), row.value, row.expire_ts_unix_secs, row.commit_ts, row.op_type == DELETE)
            for event in message.events
            for row in event.entries.entries
            if row.type == COMMITTED
        ]
        batch = found.changes.records(CODEC, CODEC.rpc_range())
        assert [tuple(row.values()) for row in batch.to_pylist()] == expected, where
        rows += batch.num_rows
        failures += len(errors)
    assert rows
    assert failures
