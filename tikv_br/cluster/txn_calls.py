"""Requests about locks and the transactions that they belong to, sent to the regions of their keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.region_errors import RegionErrorSeen, check_error_text, check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.scan import RangeWalk
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import MAX_TS
from tikv_br.errors import RequestRefused
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.ranges import KeyRange

LITE_LOCKS = 16
"""Locks of a transaction up to which a request names their keys; for more, the store looks for them in the whole region."""
BATCH_KEYS = 512
"""Keys of one request."""

T = TypeVar("T")
Request = TypeVar("Request")
Response = TypeVar("Response")


class TxnCalls:
    """Requests to one cluster. Keys are RPC keys, and ascending; transactions are named by their start ts.

    Raises as `Router.call`, and `RequestRefused` for what the protocol of transactions does not allow.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._router = cluster.router
        self._codec = KeyCodec(cluster.api_version, mode=KeyMode.TXN)
        self._cluster_id = cluster.cluster_id

    def walk(self, span: KeyRange) -> RangeWalk:
        """A cursor over a range, region by region."""
        return RangeWalk(self._router, self._codec, self._cluster_id, span.start, span.end)

    def scan_locks(self, walk: RangeWalk, max_ts: int, limit: int) -> tuple[Sequence[kv.LockInfo], bytes]:
        """The first locks up to a start ts in the walk's first region; how far they are all."""

        def send(store: StoreClient, context: kv.Context, start: bytes, end: bytes) -> Sequence[kv.LockInfo]:
            request = kv.ScanLockRequest(context=context, max_version=max_ts, start_key=start, end_key=end, limit=limit)
            answer = _send(store, store.kv.KvScanLock, request)
            check_region_error(answer)
            if answer.error.HasField("locked"):
                # In the store's memory: an async commit or 1PC that is being written at this moment.
                not_ready = errorpb_pb2.ReadIndexNotReady()
                raise RegionErrorSeen(
                    errorpb_pb2.Error(message="a transaction is being written", read_index_not_ready=not_ready)
                )
            check_key_error(answer.error, "ScanLock")
            return answer.locks

        locks, reached = walk.send_part(send, "KvScanLock")
        return locks, locks[-1].key + b"\0" if len(locks) >= limit else reached

    def check_status(self, request: kv.CheckTxnStatusRequest) -> kv.CheckTxnStatusResponse:
        """The status of a transaction according to its primary key. Its error is not checked."""

        def send(region: Region, store: StoreClient) -> kv.CheckTxnStatusResponse:
            request.context.CopyFrom(self._context(region))
            answer = _send(store, store.kv.KvCheckTxnStatus, request)
            check_region_error(answer)
            return answer

        return self._router.call(self._codec.bound(request.primary_key), send, "KvCheckTxnStatus", retry_unknown=True)

    def check_secondaries(
        self, start_ts: int, keys: Sequence[bytes]
    ) -> Iterator[tuple[int, kv.CheckSecondaryLocksResponse]]:
        """The locks of keys of an async commit, with the number of keys of each answer. A key without lock and record is rolled back."""

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> kv.CheckSecondaryLocksResponse:
            request = kv.CheckSecondaryLocksRequest(context=self._context(region), keys=inside, start_version=start_ts)
            answer = _send(store, store.kv.KvCheckSecondaryLocks, request)
            check_region_error(answer)
            check_key_error(answer.error, "CheckSecondaryLocks")
            return answer

        return self._by_region(keys, send, "KvCheckSecondaryLocks")

    def resolve(self, start_ts: int, commit_ts: int, keys: Sequence[bytes]) -> None:
        """Commit, or with 0 roll back, the locks of a transaction."""

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> None:
            request = kv.ResolveLockRequest(
                context=self._context(region),
                start_version=start_ts,
                commit_version=commit_ts,
                keys=inside if len(inside) <= LITE_LOCKS else (),
            )
            answer = _send(store, store.kv.KvResolveLock, request)
            check_region_error(answer)
            check_key_error(answer.error, "ResolveLock")

        for _ in self._by_region(keys, send, "KvResolveLock"):
            pass

    def batch_get(self, keys: Sequence[bytes], ts: int, resolved: Sequence[int] = ()) -> dict[bytes, bytes]:
        """The values that a reader at ``ts`` finds of these keys; ``resolved`` as of `SnapshotLocks`."""
        found: dict[bytes, bytes] = {}

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> None:
            request = kv.BatchGetRequest(context=self._context(region), keys=inside, version=ts)
            request.context.resolved_locks.extend(resolved)
            answer = _send(store, store.kv.KvBatchGet, request)
            check_region_error(answer)
            for error in (answer.error, *(pair.error for pair in answer.pairs)):
                check_key_error(error, "BatchGet")
            found.update((pair.key, pair.value) for pair in answer.pairs)

        for _ in self._by_region(keys, send, "KvBatchGet"):
            pass
        return found

    def roll_back_pessimistic(self, locks: Sequence[kv.LockInfo]) -> None:
        """Remove pessimistic locks of one transaction, which leave nothing behind."""

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> None:
            request = kv.PessimisticRollbackRequest(
                context=self._context(region),
                start_version=locks[0].lock_version,
                for_update_ts=max(lock.lock_for_update_ts for lock in locks) or MAX_TS,
                keys=inside,
            )
            answer = _send(store, store.kv.KVPessimisticRollback, request)
            check_region_error(answer)
            for error in answer.errors:
                check_key_error(error, "PessimisticRollback")

        for _ in self._by_region([lock.key for lock in locks], send, "KVPessimisticRollback"):
            pass

    def _by_region(
        self, keys: Sequence[bytes], send: Callable[[Region, StoreClient, Sequence[bytes]], T], what: str
    ) -> Iterator[tuple[int, T]]:
        """Send for the keys of one region after the other; yields how many, and the answer."""

        def send_first(region: Region, store: StoreClient) -> tuple[int, T]:
            is_inside = (region.contains(self._codec.bound(key)) for key in keys[:BATCH_KEYS])
            inside = keys[: sum(itertools.takewhile(bool, is_inside))]
            return len(inside), send(region, store, inside)

        while keys:
            answer = self._router.call(self._codec.bound(keys[0]), send_first, what, retry_unknown=True)
            keys = keys[answer[0] :]
            yield answer

    def _context(self, region: Region) -> kv.Context:
        return region.context(self._codec.api_version, self._cluster_id)


def _send(store: StoreClient, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request) -> Response:
    """Send a request that is cancelled with the work."""
    return store.call(method, request, timeout=store.request_timeout)


def check_key_error(error: kv.KeyError, what: str) -> None:
    """Raise what an error of a response means, if there is one."""
    check_error_text(error.abort or error.retryable)
    if kinds := [field.name for field, _ in error.ListFields()]:
        raise RequestRefused(f"{what}: a store answered {', '.join(kinds)}")
