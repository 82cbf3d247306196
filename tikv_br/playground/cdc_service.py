"""The ``cdcpb.ChangeData`` service of one store: the change feed that TiKV-CDC reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import grpc

from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.playground.cdc_stream import FeedStream
from tikv_br.playground.node import StoreNode
from tikv_br.playground.rpc import bidi

SERVICE: Final = "cdcpb.ChangeData"
_FEATURES: Final = "features"
_MULTIPLEXING: Final = "stream-multiplexing"
_SHORTEST: Final = 0.01
"""No resolved-ts more often than so many seconds, whatever was asked for."""


class ChangeDataService:
    """Serves one store. ``interval`` (seconds) is that of resolved-ts, ``quota`` (bytes) what a slow stream may hold."""

    def __init__(self, node: StoreNode, interval: float, quota: int) -> None:
        self._node = node
        self._interval = max(interval, _SHORTEST)
        self._quota = quota

    def add_to(self, server: grpc.Server) -> None:
        """Register the service."""
        handlers = {
            "EventFeed": bidi(cdcpb_pb2.ChangeDataRequest, self._event_feed),
            "EventFeedV2": bidi(cdcpb_pb2.ChangeDataRequest, self._event_feed_v2),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    def _event_feed(
        self, requests: Iterator[cdcpb_pb2.ChangeDataRequest], context: grpc.ServicerContext
    ) -> Iterator[cdcpb_pb2.ChangeDataEvent]:
        return self._serve(requests, context, multiplexing=False)

    def _event_feed_v2(
        self, requests: Iterator[cdcpb_pb2.ChangeDataRequest], context: grpc.ServicerContext
    ) -> Iterator[cdcpb_pb2.ChangeDataEvent]:
        features = _features(context)
        unknown = [name for name in features if name != _MULTIPLEXING]
        if unknown:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, ",".join(unknown))
        return self._serve(requests, context, multiplexing=bool(features))

    def _serve(
        self, requests: Iterator[cdcpb_pb2.ChangeDataRequest], context: grpc.ServicerContext, *, multiplexing: bool
    ) -> Iterator[cdcpb_pb2.ChangeDataEvent]:
        stream = FeedStream(self._node, context, multiplexing=multiplexing, interval=self._interval, quota=self._quota)
        return stream.serve(requests)


def _features(context: grpc.ServicerContext) -> list[str]:
    """The names in the headers ``features`` of a call."""
    values = [str(value) for key, value in context.invocation_metadata() if key == _FEATURES]
    return [name for value in values for name in value.split(",")]
