"""The first phase of transactions: prewrites, also those that commit in one phase, and pessimistic locks."""

from __future__ import annotations

import itertools
import time
from typing import Final

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.mvcc import PUT, ROLLBACK
from tikv_br.formats.values import SHORT_VALUE
from tikv_br.playground import region_errors
from tikv_br.playground.engine import DEFAULT, Change
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import RegionFault
from tikv_br.playground.txn.mvcc import LockRecord, Snapshot, commit_changes, versioned_key
from tikv_br.playground.txn.state import KeyFault, TxnCommands, conflict, locked, mvcc_fault

_SKIP: Final = kv.PrewriteRequest.SKIP_PESSIMISTIC_CHECK
_LOCK_NEEDED: Final = kv.PrewriteRequest.DO_PESSIMISTIC_CHECK
_CONSTRAINT: Final = kv.PrewriteRequest.DO_CONSTRAINT_CHECK
_MAX_WAIT: Final = 1.0
"""``pessimistic-txn.wait-for-lock-timeout``, in seconds."""
_LOCK_TYPES: Final = {kv.Put: kv.Put, kv.Insert: kv.Put, kv.Del: kv.Del, kv.Lock: kv.Lock}


class FirstPhase(TxnCommands):
    """KvPrewrite and KvPessimisticLock."""

    def prewrite(self, request: kv.PrewriteRequest) -> kv.PrewriteResponse:
        """Lock all keys or none. With async commit the answer has a ``min_commit_ts``, after a commit in one phase its ts."""
        region = self._region_of_keys(request.context, "prewrite", [each.key for each in request.mutations])
        if (request.use_async_commit or request.try_one_pc) and not self._node.regions.is_synced(region.id):
            raise RegionFault(region_errors.max_timestamp_not_synced(region.id))
        with self._writing(region) as changes:
            try:
                found = self._check_all(request)
            except KeyFault:
                answer = self._answer_again(request)
                if answer is None:
                    raise
                return answer
            if errors := [fault.error for _, fault in found if isinstance(fault, KeyFault)]:
                return kv.PrewriteResponse(errors=errors)
            mutations = [(mutation, lock) for mutation, lock in found if not isinstance(lock, KeyFault)]
            return self._write(request, mutations, changes)

    def _check_all(self, request: kv.PrewriteRequest) -> list[tuple[kv.Mutation, LockRecord | KeyFault | None]]:
        """Each mutation with its transaction's lock, or why a lock is in the way. Raises `KeyFault` for everything else."""
        found: list[tuple[kv.Mutation, LockRecord | KeyFault | None]] = []
        for mutation, action in itertools.zip_longest(request.mutations, request.pessimistic_actions, fillvalue=_SKIP):
            assert isinstance(mutation, kv.Mutation)  # noqa: S101 - there are no more actions than mutations
            try:
                found.append((mutation, self._check(request, mutation, action)))
            except KeyFault as fault:
                if not fault.error.HasField("locked"):
                    raise
                found.append((mutation, fault))
        return found

    def _check(self, request: kv.PrewriteRequest, mutation: kv.Mutation, action: int) -> LockRecord | None:
        key, start_ts = mutation.key, request.start_version
        lock = self._reader.lock(key)
        if lock is not None and lock.ts != start_ts:
            raise self._no_pessimistic_lock(request, key) if action == _LOCK_NEEDED else locked(lock)
        if lock is not None and not lock.is_pessimistic:
            return lock  # prewritten before
        if lock is None:
            self._check_versions(request, mutation, action)
        elif not request.for_update_ts:
            raise mvcc_fault("LockTypeNotMatch", start_ts=start_ts, key=key.hex().upper(), pessimistic="true")
        self._check_assertion(request, mutation)
        return lock

    def _check_versions(self, request: kv.PrewriteRequest, mutation: kv.Mutation, action: int) -> None:
        """Check a key without lock for newer versions, and that a key to insert does not exist."""
        key, start_ts = mutation.key, request.start_version
        newest = next(self._reader.versions(key), None)
        if action == _LOCK_NEEDED:
            # A lock that got lost may be written now as long as nothing has been committed since.
            if newest is not None and newest[0] >= start_ts:
                raise self._no_pessimistic_lock(request, key)
            return
        if newest is not None:
            commit_ts, record = newest
            reasons = kv.WriteConflict
            if commit_ts == start_ts and (record.kind == ROLLBACK or record.is_rolled_back):
                raise conflict(start_ts, key, request.primary_lock, newest, reasons.SelfRolledBack)
            if action == _CONSTRAINT and commit_ts > request.for_update_ts:
                raise conflict(start_ts, key, request.primary_lock, newest, reasons.LazyUniquenessCheck)
            if not request.for_update_ts and not request.skip_constraint_check and commit_ts > start_ts:
                raise conflict(start_ts, key, request.primary_lock, newest, reasons.Optimistic)
        self._check_new(mutation, must_be_new=mutation.op in {kv.Insert, kv.CheckNotExists})

    def _check_new(self, mutation: kv.Mutation, *, must_be_new: bool) -> None:
        if must_be_new and self._reader.exists(mutation.key):
            raise KeyFault(kv.KeyError(already_exist=kv.AlreadyExist(key=mutation.key)))

    def _check_assertion(self, request: kv.PrewriteRequest, mutation: kv.Mutation) -> None:
        assertion = mutation.assertion
        if request.assertion_level == kv.Off or assertion not in {kv.Exist, kv.NotExist}:
            return
        found = self._reader.newest(mutation.key)
        exists = found is not None and found[1].kind == PUT
        if exists != (assertion == kv.Exist):
            failed = kv.AssertionFailed(start_ts=request.start_version, key=mutation.key, assertion=assertion)
            if found is not None:
                failed.existing_commit_ts, failed.existing_start_ts = found[0], found[1].start_ts
            raise KeyFault(kv.KeyError(assertion_failed=failed))

    def _answer_again(self, request: kv.PrewriteRequest) -> kv.PrewriteResponse | None:
        """The answer to a repeated request of a transaction that has committed in the meantime; None if it has not."""
        if request.mutations and (request.use_async_commit or request.try_one_pc):
            commit_ts = self._reader.outcome(request.mutations[0].key, request.start_version).commit_ts
            if commit_ts and request.try_one_pc:
                return kv.PrewriteResponse(one_pc_commit_ts=commit_ts)
            if commit_ts:
                return kv.PrewriteResponse(min_commit_ts=commit_ts)
        return None

    def _write(
        self,
        request: kv.PrewriteRequest,
        mutations: list[tuple[kv.Mutation, LockRecord | None]],
        changes: list[Change],
    ) -> kv.PrewriteResponse:
        least = max(self._state.max_ts, request.start_version, request.for_update_ts) + 1
        least = max(least, request.min_commit_ts)
        chooses = not request.max_commit_ts or least <= request.max_commit_ts
        prewritten = [lock for _, lock in mutations if lock is not None and not lock.is_pessimistic]
        is_async, in_one_phase = request.use_async_commit and chooses, request.try_one_pc and chooses and not prewritten
        for mutation, earlier in mutations:
            if mutation.op == kv.CheckNotExists or (earlier is not None and not earlier.is_pessimistic):
                continue
            lock = _lock_of(request, mutation, earlier)
            if lock.info.lock_type == kv.Put and lock.value is None:
                changes.append((DEFAULT, versioned_key(mutation.key, request.start_version), mutation.value))
            if in_one_phase:
                changes.extend(commit_changes(self._reader, lock, least))
                continue
            if is_async:
                lock.info.use_async_commit, lock.info.min_commit_ts = True, least
                if mutation.key == request.primary_lock:
                    lock.info.secondaries.extend(request.secondaries)
            changes.append(lock.to_change())
        if in_one_phase:
            return kv.PrewriteResponse(one_pc_commit_ts=least)
        if not is_async or any(not lock.info.use_async_commit for lock in prewritten):
            return kv.PrewriteResponse()
        return kv.PrewriteResponse(min_commit_ts=max([least, *(lock.info.min_commit_ts for lock in prewritten)]))

    def _no_pessimistic_lock(self, request: kv.PrewriteRequest, key: bytes) -> KeyFault:
        return mvcc_fault("PessimisticLockNotFound", start_ts=request.start_version, key=key.hex().upper())

    # -- pessimistic locks --------------------------------------------------------------------------------------

    def pessimistic_lock(self, request: kv.PessimisticLockRequest) -> kv.PessimisticLockResponse:
        """Lock all keys or none; wait up to a second for other transactions' locks."""
        keys = [each.key for each in request.mutations]
        region = self._region_of_keys(request.context, "pessimistic_lock", keys)
        self._state.observe(request.for_update_ts)
        timeout = min(request.wait_timeout / 1000, _MAX_WAIT) if request.wait_timeout else _MAX_WAIT
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._lock_all(request, region, deadline)
            except _LockRemoved:
                continue

    def _lock_all(
        self, request: kv.PessimisticLockRequest, region: Region, deadline: float
    ) -> kv.PessimisticLockResponse:
        with self._writing(region) as changes:
            response = kv.PessimisticLockResponse()
            for mutation in request.mutations:
                try:
                    change, value = self._acquire(request, mutation)
                except KeyFault as fault:
                    seconds = deadline - time.monotonic()
                    if not fault.error.HasField("locked") or seconds <= 0:
                        raise
                    self._state.wait(request.start_version, LockRecord(fault.error.locked), seconds)
                    raise _LockRemoved from None
                changes.extend(change)
                if request.return_values or request.check_existence:
                    response.values.append(value or b"" if request.return_values else b"")
                    response.not_founds.append(value is None)
            return response

    def _acquire(self, request: kv.PessimisticLockRequest, mutation: kv.Mutation) -> tuple[list[Change], bytes | None]:
        """The lock to write, unless there is a newer one of the transaction, and the key's value as of ``for_update_ts``."""
        key, start_ts, for_update_ts = mutation.key, request.start_version, request.for_update_ts
        lock = self._reader.lock(key)
        if lock is not None and lock.ts != start_ts:
            raise locked(lock)
        if lock is not None and not lock.is_pessimistic:
            raise mvcc_fault("LockTypeNotMatch", start_ts=start_ts, key=key.hex().upper(), pessimistic="false")
        if lock is None:
            newest = next(self._reader.versions(key), None)
            if newest is not None and newest[0] > for_update_ts:
                reason = kv.WriteConflict.PessimisticRetry
                raise conflict(start_ts, key, request.primary_lock, newest, reason)
            if self._reader.outcome(key, start_ts).known:
                raise mvcc_fault("PessimisticLockRolledBack", start_ts=start_ts, key=key.hex().upper())
            self._check_new(mutation, must_be_new=mutation.assertion == kv.NotExist)
        row = self._reader.get(key, Snapshot(for_update_ts, checks_locks=False))
        value = self._reader.value(row) if row is not None and row.record.kind == PUT else None
        if request.lock_only_if_exists and value is None:
            return [], None
        if lock is not None and lock.info.lock_for_update_ts >= for_update_ts:
            return [], value
        info = kv.LockInfo(
            key=key,
            primary_lock=request.primary_lock,
            lock_version=start_ts,
            lock_ttl=max(request.lock_ttl, lock.info.lock_ttl if lock else 0),
            lock_type=kv.PessimisticLock,
            lock_for_update_ts=for_update_ts,
            min_commit_ts=request.min_commit_ts,
        )
        return [LockRecord(info).to_change()], value


class _LockRemoved(Exception):
    """A lock was waited for; everything must be read again."""


def _lock_of(request: kv.PrewriteRequest, mutation: kv.Mutation, earlier: LockRecord | None) -> LockRecord:
    """The lock of a mutation; ``earlier``: the transaction's pessimistic one, which it replaces."""
    info = kv.LockInfo(
        key=mutation.key,
        primary_lock=request.primary_lock,
        lock_version=request.start_version,
        lock_ttl=max(request.lock_ttl, earlier.info.lock_ttl if earlier else 0),
        txn_size=request.txn_size,
        lock_type=_LOCK_TYPES[mutation.op],
        lock_for_update_ts=request.for_update_ts,
        min_commit_ts=max(request.min_commit_ts, earlier.info.min_commit_ts if earlier else 0),
    )
    is_short = info.lock_type == kv.Put and len(mutation.value) <= SHORT_VALUE
    return LockRecord(info, mutation.value if is_short else None)
