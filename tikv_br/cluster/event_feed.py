"""The stream of changes of one store."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import grpc

from tikv_br.cluster.channel import open_channel, run_in_worker_thread
from tikv_br.cluster.config import TlsFiles
from tikv_br.cluster.pb import cdcpb_pb2
from tikv_br.cluster.topology import Store
from tikv_br.errors import ClusterError, ClusterUnreachable
from tikv_br.retry import Outage

MULTIPLEXED = (("features", "stream-multiplexing"),)
"""Metadata of an EventFeedV2 call; without it the store treats the call as EventFeed."""


class EventFeed:
    """A stream of changes, with flow control of its own: what is not read stays in the store.

    `send` and `cancel` may be called from any thread; one thread iterates, once.

    Iterating raises `ClusterUnreachable` (also after `cancel` and when the store ends the call), `CallUnsupported` when
    the store has no such call, `ClusterTlsError` or `RequestRefused`.
    """

    def __init__(
        self,
        store: Store,
        tls: TlsFiles,
        to_error: Callable[[grpc.RpcError], ClusterError],
        outage: Outage,
        probe: Callable[[], bool],
        *,
        multiplexed: bool,
    ) -> None:
        """`multiplexed` calls EventFeedV2, which older stores do not have. ``outage`` and ``probe`` are the store's."""
        self.store = store
        self.multiplexed = multiplexed
        self._to_error, self._outage, self._probe = to_error, outage, probe
        self._requests: queue.SimpleQueue[cdcpb_pb2.ChangeDataRequest | None] = queue.SimpleQueue()
        self._channel = open_channel(store.address, tls, own_connection=True)
        call: grpc.StreamStreamMultiCallable[cdcpb_pb2.ChangeDataRequest, bytes] = self._channel.stream_stream(
            f"/cdcpb.ChangeData/{'EventFeedV2' if multiplexed else 'EventFeed'}",
            request_serializer=cdcpb_pb2.ChangeDataRequest.SerializeToString,
        )
        requests, metadata = iter(self._requests.get, None), MULTIPLEXED if multiplexed else None
        self._answers = run_in_worker_thread(lambda: call(requests, metadata=metadata))

    def send(self, request: cdcpb_pb2.ChangeDataRequest) -> None:
        """Queue a request; it is lost when the stream ends first."""
        self._requests.put(request)

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._outage.working(self._probe):
                for answer in self._answers:
                    self._outage.end()
                    yield answer
        except grpc.RpcError as error:
            raise self._to_error(error) from None
        finally:
            self.cancel()
        raise ClusterUnreachable(f"{self}: the store ended the feed")

    def cancel(self) -> None:
        run_in_worker_thread(self._end)

    def _end(self) -> None:
        self._answers.cancel()
        self._requests.put(None)  # gRPC waits for the next request in a thread
        self._channel.close()

    def __str__(self) -> str:
        return f"store {self.store.id} ({self.store.address})"
