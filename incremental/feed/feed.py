"""All changes of a span of keys, whatever its regions and stores do meanwhile."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np

from formats import columns
from formats.keys import KeyCodec
from incremental.feed.coverage import Coverage, Piece
from incremental.feed.decode import Message, decode_all
from incremental.feed.inbox import Inbox
from incremental.feed.locator import Located, Locator
from incremental.feed.options import FeedOptions
from incremental.feed.outputs import Event, Resolved, Rows
from incremental.feed.status import WORTH_TELLING, FeedStatus
from incremental.feed.stream import Arrived, Ended, StoreStream, Subscription
from incremental.feed.troubles import Trouble, learn
from incremental.span import Span
from tikv_br.cluster import retry
from tikv_br.cluster.channel import CallUnsupported
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamp import minus_seconds
from tikv_br.errors import (
    ClusterError,
    ClusterTlsError,
    ClusterUnfit,
    RequestRefused,
    RetryBudgetExhausted,
    TikvBrError,
    UsageError,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
JOIN_SECONDS = 10.0
TAKE_BYTES = 1 << 20
"""Messages that are looked at together: small ones cost as much as large ones."""
CHECK_SECONDS = 5.0
"""How often the feed looks for regions that stand still."""
WARN_SECONDS = 60.0
"""How often what goes wrong for longer is logged."""


class Feed:
    """The changes of one span after `start_ts`, at least once each, and the span's resolved-ts.

    All decisions are made in the thread of whoever iterates (or polls): one thread at a time. Streams are read by
    threads that wait when the consumer does. Close it, or use it as a context manager; `close` may come from any thread
    and ends the iteration.

    Raises `ClusterUnfit` for a store without a RawKV feed or of another cluster, `ClusterTlsError` at first, and
    `RetryBudgetExhausted` when a part of the span has failed for ``options.patience``.
    """

    def __init__(
        self, cluster: Cluster, codec: KeyCodec, span: Span, start_ts: int, options: FeedOptions | None = None
    ) -> None:
        """`start_ts` must be safe to start at: no store may have older timestamps left to give to writes.

        Raises `ClusterUnfit` before API V2, `UsageError` for a span that is empty or not of the codec's keyspace.
        """
        if not codec.is_v2:
            raise ClusterUnfit(f"API {codec.api_version.label} has no timestamps, and so no changes to follow")
        first, last = codec.rpc_range(b"", b"")
        if not first <= span.start < span.end <= last:
            raise UsageError(f"[{span.start.hex()}, {span.end.hex()}) is no span of keyspace {codec.keyspace_id}")
        self._cluster, self._codec, self._span = cluster, codec, span
        self._options = options or FeedOptions()
        self._coverage = Coverage(codec.bound(span.start), codec.bound(span.end), start_ts)
        self._inbox: Inbox[Arrived | Ended | Located] = Inbox(self._options.queue_bytes)
        self._locator = Locator(cluster, self._inbox)
        self._streams: dict[int, StoreStream] = {}
        self._plain: set[int] = set()  # stores without EventFeedV2
        self._requests = 0
        self._due = 0.0  # when the next hole may be tried
        self._check = time.monotonic() + CHECK_SECONDS
        self._behind = 0.0  # when the consumer was last seen to be slow: what regions said may have waited for it
        self._ready: deque[Event] = deque()
        self._resolved = start_ts
        self._advanced = False  # since that was computed
        self._heard = False  # anything from any store
        self._rows = self._late = 0
        self._errors: Counter[str] = Counter()
        self._last_error = ""
        self._warn_at = 0.0  # no earlier
        self._closed = False
        self._lock = threading.Lock()  # `close` finds all streams, and none is opened after it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        while not self._closed:
            said = self.poll(POLL_SECONDS)
            if said is not None:
                yield said

    def poll(self, timeout: float) -> Event | None:
        """What is next; None when there is nothing for `timeout` seconds, or after `close`."""
        until = time.monotonic() + timeout
        while not self._ready:
            now = time.monotonic()
            items = self._inbox.get(max(0.0, min(until, self._next_mend()) - now), TAKE_BYTES)
            with self._lock:
                if self._closed:
                    return None
                for item in _joined(items):
                    self._take(item)
                self._mend(time.monotonic())
            if not items and now >= until:
                return None
        return self._ready.popleft()

    def close(self) -> None:
        """End all streams and wait for their threads."""
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
        """A picture of now; from any thread."""
        with self._lock:
            holes = len(self._coverage.holes)
            failing = [piece.failing_since for piece in self._coverage if piece.failing_since is not None]
            return FeedStatus(
                resolved_ts=self._resolved,
                regions=len(self._coverage) - holes,
                scanning=sum(
                    not each.initialized for stream in self._streams.values() for each in stream.subscriptions
                ),
                holes=holes,
                stores=len(self._streams),
                rows=self._rows,
                late_rows=self._late,
                queued_bytes=self._inbox.bytes,
                errors=dict(self._errors),
                failing_seconds=time.monotonic() - min(failing) if failing else 0.0,
                last_error=self._last_error,
            )

    # What comes in

    def _take(self, item: Arrived | Ended | Located) -> None:
        match item:
            case Arrived():
                self._take_messages(item)
            case Ended():
                self._take_end(item.stream, item.error)
            case Located():
                self._take_places(item)

    def _take_messages(self, arrived: Arrived) -> None:
        stream = arrived.stream
        if self._streams.get(stream.store_id) is not stream:
            return
        try:
            for message in decode_all(arrived.data):
                self._take_message(stream, message)
        except RequestRefused as error:
            stream.cancel()
            self._take_end(stream, error)

    def _take_message(self, stream: StoreStream, message: Message) -> None:
        self._heard, now, changes = True, time.monotonic(), message.changes
        keys = zip(changes.region_ids.tolist(), changes.request_ids.tolist(), strict=True)
        wanted = [stream.find(*key) for key in keys]
        batch = changes.records(
            self._codec, self._span.start, self._span.end, np.array([each is not None for each in wanted], np.bool_)
        )
        if batch.num_rows:
            self._rows += batch.num_rows
            self._late += int(np.count_nonzero(columns.numbers(batch["ts"]) <= np.uint64(self._resolved)))
            self._ready.append(Rows(batch))
        for index, subscription in enumerate(wanted):
            if subscription is not None:
                if changes.initialized[index]:
                    self._initialize(stream, subscription, now)
                self._advance(subscription, int(changes.event_resolved[index]), now)
        resolved_for = stream.resolved_for(changes.resolved_regions.tolist(), changes.resolved_request)
        for subscription in resolved_for:
            self._advance(subscription, changes.resolved_ts, now)
        for failure in message.failures:
            failed = stream.find(failure.region_id, failure.request_id)
            if failed is not None:
                self._end(stream, failed, learn(self._cluster.regions, failed.region, failure.error))
        self._announce()

    @staticmethod
    def _initialize(stream: StoreStream, subscription: Subscription, now: float) -> None:
        stream.scan_ended = subscription.moved = now
        subscription.initialized = True
        subscription.piece.tries = 0
        subscription.piece.failing_since = None

    def _advance(self, subscription: Subscription, ts: int, now: float) -> None:
        """Take a resolved-ts, 0 being none, as so much older: subscriptions start anew from there, too."""
        if not ts or not subscription.initialized:
            return
        held = minus_seconds(ts, self._options.hold_back) if self._options.hold_back else ts
        if held > subscription.piece.resolved:
            self._coverage.advance(subscription.piece, held)
            self._advanced, subscription.moved = True, now

    def _announce(self) -> None:
        """Say the span's resolved-ts when it has moved. With many regions it is not cheap to ask for."""
        if not self._advanced:
            return
        self._advanced = False
        resolved = self._coverage.resolved
        if resolved > self._resolved:
            self._resolved = resolved
            self._ready.append(Resolved(resolved))

    def _end(self, stream: StoreStream, subscription: Subscription, trouble: Trouble) -> None:
        """A subscription is over: its part of the span is a hole until the next try."""
        stream.drop(subscription)
        self._coverage.lose(subscription.piece)
        self._fail(subscription.piece, trouble)
        if trouble.breaks_stream:
            stream.cancel()

    def _take_end(self, stream: StoreStream, error: TikvBrError) -> None:
        """A stream is over: ask PD anew where its regions are, and try again."""
        if self._streams.get(stream.store_id) is not stream:
            return
        del self._streams[stream.store_id]
        unsupported = isinstance(error, CallUnsupported)
        if unsupported and stream.call.multiplexed:
            log.info("%s has no EventFeedV2: it gets an EventFeed", stream.call)
            self._plain.add(stream.store_id)
        elif self._is_final(error):
            raise error
        trouble = Trouble("stream", error.message, retry.STORE_UNREACHABLE, at_once=unsupported)
        if not unsupported:
            self._cluster.router.forget_store(stream.store_id)
        for subscription in stream.subscriptions:
            if not unsupported:
                self._cluster.regions.invalidate(subscription.region.id)
            self._end(stream, subscription, trouble)

    def _is_final(self, error: TikvBrError) -> bool:
        """Whether no other try can help. TLS that has worked is trouble like any: a store that ends may break a handshake."""
        return isinstance(error, ClusterUnfit) or (isinstance(error, ClusterTlsError) and not self._heard)

    # Holes

    def _mend(self, now: float) -> None:
        """Have the holes that are due searched for regions."""
        if now >= self._check:
            if self._inbox.bytes or now - self._check > CHECK_SECONDS:
                self._behind = now
            self._check = now + CHECK_SECONDS
            self._end_stalled(now)
        if now < self._due or self._locator.busy:
            return
        holes = self._coverage.holes
        due = [hole for hole in holes if hole.due <= now]
        self._due = min((hole.due for hole in holes if hole.due > now), default=math.inf)
        if due:
            for hole in due:
                hole.due = math.inf
            self._locator.search([(hole.start, hole.end) for hole in due])

    def _next_mend(self) -> float:
        return self._check if self._locator.busy else min(self._due, self._check)

    def _end_stalled(self, now: float) -> None:
        """Start regions anew that are silent: a leader that lost its followers says nothing at all."""
        for stream in self._streams.values():
            for subscription in stream.subscriptions:
                heard, limit = subscription.moved, self._options.stall
                if not subscription.initialized:
                    heard, limit = max(heard, stream.scan_ended), self._options.scan_stall
                if max(heard, self._behind) >= now - limit:
                    continue
                missed = "new resolved-ts" if subscription.initialized else "end of its scan"
                cause = f"region {subscription.region.id}: no {missed} for {limit:g} s"
                stream.deregister(subscription)
                self._cluster.regions.invalidate(subscription.region.id)
                self._end(stream, subscription, Trouble("stalled", cause, retry.REGION_MISS))

    def _take_places(self, located: Located) -> None:
        """Subscribe to what was found; what stays a hole is searched again."""
        self._locator.answered()
        if located.error is not None and self._is_final(located.error):
            raise located.error
        self._requests += 1
        for region, store in located.places:
            if not self._subscribe(region, store):
                self._cluster.regions.invalidate(region.id)
        trouble = _unlocated(located.error)
        for hole in self._coverage.holes:
            if hole.due == math.inf:
                self._fail(hole, trouble)
            self._due = min(self._due, hole.due)

    def _subscribe(self, region: Region, store: StoreClient) -> bool:
        """Claim a region; False when it has nothing that is still missing, or is known to be out of date.

        All that is asked for in one go has one request id, so that stores can say their resolved-ts in one message.
        """
        if self._find(region.id, self._requests) is not None:
            self._requests += 1  # the region was found twice, before and after it moved
        request_id = self._requests
        claim = self._coverage.claim(
            region.start, region.end, region_id=region.id, version=region.version, request_id=request_id
        )
        if claim is None:
            return False
        for key in claim.replaced:
            stale = self._find(*key)
            if stale is not None:
                stale[0].deregister(stale[1])
        stream = self._streams.get(store.store.id)
        if stream is None:
            multiplexed = store.store.id not in self._plain
            call = store.event_feed(multiplexed=multiplexed)
            stream = self._streams[store.store.id] = StoreStream(call, self._inbox, self._cluster.cluster_id)
        stream.register(Subscription(region, request_id, claim.piece, time.monotonic()))
        return True

    def _find(self, region_id: int, request_id: int) -> tuple[StoreStream, Subscription] | None:
        """A subscription, and the stream that it is on."""
        for stream in self._streams.values():
            found = stream.find(region_id, request_id)
            if found is not None:
                return stream, found
        return None

    def _fail(self, hole: Piece, trouble: Trouble) -> None:
        """Set when a hole is tried again. Raises `RetryBudgetExhausted` when it has failed for too long."""
        now = time.monotonic()
        self._errors[trouble.kind] += 1
        self._last_error = trouble.cause
        if hole.failing_since is None:
            hole.failing_since = now
        failing = now - hole.failing_since
        if failing > self._options.patience:
            raise RetryBudgetExhausted(
                f"the feed has had no changes of [{hole.start.hex()}, {hole.end.hex()}) for {failing:.0f} s: "
                f"{trouble.cause}"
            )
        if failing >= WORTH_TELLING and now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            log.warning("part of the source has not been followed for %.0f s: %s", failing, trouble.cause)
        # Without chance: holes that are due together are searched together.
        wait = 0.0 if trouble.at_once and not hole.tries else trouble.backoff.delay(hole.tries, 0.5)
        log.debug("try %d again in %.3f s: %s", hole.tries + 1, wait, trouble.cause)
        hole.tries += 1
        hole.due = now + max(wait, trouble.at_least)
        self._due = min(self._due, hole.due)


def _joined(items: Iterable[Arrived | Ended | Located]) -> list[Arrived | Ended | Located]:
    """What has come, with the messages of each stream together; between streams the order says nothing."""
    found: list[Arrived | Ended | Located] = []
    by_stream: dict[StoreStream, Arrived] = {}
    for item in items:
        if isinstance(item, Arrived) and item.stream in by_stream:
            by_stream[item.stream].data.extend(item.data)
            continue
        if isinstance(item, Arrived):
            by_stream[item.stream] = item
        found.append(item)
    return found


def _unlocated(error: ClusterError | None) -> Trouble:
    """Why a hole is still one after a search."""
    if error is None:
        return Trouble("stale regions", "what PD says of its regions is out of date", retry.REGION_MISS)
    return Trouble("no region", error.message, retry.PD_TROUBLE)
