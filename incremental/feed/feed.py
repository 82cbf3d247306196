"""The change feed of a range: delivers all changes, across splits, merges, leader transfers and failures of stores.

Keeps every part of the range subscribed, and decodes the messages of the streams.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Self

import numpy as np
from google.protobuf.message import DecodeError

from tikv_br import retry
from tikv_br.backupset.coverage import codec_of
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.ingests import Ingest
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import ClusterTlsError, ClusterUnfit, RequestRefused, RetryBudgetExhausted, TikvBrError, UsageError
from tikv_br.formats import cdc, columns
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.cdc import ChangeEvent
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.text import show_key
from tikv_br.incremental.feed.events import (
    REPORT_SECONDS,
    STALLED_SECONDS,
    Event,
    FeedOptions,
    FeedStatus,
    Missed,
    Resolved,
    Rows,
    Scanned,
    hold_back_for,
)
from tikv_br.incremental.feed.ingests import WARN_SECONDS, IngestWatch
from tikv_br.incremental.feed.stream import (
    FeedInbox,
    FeedItem,
    Inbox,
    LocatedRegions,
    Locator,
    RegionSpan,
    ResolvedFrontier,
    ResubscribeAdvice,
    StoreStream,
    StreamEnd,
    StreamMessages,
    Subscription,
    classify_feed_error,
)

if TYPE_CHECKING:
    from tikv_br.cluster.ingests import Ingests

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
CHECK_SECONDS = 5.0
"""Interval of the search for stalled regions."""


class Subscriptions:
    """The subscriptions of all regions of a range, and the streams that they are on. Not thread-safe.

    Methods raise `RetryBudgetExhausted` if a part of the range has failed for longer than the patience.
    """

    def __init__(self, cluster: Cluster, frontier: ResolvedFrontier, inbox: FeedInbox, options: FeedOptions) -> None:
        """`inbox` receives the messages and ends of streams, and located regions."""
        self._cluster, self._frontier, self._inbox, self._options = cluster, frontier, inbox, options
        self._locator = Locator(cluster, inbox)
        self._streams: dict[int, StoreStream] = {}
        self._v1_stores: set[int] = set()  # stores without EventFeedV2
        self._request_id = 0
        self._next_retry = 0.0  # when to locate the next gap
        self._next_check = time.monotonic() + CHECK_SECONDS
        self._warn_at = 0.0  # earliest time of the next warning
        self.backlog_at = 0.0
        """Time at which the consumer was last slow: messages of regions may have been queued then."""
        self.has_received = False
        """Whether any store has sent a message."""
        self.errors: Counter[str] = Counter()
        self.last_error = ""

    @property
    def stores(self) -> int:
        return len(self._streams)

    @property
    def active(self) -> list[Subscription]:
        return [each for stream in self._streams.values() for each in stream.subscriptions]

    def has(self, stream: StoreStream) -> bool:
        return self._streams.get(stream.store_id) is stream

    def close(self) -> None:
        """End all streams and wait for their threads."""
        for stream in self._streams.values():
            stream.cancel()
        for stream in self._streams.values():
            stream.join(JOIN_SECONDS)
        self._locator.close()

    def scan_again(self, start: bytes, end: bytes, ts: int) -> None:
        """End the subscriptions of encoded keys: new ones deliver all changes since a ts."""
        spans = set(map(id, self._frontier.rewind(start, end, ts)))
        for stream in list(self._streams.values()):
            for subscription in stream.subscriptions:
                if id(subscription.span) not in spans:
                    continue
                self._deregister(stream, subscription)
                self._frontier.mark_gap(subscription.span)
                subscription.span.retry_at = self._next_retry = 0.0
                if not stream.call.multiplexed:
                    break  # all its subscriptions have ended

    def end(self, stream: StoreStream, subscription: Subscription, advice: ResubscribeAdvice) -> None:
        """Turn a subscription that has ended into a gap, and schedule its retry."""
        stream.drop(subscription)
        self._frontier.mark_gap(subscription.span)
        self._schedule_retry(subscription.span, advice)
        if advice.breaks_stream:
            stream.cancel()

    def end_stream(self, stream: StoreStream, error: TikvBrError) -> None:
        """Turn all subscriptions of a stream into gaps; their regions are located through PD again. Raises permanent errors."""
        if not self.has(stream):
            return
        del self._streams[stream.store_id]
        unsupported = isinstance(error, CallUnsupported)
        if unsupported and stream.call.multiplexed:
            log.info("%s does not support EventFeedV2; using EventFeed", stream.call)
            self._v1_stores.add(stream.store_id)
        elif self._is_final(error):
            raise error
        advice = ResubscribeAdvice("stream", error.message, retry.STORE_UNREACHABLE, immediate=unsupported)
        if not unsupported:
            self._cluster.router.forget_store(stream.store_id)
        for subscription in stream.subscriptions:
            if not unsupported:
                self._cluster.regions.invalidate(subscription.region.id)
            self.end(stream, subscription, advice)

    def _is_final(self, error: TikvBrError) -> bool:
        # A TLS error after TLS has worked is retried: a store that shuts down may break a handshake.
        return isinstance(error, ClusterUnfit) or (isinstance(error, ClusterTlsError) and not self.has_received)

    def maintain(self, now: float) -> None:
        """Start to locate the regions of the gaps whose retry is due; before that, end stalled subscriptions."""
        if now >= self._next_check:
            if self._inbox.bytes or now - self._next_check > CHECK_SECONDS:
                self.backlog_at = now
            self._next_check = now + CHECK_SECONDS
            self._end_stalled(now)
        if now < self._next_retry or self._locator.busy:
            return
        gaps = self._frontier.gaps
        due = [gap for gap in gaps if gap.retry_at <= now]
        self._next_retry = min((gap.retry_at for gap in gaps if gap.retry_at > now), default=math.inf)
        if due:
            for gap in due:
                gap.retry_at = math.inf
            self._locator.search([(gap.start, gap.end) for gap in due])

    @property
    def due_at(self) -> float:
        """Return when to call `maintain` next, on the monotonic clock."""
        return self._next_check if self._locator.busy else min(self._next_retry, self._next_check)

    def _end_stalled(self, now: float) -> None:
        """End subscriptions that make no progress, to resubscribe: a leader that lost its followers sends nothing at all."""
        for stream in list(self._streams.values()):
            for subscription in stream.subscriptions:
                progress_at, limit = subscription.advanced_at, self._options.stall
                if not subscription.initialized:
                    progress_at, limit = max(progress_at, stream.scan_ended_at), self._options.scan_stall
                if max(progress_at, self.backlog_at) >= now - limit:
                    continue
                missing = "new resolved-ts" if subscription.initialized else "end of its incremental scan"
                cause = f"region {subscription.region.id}: no {missing} for {limit:g} s"
                self._deregister(stream, subscription)
                self._cluster.regions.invalidate(subscription.region.id)
                self.end(stream, subscription, ResubscribeAdvice("stalled", cause, retry.REGION_MISS))
                if not stream.call.multiplexed:
                    break  # all its subscriptions have ended

    def _deregister(self, stream: StoreStream, subscription: Subscription) -> None:
        """End a subscription that the store has not ended.

        Stores before 7.3 take a Deregister for a Register: their stream is closed, and opened again for its other regions.
        """
        if stream.call.multiplexed:
            stream.deregister(subscription)
            return
        stream.drop(subscription)
        if self.has(stream):
            del self._streams[stream.store_id]
        stream.cancel()
        for other in stream.subscriptions:
            cause = f"region {other.region.id}: its stream was closed to end the subscription of region {subscription.region.id}"
            advice = ResubscribeAdvice("stream", cause, retry.STORE_UNREACHABLE, immediate=True)
            self.end(stream, other, advice)

    def add_located(self, located: LocatedRegions) -> None:
        """Subscribe to the regions found; schedule a retry for each remaining gap."""
        self._locator.finish_search()
        if located.error is not None and self._is_final(located.error):
            raise located.error
        self._request_id += 1
        for region, store in located.regions:
            if not self._subscribe(region, store):
                self._cluster.regions.invalidate(region.id)
        advice = ResubscribeAdvice("stale regions", "PD's region information is out of date", retry.REGION_MISS)
        if located.error is not None:
            advice = ResubscribeAdvice("no region", located.error.message, retry.PD_UNAVAILABLE)
        for gap in self._frontier.gaps:
            if gap.retry_at == math.inf:
                self._schedule_retry(gap, advice)
            self._next_retry = min(self._next_retry, gap.retry_at)

    def _subscribe(self, region: Region, store: StoreClient) -> bool:
        """Subscribe to a region; False if it overlaps no gap, or is known to be out of date.

        All subscriptions of one search share a request id, so that stores can send their resolved-ts in one message.
        """
        if self._find(region.id, self._request_id) is not None:
            self._request_id += 1  # the search found the region twice, before and after it moved
        request_id = self._request_id
        claim = self._frontier.claim(
            region.start, region.end, region_id=region.id, version=region.version, request_id=request_id
        )
        if claim is None:
            return False
        for key in claim.replaced:
            stale = self._find(*key)
            if stale is not None:
                self._deregister(*stale)
        stream = self._streams.get(store.store.id)
        if stream is None:
            multiplexed = store.store.id not in self._v1_stores
            call = store.event_feed(multiplexed=multiplexed)
            stream = self._streams[store.store.id] = StoreStream(call, self._inbox, self._cluster.cluster_id)
        stream.register(Subscription(region, request_id, claim.span, time.monotonic()))
        return True

    def _find(self, region_id: int, request_id: int) -> tuple[StoreStream, Subscription] | None:
        for stream in self._streams.values():
            found = stream.find(region_id, request_id)
            if found is not None:
                return stream, found
        return None

    def _schedule_retry(self, gap: RegionSpan, advice: ResubscribeAdvice) -> None:
        """Set when to locate a gap again. Raises `RetryBudgetExhausted` if it has failed for too long."""
        now = time.monotonic()
        self.errors[advice.kind] += 1
        self.last_error = advice.cause
        if gap.failing_since is None:
            gap.failing_since = now
        failing = now - gap.failing_since
        if failing > self._options.patience:
            raise RetryBudgetExhausted(
                f"the feed has had no subscription for [{show_key(gap.start)}, {show_key(gap.end)}) for {failing:.0f} s: "
                f"{advice.cause}"
            )
        if failing >= REPORT_SECONDS and now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            log.warning("part of the source has had no subscription for %.0f s: %s", failing, advice.cause)
        # No jitter, so that gaps that fail together are located in one search.
        wait = 0.0 if advice.immediate and not gap.tries else advice.backoff.delay(gap.tries, 0.5)
        log.debug("retry %d in %.3f s: %s", gap.tries + 1, wait, advice.cause)
        gap.tries += 1
        gap.retry_at = now + max(wait, advice.min_delay)
        self._next_retry = min(self._next_retry, gap.retry_at)


RESOLVED = b"\x12"
"""The tag of the field ``resolved_ts``, with which a message without events starts."""


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """A decoded message: rows and resolved-ts, which are handled first, and subscriptions that have ended."""

    changes: cdc.ChangeEvent
    failures: tuple[cdcpb_pb2.Event, ...] = ()
    """Events with an error."""


def decode_all(data: Sequence[bytes]) -> Iterator[FeedMessage]:
    """Decode serialized messages of one stream, in order (see `decode`); adjacent messages are merged if possible.

    Concatenated messages decode as one message with all their events, which costs about as much as decoding a small one.
    Messages with a resolved-ts are not merged: a message has at most one. Stores send it without events.
    """
    for is_resolved, group in groupby(data, lambda each: each.startswith(RESOLVED)):
        parts = list(group)
        merged = None if is_resolved or len(parts) == 1 else cdc.parse(b"".join(parts))
        if merged is None:
            yield from map(decode, parts)
        else:
            yield FeedMessage(merged)


def decode(data: bytes) -> FeedMessage:
    """Decode a ``cdcpb.ChangeDataEvent``. Raises `RequestRefused` for damaged bytes and for transactional rows."""
    changes = cdc.parse(data)
    return _decode_with_protobuf(data) if changes is None else FeedMessage(changes)


def _decode_with_protobuf(data: bytes) -> FeedMessage:
    """Decode a message with fields that `cdc.parse` does not know: split off errors, drop unused fields, parse the rest."""
    try:
        message = cdcpb_pb2.ChangeDataEvent.FromString(data)
    except DecodeError as error:
        raise RequestRefused(f"cannot decode a store's change event: {error}") from None
    message.DiscardUnknownFields()
    failures = tuple(event for event in message.events if event.HasField("error"))
    rest = cdcpb_pb2.ChangeDataEvent()
    if message.HasField("resolved_ts"):
        rest.resolved_ts.CopyFrom(message.resolved_ts)
    for event in message.events:
        if not event.HasField("error"):
            rest.events.add().CopyFrom(event)
    for event in rest.events:
        for row in event.entries.entries:
            for unused in ("old_value", "txn_source", "generation"):
                row.ClearField(unused)
    changes = cdc.parse(rest.SerializeToString())
    if changes is None:
        raise RequestRefused("cannot decode a store's change event: it has rows other than RawKV puts and deletes")
    return FeedMessage(changes, failures)


POLL_BYTES = 1 << 20
"""Bytes of messages decoded together: decoding one small message costs as much as decoding a large one."""


class Feed:
    """Yields the changes of one range after `start_ts`, each at least once, and the resolved-ts of the range.

    Poll from one thread at a time, which does all the work except reading the streams. Close it, or use it as a context
    manager; `close` may be called from any thread and ends a `poll`.

    `poll` raises `ClusterUnfit` for a store without a RawKV change feed or of another cluster, `ClusterTlsError` until
    the first message has arrived, and `RetryBudgetExhausted` if a part of the range has failed for ``options.patience``.
    """

    def __init__(
        self,
        cluster: Cluster,
        codec: KeyCodec,
        span: KeyRange,
        start_ts: int,
        options: FeedOptions | None = None,
        *,
        ingests: Ingests | None = None,
        joined: KeyRange | None = None,
    ) -> None:
        """`span` is in RPC keys. No store may still give writes a timestamp at or below `start_ts`; see `handover.resolve`.

        With `ingests`, rows of announced ingests are delivered, too, or reported as `Missed`: no resolved-ts passes them.

        `joined` is for one of `JoinedFeeds`, whose ranges lie in it: rows have RPC keys, and ingests into all of it are waited for.

        Raises `ClusterUnfit` before API V2, `UsageError` for a range that is empty or not in the codec's keyspace, or a
        hold-back that is too short.
        """
        if not codec.is_v2:
            raise ClusterUnfit(
                f"a change feed requires API V2; the cluster has API {codec.api_version.label}, which has no timestamps"
            )
        if span.is_empty or not codec.rpc_range().contains(span):
            raise UsageError(f"{span} is not a range of keyspace {codec.keyspace_id}, or is empty")
        self._cluster, self._codec, self._span = cluster, codec, span
        self._row_codec = codec if joined is None else _RPC_KEYS
        self._options = options or FeedOptions()
        self._hold_back = hold_back_for(cluster, self._options.hold_back)
        self._frontier = ResolvedFrontier(codec.bound(span.start), codec.bound(span.end), start_ts)
        self._inbox: FeedInbox = Inbox(self._options.queue_bytes)
        self._subscriptions = Subscriptions(cluster, self._frontier, self._inbox, self._options)
        self._polled_at = time.monotonic()  # when queued messages were last processed
        self._events: deque[Event] = deque()
        self._resolved_ts = start_ts
        self._advanced = False  # whether a span has advanced since `_resolved_ts` was computed
        self._rows = self._late_rows = 0
        self._ingests = IngestWatch(ingests, joined or span)
        self._closed = False
        self._lock = threading.Lock()  # so that no stream is opened after `close`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def poll(self, timeout: float) -> Event | None:
        """The next event; None if there is none within `timeout` seconds, or after `close`."""
        until = time.monotonic() + timeout
        while not self._events:
            now = time.monotonic()
            wakeup = min(until, self._subscriptions.due_at, self._ingests.due_at)
            items = self._inbox.get(max(0.0, wakeup - now), POLL_BYTES)
            with self._lock:
                if self._closed:
                    return None
                for item in _merge_messages(items):
                    match item:
                        case StreamMessages():
                            self._handle_messages(item)
                        case StreamEnd():
                            self._subscriptions.end_stream(item.stream, item.error)
                        case LocatedRegions():
                            self._subscriptions.add_located(item)
                self._polled_at = time.monotonic()
            self._advance_range()
            with self._lock:
                if not self._closed:
                    self._subscriptions.maintain(time.monotonic())
            if not items and now >= until:
                return None
        return self._events.popleft()

    def close(self) -> None:
        """End all streams and wait for their threads. Thread-safe."""
        with self._lock:
            self._closed = True
        self._inbox.close()
        self._subscriptions.close()

    @property
    def status(self) -> FeedStatus:
        """The current status. Thread-safe."""
        with self._lock:
            gaps = len(self._frontier.gaps)
            failing = [span.failing_since for span in self._frontier if span.failing_since is not None]
            subscriptions = self._subscriptions.active
            oldest = self._polled_at - STALLED_SECONDS
            return FeedStatus(
                resolved_ts=self._resolved_ts,
                regions=len(self._frontier) - gaps,
                scanning=sum(not each.initialized for each in subscriptions),
                stalled=sum(
                    each.initialized and max(each.advanced_at, self._subscriptions.backlog_at) < oldest
                    for each in subscriptions
                ),
                holes=gaps,
                stores=self._subscriptions.stores,
                rows=self._rows,
                late_rows=self._late_rows,
                queued_bytes=self._inbox.bytes,
                errors=dict(self._subscriptions.errors),
                failing_seconds=time.monotonic() - min(failing) if failing else 0.0,
                last_error=self._subscriptions.last_error,
                waits_for=self._ingests.waits_for,
            )

    # Handling of items from the inbox

    def _handle_messages(self, messages: StreamMessages) -> None:
        stream = messages.stream
        if not self._subscriptions.has(stream):
            return
        try:
            for message in decode_all(messages.data):
                self._handle_message(stream, message)
        except RequestRefused as error:
            stream.cancel()
            self._subscriptions.end_stream(stream, error)

    def _handle_message(self, stream: StoreStream, message: FeedMessage) -> None:
        self._subscriptions.has_received, now, changes = True, time.monotonic(), message.changes
        keys = zip(changes.region_ids.tolist(), changes.request_ids.tolist(), strict=True)
        subscriptions = [stream.find(*key) for key in keys]
        active = np.array([each is not None for each in subscriptions], np.bool_)
        batch = changes.records(self._row_codec, self._span, active)
        if batch.num_rows:
            self._rows += batch.num_rows
            self._late_rows += int(np.count_nonzero(columns.numbers(batch["ts"]) <= np.uint64(self._resolved_ts)))
            self._events.append(Rows(batch))
        _note_scanned(changes, subscriptions)
        for index, subscription in enumerate(subscriptions):
            if subscription is not None:
                if changes.initialized[index]:
                    self._mark_initialized(stream, subscription, now)
                self._advance(subscription, int(changes.event_resolved[index]), now)
        resolved_for = stream.resolved_for(changes.resolved_regions.tolist(), changes.resolved_request)
        for subscription in resolved_for:
            self._advance(subscription, changes.resolved_ts, now)
        for failure in message.failures:
            failed = stream.find(failure.region_id, failure.request_id)
            if failed is not None:
                advice = classify_feed_error(self._cluster.regions, failed.region, failure.error)
                self._subscriptions.end(stream, failed, advice)

    def _mark_initialized(self, stream: StoreStream, subscription: Subscription, now: float) -> None:
        stream.scan_ended_at = subscription.advanced_at = now
        subscription.initialized = True
        subscription.span.tries = 0
        subscription.span.failing_since = None
        if subscription.scanned_ts > subscription.span.resolved_ts:
            span = self._rpc_range(subscription.span)
            self._events.append(Scanned(span, subscription.span.resolved_ts, subscription.scanned_ts))

    def _rpc_range(self, span: RegionSpan) -> KeyRange:
        """The RPC keys of a span; all of the feed's if its bounds are no encoded keys (PD can be made to split anywhere)."""
        try:
            return KeyRange(self._codec.from_bound(span.start), self._codec.from_bound(span.end))
        except DamagedBytes:
            return self._span

    def _advance(self, subscription: Subscription, ts: int, now: float) -> None:
        """Apply a resolved-ts (0 = none), lowered by the hold-back. A region is subscribed again from the lowered one."""
        if not ts or not subscription.initialized:
            return
        reduced = minus_seconds(ts, self._hold_back) if self._hold_back else ts
        if reduced > subscription.span.resolved_ts:
            self._frontier.advance(subscription.span, reduced)
            self._advanced, subscription.advanced_at = True, now

    def _advance_range(self) -> None:
        """Yield a new resolved-ts of the range, unless it may pass rows of an ingest.

        The order is: an ingest is announced, PD issues the timestamp of its rows, a store resolves beyond that timestamp. So announcements
        that are read after a resolved-ts was received include every ingest with rows below it.
        """
        resolved = self._resolved_ts
        if self._advanced and not self._ingests.unfinished:  # computing the resolved-ts of many regions is not cheap
            resolved = self._frontier.resolved_ts
        if self._ingests.is_due(advances=resolved > self._resolved_ts):
            found = self._ingests.read()
            with self._lock:
                if self._closed:
                    return
                for each in self._ingests.update(found, self._resolved_ts):
                    self._deliver(each)
            resolved = min(resolved, self._frontier.resolved_ts)
        if self._ingests.waits_for:
            return
        self._advanced = False
        # Never to a time within an ingest: a feed that starts from there would not know that the rows of the ingest were delivered.
        if resolved > self._resolved_ts and resolved >= self._ingests.finished_ts:
            self._resolved_ts = resolved
            self._events.append(Resolved(resolved))

    def _deliver(self, ingest: Ingest) -> None:
        """Scan the ranges of a finished ingest again, and report what no scan delivers."""
        for span in (intersection(each, self._span) for each in ingest.ranges):
            if span.is_empty:
                continue
            if not ingest.can_be_followed(self._resolved_ts):
                self._events.append(Missed(span, self._resolved_ts, ingest.finished_ts, str(ingest)))
            start, end = self._codec.bound(span.start), self._codec.bound(span.end)
            self._subscriptions.scan_again(start, end, self._resolved_ts)


