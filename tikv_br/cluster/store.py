"""Client of one store, with timeouts and errors of this package; and the pool of all stores' clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import grpc

from tikv_br import cancellation
from tikv_br.cancellation import TaskCancelled, request_seconds
from tikv_br.cluster.channel import open_channel, run_in_worker_thread, status_of, to_cluster_error
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2, import_sstpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pb.brpb_pb2_grpc import BackupStub
from tikv_br.cluster.pb.import_sstpb_pb2_grpc import ImportSSTStub
from tikv_br.cluster.pb.tikvpb_pb2_grpc import TikvStub
from tikv_br.cluster.regions import Region
from tikv_br.cluster.request_guards import check_backup, check_get_ttl, check_sst
from tikv_br.cluster.topology import Store
from tikv_br.errors import ClusterError, ClusterUnreachable, DangerousRequest
from tikv_br.formats.api_version import ApiVersion
from tikv_br.retry import Outage

if TYPE_CHECKING:
    from grpc import _CallIterator
from tikv_br.cluster.event_feed import EventFeed

_SILENCE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Statuses of calls that the store has not answered; nearly always."""
PROBE_TIMEOUT = 5.0
"""Seconds for the answer to a probe, after which the next one is sent."""


LONG_FACTOR = 10


LARGEST_PAGE = 256 << 20
"""Bytes that one answer to RawScan may have: of a larger page, fewer rows must be asked for."""


Request = TypeVar("Request")
Response = TypeVar("Response")


