"""Locks that transactions left: finds them, and resolves them as every reader does.

All locks of a transaction name its primary key, whose lock or record decides: committed, rolled back, or alive as long as its TTL has
not ended by PD's clock. With async commit the primary lock lists the other keys, and the transaction is committed once all of them
are locked. A transaction that is alive is left alone, or made to commit above the timestamp of a reader.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tikv_br import cancellation
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.cluster.timestamps import physical_ms, seconds_between, show_ts
from tikv_br.cluster.txn_calls import TxnCalls, check_key_error
from tikv_br.errors import LocksRemain
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_key

PAGE_LOCKS = 1024
CACHED_FATES = 100_000
POLL_SECONDS = 1.0
READER_PATIENCE = 60.0
"""Seconds that a reader waits for live transactions whose locks are in its way."""
SHOWN_LOCKS = 3
"""Locks that an error names."""


class LiveLock(Struct, frozen=True):
    """A lock of a transaction that is alive."""

    key: bytes
    start_ts: int
    ttl_ms: int
    age: float
    """Seconds since the transaction began, by PD's clock."""

    def __str__(self) -> str:
        began = f"{show_ts(self.start_ts, age=False)}, {self.age:.0f} s ago"
        return f"the lock at key {show_key(self.key)} of the transaction that began at {began}, with a TTL of {self.ttl_ms / 1000:g} s"


class LockReport(Struct, frozen=True):
    """Result of resolving the locks of a range."""

    resolved: int
    """Number of locks that were committed or removed."""
    live: tuple[LiveLock, ...]
    """One lock of each transaction that is still alive and in the way, the oldest transaction first."""
    pushed: frozenset[int]
    """Start ts of transactions in `live` that a reader need not wait for: they can only commit above its timestamp. Never of async commits."""


class SnapshotLocks:
    """The locks in the way of a reader at one timestamp. For one thread."""

    def __init__(
        self, cluster: Cluster, ts: int, resolved: Iterable[int] = (), *, patience: float = READER_PATIENCE
    ) -> None:
        """`ts` must not be above PD's time. `patience` is how many seconds live transactions are waited for."""
        self.ts = ts
        self.resolved = set(resolved)
        """Start ts of transactions that commit above `ts`: stores ignore their locks in requests with ``context.resolved_locks``."""
        self._resolver = LockResolver(cluster)
        self._patience = patience

    def clear(self, span: KeyRange) -> int:
        """Resolve the locks in the way in an RPC range, and add to `resolved`; returns the number of locks that it has ended.

        Raises `LocksRemain` if live transactions have not ended in time, and as `LockResolver`.
        """
        report = self._resolver.resolve(span, self.ts, reader_ts=self.ts, patience=self._patience)
        self.resolved |= report.pushed
        if blocking := [lock for lock in report.live if lock.start_ts not in report.pushed]:
            shown = "; ".join(map(str, blocking[:SHOWN_LOCKS]))
            more = f"; and {len(blocking) - SHOWN_LOCKS} more" if len(blocking) > SHOWN_LOCKS else ""
            raise LocksRemain(
                f"after {self._patience:g} s live transactions still hold locks below {show_ts(self.ts, age=False)}: {shown}{more}"
            )
        return report.resolved


