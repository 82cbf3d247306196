"""The change feed of a range: delivers all changes, across splits, merges, leader transfers and failures of stores."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from tikv_br import retry
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.ingests import Ingest
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.errors import (
    ClusterTlsError,
    ClusterUnfit,
    RequestRefused,
    RetryBudgetExhausted,
    TikvBrError,
    UsageError,
)
from tikv_br.formats import columns
from tikv_br.formats.cdc import ChangeEvent
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange, intersection
from tikv_br.formats.keys.text import show_key
from tikv_br.incremental.feed.decode import FeedMessage, decode_all
from tikv_br.incremental.feed.events import Event, Missed, Resolved, Rows, Scanned
from tikv_br.incremental.feed.frontier import RegionSpan, ResolvedFrontier
from tikv_br.incremental.feed.inbox import Inbox
from tikv_br.incremental.feed.ingests import WARN_SECONDS, IngestSource, IngestWatch
from tikv_br.incremental.feed.status import REPORT_SECONDS, STALLED_SECONDS, FeedStatus
from tikv_br.incremental.feed.stream import (
    LocatedRegions,
    Locator,
    ResubscribeAdvice,
    StoreStream,
    StreamEnd,
    StreamMessages,
    Subscription,
    classify_feed_error,
)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """All times are in seconds."""

    hold_back: float | None = None
    """Argument of `hold_back_for`."""
    queue_bytes: int = 64 << 20
    """Size of the queue of received messages. When it is full, streams are not read, and stores wait."""
    patience: float = 600.0
    """Seconds for which a region may fail continuously before the feed fails."""
    stall: float = 300.0
    """Resubscribe a region whose resolved-ts has not advanced for this long."""
    scan_stall: float = 1800.0
    """Resubscribe a region whose incremental scan has not ended if its store has ended no scan for this long: stores run
    scans one after the other."""


HOLD_BACK_SECONDS = 3.0
"""The least default of the hold-back."""


def hold_back_for(cluster: Cluster, wanted: float | None) -> float:
    """Seconds to subtract from every resolved-ts; None = as many as the settings of the stores need.

    The first changes after a leader transfer may be older than the previous leader's resolved-ts, by as much as stores use
    timestamps that they have cached. 0 loses changes when leaders move. Raises `UsageError` for other values below that age.
    """
    age = cluster.timestamp_age if wanted != 0 else 0.0
    if wanted is None:
        return max(HOLD_BACK_SECONDS, age)
    if wanted < age:
        raise UsageError(
            f"a hold-back of {wanted:g} s is too short: stores use timestamps up to {age:g} s old "
            "(causal-ts.alloc-ahead-buffer), so a new leader's changes may be that late, and would be lost",
            hint=f"Leave out --hold-back, or pass {age:g}s or more; `changefeed update` changes it for a changefeed. "
            "0s turns it off, which loses changes when leaders move.",
        )
    return wanted


log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
POLL_BYTES = 1 << 20
"""Bytes of messages decoded together: decoding one small message costs as much as decoding a large one."""
CHECK_SECONDS = 5.0
"""Interval of the search for stalled regions."""


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
        ingests: IngestSource | None = None,
    ) -> None:
        """`span` is in RPC keys. No store may still give writes a timestamp at or below `start_ts`; see `handover.resolve`.

        With `ingests`, rows of announced ingests are delivered, too, or reported as `Missed`: no resolved-ts passes them.

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
        self._options = options or FeedOptions()
        self._hold_back = hold_back_for(cluster, self._options.hold_back)
        self._frontier = ResolvedFrontier(codec.bound(span.start), codec.bound(span.end), start_ts)
        self._inbox: Inbox[StreamMessages | StreamEnd | LocatedRegions] = Inbox(self._options.queue_bytes)
        self._locator = Locator(cluster, self._inbox)
        self._streams: dict[int, StoreStream] = {}
        self._v1_stores: set[int] = set()  # stores without EventFeedV2
        self._request_id = 0
        self._next_retry = 0.0  # when to locate the next gap
        self._next_check = time.monotonic() + CHECK_SECONDS
        self._backlog_at = 0.0  # when the consumer was last slow: messages of regions may have been queued then
        self._polled_at = time.monotonic()  # when queued messages were last processed
        self._events: deque[Event] = deque()
        self._resolved_ts = start_ts
        self._advanced = False  # whether a span has advanced since `_resolved_ts` was computed
        self._received = False  # whether any store has sent a message
        self._rows = self._late_rows = 0
        self._errors: Counter[str] = Counter()
        self._last_error = ""
        self._warn_at = 0.0  # earliest time of the next warning
        self._ingests = IngestWatch(ingests, span)
        self._closed = False
        self._lock = threading.Lock()  # so that `close` sees all streams, and none is opened after it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def poll(self, timeout: float) -> Event | None:
        """The next event; None if there is none within `timeout` seconds, or after `close`."""
        until = time.monotonic() + timeout
        while not self._events:
            now = time.monotonic()
            items = self._inbox.get(max(0.0, min(until, self._next_wakeup()) - now), POLL_BYTES)
            with self._lock:
                if self._closed:
                    return None
                for item in _merge_messages(items):
                    match item:
                        case StreamMessages():
                            self._handle_messages(item)
                        case StreamEnd():
                            self._handle_stream_end(item.stream, item.error)
                        case LocatedRegions():
                            self._handle_located(item)
                self._polled_at = time.monotonic()
            self._advance_range()
            with self._lock:
                self._locate_gaps(time.monotonic())
            if not items and now >= until:
                return None
        return self._events.popleft()

    def close(self) -> None:
        """End all streams and wait for their threads. Thread-safe."""
        with self._lock:
            self._closed = True
            streams = list(self._streams.values())
        self._inbox.close()
        for stream in streams:
            stream.cancel()
        for stream in streams:
            stream.join(JOIN_SECONDS)
        self._locator.close()

    @property
    def status(self) -> FeedStatus:
        """The current status. Thread-safe."""
        with self._lock:
            gaps = len(self._frontier.gaps)
            failing = [span.failing_since for span in self._frontier if span.failing_since is not None]
            subscriptions = [each for stream in self._streams.values() for each in stream.subscriptions]
            oldest = self._polled_at - STALLED_SECONDS
            return FeedStatus(
                resolved_ts=self._resolved_ts,
                regions=len(self._frontier) - gaps,
                scanning=sum(not each.initialized for each in subscriptions),
                stalled=sum(
                    each.initialized and max(each.advanced_at, self._backlog_at) < oldest for each in subscriptions
                ),
                holes=gaps,
                stores=len(self._streams),
                rows=self._rows,
                late_rows=self._late_rows,
                queued_bytes=self._inbox.bytes,
                errors=dict(self._errors),
                failing_seconds=time.monotonic() - min(failing) if failing else 0.0,
                last_error=self._last_error,
                waits_for=self._ingests.waits_for,
            )

    # Handling of items from the inbox

    def _handle_messages(self, messages: StreamMessages) -> None:
        stream = messages.stream
        if self._streams.get(stream.store_id) is not stream:
            return
        try:
            for message in decode_all(messages.data):
                self._handle_message(stream, message)
        except RequestRefused as error:
            stream.cancel()
            self._handle_stream_end(stream, error)

    def _handle_message(self, stream: StoreStream, message: FeedMessage) -> None:
        self._received, now, changes = True, time.monotonic(), message.changes
        keys = zip(changes.region_ids.tolist(), changes.request_ids.tolist(), strict=True)
        subscriptions = [stream.find(*key) for key in keys]
        active = np.array([each is not None for each in subscriptions], np.bool_)
        batch = changes.records(self._codec, self._span, active)
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
                self._end_subscription(
                    stream, failed, classify_feed_error(self._cluster.regions, failed.region, failure.error)
                )

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
        """Apply a resolved-ts (0 = none), less the hold-back, which resubscriptions must cover, too."""
        if not ts or not subscription.initialized:
            return
        reduced = minus_seconds(ts, self._hold_back) if self._hold_back else ts
        if reduced > subscription.span.resolved_ts:
            self._frontier.advance(subscription.span, reduced)
            self._advanced, subscription.advanced_at = True, now

    def _advance_range(self) -> None:
        """Yield a new resolved-ts of the range, unless it may pass rows of an ingest.

        An ingest is announced before PD issues the new timestamp of its rows. So if a resolved-ts that was received is above that
        timestamp, the announcements that are read after it include this ingest.
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
        # Not into an ingest: a feed that starts from there does not know that the ingest's rows were delivered.
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
            self._scan_again(self._codec.bound(span.start), self._codec.bound(span.end))

    def _scan_again(self, start: bytes, end: bytes) -> None:
        """End the subscriptions of a range: new ones deliver all changes since the resolved-ts of the feed."""
        spans = set(map(id, self._frontier.rewind(start, end, self._resolved_ts)))
        for stream in self._streams.values():
            for subscription in stream.subscriptions:
                if id(subscription.span) in spans:
                    stream.deregister(subscription)
                    self._frontier.mark_gap(subscription.span)
                    subscription.span.retry_at = self._next_retry = 0.0

    def _end_subscription(self, stream: StoreStream, subscription: Subscription, advice: ResubscribeAdvice) -> None:
        """Turn a subscription that has ended into a gap, and schedule its retry."""
        stream.drop(subscription)
        self._frontier.mark_gap(subscription.span)
        self._schedule_retry(subscription.span, advice)
        if advice.breaks_stream:
            stream.cancel()

    def _handle_stream_end(self, stream: StoreStream, error: TikvBrError) -> None:
        """Turn all subscriptions of a stream into gaps; their regions are located through PD again."""
        if self._streams.get(stream.store_id) is not stream:
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
            self._end_subscription(stream, subscription, advice)

    def _is_final(self, error: TikvBrError) -> bool:
        # A TLS error after TLS has worked is retried: a store that shuts down may break a handshake.
        return isinstance(error, ClusterUnfit) or (isinstance(error, ClusterTlsError) and not self._received)

    # Gaps

    def _locate_gaps(self, now: float) -> None:
        """Start to locate the regions of the gaps whose retry is due; before that, end stalled subscriptions."""
        if now >= self._next_check:
            if self._inbox.bytes or now - self._next_check > CHECK_SECONDS:
                self._backlog_at = now
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

    def _next_wakeup(self) -> float:
        wakeup = self._next_check if self._locator.busy else min(self._next_retry, self._next_check)
        return min(wakeup, self._ingests.due_at)

    def _end_stalled(self, now: float) -> None:
        """End subscriptions that make no progress, to resubscribe: a leader that lost its followers sends nothing at all."""
        for stream in list(self._streams.values()):
            for subscription in stream.subscriptions:
                progress_at, limit = subscription.advanced_at, self._options.stall
                if not subscription.initialized:
                    progress_at, limit = max(progress_at, stream.scan_ended_at), self._options.scan_stall
                if max(progress_at, self._backlog_at) >= now - limit:
                    continue
                missing = "new resolved-ts" if subscription.initialized else "end of its incremental scan"
                cause = f"region {subscription.region.id}: no {missing} for {limit:g} s"
                self._deregister(stream, subscription)
                self._cluster.regions.invalidate(subscription.region.id)
                self._end_subscription(stream, subscription, ResubscribeAdvice("stalled", cause, retry.REGION_MISS))
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
        if self._streams.get(stream.store_id) is stream:
            del self._streams[stream.store_id]
        stream.cancel()
        for other in stream.subscriptions:
            cause = f"region {other.region.id}: its stream was closed to end the subscription of region {subscription.region.id}"
            advice = ResubscribeAdvice("stream", cause, retry.STORE_UNREACHABLE, immediate=True)
            self._end_subscription(stream, other, advice)

    def _handle_located(self, located: LocatedRegions) -> None:
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
        """A subscription and its stream."""
        for stream in self._streams.values():
            found = stream.find(region_id, request_id)
            if found is not None:
                return stream, found
        return None

    def _schedule_retry(self, gap: RegionSpan, advice: ResubscribeAdvice) -> None:
        """Set when to locate a gap again. Raises `RetryBudgetExhausted` if it has failed for too long."""
        now = time.monotonic()
        self._errors[advice.kind] += 1
        self._last_error = advice.cause
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


def _note_scanned(changes: ChangeEvent, subscriptions: Sequence[Subscription | None]) -> None:
    """Note how new the rows are that come before the end of an incremental scan."""
    if all(each is None or each.initialized for each in subscriptions):
        return
    for subscription, ts in zip(subscriptions, changes.newest_ts().tolist(), strict=True):
        if subscription is not None and not subscription.initialized:
            subscription.scanned_ts = max(subscription.scanned_ts, ts)


def _merge_messages(
    items: Iterable[StreamMessages | StreamEnd | LocatedRegions],
) -> list[StreamMessages | StreamEnd | LocatedRegions]:
    """Merge the messages of each stream into one item; the order between streams does not matter."""
    merged: list[StreamMessages | StreamEnd | LocatedRegions] = []
    by_stream: dict[StoreStream, StreamMessages] = {}
    for item in items:
        if isinstance(item, StreamMessages) and item.stream in by_stream:
            by_stream[item.stream].data.extend(item.data)
            continue
        if isinstance(item, StreamMessages):
            by_stream[item.stream] = item
        merged.append(item)
    return merged
