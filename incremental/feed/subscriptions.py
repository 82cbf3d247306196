"""Keeps every part of a range subscribed: locates gaps, subscribes, and subscribes again after errors and stalls."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from tikv_br import retry
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterTlsError, ClusterUnfit, RetryBudgetExhausted, TikvBrError
from tikv_br.formats.keys.text import show_key
from tikv_br.incremental.feed.events import REPORT_SECONDS, FeedOptions
from tikv_br.incremental.feed.ingests import WARN_SECONDS
from tikv_br.incremental.feed.stream import (
    FeedInbox,
    LocatedRegions,
    Locator,
    RegionSpan,
    ResolvedFrontier,
    ResubscribeAdvice,
    StoreStream,
    Subscription,
)

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
