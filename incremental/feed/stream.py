"""The stream of one store and its subscriptions, errors that end them, and locating the regions of gaps; `Inbox` is the queue of its messages.

`ResolvedFrontier`, which does no I/O, computes the resolved-ts of a range of keys from subscriptions and gaps.

The range is always divided into adjacent spans that do not overlap. Each span is either the subscription of one region or a
gap, and has a resolved-ts: all changes of its keys up to it have been delivered. A region has one subscription for all of
its keys in the range, which starts from the lowest resolved-ts of these keys. The resolved-ts of the range is the minimum
over all spans, including gaps. So it never covers a change that was not delivered. It moves back only for a new scan (`rewind`).
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from tikv_br import retry
from tikv_br.cancellation import Cancellation
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import cdcpb_pb2, metapb_pb2
from tikv_br.cluster.region_errors import REACTIONS
from tikv_br.cluster.regions import Region, RegionCache
from tikv_br.cluster.router import apply_current_regions, apply_leader_hint
from tikv_br.cluster.store import EventFeed, StoreClient
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, RequestRefused, TikvBrError
from tikv_br.formats.keys.text import show_key
from tikv_br.retry import Backoff

GAP = 0
"""The request id of a span without a subscription."""


@dataclass(slots=True, eq=False)
class RegionSpan:
    """A part of the range: encoded keys [start, end), as in region bounds and in requests."""

    start: bytes
    end: bytes
    resolved_ts: int
    region_id: int = 0
    version: int = 0
    """Version of the region's epoch; a split or merge raises it in all resulting regions."""
    request_id: int = GAP
    tries: int = 0
    """Number of consecutive failures."""
    retry_at: float = 0.0
    """Time to locate the region of a gap again, on the monotonic clock; infinite while a search is running."""
    failing_since: float | None = None
    """Start of the failures, on the monotonic clock; None while there are none."""

    @property
    def is_gap(self) -> bool:
        return self.request_id == GAP


@dataclass(frozen=True, slots=True)
class Claim:
    """The span of a new subscription, and the subscriptions that it replaces."""

    span: RegionSpan
    replaced: tuple[tuple[int, int], ...]
    """(region id, request id) of each."""


class ResolvedFrontier:
    """The spans of one range. Not thread-safe."""

    def __init__(self, start: bytes, end: bytes, start_ts: int) -> None:
        """Start with one gap [start, end), resolved up to `start_ts`. The range must have an end and must not be empty."""
        if not start < end:
            raise ValueError(f"the range [{show_key(start)}, {show_key(end)}) is empty")
        self._spans = [RegionSpan(start, end, start_ts)]

    def __iter__(self) -> Iterator[RegionSpan]:
        return iter(tuple(self._spans))

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def start(self) -> bytes:
        return self._spans[0].start

    @property
    def end(self) -> bytes:
        return self._spans[-1].end

    @property
    def resolved_ts(self) -> int:
        """All changes of the range up to this have been delivered."""
        return min(span.resolved_ts for span in self._spans)

    @property
    def gaps(self) -> list[RegionSpan]:
        return [span for span in self._spans if span.is_gap]

    def claim(self, start: bytes, end: bytes, *, region_id: int, version: int, request_id: int) -> Claim | None:
        """Make the keys [start, end) of a region one subscribed span; an empty end is unbounded.

        Returns None and changes nothing if the region overlaps no gap, or overlaps the subscription of a region with a
        newer version: then the region is out of date. Subscriptions of older regions that it overlaps are replaced, and
        their keys outside of it become gaps.
        """
        start, end = max(start, self.start), min(end or self.end, self.end)
        if not start < end:
            return None
        first = bisect.bisect_right(self._spans, start, key=lambda span: span.start) - 1
        stop = bisect.bisect_left(self._spans, end, key=lambda span: span.start)
        old = self._spans[first:stop]
        if not any(span.is_gap for span in old) or any(span.version > version for span in old if not span.is_gap):
            return None
        replaced = tuple((span.region_id, span.request_id) for span in old if not span.is_gap)
        since = [span.failing_since for span in old if span.failing_since is not None]
        new = RegionSpan(
            start,
            end,
            min(span.resolved_ts for span in old),
            region_id,
            version,
            request_id,
            tries=max(span.tries for span in old),
            failing_since=min(since, default=None),
        )
        self._spans[first:stop] = [
            *_remainder(old[0], old[0].start, start),
            new,
            *_remainder(old[-1], end, old[-1].end),
        ]
        return Claim(new, replaced)

    def advance(self, span: RegionSpan, ts: int) -> None:
        """Set the resolved-ts of a span; an older `ts` has no effect."""
        span.resolved_ts = max(span.resolved_ts, ts)

    def rewind(self, start: bytes, end: bytes, ts: int) -> list[RegionSpan]:
        """Set the resolved-ts of all spans that overlap [start, end) back to `ts`, if it is newer; returns them. An empty end is unbounded."""
        found = [span for span in self._spans if span.end > start and (not end or span.start < end)]
        for span in found:
            span.resolved_ts = min(span.resolved_ts, ts)
        return found

    def mark_gap(self, span: RegionSpan) -> None:
        """Turn a span whose subscription has ended into a gap, which keeps its resolved-ts."""
        span.request_id = GAP


