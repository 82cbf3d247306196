"""A bare client of a store's change feed: it keeps what comes, and tests wait for what they want of it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from tests.integration.playground.clients import Client
from tikv_br.cluster.pb import cdcpb_pb2, cdcpb_pb2_grpc
from tikv_br.playground.region import Region

Event = cdcpb_pb2.Event
Request = cdcpb_pb2.ChangeDataRequest
_PATIENCE: Final = 60.0
MULTIPLEXING: Final = (("features", "stream-multiplexing"),)


class Feed:
    """One EventFeedV2 stream, multiplexed, or another RPC's. Take it from `feeding`."""

    def __init__(self, client: Client, store_id: int, rpc: str = "EventFeedV2") -> None:
        self._client = client
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._news = threading.Condition(threading.RLock())
        self._messages: list[cdcpb_pb2.ChangeDataEvent] = []
        self._resolved: dict[int, int] = {}
        self.failed: set[int] = set()
        """Requests of which a region has ended with an error."""
        self.ended: grpc.StatusCode | None = None
        stub = cdcpb_pb2_grpc.ChangeDataStub(client.channel(client.playground.nodes[store_id].address))
        self.call: Any = getattr(stub, rpc)(iter(self._requests.get, None), metadata=MULTIPLEXING)
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Begin to take messages; until then the store has nobody to send them to."""
        self._reader.start()

    def register(self, region: Region, *, request_id: int = 1, checkpoint_ts: int = 0, **fields: Any) -> None:  # noqa: ANN401
        """Subscribe to a whole region's RawKV changes."""
        request = Request(
            header=cdcpb_pb2.Header(cluster_id=self._client.playground.state.cluster_id, ticdc_version="6.5.0"),
            region_id=region.id,
            region_epoch=region.to_pb().region_epoch,
            checkpoint_ts=checkpoint_ts,
            request_id=request_id,
            kv_api=Request.RawKV,
            **fields,
        )
        self._requests.put(request)

    def deregister(self, *, request_id: int = 1, region_id: int = 0) -> None:
        """End one region of a request, or all of them."""
        header = cdcpb_pb2.Header(cluster_id=self._client.playground.state.cluster_id, ticdc_version="6.5.0")
        deregister = Request.Deregister()
        request = Request(header=header, region_id=region_id, request_id=request_id, deregister=deregister)
        self._requests.put(request)

    def events(self) -> list[Event]:
        """All events so far."""
        with self._news:
            return [event for message in self._messages for event in message.events]

    def messages(self) -> list[cdcpb_pb2.ChangeDataEvent]:
        """All messages so far."""
        with self._news:
            return list(self._messages)

    def rows(self) -> list[Event.Row]:
        """All rows so far, INITIALIZED among them."""
        return [row for event in self.events() for row in event.entries.entries]

    def errors(self) -> list[tuple[int, str]]:
        """Region and kind of every error so far."""
        return [
            (event.region_id, next(field.name for field, _ in event.error.ListFields()))
            for event in self.events()
            if event.HasField("error")
        ]

    def resolved(self, region_id: int) -> int:
        """The last resolved-ts of a region, 0 before the first."""
        return self._resolved.get(region_id, 0)

    def await_(self, condition: Callable[[], object]) -> None:
        """Return as soon as a condition of what came holds; fail when the stream ends or nothing comes in time."""
        with self._news:
            held = self._news.wait_for(lambda: self.ended or condition(), _PATIENCE)
        assert held, f"not so: {self._messages[-3:]}"
        assert condition(), f"the stream ended: {self.ended}"

    def await_error(self, region_id: int, kind: str) -> Event:
        """The error that ends a region's subscription."""
        self.await_(lambda: (region_id, kind) in self.errors())
        return next(event for event in self.events() if event.HasField("error") and event.region_id == region_id)

    def await_end(self) -> grpc.StatusCode | None:
        """Wait for the end of the stream, and return its status."""
        self._reader.join(_PATIENCE)
        return self.ended

    def await_initialized(self, regions: int = 1) -> None:
        """Return once the scans of so many regions are over."""
        self.await_(lambda: sum(row.type == Event.INITIALIZED for row in self.rows()) >= regions)

    def close(self) -> None:
        """End the call."""
        self._requests.put(None)
        self.call.cancel()
        if self._reader.is_alive():
            self._reader.join(_PATIENCE)

    def _read(self) -> None:
        code: grpc.StatusCode | None = grpc.StatusCode.OK
        try:
            for message in self.call:
                with self._news:
                    self._messages.append(message)
                    self._resolved.update(dict.fromkeys(message.resolved_ts.regions, message.resolved_ts.ts))
                    self.failed.update(event.request_id for event in message.events if event.HasField("error"))
                    self._news.notify_all()
        except grpc.RpcError as error:
            code = error.code()
        with self._news:
            self.ended = code
            self._news.notify_all()


@contextlib.contextmanager
def feeding(client: Client, store_id: int, rpc: str = "EventFeedV2", *, reading: bool = True) -> Iterator[Feed]:
    """A stream to one store; with ``reading`` False nothing is taken from it until `Feed.start`."""
    feed = Feed(client, store_id, rpc)
    if reading:
        feed.start()
    try:
        yield feed
    finally:
        feed.close()
