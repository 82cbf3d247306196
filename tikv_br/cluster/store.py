"""Clients of stores, with timeouts and errors of this package.

`StoreClient` calls one store, `EventFeed` is its stream of changes, ``check_…`` refuse requests that would crash it, `StorePool` has the
clients of all stores.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import grpc

from tikv_br import cancellation
from tikv_br.cancellation import TaskCancelled, request_seconds
from tikv_br.cluster.channel import open_channel, run_in_worker_thread, status_of, to_cluster_error
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.cluster.pb import brpb_pb2, cdcpb_pb2, import_sstpb_pb2, kvrpcpb_pb2
from tikv_br.cluster.pb.brpb_pb2_grpc import BackupStub
from tikv_br.cluster.pb.import_sstpb_pb2_grpc import ImportSSTStub
from tikv_br.cluster.pb.tikvpb_pb2_grpc import TikvStub
from tikv_br.cluster.regions import Region
from tikv_br.cluster.topology import Store
from tikv_br.errors import ClusterError, ClusterUnfit, ClusterUnreachable, DangerousRequest
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import decode, encode
from tikv_br.formats.keys.ranges import KeyRange, gaps
from tikv_br.formats.keys.text import show_both, show_key
from tikv_br.retry import Outage

if TYPE_CHECKING:
    from grpc import _CallIterator


MULTIPLEXED = (("features", "stream-multiplexing"),)
"""Metadata of an EventFeedV2 call; without it the store treats the call as EventFeed."""


Answer = TypeVar("Answer")


def _received(
    answers: Iterable[Answer],
    outage: Outage,
    probe: Callable[[], bool],
    to_error: Callable[[grpc.RpcError], ClusterError],
) -> Iterator[Answer]:
    """The answers of a stream, whose silence is an outage of the store only if it does not answer the probe either."""
    try:
        with outage.working(probe):
            for answer in answers:
                outage.end()
                yield answer
    except grpc.RpcError as error:
        raise to_error(error) from None


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
            yield from _received(self._answers, self._outage, self._probe, self._to_error)
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


SST_CFS = frozenset({"default", "write"})
"""Column families that a store's importer knows; it panics at any other."""


def check_get_ttl(api_version: ApiVersion) -> None:
    """RawGetKeyTTL makes a store without TTL panic."""
    if not api_version.has_ttl:
        raise DangerousRequest("RawGetKeyTTL would crash a store without TTL")


def check_backup(request: brpb_pb2.BackupRequest, regions: Sequence[Region] = ()) -> None:
    """Raise `DangerousRequest` for a Backup of no range (start equal to end), which aborts a store.

    One of transactions needs the regions that PD has just returned for its range: for their bounds see `check_bounds`.
    """
    ranges = [KeyRange(request.start_key, request.end_key)]
    ranges += [KeyRange(sub.start_key, sub.end_key) for sub in request.sub_ranges]
    for span in ranges:
        if span.is_empty:
            raise DangerousRequest(f"a Backup of the empty range {span} would crash the store")
        if not request.is_raw_kv:
            if unknown := gaps(_bounds(span), [KeyRange(region.start, region.end) for region in regions]):
                raise DangerousRequest(
                    f"a Backup of transactions in {span} could crash the store: the regions of {unknown[0]} are unknown"
                )
            check_bounds(span, regions)


def check_bounds(span: KeyRange, regions: Iterable[Region]) -> None:
    """Raise `ClusterUnfit` if a region's bound within a range of transactional rows is not memcomparable.

    A store that backs up transactions decodes the bounds that do not lie outside of the range, and aborts at such a one.
    """
    inside = _bounds(span)
    for region in regions:
        for bound in (region.start, region.end):
            if bound <= inside.start or (inside.end and bound >= inside.end):
                continue
            try:
                decode(bound)
            except DamagedBytes as error:
                raise ClusterUnfit(
                    f"a Backup of transactions in {span} would crash a store: the bound {show_both(bound)} of region "
                    f"{region.id} is not the key of a transactional row: {error}",
                    hint="The cluster also has raw data in this range. Back up ranges that exclude it, such as by --prefix.",
                ) from None


def _bounds(span: KeyRange) -> KeyRange:
    return KeyRange(*(encode(key) if key else b"" for key in (span.start, span.end)))


def check_sst(meta: import_sstpb_pb2.SSTMeta) -> None:
    """Raise `DangerousRequest` for metadata that would crash a store: unknown column family, invalid UUID or range.

    The file itself is checked where it is read (`tikv_br.formats.sst`): a store dies of a wrong one at ingest.
    """
    if meta.cf_name not in SST_CFS:
        raise DangerousRequest(f"an SST for column family {meta.cf_name!r} would crash the store")
    if len(meta.uuid) != len(uuid.NAMESPACE_DNS.bytes):
        raise DangerousRequest(f"an SST needs a UUID of 16 bytes, not {len(meta.uuid)}")
    if meta.range.end and meta.range.start > meta.range.end:
        raise DangerousRequest(
            f"an SST with the reversed range {show_key(meta.range.start)} to {show_key(meta.range.end)}"
        )
    if not meta.region_id or not meta.HasField("region_epoch"):
        raise DangerousRequest("an SST without its region and epoch could land in another region")


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
            yield from _received(self._answers, self._outage, self._probe, self._to_error)
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
