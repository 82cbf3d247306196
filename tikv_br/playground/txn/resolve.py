"""The second phase of transactions, and how others find out and decide what becomes of one that has left locks."""

from __future__ import annotations

from collections.abc import Sequence

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.playground.engine import Change
from tikv_br.playground.txn.mvcc import LockRecord, commit_changes, rollback_changes, unlock
from tikv_br.playground.txn.state import KeyFault, TxnCommands, locked, mvcc_fault


class SecondPhase(TxnCommands):
    """KvCommit, the rollbacks, KvTxnHeartBeat, KvCheckTxnStatus, KvCheckSecondaryLocks and KvResolveLock."""

    def commit(self, request: kv.CommitRequest) -> kv.CommitResponse:
        """Commit all keys or none; keys that are committed already are no error."""
        region = self._region_of_keys(request.context, "commit", request.keys)
        with self._writing(region) as changes:
            for key in request.keys:
                changes.extend(self._commit(key, request.start_version, request.commit_version))
        return kv.CommitResponse(commit_version=request.commit_version)

    def cleanup(self, request: kv.CleanupRequest) -> kv.CleanupResponse:
        """Roll back one key, protected; with ``current_ts`` only if the lock's TTL has ended."""
        region = self._region_of_keys(request.context, "cleanup", [request.key])
        with self._writing(region) as changes:
            lock = self._own_lock(request.key, request.start_version)
            if lock is not None and request.current_ts and not lock.is_expired(request.current_ts):
                raise locked(lock)
            outcome = self._reader.outcome(request.key, request.start_version)
            if outcome.commit_ts:
                return kv.CleanupResponse(commit_version=outcome.commit_ts)
            if not outcome.known:
                changes.extend(rollback_changes(self._reader, request.key, request.start_version, lock, protected=True))
        return kv.CleanupResponse()

    def batch_rollback(self, request: kv.BatchRollbackRequest) -> kv.BatchRollbackResponse:
        region = self._region_of_keys(request.context, "batch_rollback", request.keys)
        with self._writing(region) as changes:
            for key in request.keys:
                changes.extend(self._roll_back(key, request.start_version))
        return kv.BatchRollbackResponse()

    def pessimistic_rollback(self, request: kv.PessimisticRollbackRequest) -> kv.PessimisticRollbackResponse:
        """Remove pessimistic locks up to ``for_update_ts``, without a trace; without keys all of the region's."""
        region = self._region_of_keys(request.context, "pessimistic_rollback", request.keys)
        with self._writing(region) as changes:
            locks = (
                map(self._reader.lock, request.keys) if request.keys else self._reader.locks(region.start, region.end)
            )
            for lock in locks:
                if (
                    lock is not None
                    and lock.is_pessimistic
                    and lock.ts == request.start_version
                    and lock.info.lock_for_update_ts <= request.for_update_ts
                ):
                    changes.append(unlock(lock.info.key))
        return kv.PessimisticRollbackResponse()

    def heart_beat(self, request: kv.TxnHeartBeatRequest) -> kv.TxnHeartBeatResponse:
        """Extend the TTL of a primary lock; it never gets shorter."""
        region = self._region_of_keys(request.context, "txn_heart_beat", [request.primary_lock])
        with self._writing(region) as changes:
            lock = self._own_lock(request.primary_lock, request.start_version)
            if lock is None:
                raise _txn_not_found(request.start_version, request.primary_lock)
            if request.advise_lock_ttl > lock.info.lock_ttl:
                lock.info.lock_ttl = request.advise_lock_ttl
                changes.append(lock.to_change())
        return kv.TxnHeartBeatResponse(lock_ttl=lock.info.lock_ttl)

    def check_txn_status(self, request: kv.CheckTxnStatusRequest) -> kv.CheckTxnStatusResponse:
        """Say whether a transaction is alive, committed or rolled back; roll it back if its TTL has ended.

        One that is alive is made to commit above the caller's timestamp, unless it chooses its commit ts itself.
        """
        region = self._region_of_keys(request.context, "check_txn_status", [request.primary_key])
        self._state.observe(request.lock_ts, request.caller_start_ts, request.current_ts)
        with self._writing(region) as changes:
            lock = self._own_lock(request.primary_key, request.lock_ts)
            if lock is None:
                return self._check_missing(request, changes)
            if request.verify_is_primary and lock.info.primary_lock != request.primary_key:
                raise KeyFault(kv.KeyError(primary_mismatch=kv.PrimaryMismatch(lock_info=lock.info)))
            if lock.info.use_async_commit and not request.force_sync_commit:
                return kv.CheckTxnStatusResponse(lock_ttl=lock.info.lock_ttl, lock_info=lock.info)
            if lock.is_expired(request.current_ts):
                if lock.is_pessimistic and request.resolving_pessimistic_lock:
                    changes.append(unlock(request.primary_key))
                    return kv.CheckTxnStatusResponse(action=kv.TTLExpirePessimisticRollback)
                changes.extend(
                    rollback_changes(self._reader, request.primary_key, request.lock_ts, lock, protected=True)
                )
                return kv.CheckTxnStatusResponse(action=kv.TTLExpireRollback)
            return self._push(request, lock, changes)

    def _check_missing(self, request: kv.CheckTxnStatusRequest, changes: list[Change]) -> kv.CheckTxnStatusResponse:
        outcome = self._reader.outcome(request.primary_key, request.lock_ts)
        if outcome.known:
            return kv.CheckTxnStatusResponse(commit_version=outcome.commit_ts)
        if not request.rollback_if_not_exist:
            raise _txn_not_found(request.lock_ts, request.primary_key)
        if request.resolving_pessimistic_lock:
            return kv.CheckTxnStatusResponse(action=kv.LockNotExistDoNothing)
        changes.extend(rollback_changes(self._reader, request.primary_key, request.lock_ts, None, protected=True))
        return kv.CheckTxnStatusResponse(action=kv.LockNotExistRollback)

    def _push(
        self, request: kv.CheckTxnStatusRequest, lock: LockRecord, changes: list[Change]
    ) -> kv.CheckTxnStatusResponse:
        """Raise the least commit ts of a live transaction above the caller's; one without (0) cannot be pushed."""
        caller, info = request.caller_start_ts, lock.info
        if info.min_commit_ts and caller != MAX_TS and caller >= info.min_commit_ts:
            info.min_commit_ts = max(caller + 1, request.current_ts)
            changes.append(lock.to_change())
        is_pushed = caller == MAX_TS or (caller and info.min_commit_ts > caller)
        action = kv.MinCommitTSPushed if is_pushed else kv.NoAction
        return kv.CheckTxnStatusResponse(lock_ttl=info.lock_ttl, lock_info=info, action=action)

    def check_secondary_locks(self, request: kv.CheckSecondaryLocksRequest) -> kv.CheckSecondaryLocksResponse:
        """The locks of an async commit. One that is missing rolls the transaction back, unless it is committed."""
        region = self._region_of_keys(request.context, "check_secondary_locks", request.keys)
        self._state.observe(request.start_version)
        response = kv.CheckSecondaryLocksResponse()
        with self._writing(region) as changes:
            for key in request.keys:
                lock = self._own_lock(key, request.start_version)
                if lock is not None and not lock.is_pessimistic:
                    response.locks.append(lock.info)
                    continue
                outcome = self._reader.outcome(key, request.start_version)
                if not outcome.known:
                    changes.extend(rollback_changes(self._reader, key, request.start_version, lock, protected=True))
                return kv.CheckSecondaryLocksResponse(commit_ts=outcome.commit_ts)
        return response

    def resolve_lock(self, request: kv.ResolveLockRequest) -> kv.ResolveLockResponse:
        """Commit or roll back the locks of transactions: of the keys in the request, or all of the region's."""
        region = self._region_of_keys(request.context, "resolve_lock", request.keys)
        commits = {each.txn: each.status for each in request.txn_infos}
        commits = commits or {request.start_version: request.commit_version}
        with self._writing(region) as changes:
            if request.keys:
                changes.extend(self._resolve_keys(request.keys, request.start_version, request.commit_version))
            else:
                for lock in self._reader.locks(region.start, region.end):
                    if lock.ts in commits:
                        changes.extend(self._resolve_keys([lock.info.key], lock.ts, commits[lock.ts]))
        return kv.ResolveLockResponse()

    def _resolve_keys(self, keys: Sequence[bytes], start_ts: int, commit_ts: int) -> list[Change]:
        changes: list[Change] = []
        for key in keys:
            changes += self._commit(key, start_ts, commit_ts) if commit_ts else self._roll_back(key, start_ts)
        return changes

    def _commit(self, key: bytes, start_ts: int, commit_ts: int) -> list[Change]:
        lock = self._own_lock(key, start_ts)
        if lock is None:
            if self._reader.outcome(key, start_ts).commit_ts:
                return []
            raise mvcc_fault("TxnLockNotFound", start_ts=start_ts, commit_ts=commit_ts, key=key.hex().upper())
        if lock.info.min_commit_ts > commit_ts:
            expired = kv.CommitTsExpired(
                start_ts=start_ts, attempted_commit_ts=commit_ts, key=key, min_commit_ts=lock.info.min_commit_ts
            )
            raise KeyFault(kv.KeyError(commit_ts_expired=expired))
        return commit_changes(self._reader, lock, commit_ts)

    def _roll_back(self, key: bytes, start_ts: int) -> list[Change]:
        """Roll back a key; the rollback of a pessimistic transaction's primary is protected."""
        lock = self._own_lock(key, start_ts)
        outcome = self._reader.outcome(key, start_ts)
        if outcome.commit_ts:
            raise mvcc_fault("Committed", start_ts=start_ts, commit_ts=outcome.commit_ts, key=key.hex().upper())
        if outcome.known:
            return []
        protected = lock is not None and lock.info.lock_for_update_ts > 0 and lock.info.primary_lock == key
        return rollback_changes(self._reader, key, start_ts, lock, protected=protected)

    def _own_lock(self, key: bytes, start_ts: int) -> LockRecord | None:
        lock = self._reader.lock(key)
        return lock if lock is not None and lock.ts == start_ts else None


def _txn_not_found(start_ts: int, primary_key: bytes) -> KeyFault:
    return KeyFault(kv.KeyError(txn_not_found=kv.TxnNotFound(start_ts=start_ts, primary_key=primary_key)))