def _remainder(span: RegionSpan, start: bytes, end: bytes) -> list[RegionSpan]:
    """The part [start, end) of a span as a gap; no span if it is empty."""
    if start >= end:
        return []
    return [RegionSpan(start, end, span.resolved_ts, tries=span.tries, failing_since=span.failing_since)]


T = TypeVar("T")


class InboxClosed(Exception):
    """The inbox was closed."""


class Inbox(Generic[T]):
    """A FIFO queue bounded by the total size of its items. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """`limit` is in bytes; a single item may be larger."""
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """Total size of the queued items."""
        return self._bytes

    def put(self, item: T, size: int) -> None:
        """Add an item; waits until there is room. Raises `InboxClosed`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._limit)
            if self._closed:
                raise InboxClosed
            self._add(item, size)

    def put_now(self, item: T) -> None:
        """Add an item of size 0 without waiting; no effect if the inbox is closed."""
        with self._changed:
            if not self._closed:
                self._add(item, 0)

    def get(self, timeout: float, most: int) -> list[T]:
        """Take at least one item, and more up to `most` bytes. Empty after `timeout` seconds, or if the inbox is closed."""
        items: list[T] = []
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items, timeout)
            while self._items and (not items or self._items[0][1] <= most):
                item, size = self._items.popleft()
                items.append(item)
                most -= size
                self._bytes -= size
            if items:
                self._changed.notify_all()
        return items

    def close(self) -> None:
        """Drop all items and wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _add(self, item: T, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size
        self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class ResubscribeAdvice:
    """Cause of a subscription's end or failure to start, and the time of the next try."""

    kind: str
    cause: str
    backoff: Backoff
    min_delay: float = 0.0
    """Seconds that the store asked the client to wait."""
    immediate: bool = False
    """True if the first retry needs no wait, because the new place is known."""
    breaks_stream: bool = False
    """Reopen the whole stream, because store and client disagree about its subscriptions."""


def classify_feed_error(regions: RegionCache, region: Region, error: cdcpb_pb2.Error) -> ResubscribeAdvice:
    """Update the region cache from the error, and decide on the retry. Raises `ClusterUnfit` for permanent errors."""
    kind = next((field.name for field, _ in error.ListFields()), "")
    cause = f"region {region.id}: {kind or 'an error without a kind'}"
    match kind:
        case "not_leader":
            named = apply_leader_hint(regions, region, error.not_leader)
            return ResubscribeAdvice(kind, cause, REACTIONS[kind].backoff, immediate=named)
        case "epoch_not_match":
            apply_current_regions(regions, region, error.epoch_not_match)
            return ResubscribeAdvice(
                kind, cause, REACTIONS[kind].backoff, immediate=bool(error.epoch_not_match.current_regions)
            )
        case "server_is_busy":
            busy = error.server_is_busy
            cause += f": {busy.reason}" if busy.reason else ""
            return ResubscribeAdvice(kind, cause, REACTIONS[kind].backoff, busy.backoff_ms / 1000)
        case "congested":
            return ResubscribeAdvice(kind, cause, retry.STORE_BUSY)
        case "duplicate_request":
            return ResubscribeAdvice(kind, cause, retry.REGION_MISS, breaks_stream=True)
        case "compatibility":
            raise ClusterUnfit(
                f"{cause}: the store has no RawKV change feed, or requires a client of version {error.compatibility.required_version}",
                hint="A change feed requires a source with API V2. For API V1 and V1TTL, pass --mode diff.",
            )
        case "cluster_id_mismatch":
            raise ClusterUnfit(
                f"{cause}: the store belongs to cluster {error.cluster_id_mismatch.current}, "
                f"not to {error.cluster_id_mismatch.request}",
                hint="Check --pd: its stores belong to another cluster.",
            )
        case _:  # region_not_found, or an unknown kind
            regions.invalidate(region.id)
            return ResubscribeAdvice(kind or "unknown", cause, retry.REGION_MISS)