_RPC_KEYS = KeyCodec(ApiVersion.V1)
"""A codec whose user keys are RPC keys."""
JOINED_WAIT = 0.1
"""Seconds that `JoinedFeeds` wait for one of them while none has an event."""


class JoinedFeeds:
    """Feeds of ranges in several keyspaces, polled and closed as one `Feed`. Rows have RPC keys; a resolved-ts holds for all ranges."""

    def __init__(
        self,
        cluster: Cluster,
        spans: Sequence[KeyRange],
        start_ts: int,
        options: FeedOptions | None = None,
        *,
        ingests: Ingests | None = None,
    ) -> None:
        """`spans` (RPC keys) are in order, and each lies in one keyspace. Raises as `Feed`."""
        joined = KeyRange(spans[0].start, spans[-1].end)
        self._feeds = [
            Feed(cluster, codec_of(ApiVersion.V2, each), each, start_ts, options, ingests=ingests, joined=joined)
            for each in spans
        ]
        self._resolved = [start_ts] * len(spans)
        self._next = 0

    def poll(self, timeout: float) -> Event | None:
        """See `Feed.poll`."""
        until = time.monotonic() + timeout
        idle = 0
        while True:
            at = self._next = (self._next + 1) % len(self._feeds)
            # Wait only after a round without any event: one that is silent must not delay the others.
            left = until - time.monotonic()
            waits = idle >= len(self._feeds)
            event = self._feeds[at].poll(max(0.0, min(left, JOINED_WAIT)) if waits else 0.0)
            if isinstance(event, Resolved):
                before = min(self._resolved)
                self._resolved[at] = event.ts
                event = Resolved(found) if (found := min(self._resolved)) > before else None
            if event is not None:
                return event
            idle = 0 if waits else idle + 1
            if left <= 0:
                return None

    def close(self) -> None:
        """See `Feed.close`."""
        for each in self._feeds:
            each.close()

    @property
    def status(self) -> FeedStatus:
        """The sums of all. Thread-safe."""
        found = [each.status for each in self._feeds]
        return FeedStatus(
            resolved_ts=min(self._resolved),
            regions=sum(each.regions for each in found),
            scanning=sum(each.scanning for each in found),
            stalled=sum(each.stalled for each in found),
            holes=sum(each.holes for each in found),
            stores=max(each.stores for each in found),
            rows=sum(each.rows for each in found),
            late_rows=sum(each.late_rows for each in found),
            queued_bytes=sum(each.queued_bytes for each in found),
            errors=dict(sum((Counter(each.errors) for each in found), Counter())),
            failing_seconds=max(each.failing_seconds for each in found),
            last_error=next((each.last_error for each in found if each.last_error), ""),
            waits_for=next((each.waits_for for each in found if each.waits_for), ""),
        )


def _note_scanned(changes: ChangeEvent, subscriptions: Sequence[Subscription | None]) -> None:
    """Note how new the rows are that come before the end of an incremental scan."""
    if all(each is None or each.initialized for each in subscriptions):
        return
    for subscription, ts in zip(subscriptions, changes.newest_ts().tolist(), strict=True):
        if subscription is not None and not subscription.initialized:
            subscription.scanned_ts = max(subscription.scanned_ts, ts)


def _merge_messages(
    items: Iterable[FeedItem],
) -> list[FeedItem]:
    """Merge the messages of each stream into one item; the order between streams does not matter."""
    merged: list[FeedItem] = []
    by_stream: dict[StoreStream, StreamMessages] = {}
    for item in items:
        if isinstance(item, StreamMessages) and item.stream in by_stream:
            by_stream[item.stream].data.extend(item.data)
            continue
        if isinstance(item, StreamMessages):
            by_stream[item.stream] = item
        merged.append(item)
    return merged