class LockResolver:
    """Resolves locks of one cluster. For one thread. Raises as `TxnCalls`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        sleep: Callable[[float], object] = cancellation.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sleep` is called before each page, too, with 0: what it raises ends the work."""
        self._calls = TxnCalls(cluster)
        self._tso = cluster.pd.tso
        self._sleep, self._clock = sleep, clock
        self._now = 0
        self._fates: dict[int, int] = {}
        """Commit ts by start ts of transactions that have ended; 0 = rolled back."""
        self._pushed: set[int] = set()
        self._resolved = 0
        self._ttl_ms = 0
        """TTL of the transaction that `_fate` has found alive: the TTL of its primary lock, which its client keeps alive."""

    def resolve(self, span: KeyRange, max_ts: int, *, reader_ts: int = 0, patience: float = 0.0) -> LockReport:
        """Resolve the locks with a start ts up to `max_ts` in an RPC range; waits up to `patience` seconds for live transactions to end.

        With a `reader_ts` only the locks that block a reader at that timestamp count, and live transactions are pushed: made to
        commit above it.
        """
        self._resolved = 0
        self._pushed.clear()
        live: dict[int, LiveLock] = {}
        parts = self._pass([span], max_ts, reader_ts, live)
        until = self._clock() + patience
        while parts and (left := until - self._clock()) > 0:
            self._sleep(min(POLL_SECONDS, left))
            live = {
                each: lock for each, lock in live.items() if each in self._pushed
            }  # the others are looked for again
            parts = self._pass(parts, max_ts, reader_ts, live)
        oldest = tuple(live[each] for each in sorted(live))
        return LockReport(self._resolved, oldest, frozenset(self._pushed & live.keys()))

    def _pass(
        self, parts: Sequence[KeyRange], max_ts: int, reader_ts: int, live: dict[int, LiveLock]
    ) -> list[KeyRange]:
        """Resolve the locks of some ranges; returns the parts of them where locks are in the way, and adds these to `live`."""
        left: list[KeyRange] = []
        for part in parts:
            walk = self._calls.walk(part)
            while not walk.done:
                self._sleep(0)
                begin = walk.cursor
                locks, reached = self._calls.scan_locks(walk, max_ts, PAGE_LOCKS)
                found = self._resolve_page([lock for lock in locks if _blocks(lock, reader_ts)], reader_ts)
                live |= {lock.start_ts: lock for lock in reversed(found)}
                if any(lock.start_ts not in self._pushed for lock in found):
                    if left and left[-1].end == begin:  # one part with the page before
                        begin = left.pop().start
                    left.append(KeyRange(begin, reached))
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
                age = seconds_between(first.lock_version, self._now)
                live.append(LiveLock(first.key, first.lock_version, self._ttl_ms, age))
                continue
            if first.lock_type == kv.PessimisticLock:
                self._calls.roll_back_pessimistic(locks)
            else:
                self._calls.resolve(first.lock_version, commit_ts, [lock.key for lock in locks])
            self._resolved += len(locks)
        return live

    def _fate(self, lock: kv.LockInfo, reader_ts: int) -> int | None:
        """The commit ts of a lock's transaction; 0 if it is rolled back, None if it is alive."""
        if lock.lock_version in self._fates:
            return self._fates[lock.lock_version]
        is_pessimistic, self._ttl_ms = lock.lock_type == kv.PessimisticLock, lock.lock_ttl
        self._now = now = self._tso()  # a ts above PD's would roll back live transactions
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
        status = self._calls.check_status(request)
        if status.error.HasField("txn_not_found"):
            return None
        if status.error.HasField("primary_mismatch") and is_pessimistic:
            # The lock of an attempt that the transaction has given up: nothing depends on it.
            return 0 if request.rollback_if_not_exist else None
        check_key_error(status.error, "CheckTxnStatus")
        self._ttl_ms = status.lock_ttl or self._ttl_ms
        if status.lock_info.use_async_commit:
            if not _has_expired(lock.lock_version, status.lock_ttl, now):
                return None
            commit_ts = self._async_fate(status.lock_info)
            if commit_ts is not None:
                return self._remember(lock.lock_version, commit_ts)
            # Not all of its locks are for async commit: its primary alone decides.
            request.force_sync_commit = True
            status = self._calls.check_status(request)
            check_key_error(status.error, "CheckTxnStatus")
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

    def _async_fate(self, primary: kv.LockInfo) -> int | None:
        """The commit ts of an async commit whose TTL has ended; 0 if it is rolled back, None if it turned into a two-phase commit."""
        commit_ts = primary.min_commit_ts
        is_async = True
        for asked, answer in self._calls.check_secondaries(primary.lock_version, sorted(primary.secondaries)):
            if len(answer.locks) < asked:
                return answer.commit_ts
            is_async &= all(lock.use_async_commit for lock in answer.locks)
            commit_ts = max(commit_ts, *(lock.min_commit_ts for lock in answer.locks))
        return commit_ts if is_async else None


def _blocks(lock: kv.LockInfo, reader_ts: int) -> bool:
    """Whether a lock is in the way of a reader at a timestamp; of GC (0) all are."""
    if not reader_ts:
        return True
    return lock.lock_type in {kv.Put, kv.Del} and lock.min_commit_ts <= reader_ts


def _owner(lock: kv.LockInfo) -> tuple[int, bool, bytes]:
    """Locks for which this is equal end in the same way."""
    return lock.lock_version, lock.lock_type == kv.PessimisticLock, lock.primary_lock


def _has_expired(start_ts: int, ttl_ms: int, now: int) -> bool:
    return physical_ms(start_ts) + ttl_ms < physical_ms(now)