CLIENT_VERSION = "6.2.0"
"""The version sent to stores: from 4.0.8 on they batch the resolved-ts of regions, from 5.3.0 on they check the cluster id,
and 6.2.0 is the first with RawKV."""
MESSAGE_OVERHEAD = 256
"""Estimated memory of a queued message besides its bytes; messages with one small row are smaller than this."""


@dataclass(slots=True, eq=False)
class Subscription:
    """The subscription of one region, on one stream."""

    region: Region
    request_id: int
    span: RegionSpan
    advanced_at: float
    """Time of registration or of the last new resolved-ts, on the monotonic clock."""
    initialized: bool = False
    """True once the incremental scan has ended; before that there is no valid resolved-ts."""
    scanned_ts: int = 0
    """Largest ts of the rows received before the incremental scan has ended."""

    @property
    def key(self) -> tuple[int, int]:
        """The region id and request id in its events."""
        return self.region.id, self.request_id


@dataclass(frozen=True, slots=True)
class StreamMessages:
    """Serialized messages of a stream, in order."""

    stream: StoreStream
    data: list[bytes]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A stream has ended, and with it all its subscriptions."""

    stream: StoreStream
    error: TikvBrError


class StoreStream:
    """An open stream. Used by the feed's thread only, except for its reader thread, which fills the inbox."""

    def __init__(self, call: EventFeed, inbox: FeedInbox, cluster_id: int) -> None:
        """Starts the reader thread."""
        self.call = call
        self._inbox = inbox
        self._header = cdcpb_pb2.Header(cluster_id=cluster_id, ticdc_version=CLIENT_VERSION)
        self._by_key: dict[tuple[int, int], Subscription] = {}
        self._by_region: dict[int, Subscription] = {}
        self.scan_ended_at = 0.0
        """Time at which an incremental scan on this stream last ended, on the monotonic clock."""
        self._reader = threading.Thread(target=self._read, name=f"feed of {call}", daemon=True)
        self._reader.start()

    @property
    def store_id(self) -> int:
        return self.call.store.id

    @property
    def subscriptions(self) -> list[Subscription]:
        return list(self._by_key.values())

    def find(self, region_id: int, request_id: int) -> Subscription | None:
        """The subscription of an event; None if it has ended."""
        return self._by_key.get((region_id, request_id))

    def resolved_for(self, region_ids: list[int], request_id: int) -> Iterator[Subscription]:
        """The subscriptions of a resolved-ts; without multiplexing its request id is 0."""
        for region_id in region_ids:
            found = self._by_key.get((region_id, request_id)) if request_id else self._by_region.get(region_id)
            if found is not None:
                yield found

    def register(self, subscription: Subscription) -> None:
        """Request the changes of a region's span after its resolved-ts."""
        region, span = subscription.region, subscription.span
        self._by_key[subscription.key] = self._by_region[region.id] = subscription
        self.call.send(
            cdcpb_pb2.ChangeDataRequest(
                header=self._header,
                region_id=region.id,
                region_epoch=metapb_pb2.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
                checkpoint_ts=span.resolved_ts,
                start_key=span.start,
                end_key=span.end,
                request_id=subscription.request_id,
                register=cdcpb_pb2.ChangeDataRequest.Register(),
                kv_api=cdcpb_pb2.ChangeDataRequest.RawKV,
            )
        )

    def deregister(self, subscription: Subscription) -> None:
        """End a subscription; events that still arrive for it are ignored."""
        self.drop(subscription)
        self.call.send(
            cdcpb_pb2.ChangeDataRequest(
                header=self._header,
                region_id=subscription.region.id,
                request_id=subscription.request_id,
                deregister=cdcpb_pb2.ChangeDataRequest.Deregister(),
            )
        )

    def drop(self, subscription: Subscription) -> None:
        """Remove a subscription that the store has ended."""
        self._by_key.pop(subscription.key, None)
        if self._by_region.get(subscription.region.id) is subscription:
            del self._by_region[subscription.region.id]

    def cancel(self) -> None:
        """End the stream; a `StreamEnd` still follows unless the inbox is closed."""
        self.call.cancel()

    def join(self, timeout: float) -> None:
        """Wait for the reader thread, which ends after `cancel` once the inbox has room or is closed."""
        self._reader.join(timeout)

    def _read(self) -> None:
        error: TikvBrError = ClusterUnreachable(f"{self.call}: the thread that reads its feed failed")
        try:
            for data in self.call:
                self._inbox.put(StreamMessages(self, [data]), len(data) + MESSAGE_OVERHEAD)
        except InboxClosed:
            pass
        except TikvBrError as failure:
            error = failure
        finally:
            self.call.cancel()
            self._inbox.put_now(StreamEnd(self, error))


