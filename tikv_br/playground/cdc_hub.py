"""All writes of V2 stores, and the subscriptions of change feeds that receive them.

One lock orders three things: a write with its events, a change of a region as feeds see it, and a subscription. So a
write that was accepted before its region split or moved is refused, as Raft would, instead of being missed by a later
scan of the region.

Rows of a V2 store as events of its change feed, cut and batched as TiKV does.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tikv_br.cluster.pb import cdcpb_pb2, errorpb_pb2, metapb_pb2
from tikv_br.playground import region_errors
from tikv_br.playground.encoding import Row, data_range, from_memcomparable, v2_ts, v2_version
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.failpoints import FailpointTable
from tikv_br.playground.node import FEED_OF_RAW_ROWS, StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.request_checks import RegionFault
from tikv_br.playground.settings import ServerVersion

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


def region_not_found(region_id: int) -> cdcpb_pb2.Error:
    """The store has no peer of the region; also the answer to a deregistration."""
    return cdcpb_pb2.Error(region_not_found=errorpb_pb2.RegionNotFound(region_id=region_id))


class Outbox(Protocol):
    """The stream that a subscription's events are sent on. Called under the hub's lock."""

    def push(self, event: Event) -> None: ...

    def has_room(self, event: Event) -> bool: ...


@dataclass(slots=True, eq=False)
class FeedSubscription:
    """One region's changes for one request of one stream."""

    outbox: Outbox
    store_id: int
    region_id: int
    request_id: int
    span: SubscribedRange
    raw: bool
    """True for RawKV; a subscription for transactions never gets a row here."""
    version: int = 0
    """Version of the region's epoch at registration."""
    initialized: bool = False
    """True once the incremental scan has ended; resolved-ts are sent from then on."""
    overrun_until: float = 0.0
    """Monotonic time until which the store does not notice that it lost the leadership; 0 while it leads."""
    ended: bool = False