class StoreClient:
    """Calls one store, once: no retry and no routing here. Thread-safe.

    Every call raises `ClusterUnreachable` (another try may help), `ClusterTlsError`, `ClusterUnfit` or
    `RequestRefused` for a gRPC failure, and returns region errors inside the answer. In cancelled work no call is sent: it
    raises `TaskCancelled`, as do calls in flight that may take long.
    """

    def __init__(self, store: Store, config: ClusterConfig, outage: Outage) -> None:
        """Connects with the first call. ``outage`` is the store's."""
        self.store = store
        self._config, self._outage = config, outage
        self._closed = False
        self._channel = open_channel(store.address, config.tls)
        self.kv = TikvStub(self._channel)
        self.batch_put: grpc.UnaryUnaryMultiCallable[bytes, kvrpcpb_pb2.RawBatchPutResponse] = (
            self._channel.unary_unary(
                "/tikvpb.Tikv/RawBatchPut", response_deserializer=kvrpcpb_pb2.RawBatchPutResponse.FromString
            )
        )
        """As ``kv.RawBatchPut``, with a serialized request: `tikv_br.cluster.puts` writes those without protobuf."""
        self.batch_delete: grpc.UnaryUnaryMultiCallable[bytes, kvrpcpb_pb2.RawBatchDeleteResponse] = (
            self._channel.unary_unary(
                "/tikvpb.Tikv/RawBatchDelete", response_deserializer=kvrpcpb_pb2.RawBatchDeleteResponse.FromString
            )
        )
        """As ``kv.RawBatchDelete``, with a serialized request."""
        self._health: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        self._backup = BackupStub(self._channel)
        self._import = ImportSSTStub(self._channel)
        self._scan_channel = open_channel(store.address, config.tls, LARGEST_PAGE)
        self._raw_scan: grpc.UnaryUnaryMultiCallable[kvrpcpb_pb2.RawScanRequest, bytes] = (
            self._scan_channel.unary_unary(
                "/tikvpb.Tikv/RawScan", request_serializer=kvrpcpb_pb2.RawScanRequest.SerializeToString
            )
        )

    def close(self) -> None:
        """Close the channel; calls under way and later ones end with `ClusterUnreachable`."""
        self._closed = True
        run_in_worker_thread(lambda: [channel.close() for channel in (self._channel, self._scan_channel)])

    @property
    def long_timeout(self) -> float:
        """Seconds for a call that moves or reads a whole region's data."""
        return LONG_FACTOR * self._config.request_timeout

    @property
    def request_timeout(self) -> float:
        """Seconds for a call that has little to do."""
        return self._config.request_timeout

    def call(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request, *, timeout: float | None = None
    ) -> Response:
        """Send one request of `kv`; `timeout` in seconds, by default the config's. With one of its own it can be cancelled."""
        if timeout is None:
            with self._outage.asking():
                return self._answer(lambda: method(request, timeout=request_seconds(self._config.request_timeout)))
        return self._run_long(lambda: method.future(request, timeout=request_seconds(timeout)))

    def raw_scan(self, request: kvrpcpb_pb2.RawScanRequest) -> bytes:
        """RawScan, with the answer as the bytes on the wire: `tikv_br.formats.rawscan` reads them without protobuf.

        An answer of more than `LARGEST_PAGE` is `ClusterUnreachable` too: the next try must ask for less.
        """
        return self.call(self._raw_scan, request)

    def raw_get_key_ttl(
        self, request: kvrpcpb_pb2.RawGetKeyTTLRequest, api_version: ApiVersion
    ) -> kvrpcpb_pb2.RawGetKeyTTLResponse:
        """RawGetKeyTTL. Raises `DangerousRequest` for a store without TTL."""
        check_get_ttl(api_version)
        return self.call(self.kv.RawGetKeyTTL, request)

    def backup(
        self, request: brpb_pb2.BackupRequest, regions: Sequence[Region] = (), *, timeout: float | None = None
    ) -> BackupStream:
        """Have the store back up what it leads of a range; one answer a region, in no order; all within ``timeout`` seconds.

        For ``regions``, and what is raised, see `check_backup`.
        """
        check_backup(request, regions)
        answers = self._run(lambda: self._backup.backup(request, timeout=timeout))
        return BackupStream(answers, self._failure, self._outage, self.is_alive)

    def event_feed(self, *, multiplexed: bool) -> EventFeed:
        """A new feed of changes over a connection of its own; see `EventFeed`."""
        return EventFeed(
            self.store, self._config.tls, self._failure, self._outage, self.is_alive, multiplexed=multiplexed
        )

    def is_alive(self) -> bool:
        """Return whether the store answers a health check; stores that know none answer that."""
        try:
            self._health(b"", timeout=PROBE_TIMEOUT)
        except grpc.RpcError as error:
            return status_of(error)[0] not in _SILENCE | {grpc.StatusCode.CANCELLED}
        except ValueError:  # gRPC raises it for a closed channel
            return False
        return True

    def download(
        self, request: import_sstpb_pb2.DownloadRequest, *, extra_seconds: float = 0.0
    ) -> import_sstpb_pb2.DownloadResponse:
        """Have the store fetch an SST from storage. The timeout is `long_timeout`, longer where a limit slows the store."""
        check_sst(request.sst)
        return self.call(self._import.Download, request, timeout=self.long_timeout + extra_seconds)

    def upload(
        self, meta: import_sstpb_pb2.SSTMeta, chunks: Iterable[bytes], *, verified: bool, extra_seconds: float = 0.0
    ) -> None:
        """Send an SST, in chunks, to the store. Empty chunks are left out: stores refuse them.

        `verified`: every block's checksum was checked: stores compare ``meta.crc32`` only, and die of a
        damaged block at ingest.
        """
        if not verified:
            raise DangerousRequest("an upload of unverified bytes would crash the store at ingest")
        check_sst(meta)
        parts = (import_sstpb_pb2.UploadRequest(data=chunk) for chunk in chunks if chunk)
        requests = _chain(import_sstpb_pb2.UploadRequest(meta=meta), parts)
        timeout = self.long_timeout + extra_seconds
        self._run_long(lambda: self._import.Upload.future(requests, timeout=request_seconds(timeout)))

    def ingest(self, request: import_sstpb_pb2.IngestRequest) -> import_sstpb_pb2.IngestResponse:
        """Take a downloaded or uploaded SST into a region that this store leads."""
        check_sst(request.sst)
        return self.call(self._import.Ingest, request, timeout=self.request_timeout)

    def switch_mode(self, mode: import_sstpb_pb2.SwitchMode.ValueType) -> None:
        """Enter or leave import mode; a store leaves it without a request after ten minutes."""
        self.call(self._import.SwitchMode, import_sstpb_pb2.SwitchModeRequest(mode=mode))

    def is_importing(self) -> bool:
        """Return whether the store is in import mode. Raises `CallUnsupported` if it cannot report it, as TiKV 9.0."""
        answer = self.call(self._import.GetMode, import_sstpb_pb2.GetModeRequest())
        return answer.mode == import_sstpb_pb2.Import

    def set_download_speed_limit(self, bytes_per_second: int, *, task_id: str = "", ttl_seconds: int = 0) -> None:
        """Limit downloads of this store, for a named task so long; 0 is no limit. The smallest of all tasks' limits counts."""
        request = import_sstpb_pb2.SetDownloadSpeedLimitRequest(
            speed_limit=bytes_per_second, task_id=task_id, ttl_seconds=ttl_seconds
        )
        self.call(self._import.SetDownloadSpeedLimit, request)

    def _run_long(self, start: Callable[[], grpc.Future[Response]]) -> Response:
        """Run a call that is cancelled with the work that it is part of: twice as costly for us as one that is not."""
        work = cancellation.current()

        def send() -> Response:
            call = start()
            with nullcontext() if work is None else work.calling(lambda: run_in_worker_thread(call.cancel)):
                return call.result()

        try:
            with self._outage.working(self.is_alive):
                return self._answer(send)
        except grpc.FutureCancelledError:
            if work is None:
                raise
            raise TaskCancelled from None

    def _answer(self, send: Callable[[], Response]) -> Response:
        answer = self._run(send)
        self._outage.end()
        return answer

    def _run(self, send: Callable[[], Response]) -> Response:
        cancellation.check()
        self._outage.check()
        try:
            return run_in_worker_thread(send)
        except grpc.RpcError as error:
            raise self._failure(error) from None
        except ValueError:  # gRPC raises it for a closed channel
            if self._closed:
                raise ClusterUnreachable(f"{self}: the connection was closed") from None
            raise

    def _failure(self, error: grpc.RpcError) -> ClusterError:
        if status_of(error)[0] in _SILENCE:
            self._outage.fail()
        return to_cluster_error(error, str(self), self._config.tls)

    def __str__(self) -> str:
        return f"store {self.store.id} ({self.store.address})"