LocatedRegion = tuple[Region, StoreClient]
"""A region, and the store of its leader."""


@dataclass(frozen=True, slots=True)
class LocatedRegions:
    """The result of one search: the regions found, and why the others were not found."""

    regions: tuple[LocatedRegion, ...]
    error: ClusterError | None = None


FeedItem = StreamMessages | StreamEnd | LocatedRegions
FeedInbox = Inbox[FeedItem]


class Locator:
    """Locates the regions of gaps in a background thread, one search at a time."""

    def __init__(self, cluster: Cluster, inbox: FeedInbox) -> None:
        self._cluster = cluster
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed-locator")
        self._cancellation = Cancellation()
        self._scanned_all = False
        self._running_search: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._running_search is not None

    def search(self, gaps: Sequence[tuple[bytes, bytes]]) -> None:
        """Start to locate the regions of these encoded ranges; the inbox receives a `LocatedRegions`."""
        self._running_search = self._pool.submit(self._search, gaps)

    def finish_search(self) -> None:
        """Call this for each `LocatedRegions`. Raises errors of the search other than `ClusterError`."""
        if self._running_search is not None:
            self._running_search.result()
        self._running_search = None

    def close(self) -> None:
        """Cancel a running search."""
        self._cancellation.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)  # a request under way ends with the connection

    def _search(self, gaps: Sequence[tuple[bytes, bytes]]) -> None:
        found: list[LocatedRegion] = []
        error: ClusterError | None = None
        try:
            with self._cancellation.active():
                error = self._locate(found, gaps)
        except ClusterError as failure:
            error = failure
        finally:
            self._inbox.put_now(LocatedRegions(tuple(found), error))

    def _locate(self, found: list[LocatedRegion], gaps: Sequence[tuple[bytes, bytes]]) -> ClusterError | None:
        """Add the regions of the gaps to `found`; returns the error of the last region whose store is unknown."""
        unknown_store: ClusterError | None = None
        if not self._scanned_all:  # the first search covers all regions, which are faster to read page by page
            self._cluster.regions.update(self._cluster.pd.scan_regions(gaps[0][0], gaps[-1][1]))
            self._scanned_all = True
        for gap in gaps:
            for region in self._regions(*gap):
                try:
                    found.append((region, self._cluster.store(region.leader.store_id)))
                except RequestRefused as error:
                    self._cluster.regions.invalidate(region.id)
                    unknown_store = error
        return unknown_store

    def _regions(self, start: bytes, end: bytes) -> Iterator[Region]:
        while start < end:
            region = self._cluster.regions.locate(start)
            yield region
            start = region.end or end
