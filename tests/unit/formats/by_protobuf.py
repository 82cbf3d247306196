"""Contents of messages according to protobuf, for comparison with kernels."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from tikv_br.cluster.pb import cdcpb_pb2, kvrpcpb_pb2
from tikv_br.formats.cdc import ChangeEvent
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

Pairs = list[tuple[bytes, bytes]]
Rows = list[tuple[bytes, bytes, int, int, bool]]
Events = list[tuple[int, int, bool, int]]
Changes = tuple[Events, Rows, tuple[list[int], int, int]]
_LogType, _OpType = cdcpb_pb2.Event.LogType, cdcpb_pb2.Event.Row.OpType


def pairs(data: bytes) -> Pairs | None:
    """The pairs of a page of RawScan; None when the bytes are damaged or hold anything else."""
    try:
        message = kvrpcpb_pb2.RawScanResponse.FromString(data)
    except DecodeError:
        return None
    rows = [(pair.key, pair.value) for pair in message.kvs]
    only_pairs = not message.HasField("region_error") and not any(pair.HasField("error") for pair in message.kvs)
    return rows if only_pairs else None


def changes(data: bytes) -> Changes | None:
    """Events, rows and resolved-ts of a change event; None when there is anything that the kernel must not take."""
    try:
        message = cdcpb_pb2.ChangeDataEvent.FromString(data)
    except DecodeError:
        return None
    events, rows = [], []
    for event in message.events:
        initialized = False
        for row in event.entries.entries:
            if row.type == _LogType.INITIALIZED:
                initialized = True
            elif row.type == _LogType.COMMITTED and row.op_type in {_OpType.PUT, _OpType.DELETE}:
                rows.append((row.key, row.value, row.expire_ts_unix_secs, row.commit_ts, row.op_type == _OpType.DELETE))
            else:
                return None
        if event.WhichOneof("event") == "error":
            return None
        events.append((event.region_id, event.request_id, initialized, event.resolved_ts))
    resolved = message.resolved_ts
    return events, rows, (list(resolved.regions), resolved.ts, resolved.request_id)


def inside(found: Changes | None, span: KeyRange) -> Changes | None:
    """The same with the rows of a range of RPC keys alone."""
    if found is None:
        return None
    events, rows, resolved = found
    return events, [row for row in rows if span.start <= row[0] < span.end], resolved


def taken(found: ChangeEvent, codec: KeyCodec) -> Changes:
    """Contents of a keyspace according to the kernel, in the form of `changes`; keys without the prefix do not count."""
    columns = (found.region_ids, found.request_ids, found.initialized, found.event_resolved)
    events = list(zip(*(column.tolist() for column in columns), strict=True))
    batch = found.records(codec, codec.rpc_range())
    rows = [(codec.prefix + row["key"], *list(row.values())[1:]) for row in batch.to_pylist()]
    return events, rows, (found.resolved_regions.tolist(), found.resolved_ts, found.resolved_request)
