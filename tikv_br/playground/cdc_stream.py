"""The ``cdcpb.ChangeData`` service of one store: streams of events, incremental scans and resolved-ts."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import cdc_hub
from tikv_br.playground.cdc_hub import ChangeHub, Event, FeedSubscription, SubscribedRange
from tikv_br.playground.failpoints import CDC_REGISTER, CDC_RESOLVED, CDC_SCAN
from tikv_br.playground.node import StoreNode
from tikv_br.playground.servers import bidi
from tikv_br.playground.timestamps import TimestampFault

Request = cdcpb_pb2.ChangeDataRequest
Message = cdcpb_pb2.ChangeDataEvent
_REQUIRED_VERSION: Final = "6.2.0"
_MIN_INTERVAL: Final = 0.01
"""Lower bound of the seconds between two resolved-ts."""
_SEMVER: Final = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?(?:\+[0-9A-Za-z.-]+)?"
)


@dataclass(frozen=True, slots=True)
class Features:
    """Features of a client, by the version in its first request; an invalid version counts as 0.0.0."""

    batched_resolved_ts: bool
    checks_cluster: bool

    @classmethod
    def of(cls, version: str) -> Features:
        found = _SEMVER.fullmatch(version)
        number = (*map(int, found.group(1, 2, 3)), not found.group(4)) if found else (0, 0, 0, True)
        return cls(batched_resolved_ts=number >= (4, 0, 8, True), checks_cluster=number >= (5, 3, 0, True))


@dataclass(slots=True)
class _QueuedScan:
    """A queued scan. Its snapshot is taken when its turn comes, so that not every region holds one open."""

    subscription: FeedSubscription
    begin: Callable[[], Iterator[Event.Row]]
    rows: Iterator[Event.Row] | None = None


class FeedStream:
    """Serves one call on one thread; requests are read on another. An `Outbox` of the hub."""

    def __init__(
        self,
        node: StoreNode,
        hub: ChangeHub,
        context: grpc.ServicerContext,
        *,
        multiplexing: bool,
        interval: float,
        quota: int,
    ) -> None:
        self._node = node
        self._hub = hub
        self._context = context
        self._multiplexing = multiplexing
        self._interval = interval
        self._quota = quota
        self._features: Features | None = None
        self._changed = threading.Condition(self._hub.lock)
        self._requests: deque[Request] = deque()
        self._events: deque[Event] = deque()
        self._queued_bytes = 0
        self._scans: deque[_QueuedScan] = deque()
        self._ended = False

    def push(self, event: Event) -> None:
        """Queue an event, also if there is no room for it."""
        self._events.append(event)
        self._queued_bytes += event.ByteSize()
        self._changed.notify()

    def has_room(self, event: Event) -> bool:
        return self._queued_bytes + event.ByteSize() <= self._quota

    def serve(self, requests: Iterator[Request]) -> Iterator[Message]:
        """Answer until the client ends the call, or its own side of it."""
        if not self._context.add_callback(self._finish):  # it has ended already
            return
        threading.Thread(target=self._read, args=(requests,), name="event-feed", daemon=True).start()
        next_tick = time.monotonic() + self._interval
        try:
            while self._await_change(next_tick):
                for request in self._take_requests():
                    self._handle(request)
                yield from self._queued_messages()
                yield from self._scan_batch()
                if time.monotonic() >= next_tick:
                    yield from self._resolve()
                    next_tick = time.monotonic() + self._interval
        finally:
            self._hub.drop(self)

    def _read(self, requests: Iterator[Request]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the call was cancelled
            for request in requests:
                with self._changed:
                    self._requests.append(request)
                    self._changed.notify()
        self._finish()

    def _finish(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _await_change(self, until: float) -> bool:
        """Wait for something to do; False if the call has ended."""
        with self._changed:
            while not (self._ended or self._requests or self._events or self._scans):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return not self._ended

    def _take_requests(self) -> list[Request]:
        with self._changed:
            taken = list(self._requests)
            self._requests.clear()
            return taken

    def _queued_messages(self) -> Iterator[Message]:
        with self._changed:
            events = self._drain()
        yield from cdc_hub.messages_of(events)

    def _drain(self) -> list[Event]:
        taken = list(self._events)
        self._events.clear()
        self._queued_bytes = 0
        return taken

    def _handle(self, request: Request) -> None:
        if self._features is None:
            self._features = Features.of(request.header.ticdc_version)
        if request.WhichOneof("request") == "deregister" and self._node.release.multiplexes:
            self._deregister(request)
        else:
            error = self._register(request, self._features)
            if error is not None:
                with self._changed:
                    self.push(Event(region_id=request.region_id, request_id=request.request_id, error=error))

    def _register(self, request: Request, features: Features) -> cdcpb_pb2.Error | None:
        """Start a subscription, or return why it cannot be; the checks are in TiKV's order."""
        node = self._node
        error = self._failpoint(CDC_REGISTER, request.region_id)
        if error is not None:
            return error
        cluster_id = request.header.cluster_id
        if features.checks_cluster and cluster_id != node.cluster_id:
            mismatch = cdcpb_pb2.ClusterIDMismatch(current=node.cluster_id, request=cluster_id)
            return cdcpb_pb2.Error(cluster_id_mismatch=mismatch)
        api = request.kv_api if node.release.knows_raw_feeds else Request.TiDB
        raw = api == Request.RawKV
        if api != Request.TiDB and not (raw and node.api_version is ApiVersion.V2):
            return cdcpb_pb2.Error(compatibility=cdcpb_pb2.Compatibility(required_version=_REQUIRED_VERSION))
        span = SubscribedRange.of(request.start_key, request.end_key)
        subscription = FeedSubscription(self, node.store_id, request.region_id, request.request_id, span, raw)
        region = self._hub.subscribe(subscription, request.region_epoch)
        if isinstance(region, cdcpb_pb2.Error):
            return region
        scan = functools.partial(cdc_hub.scan, node.engine, region, request.checkpoint_ts)
        self._scans.append(_QueuedScan(subscription, scan if raw else lambda: iter(())))
        return None

    def _deregister(self, request: Request) -> None:
        """End one region's subscription, or without a region all of the request's."""
        for each in self._hub.subscriptions(self):
            if each.request_id == request.request_id and request.region_id in {0, each.region_id}:
                self._hub.end(each, cdc_hub.region_not_found(each.region_id))

    def _scan_batch(self) -> Iterator[Message]:
        """The next batch of the oldest scan, after the live events queued so far."""
        if not self._scans:
            return
        scan = self._scans[0]
        subscription = scan.subscription
        if scan.rows is None:
            scan.rows = scan.begin()
        error = self._failpoint(CDC_SCAN, subscription.region_id)
        if error is not None:
            self._hub.end(subscription, error)
        yield from self._queued_messages()
        if subscription.ended:  # checked after the events: no row may follow the error
            self._scans.popleft()
            return
        rows = cdc_hub.batch_of(scan.rows)
        last = rows[-1] is cdc_hub.INITIALIZED
        if last:
            self._scans.popleft()
        yield from cdc_hub.messages_of(cdc_hub.events_of(subscription.region_id, subscription.request_id, rows))
        subscription.initialized = last

    def _resolve(self) -> Iterator[Message]:
        """Send a resolved-ts, and before it all events up to it; nothing while PD is down."""
        if not self._node.tso.available:
            return
        for each in self._hub.subscriptions(self):
            error = self._failpoint(CDC_RESOLVED, each.region_id) if each.initialized else None
            if error is not None:
                self._hub.end(each, error)
        with self._changed:
            try:
                ts, subscriptions = self._hub.resolve(self._node, self)
            except TimestampFault:
                return
            events = self._drain()
        yield from cdc_hub.messages_of(events)
        yield from self._resolved(ts, subscriptions)
        if overrun := self._hub.overrun(self):  # PD's newest timestamp, though the new leader may write below it
            yield from self._resolved(self._node.tso.next(), overrun)

    def _resolved(self, ts: int, subscriptions: Iterable[FeedSubscription]) -> Iterator[Message]:
        if self._features is None or not subscriptions:
            return
        if not self._features.batched_resolved_ts:
            if not self._multiplexing:  # else there is no message for such a client
                for each in subscriptions:
                    event = Event(region_id=each.region_id, request_id=each.request_id, resolved_ts=ts)
                    yield Message(events=[event])
            return
        by_request: dict[int, set[int]] = {}
        for each in subscriptions:
            by_request.setdefault(each.request_id if self._multiplexing else 0, set()).add(each.region_id)
        for request_id, regions in by_request.items():
            yield Message(resolved_ts=cdcpb_pb2.ResolvedTs(regions=sorted(regions), ts=ts, request_id=request_id))

    def _failpoint(self, point: str, region_id: int) -> cdcpb_pb2.Error | None:
        return self._node.failpoints.intercept_feed(
            point, store_id=self._node.store_id, region_id=region_id, context=self._context
        )