class BackupStream:
    """The answers to one Backup request as they come: iterate once; raises as any call of `StoreClient`."""

    waiting = False

    def __init__(
        self,
        answers: _CallIterator[brpb_pb2.BackupResponse],
        to_error: Callable[[grpc.RpcError], ClusterError],
        outage: Outage,
        probe: Callable[[], bool],
    ) -> None:
        self._answers = answers
        self._to_error, self._outage, self._probe = to_error, outage, probe

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
        try:
            with self._outage.working(self._probe):
                for answer in self._answers:
                    self._outage.end()
                    yield answer
        except grpc.RpcError as error:
            raise self._to_error(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request; callable from any thread. Iterating then raises `ClusterUnreachable`."""
        self._answers.cancel()


class StorePool:
    """Clients by store id, made when first needed. Thread-safe."""

    def __init__(self, find: Callable[[int], Store], config: ClusterConfig) -> None:
        """`find` asks PD for a store."""
        self._find = find
        self._config = config
        self._lock = threading.Lock()
        self._clients: dict[int, StoreClient] = {}
        self._outages: dict[int, Outage] = {}

    def get(self, store_id: int) -> StoreClient:
        """The client of a store. Raises `RequestRefused` for an unknown id, `ClusterError` when PD cannot say."""
        with self._lock:
            client = self._clients.get(store_id)
        if client is not None:
            return client
        store = self._find(store_id)
        with self._lock:
            if store_id not in self._clients:
                outage = self._outages.setdefault(store_id, Outage(f"store {store.address}", self._config.retry_budget))
                self._clients[store_id] = StoreClient(store, self._config, outage)
            return self._clients[store_id]

    def forget(self, store_id: int) -> None:
        """Ask PD again for this store's address before the next use; calls under way go on."""
        with self._lock:
            self._clients.pop(store_id, None)

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def _chain(
    first: import_sstpb_pb2.UploadRequest, rest: Iterable[import_sstpb_pb2.UploadRequest]
) -> Iterator[import_sstpb_pb2.UploadRequest]:
    yield first
    yield from rest
