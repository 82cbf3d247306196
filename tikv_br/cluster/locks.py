"""Locks that transactions left: finds them, and resolves them as every reader does.

All locks of a transaction name its primary key, whose lock or record decides: committed, rolled back, or alive as long as its TTL has
not ended by PD's clock. With async commit the primary lock lists the other keys, and the transaction is committed once all of them
are locked. A transaction that is alive is left alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tikv_br import cancellation
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.region_errors import RegionErrorSeen, check_error_text, check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.scan import RangeWalk
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.timestamps import MAX_TS, physical_ms, show_ts
from tikv_br.errors import RequestRefused
from tikv_br.formats.keys.codec import KeyCodec, KeyMode
from tikv_br.formats.keys.text import show_key

PAGE_LOCKS = 1024
LITE_LOCKS = 16
"""Locks of a transaction up to which a request names their keys; for more, the store looks for them in the whole region."""
BATCH_KEYS = 512
"""Keys of one request."""
CACHED_FATES = 100_000
POLL_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LiveLock:
    """A lock of a transaction that is alive."""

    key: bytes
    start_ts: int
    ttl_ms: int

    def __str__(self) -> str:
        began = show_ts(self.start_ts)
        return f"the lock at key {show_key(self.key)} of the transaction that began at {began}, with a TTL of {self.ttl_ms / 1000:g} s"


@dataclass(frozen=True, slots=True)
class LockReport:
    """Result of resolving the locks of a range."""

    resolved: int
    """Number of locks that were committed or removed."""
    live: tuple[LiveLock, ...]
    """One lock of each transaction that is still alive, the oldest transaction first."""
    pushed: frozenset[int]
    """Start ts of those of them that can no longer commit at or below the reader's timestamp; not of async commits."""


