"""Records of transactions as TiKV stores them, and how a reader finds its version among them.

A key has at most one lock; a record of each commit and rollback in the column family ``write``, newest first; and its values of
more than 255 bytes in ``default``, by the start ts of their transactions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from msgspec.structs import replace

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import DATA_PREFIX, MAX_TS
from tikv_br.formats.mvcc import DELETE, LOCK_ONLY, PUT, ROLLBACK, WriteRecord
from tikv_br.playground.encoding import DeadlyData, data_range, from_memcomparable, memcomparable
from tikv_br.playground.engine import LOCK, WRITE, Change, RocksEngine

_KINDS: Final = {kv.Put: PUT, kv.Del: DELETE, kv.Lock: LOCK_ONLY, kv.PessimisticLock: LOCK_ONLY}
_OLDEST: Final = b"\xff" * 8
_NOTHING: Final = WriteRecord(DELETE, 0)


def lock_key(key: bytes) -> bytes:
    """The data key of a lock."""
    return DATA_PREFIX + memcomparable(key)


def versioned_key(key: bytes, ts: int) -> bytes:
    """The data key of a commit record (by commit ts), or of a value (by start ts)."""
    return lock_key(key) + (MAX_TS - ts).to_bytes(8, "big")


def user_key(data_key: bytes) -> bytes:
    """The key of a lock, commit record or value. Raises `DeadlyData` for a key that transactions do not write."""
    key = from_memcomparable(data_key[1:])
    if key is None:
        raise DeadlyData(f"stored key {data_key.hex()} is not memcomparable")
    return key


@dataclass(frozen=True, slots=True)
class LockRecord:
    """A lock, as responses show it, with the value that its commit will write if that is short."""

    info: kv.LockInfo
    value: bytes | None = None

    @property
    def ts(self) -> int:
        """Start ts of the transaction."""
        return self.info.lock_version

    @property
    def is_pessimistic(self) -> bool:
        return self.info.lock_type == kv.PessimisticLock

    def is_expired(self, now: int) -> bool:
        """Return whether its TTL has ended at a timestamp."""
        return (self.ts >> 18) + self.info.lock_ttl < now >> 18

    def committed(self) -> WriteRecord:
        """The record that its commit writes."""
        return WriteRecord(_KINDS[self.info.lock_type], self.ts, self.value)

    def to_change(self) -> Change:
        info = self.info.SerializeToString()
        value = b"" if self.value is None else b"v" + self.value
        return LOCK, lock_key(self.info.key), len(info).to_bytes(4, "big") + info + value

    @classmethod
    def decode(cls, stored: bytes) -> LockRecord:
        end = 4 + int.from_bytes(stored[:4], "big")
        return cls(kv.LockInfo.FromString(stored[4:end]), stored[end + 1 :] if stored[end:] else None)


def decode_record(stored: bytes) -> WriteRecord:
    """A record of ``write``. Raises `DeadlyData`."""
    try:
        return WriteRecord.decode(stored)
    except DamagedBytes as error:
        raise DeadlyData(f"stored {error}") from None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a transaction at one key: ``commit_ts`` of its commit, 0 if it is rolled back or, not ``known``, neither."""

    known: bool
    commit_ts: int = 0
    overlapped: WriteRecord | None = None
    """Another transaction's record at the start ts of this one, where its rollback must go."""
    fence: int = 0
    """GC fence for a rollback there."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A reader's timestamp, and the transactions whose locks it ignores or reads as committed."""

    ts: int
    ignored: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()
    checks_locks: bool = True

    @classmethod
    def of(cls, context: kv.Context, ts: int) -> Snapshot:
        """The snapshot of a request."""
        checks_locks = context.isolation_level == kv.SI
        return cls(ts, frozenset(context.resolved_locks), frozenset(context.committed_locks), checks_locks)

    def blocked_by(self, lock: LockRecord) -> bool:
        """Return whether a lock may be committed at or below the timestamp."""
        return (
            self.checks_locks
            and lock.info.lock_type in {kv.Put, kv.Del}
            and lock.ts <= self.ts
            and lock.info.min_commit_ts <= self.ts
            and lock.ts not in self.ignored
        )


