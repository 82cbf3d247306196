"""Both ends of a sync from memory, each a process of its own: ``python -m bench.replay_feed source|target ROWS VALUE_SIZE REGIONS``.

The source tells the same changes to each that subscribes to all of its regions: serialized beforehand, as a store sends
them that takes requests of `EVENT_ROWS` rows all over its keys. The target takes puts and deletes and forgets them. PD
and one store of API V2 each, at one address, which is printed; they serve until their input ends.
"""

from __future__ import annotations

import bisect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import grpc

from bench.canned_pd import CannedPd, serve, serving, streaming, unary
from bench.dataset import Dataset
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec

CODEC = KeyCodec(ApiVersion.V2)
EVENT_ROWS = 64
"""Rows of one request at the source: neighbours, with one timestamp, delivered as one event."""
MESSAGE_EVENTS = 32
RESOLVED_ROWS = 100_000
"""A resolved-ts of all regions comes after so many: once a second at 100,000 rows a second."""
START_TS = 1_000 << 18
REQUEST_ID = 1
"""Request id of the first subscriptions of a feed."""

_LogType, _PUT = cdcpb_pb2.Event.LogType, cdcpb_pb2.Event.Row.OpType.PUT


def source(dataset: Dataset, regions: int) -> AbstractContextManager[str]:
    """Start a source; yields its address."""
    return serving("bench.replay_feed", "source", dataset.rows, dataset.value_size, regions)


def target(dataset: Dataset, regions: int) -> AbstractContextManager[str]:
    """Start a target with the same regions; yields its address."""
    return serving("bench.replay_feed", "target", dataset.rows, dataset.value_size, regions)


def last_ts(dataset: Dataset) -> int:
    """Last resolved-ts of the source."""
    return START_TS + _events(dataset)


def bounds(dataset: Dataset, regions: int) -> list[bytes]:
    """Start keys of regions: at the first row of an event."""
    first_rows = [event * EVENT_ROWS for event in _first_events(_events(dataset), regions)[1:]]
    return [b"", *(CODEC.bound(CODEC.rpc_key(dataset.key(row))) for row in first_rows)]


def messages(dataset: Dataset, regions: int) -> list[bytes]:
    """All messages after the subscriptions: each row once, and a resolved-ts every `RESOLVED_ROWS`."""
    found = [initialized(regions)]
    last, delivered = _events(dataset), 0
    for message in rows_delivered(dataset, regions, lambda at: START_TS + at + 1):
        before, delivered = delivered, delivered + len(message.events)
        found.append(message.SerializeToString())
        if delivered == last or delivered * EVENT_ROWS // RESOLVED_ROWS > before * EVENT_ROWS // RESOLVED_ROWS:
            found.append(resolved(START_TS + delivered, regions))
    return found


def rows_delivered(dataset: Dataset, regions: int, ts_of: Callable[[int], int]) -> Iterator[cdcpb_pb2.ChangeDataEvent]:
    """Each row once, as messages of `MESSAGE_EVENTS`; events in an order without order, the n-th has the timestamp ``ts_of(n)``."""
    order = list(range(_events(dataset)))
    random.Random(0).shuffle(order)  # noqa: S311 - data of a bench
    records, firsts = dataset.records(), _first_events(len(order), regions)
    for first in range(0, len(order), MESSAGE_EVENTS):
        message = cdcpb_pb2.ChangeDataEvent()
        for at, number in enumerate(order[first : first + MESSAGE_EVENTS], first):
            event = message.events.add(region_id=bisect.bisect_right(firsts, number), request_id=REQUEST_ID)
            rows, ts = records.slice(number * EVENT_ROWS, EVENT_ROWS), ts_of(at)
            for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
                row = event.entries.entries.add(start_ts=ts, commit_ts=ts, key=CODEC.rpc_key(key), value=value)
                row.type, row.op_type = _LogType.COMMITTED, _PUT
        yield message


def _events(dataset: Dataset) -> int:
    return -(-dataset.rows // EVENT_ROWS)


def _first_events(events: int, regions: int) -> list[int]:
    """The first event of each region."""
    return [events * number // regions for number in range(regions)]


def initialized(regions: int) -> bytes:
    """End of the incremental scans of all regions."""
    message = cdcpb_pb2.ChangeDataEvent()
    for region_id in range(1, regions + 1):
        event = message.events.add(region_id=region_id, request_id=REQUEST_ID)
        event.entries.entries.add(type=_LogType.INITIALIZED)
    return message.SerializeToString()


def resolved(ts: int, regions: int) -> bytes:
    """A resolved-ts of all regions."""
    said = cdcpb_pb2.ResolvedTs(regions=range(1, regions + 1), ts=ts, request_id=REQUEST_ID)
    return cdcpb_pb2.ChangeDataEvent(resolved_ts=said).SerializeToString()


class Feed:
    """Sends all messages to each client that has subscribed to all regions."""

    def __init__(self, delivered: Callable[[], Iterable[bytes]], regions: int) -> None:
        self._delivered = delivered
        self._regions = regions

    def event_feed(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The stream of one subscriber."""
        for _ in range(self._regions):
            if cdcpb_pb2.ChangeDataRequest.FromString(next(requests)).request_id != REQUEST_ID:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "only a feed's first subscriptions are answered")
        yield from self._delivered()
        yield from (b"" for _ in requests)  # until it hangs up


def serve_feed(dataset: Dataset, regions: int, delivered: Callable[[], Iterable[bytes]]) -> None:
    """Serve a source."""
    feed = streaming(Feed(delivered, regions).event_feed)
    serve(CannedPd(bounds(dataset, regions)), {"cdcpb.ChangeData": {"EventFeedV2": feed}})


def main(role: str, rows: int, value_size: int, regions: int) -> None:
    """Serve."""
    dataset = Dataset(rows, value_size)
    if role == "source":
        delivered = messages(dataset, regions)
        serve_feed(dataset, regions, lambda: delivered)
    else:
        taken = unary(lambda _: b"")
        serve(CannedPd(bounds(dataset, regions)), {"tikvpb.Tikv": {"RawBatchPut": taken, "RawBatchDelete": taken}})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