class LockResolver:
    """Resolves locks of one cluster. For one thread.

    Raises as `Router.call`, and `RequestRefused` for what the protocol of transactions does not allow.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        sleep: Callable[[float], object] = cancellation.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sleep` is called before each page, too, with 0: what it raises ends the work."""
        self._router = cluster.router
        self._codec = KeyCodec(cluster.api_version, mode=KeyMode.TXN)
        self._cluster_id = cluster.cluster_id
        self._tso = cluster.pd.tso
        self._sleep, self._clock = sleep, clock
        self._fates: dict[int, int] = {}
        """Commit ts by start ts of transactions that have ended; 0 = rolled back."""
        self._pushed: set[int] = set()
        self._resolved = 0

    def resolve(
        self, start: bytes, end: bytes, max_ts: int, *, reader_ts: int = 0, patience: float = 0.0
    ) -> LockReport:
        """Resolve the locks with a start ts up to `max_ts` in an RPC range; waits up to `patience` seconds for live transactions to end.

        Live transactions are pushed: made to commit above `reader_ts`. 0 = they are not.
        """
        self._resolved = 0
        self._pushed.clear()
        live: dict[int, LiveLock] = {}
        parts = self._pass([(start, end)], max_ts, reader_ts, live)
        until = self._clock() + patience
        while parts and (left := until - self._clock()) > 0:
            self._sleep(min(POLL_SECONDS, left))
            live = {each: lock for each, lock in live.items() if each in self._pushed}
            parts = self._pass(parts, max_ts, reader_ts, live)
        oldest = tuple(live[each] for each in sorted(live))
        return LockReport(self._resolved, oldest, frozenset(self._pushed & live.keys()))

    def _pass(
        self, parts: Sequence[tuple[bytes, bytes]], max_ts: int, reader_ts: int, live: dict[int, LiveLock]
    ) -> list[tuple[bytes, bytes]]:
        """Resolve the locks of some ranges; returns the parts of them where locks are in the way, and adds these to `live`."""
        left: list[tuple[bytes, bytes]] = []
        for start, end in parts:
            walk = RangeWalk(self._router, self._codec, self._cluster_id, start, end)
            while not walk.done:
                self._sleep(0)
                begin = walk.cursor
                locks, reached = walk.send_part(partial(_scan, max_ts), "KvScanLock")
                if len(locks) >= PAGE_LOCKS:
                    reached = locks[-1].key + b"\0"
                found = self._resolve_page(locks, reader_ts)
                live |= {lock.start_ts: lock for lock in reversed(found)}
                if any(lock.start_ts not in self._pushed for lock in found):
                    if left and left[-1][1] == begin:
                        begin = left.pop()[0]
                    left.append((begin, reached))
                walk.advance(reached)
        return left

    def _resolve_page(self, page: Sequence[kv.LockInfo], reader_ts: int) -> list[LiveLock]:
        """Resolve locks; returns one of each transaction that is alive."""
        live = []
        for _, group in itertools.groupby(sorted(page, key=_owner), key=_owner):
            locks = list(group)
            first = locks[0]
            commit_ts = self._fate(first, reader_ts)
            if commit_ts is None:
                live.append(LiveLock(first.key, first.lock_version, first.lock_ttl))
                continue
            if first.lock_type == kv.PessimisticLock:
                self._roll_back_pessimistic(locks)
            else:
                self._end(first.lock_version, commit_ts, [lock.key for lock in locks])
            self._resolved += len(locks)
        return live

    def _fate(self, lock: kv.LockInfo, reader_ts: int) -> int | None:
        """The commit ts of a lock's transaction; 0 if it is rolled back, None if it is alive."""
        if lock.lock_version in self._fates:
            return self._fates[lock.lock_version]
        is_pessimistic = lock.lock_type == kv.PessimisticLock
        now = self._tso()  # a ts above PD's would roll back live transactions
        request = kv.CheckTxnStatusRequest(
            primary_key=lock.primary_lock,
            lock_ts=lock.lock_version,
            caller_start_ts=reader_ts,
            current_ts=now,
            # A transaction may have locked other keys before its primary.
            rollback_if_not_exist=_has_expired(lock.lock_version, lock.lock_ttl, now),
            resolving_pessimistic_lock=is_pessimistic,
            verify_is_primary=True,
        )
        status = self._status(request)
        if status.error.HasField("txn_not_found"):
            return None
        if status.error.HasField("primary_mismatch") and is_pessimistic:
            # The lock of an attempt that the transaction has given up: nothing depends on it.
            return 0 if request.rollback_if_not_exist else None
        _check(status.error, "CheckTxnStatus")
        if status.lock_info.use_async_commit:
            if not _has_expired(lock.lock_version, status.lock_ttl, now):
                return None
            commit_ts = self._async_fate(status.lock_info)
            if commit_ts is None:  # not all of its locks are those of async commit: its primary alone decides
                request.force_sync_commit = True
                status = self._status(request)
                _check(status.error, "CheckTxnStatus")
            else:
                return self._remember(lock.lock_version, commit_ts)
        if status.lock_ttl:
            if status.action == kv.MinCommitTSPushed:
                self._pushed.add(lock.lock_version)
            return None
        if status.action in {kv.TTLExpirePessimisticRollback, kv.LockNotExistDoNothing}:
            return 0  # of this pessimistic lock; other locks of the transaction are asked for by themselves
        return self._remember(lock.lock_version, status.commit_version)

    def _remember(self, start_ts: int, commit_ts: int) -> int:
        if len(self._fates) >= CACHED_FATES:
            self._fates.clear()
        self._fates[start_ts] = commit_ts
        return commit_ts

    def _status(self, request: kv.CheckTxnStatusRequest) -> kv.CheckTxnStatusResponse:
        def send(region: Region, store: StoreClient) -> kv.CheckTxnStatusResponse:
            request.context.CopyFrom(self._context(region))
            answer = store.call(store.kv.KvCheckTxnStatus, request)
            check_region_error(answer)
            return answer

        return self._router.call(self._codec.bound(request.primary_key), send, "KvCheckTxnStatus", retry_unknown=True)

    def _async_fate(self, primary: kv.LockInfo) -> int | None:
        """The commit ts of an async commit whose TTL has ended; 0 if it is rolled back, None if it turned into a two-phase commit.

        A key without lock and record is rolled back by the request, so that it cannot be locked any more.
        """
        commit_ts = primary.min_commit_ts
        keys = sorted(primary.secondaries)
        is_async = True

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> kv.CheckSecondaryLocksResponse:
            request = kv.CheckSecondaryLocksRequest(
                context=self._context(region), keys=inside, start_version=primary.lock_version
            )
            answer = store.call(store.kv.KvCheckSecondaryLocks, request)
            check_region_error(answer)
            _check(answer.error, "CheckSecondaryLocks")
            return answer

        while keys:
            done, answer = self._on_first(keys, send, "KvCheckSecondaryLocks")
            keys = keys[done:]
            if len(answer.locks) < done:
                return answer.commit_ts
            is_async &= all(lock.use_async_commit for lock in answer.locks)
            commit_ts = max(commit_ts, *(lock.min_commit_ts for lock in answer.locks))
        return commit_ts if is_async else None

    def _end(self, start_ts: int, commit_ts: int, keys: Sequence[bytes]) -> None:
        """Commit, or with 0 roll back, the locks of a transaction at ascending keys."""

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> None:
            request = kv.ResolveLockRequest(
                context=self._context(region),
                start_version=start_ts,
                commit_version=commit_ts,
                keys=inside if len(inside) <= LITE_LOCKS else (),
            )
            answer = store.call(store.kv.KvResolveLock, request)
            check_region_error(answer)
            _check(answer.error, "ResolveLock")

        while keys:
            keys = keys[self._on_first(keys, send, "KvResolveLock")[0] :]

    def _roll_back_pessimistic(self, locks: Sequence[kv.LockInfo]) -> None:
        """Remove pessimistic locks of a transaction, which leave nothing behind."""
        keys = [lock.key for lock in locks]

        def send(region: Region, store: StoreClient, inside: Sequence[bytes]) -> None:
            request = kv.PessimisticRollbackRequest(
                context=self._context(region),
                start_version=locks[0].lock_version,
                for_update_ts=max(lock.lock_for_update_ts for lock in locks) or MAX_TS,
                keys=inside,
            )
            answer = store.call(store.kv.KVPessimisticRollback, request)
            check_region_error(answer)
            for error in answer.errors:
                _check(error, "PessimisticRollback")

        while keys:
            keys = keys[self._on_first(keys, send, "KVPessimisticRollback")[0] :]

    def _on_first(
        self, keys: Sequence[bytes], send: Callable[[Region, StoreClient, Sequence[bytes]], T], what: str
    ) -> tuple[int, T]:
        """Send for those of ascending keys that are in the region of the first one; returns how many, and the answer."""

        def send_inside(region: Region, store: StoreClient) -> tuple[int, T]:
            is_inside = (region.contains(self._codec.bound(key)) for key in keys[:BATCH_KEYS])
            inside = keys[: sum(itertools.takewhile(bool, is_inside))]
            return len(inside), send(region, store, inside)

        return self._router.call(self._codec.bound(keys[0]), send_inside, what, retry_unknown=True)

    def _context(self, region: Region) -> kv.Context:
        return region.context(self._codec.api_version, self._cluster_id)