@dataclass(frozen=True, slots=True)
class VisibleRow:
    """What a reader finds at a key: the newest put or delete and its commit ts, or a lock that blocks it."""

    data_key: bytes
    """If a lock is found, without a timestamp."""
    lock: LockRecord | None
    commit_ts: int = 0
    record: WriteRecord = _NOTHING

    @property
    def key(self) -> bytes:
        return user_key(self.data_key)

    @property
    def record_key(self) -> bytes:
        """The data key of the record."""
        return self.data_key + (MAX_TS - self.commit_ts).to_bytes(8, "big")

    @property
    def value_key(self) -> bytes:
        """The data key of a long value."""
        return self.data_key + (MAX_TS - self.record.start_ts).to_bytes(8, "big")


class DefaultNotFound(Exception):
    """A commit record whose value is missing: an SST of ``write`` was ingested without its SST of ``default``."""


class MvccReader:
    """Reads records. A read of a key takes its lock first, then its commits: a lock in between belongs to a later commit."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine = engine

    def lock(self, key: bytes) -> LockRecord | None:
        stored = self._engine.get(lock_key(key), LOCK)
        return None if stored is None else LockRecord.decode(stored)

    def locks(self, start: bytes, end: bytes) -> Iterator[LockRecord]:
        """The locks between physical bounds, in key order."""
        for _, stored in self._engine.iterate(*data_range(start, end), family=LOCK):
            yield LockRecord.decode(stored)

    def versions(self, key: bytes, ts: int = MAX_TS) -> Iterator[tuple[int, WriteRecord]]:
        """Commit ts and record of each version up to ``ts``, newest first."""
        rows = self._engine.iterate(versioned_key(key, ts), lock_key(key) + _OLDEST, family=WRITE)
        return ((_ts_of(data_key), decode_record(stored)) for data_key, stored in rows)

    def newest(self, key: bytes, ts: int = MAX_TS) -> tuple[int, WriteRecord] | None:
        """Commit ts and record of the newest put or delete up to ``ts``; None if there is none, or it is collected."""
        return _newest(self.versions(key, ts), ts)

    def exists(self, key: bytes) -> bool:
        """Return whether the newest version of a key is a value."""
        found = self.newest(key)
        return found is not None and found[1].kind == PUT

    def outcome(self, key: bytes, start_ts: int) -> Outcome:
        """What became of the transaction that started at ``start_ts``."""
        fence = 0
        for commit_ts, record in self.versions(key):
            if record.start_ts == start_ts:
                return Outcome(known=True, commit_ts=0 if record.kind == ROLLBACK else commit_ts)
            if commit_ts == start_ts:
                return Outcome(known=record.is_rolled_back, overlapped=record, fence=fence)
            if commit_ts < start_ts:
                break
            if record.kind in {PUT, DELETE}:
                fence = commit_ts
        return Outcome(known=False)

    def get(self, key: bytes, snapshot: Snapshot) -> VisibleRow | None:
        """What a reader finds at a key; None if that was never written. Of a delete, the record."""
        lock = self.lock(key)
        if lock is not None and snapshot.blocked_by(lock):
            # Ignored by a read of the newest version of a primary key: its commit ts is still to come.
            is_ignored = snapshot.ts == MAX_TS and key == lock.info.primary_lock and not lock.info.use_async_commit
            if lock.ts in snapshot.committed or not is_ignored:
                return _locked_row(lock, snapshot)
        found = self.newest(key, snapshot.ts)
        return None if found is None else VisibleRow(lock_key(key), None, *found)

    def scan(self, start: bytes, end: bytes, snapshot: Snapshot, *, reverse: bool = False) -> Iterator[VisibleRow]:
        """What a reader finds between physical bounds, in key order, deletes included."""
        bounds = data_range(start, end)
        locks = [lock for lock in self.locks(start, end) if snapshot.blocked_by(lock)]
        if reverse:
            locks.reverse()
        blocked = ((lock_key(lock.info.key), _locked_row(lock, snapshot)) for lock in locks)
        rows = self._engine.iterate(*bounds, reverse=reverse, family=WRITE)
        visible = _visible_rows(rows, snapshot.ts, reverse=reverse)
        last = b""
        for place, row in heapq.merge(blocked, visible, key=itemgetter(0), reverse=reverse):
            if place != last:  # at the same key the lock comes first
                yield row
            last = place

    def value(self, row: VisibleRow) -> bytes:
        """The value of a put. Raises `DefaultNotFound`."""
        if row.record.value is not None:
            return row.record.value
        value = self._engine.get(row.value_key)
        if value is None:
            raise DefaultNotFound(row.key.hex().upper())
        return value


def _locked_row(lock: LockRecord, snapshot: Snapshot) -> VisibleRow:
    place = lock_key(lock.info.key)
    if lock.ts in snapshot.committed:
        return VisibleRow(place, None, 0, lock.committed())
    return VisibleRow(place, lock)


def _visible_rows(rows: Iterable[tuple[bytes, bytes]], ts: int, *, reverse: bool) -> Iterator[tuple[bytes, VisibleRow]]:
    for place, group in itertools.groupby(rows, key=lambda row: row[0][:-8]):
        versions = ((_ts_of(data_key), stored) for data_key, stored in (reversed(list(group)) if reverse else group))
        found = _newest(((each, decode_record(stored)) for each, stored in versions if each <= ts), ts)
        if found is not None:
            yield place, VisibleRow(place, None, *found)


def _newest(versions: Iterable[tuple[int, WriteRecord]], ts: int) -> tuple[int, WriteRecord] | None:
    for commit_ts, record in versions:
        if record.kind in {PUT, DELETE}:
            return None if 0 < (record.fence or 0) <= ts else (commit_ts, record)  # it has ended at its fence
    return None


def _ts_of(data_key: bytes) -> int:
    return MAX_TS - int.from_bytes(data_key[-8:], "big")


def unlock(key: bytes) -> Change:
    """Remove the lock of a key."""
    return LOCK, lock_key(key), None


def put_record(key: bytes, commit_ts: int, record: WriteRecord) -> Change:
    """Write a commit record."""
    return WRITE, versioned_key(key, commit_ts), record.encode()


def commit_changes(reader: MvccReader, lock: LockRecord, commit_ts: int) -> list[Change]:
    """Commit a lock. A rollback of the transaction that started at the commit ts is kept in the same record."""
    key, record = lock.info.key, lock.committed()
    at_the_ts = next(reader.versions(key, commit_ts), None)
    if at_the_ts is not None and at_the_ts[0] == commit_ts and at_the_ts[1].start_ts == commit_ts:
        record = replace(record, is_rolled_back=True, fence=0)
    return [put_record(key, commit_ts, record), unlock(key)]


def rollback_changes(
    reader: MvccReader, key: bytes, start_ts: int, lock: LockRecord | None, *, protected: bool
) -> list[Change]:
    """Roll back a transaction at a key, with its lock if it has one there.

    A ``protected`` rollback is never lost, not even where another commit has the start ts as its commit ts.
    """
    changes: list[Change] = []
    if lock is not None:
        changes.append(unlock(key))
        if lock.info.lock_type == kv.Put and lock.value is None:
            changes.append(("default", versioned_key(key, start_ts), None))
    outcome = reader.outcome(key, start_ts)
    if outcome.overlapped is None:
        record = WriteRecord(ROLLBACK, start_ts, b"p" if protected else None)
        changes.append(put_record(key, start_ts, record))
    elif protected:
        record = replace(outcome.overlapped, is_rolled_back=True, fence=outcome.fence)
        changes.append(put_record(key, start_ts, record))
    return changes