class ChangeDataService:
    """Serves one store. ``interval`` is the seconds between resolved-ts, ``quota`` the bytes that a stream's queued events may have."""

    def __init__(self, node: StoreNode, hub: ChangeHub, interval: float, quota: int) -> None:
        self._node, self._hub = node, hub
        self._interval = max(interval, _MIN_INTERVAL)
        self._quota = quota

    def add_to(self, server: grpc.Server) -> None:
        handlers = {"EventFeed": bidi(cdcpb_pb2.ChangeDataRequest, self._event_feed)}
        if self._node.release.multiplexes:
            handlers["EventFeedV2"] = bidi(cdcpb_pb2.ChangeDataRequest, self._event_feed_v2)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("cdcpb.ChangeData", handlers)])

    def _event_feed(self, requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Message]:
        return self._serve(requests, context, multiplexing=False)

    def _event_feed_v2(self, requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Message]:
        headers = [str(value) for key, value in context.invocation_metadata() if key == "features"]
        features = [name for header in headers for name in header.split(",")]
        unknown = [name for name in features if name != "stream-multiplexing"]
        if unknown:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, ",".join(unknown))
        return self._serve(requests, context, multiplexing=bool(features))

    def _serve(
        self, requests: Iterator[Request], context: grpc.ServicerContext, *, multiplexing: bool
    ) -> Iterator[Message]:
        stream = FeedStream(
            self._node, self._hub, context, multiplexing=multiplexing, interval=self._interval, quota=self._quota
        )
        return stream.serve(requests)