class ChangeHub:
    """All subscriptions of a playground, store by store. Thread-safe."""

    def __init__(self, regions: RegionTable, failpoints: FailpointTable, release: ServerVersion) -> None:
        self.lock = threading.Lock()
        self._release = release
        self._regions = regions
        self._failpoints = failpoints
        self._subscriptions: dict[tuple[int, int], list[FeedSubscription]] = {}
        self._pins: defaultdict[int, set[int]] = defaultdict(set)
        self._applied: defaultdict[int, int] = defaultdict(int)
        regions.on_change(self._region_changed)

    @contextlib.contextmanager
    def write_ts(self, node: StoreNode) -> Iterator[int]:
        """The timestamp of a write, 0 except in V2. The store's resolved-ts stay below it until the block ends."""
        if not node.has_timestamps:
            yield 0
            return
        with self.lock:
            pin = node.causal.next_ts()
            ts = node.causal.next_ts()
            self._pins[node.store_id].add(pin)
        try:
            yield ts
        finally:
            with self.lock:
                self._pins[node.store_id].discard(pin)

    def write(self, node: StoreNode, region: Region, puts: Sequence[Row], deletes: Sequence[bytes]) -> None:
        """Write rows of ``region``, and send them to its subscriptions.

        Raises `RegionFault` if, in V2, the region has been split, merged or moved since it was looked up.
        """
        if not node.has_timestamps:
            with self.lock:
                watched = self._of(node.store_id, region.id)
            if watched and any(from_memcomparable(key[1:]) is None for key, _ in puts):
                node.fatal_requests.record(store_id=node.store_id, rpc="RawPut", what=FEED_OF_RAW_ROWS)
            node.engine.write(puts, deletes)
            return
        with self.lock:
            self._check_unchanged(region)
            node.engine.write(puts, deletes)
            self._applied[region.id] += 1
            receivers = [each for each in self._of(node.store_id, region.id) if each.raw and not each.overrun_until]
            if receivers:
                self._send(receivers, [committed_row(*row) for row in puts])

    def _check_unchanged(self, region: Region) -> None:
        now = self._regions.get(region.id)
        if now is None:
            raise RegionFault(region_errors.region_not_found(region.id, read=False))
        if now.leader_store != region.leader_store:
            raise RegionFault(self._regions.not_leader(now))
        if now.version != region.version:
            sent = region.to_pb().region_epoch
            raise RegionFault(region_errors.epoch_not_match(now, sent, self._regions.siblings(now, sent)))

    def _send(self, subscriptions: Sequence[FeedSubscription], rows: Sequence[Event.Row]) -> None:
        for each in subscriptions:
            entries = [row for row in rows if each.span.contains(row.key)]
            if not entries:
                continue
            event = Event(
                region_id=each.region_id,
                request_id=each.request_id,
                index=self._applied[each.region_id],
                entries=Event.Entries(entries=entries),
            )
            if each.outbox.has_room(event):
                each.outbox.push(event)
            else:
                self._end(each, cdcpb_pb2.Error(congested=cdcpb_pb2.Congested(region_id=each.region_id)))

    def subscribe(self, subscription: FeedSubscription, epoch: metapb_pb2.RegionEpoch) -> cdcpb_pb2.Error | Region:
        """Receive every write from now on; the region as it is now, or why the registration fails."""
        with self.lock:
            region = self._regions.get(subscription.region_id)
            if region is None or region.peer_on(subscription.store_id) is None:
                return region_not_found(subscription.region_id)
            there = self._of(subscription.store_id, region.id)
            outbox, request_id = subscription.outbox, subscription.request_id
            one_each = not self._release.multiplexes
            if any(each.outbox is outbox and (one_each or each.request_id == request_id) for each in there):
                return cdcpb_pb2.Error(duplicate_request=cdcpb_pb2.DuplicateRequest(region_id=region.id))
            if region.leader_store != subscription.store_id:
                return self._not_leader(region)
            if epoch.version != region.version:
                return _epoch_not_match(self._regions.siblings(region, epoch))
            subscription.version = region.version
            self._subscriptions[subscription.store_id, region.id] = [*there, subscription]
            return region

    def end(self, subscription: FeedSubscription, error: cdcpb_pb2.Error) -> None:
        """End a subscription with an error, unless it has ended."""
        with self.lock:
            if not subscription.ended:
                self._end(subscription, error)

    def drop(self, outbox: Outbox) -> None:
        """Remove all subscriptions of a stream that has ended."""
        with self.lock:
            for each in self._all_of(outbox):
                self._remove(each)

    def subscriptions(self, outbox: Outbox) -> list[FeedSubscription]:
        """Subscriptions of a stream that have not ended."""
        with self.lock:
            return self._all_of(outbox)

    def describe(self) -> list[dict[str, object]]:
        """Every subscription, store by store, for the admin API; keys of the span in hex."""
        with self.lock:
            there = [each for place in sorted(self._subscriptions) for each in self._subscriptions[place]]
            return [
                {
                    "store_id": each.store_id,
                    "region_id": each.region_id,
                    "request_id": each.request_id,
                    "start": each.span.start.hex(),
                    "end": each.span.end.hex(),
                    "initialized": each.initialized,
                }
                for each in there
            ]

    def resolve(self, node: StoreNode, outbox: Outbox) -> tuple[int, list[FeedSubscription]]:
        """A timestamp below all later writes of the store, and the subscriptions of a stream that get it as resolved-ts.

        Every event up to it has been pushed. The caller holds the lock.
        """
        ts = min([node.causal.next_ts() if node.has_timestamps else node.tso.next(), *self._pins[node.store_id]])
        resolved = [each for each in self._all_of(outbox) if self._release.resolves_raw or not each.raw]
        return ts, [each for each in resolved if each.initialized and self._is_led(each)]

    def overrun(self, outbox: Outbox) -> list[FeedSubscription]:
        """The subscriptions of a stream whose store has not noticed that it lost the leadership; ends those whose time is up."""
        with self.lock:
            overrun = [each for each in self._all_of(outbox) if each.overrun_until]
            for each in overrun:
                if time.monotonic() >= each.overrun_until:
                    region = self._regions.get(each.region_id)
                    has_peer = region is not None and region.peer_on(each.store_id) is not None
                    self._end(
                        each, self._not_leader(region) if region and has_peer else region_not_found(each.region_id)
                    )
            return [each for each in overrun if each.initialized and not each.ended]

    def _is_led(self, subscription: FeedSubscription) -> bool:
        """Return whether the store still leads the region. Take a timestamp first: no later leader goes below it."""
        region = self._regions.get(subscription.region_id)
        return (
            region is not None
            and not subscription.overrun_until
            and region.leader_store == subscription.store_id
            and region.version == subscription.version
        )

    def _not_leader(self, region: Region) -> cdcpb_pb2.Error:
        return cdcpb_pb2.Error(not_leader=self._regions.not_leader(region).not_leader)

    def _of(self, store_id: int, region_id: int) -> list[FeedSubscription]:
        return self._subscriptions.get((store_id, region_id), [])

    def _all_of(self, outbox: Outbox) -> list[FeedSubscription]:
        return [each for there in self._subscriptions.values() for each in there if each.outbox is outbox]

    def _end(self, subscription: FeedSubscription, error: cdcpb_pb2.Error) -> None:
        self._remove(subscription)
        region_id, request_id = subscription.region_id, subscription.request_id
        subscription.outbox.push(Event(region_id=region_id, request_id=request_id, error=error))

    def _remove(self, subscription: FeedSubscription) -> None:
        subscription.ended = True
        place = subscription.store_id, subscription.region_id
        rest = [each for each in self._of(*place) if each is not subscription]
        if rest:
            self._subscriptions[place] = rest
        else:
            self._subscriptions.pop(place, None)

    def _region_changed(self, old: Sequence[Region], new: Sequence[Region]) -> None:
        with self.lock:
            for region in old:
                there = self._of(region.leader_store, region.id)
                stale = [each for each in there if each.version == region.version]  # not those that know the change
                if len(old) == len(new):
                    error = self._not_leader(new[0])
                    seconds = 0.0
                    if stale:
                        seconds = self._failpoints.overrun(store_id=region.leader_store, region_id=region.id)
                else:  # a split, or a merge, after which the error names no regions
                    error = _epoch_not_match(new if len(new) > 1 else [])
                    seconds = 0.0
                for each in stale:
                    if seconds:
                        each.overrun_until = time.monotonic() + seconds
                    else:
                        self._end(each, error)


def _epoch_not_match(current: Iterable[Region]) -> cdcpb_pb2.Error:
    regions = [region.to_pb() for region in current]
    return cdcpb_pb2.Error(epoch_not_match=errorpb_pb2.EpochNotMatch(current_regions=regions))