def _scan(max_ts: int, store: StoreClient, context: kv.Context, start: bytes, end: bytes) -> Sequence[kv.LockInfo]:
    request = kv.ScanLockRequest(context=context, max_version=max_ts, start_key=start, end_key=end, limit=PAGE_LOCKS)
    answer = store.call(store.kv.KvScanLock, request)
    check_region_error(answer)
    if answer.error.HasField("locked"):
        # In the store's memory: an async commit or 1PC that is being written at this moment.
        not_ready = errorpb_pb2.ReadIndexNotReady()
        raise RegionErrorSeen(
            errorpb_pb2.Error(message="a transaction is being written", read_index_not_ready=not_ready)
        )
    _check(answer.error, "ScanLock")
    return answer.locks


def _owner(lock: kv.LockInfo) -> tuple[int, bool, bytes]:
    """Locks for which this is equal end in the same way."""
    return lock.lock_version, lock.lock_type == kv.PessimisticLock, lock.primary_lock


def _has_expired(start_ts: int, ttl_ms: int, now: int) -> bool:
    return physical_ms(start_ts) + ttl_ms < physical_ms(now)


def _check(error: kv.KeyError, what: str) -> None:
    """Raise what an error of a response means, if there is one."""
    check_error_text(error.abort or error.retryable)
    if kinds := [field.name for field, _ in error.ListFields()]:
        raise RequestRefused(f"{what}: a store answered {', '.join(kinds)}")
