"""Rows of a V2 store as events of its change feed, cut and batched as TiKV does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.playground.encoding import Row, data_range, from_memcomparable, v2_ts, v2_version
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.region import Region

Event = cdcpb_pb2.Event
MAX_EVENT_BYTES: Final = 32 << 10
"""Keys and values in one event of a scan; a single larger row is an event of its own."""
BATCH_ROWS: Final = 1024
BATCH_BYTES: Final = 1 << 20
"""Upper bounds of one batch of a scan."""
MAX_MESSAGE_BYTES: Final = 6 << 20
"""Events in one message; a single larger event is a message of its own."""
_RAW_MODE: Final = (b"r", b"s")
INITIALIZED: Final = Event.Row(type=Event.INITIALIZED)
"""The row that ends an incremental scan."""


@dataclass(frozen=True, slots=True)
class SubscribedRange:
    """The RPC keys [start, end) of a subscription, ``end`` b"" unbounded."""

    start: bytes = b""
    end: bytes = b""

    @classmethod
    def of(cls, start: bytes, end: bytes) -> SubscribedRange:
        """The span between two memcomparable keys; all keys where either cannot be decoded, as where it is empty."""
        first, last = from_memcomparable(start), from_memcomparable(end)
        return cls() if first is None or last is None else cls(first, last)

    def contains(self, key: bytes) -> bool:
        return self.start <= key and (not self.end or key < self.end)


def committed_row(data_key: bytes, stored: bytes) -> Event.Row:
    """Convert one version to a row: a tombstone is a DELETE without value, an expiry is absolute, in unix seconds."""
    version = v2_version(data_key, stored)
    return Event.Row(
        start_ts=version.ts,
        commit_ts=version.ts,
        type=Event.COMMITTED,
        op_type=Event.Row.DELETE if version.stored.deleted else Event.Row.PUT,
        key=version.key,
        value=version.stored.value,
        expire_ts_unix_secs=version.stored.expire,
    )


def scan(engine: RocksEngine, region: Region, checkpoint_ts: int) -> Iterator[Event.Row]:
    """The newest version of each raw key in the region as of now, live or not, if it is above ``checkpoint_ts``."""
    start, end = max(region.start, _RAW_MODE[0]), min(region.end or _RAW_MODE[1], _RAW_MODE[1])
    rows = engine.iterate(*data_range(start, end))
    first = list(itertools.islice(rows, 1))  # takes the snapshot
    return _newest(itertools.chain(first, rows), checkpoint_ts)


def _newest(rows: Iterable[Row], checkpoint_ts: int) -> Iterator[Event.Row]:
    last = b""
    for data_key, stored in rows:
        if data_key[:-8] != last:
            last = data_key[:-8]
            if v2_ts(data_key) > checkpoint_ts:
                yield committed_row(data_key, stored)


def batch_of(rows: Iterator[Event.Row]) -> list[Event.Row]:
    """The next rows of a scan, up to `BATCH_ROWS` or about `BATCH_BYTES`; ended by `INITIALIZED` if it is over."""
    batch: list[Event.Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row.key) + len(row.value)
        if len(batch) == BATCH_ROWS or size > BATCH_BYTES:
            return batch
    return [*batch, INITIALIZED]


def events_of(region_id: int, request_id: int, rows: Iterable[Event.Row]) -> Iterator[Event]:
    """The rows of a scan as events of up to `MAX_EVENT_BYTES`."""
    event, size = Event(region_id=region_id, request_id=request_id), 0
    for row in rows:
        row_size = len(row.key) + len(row.value)
        if size + row_size >= MAX_EVENT_BYTES:
            if event.entries.entries:
                yield event
            event, size = Event(region_id=region_id, request_id=request_id), 0
        size += row_size
        event.entries.entries.append(row)
    if event.entries.entries:
        yield event


def messages_of(events: Iterable[Event]) -> Iterator[cdcpb_pb2.ChangeDataEvent]:
    """Events in as few messages as `MAX_MESSAGE_BYTES` allows, in order."""
    message, size = cdcpb_pb2.ChangeDataEvent(), 0
    for event in events:
        event_size = event.ByteSize()
        if message.events and size + event_size > MAX_MESSAGE_BYTES:
            yield message
            message, size = cdcpb_pb2.ChangeDataEvent(), 0
        message.events.append(event)
        size += event_size
    if message.events:
        yield message
