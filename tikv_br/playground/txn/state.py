"""What the transactions of all stores share, and why a command is refused.

What all commands of transactions share: the checks before them, and how they write.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.formats.mvcc import WriteRecord
from tikv_br.playground.encoding import DeadlyData, memcomparable
from tikv_br.playground.engine import Change
from tikv_br.playground.node import StoreNode
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import TXN_MODE, RegionFault, RequestChecks, RequestFault, check_within
from tikv_br.playground.settings import ServerVersion
from tikv_br.playground.timestamps import LOGICAL_BITS, Tso
from tikv_br.playground.txn.mvcc import LockRecord, MvccReader

_MAX_AHEAD = 60_000 << LOGICAL_BITS
"""``storage.max-ts.max-drift``: how far a reader's ts may be above PD's before a store of 9.0 ends itself."""


class KeyFault(RequestFault):
    """A command that is refused because of a key."""

    def __init__(self, error: kv.KeyError) -> None:
        super().__init__(str(error), str(error))
        self.error = error


def locked(lock: LockRecord) -> KeyFault:
    """Another transaction's lock is in the way."""
    return KeyFault(kv.KeyError(locked=lock.info))


def mvcc_fault(name: str, **fields: object) -> KeyFault:
    """An error that TiKV shows in its debug form; clients take only a missing lock for temporary."""
    inner = ", ".join(f"{field}: {value}" for field, value in fields.items())
    text = f"Error(Txn(Error(Mvcc(Error({name} {{ {inner} }})))))"
    return KeyFault(kv.KeyError(retryable=text) if name == "TxnLockNotFound" else kv.KeyError(abort=text))


def conflict(
    start_ts: int,
    key: bytes,
    primary: bytes,
    version: tuple[int, WriteRecord],
    reason: kv.WriteConflict.Reason.ValueType,
) -> KeyFault:
    """A newer version, or a rollback, is in the way."""
    return KeyFault(
        kv.KeyError(
            conflict=kv.WriteConflict(
                start_ts=start_ts,
                conflict_ts=version[1].start_ts,
                key=key,
                primary=primary,
                conflict_commit_ts=version[0],
                reason=reason,
            )
        )
    )


class FutureTs(RegionFault):
    """A reader's timestamp is above PD's, which is ``limit``."""

    def __init__(self, ts: int, limit: int) -> None:
        super().__init__(errorpb_pb2.Error(message=f"invalid max_ts update: {ts}, limit: {limit}"))
        self.ts, self.limit = ts, limit


class TxnState:
    """State of all transactions. ``latch`` is held by every write command, from its first read to its last write."""

    def __init__(self, tso: Tso, release: ServerVersion) -> None:
        self.latch = threading.Condition()
        self._tso = tso
        self._release = release
        self._latest = self.max_ts = tso.next()
        """``max_ts``: largest timestamp of any reader. Commits that choose their own timestamp come above it."""
        self.waiting: list[tuple[int, LockRecord]] = []
        """Start ts of transactions that wait, and the lock that each waits for."""

    def observe(self, *timestamps: int) -> None:
        """Note timestamps of a reader, before it reads.

        For one above PD's, raises `FutureTs` (8.5.7), or `DeadlyData` if the store would end itself.
        """
        ts = max((ts for ts in timestamps if ts != MAX_TS), default=0)
        with self.latch:
            if ts > self._latest:
                self._latest = self._tso.next()
                self._check_ahead(ts)
            self.max_ts = max(self.max_ts, ts)

    def _check_ahead(self, ts: int) -> None:
        if self._release.refuses_future_ts and ts > self._latest:
            raise FutureTs(ts, self._latest)
        if self._release.ends_on_future_ts and ts > self._latest + _MAX_AHEAD:
            raise DeadlyData(f"invalid max_ts update: {ts}, PD's is {self._latest}")

    def wait(self, start_ts: int, lock: LockRecord, seconds: float) -> None:
        """Wait, with the latch, until any lock is removed, or for so long. Raises `KeyFault` for a deadlock."""
        self._check_deadlock(start_ts, lock)
        wait = start_ts, lock
        self.waiting.append(wait)
        try:
            self.latch.wait(seconds)
        finally:
            self.waiting.remove(wait)

    def _check_deadlock(self, start_ts: int, lock: LockRecord) -> None:
        chain = self._chain(lock.ts, start_ts, set())
        if chain is not None:
            entries = [
                kv.WaitForEntry(txn=waiter, wait_for_txn=wanted.ts, key=wanted.info.key)
                for waiter, wanted in [(start_ts, lock), *chain]
            ]
            deadlock = kv.Deadlock(lock_ts=lock.ts, lock_key=lock.info.key, wait_chain=entries)
            raise KeyFault(kv.KeyError(deadlock=deadlock))

    def _chain(self, waiter: int, goal: int, seen: set[int]) -> list[tuple[int, LockRecord]] | None:
        """The waits that lead from a transaction to another; None if none do."""
        seen.add(waiter)
        for wait in [wait for wait in self.waiting if wait[0] == waiter]:
            if wait[1].ts == goal:
                return [wait]
            if wait[1].ts not in seen and (rest := self._chain(wait[1].ts, goal, seen)) is not None:
                return [wait, *rest]
        return None


class TxnCommands:
    """Commands of one store. Each raises `RequestFault` or `RegionFault` if it is refused."""

    def __init__(self, node: StoreNode, checks: RequestChecks, state: TxnState) -> None:
        self._node = node
        self._checks = checks
        self._state = state
        self._reader = MvccReader(node.engine)

    def _region_of_keys(self, context: kv.Context, command: str, keys: Sequence[bytes]) -> Region:
        """Check a request for keys, which must be in its region."""
        self._checks.keys(context, command, keys, TXN_MODE)
        region = self._checks.region(context, read=True)
        check_within(region, map(memcomparable, keys))
        return region

    def _region_of_range(self, context: kv.Context, command: str, start: bytes, end: bytes) -> Region:
        """Check a request for a range, of which a region answers its part; stores check the mode of the encoded bounds."""
        self._checks.ranges(context, command, [(memcomparable(start), memcomparable(end) if end else None)], TXN_MODE)
        return self._checks.region(context, read=True)

    @contextmanager
    def _writing(self, region: Region) -> Iterator[list[Change]]:
        """Hold the latch; at the end, unless the block raises, apply the changes that it has added to the list."""
        changes: list[Change] = []
        with self._state.latch:
            yield changes
            if changes:
                self._node.engine.apply(changes)
                self._state.latch.notify_all()
        self._node.sizes.written(region.id, sum(len(key) + len(value or b"") for _, key, value in changes))
