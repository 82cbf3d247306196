"""Transactional data in the smallest form: two-phase commits, and scans of rows and locks.

Rows and locks are records of the playground, not column families: backups, ingests and feeds do not see them. There are no write
conflicts, pessimistic locks or resolutions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys import codec
from tikv_br.playground.node import StoreNode
from tikv_br.playground.raw_checks import TXN_MODE, RawChecks, check_within
from tikv_br.playground.region import Region

_LOCKS, _ROWS = "lock/", "row/"


class Transactions:
    """KvPrewrite, KvCommit, KvScan and KvScanLock of one store."""

    def __init__(self, node: StoreNode, checks: RawChecks) -> None:
        self._node, self._checks = node, checks

    def prewrite(self, request: kv.PrewriteRequest) -> kv.PrewriteResponse:
        keys = [each.key for each in request.mutations]
        self._check_keys(request.context, "prewrite", keys)
        found = [self._lock(key) for key in keys]
        errors = [kv.KeyError(locked=lock) for lock in found if lock and lock.lock_version != request.start_version]
        if errors:
            return kv.PrewriteResponse(errors=errors)
        records: dict[str, bytes | None] = {}
        for each in request.mutations:
            lock = kv.LockInfo(
                primary_lock=request.primary_lock,
                lock_version=request.start_version,
                key=each.key,
                lock_ttl=request.lock_ttl,
                txn_size=len(keys),
                lock_type=each.op,
            )
            records[_LOCKS + each.key.hex()] = len(each.value).to_bytes(4) + each.value + lock.SerializeToString()
        self._node.engine.put_meta(records)
        return kv.PrewriteResponse()

    def commit(self, request: kv.CommitRequest) -> kv.CommitResponse:
        self._check_keys(request.context, "commit", request.keys)
        records: dict[str, bytes | None] = {}
        for key in request.keys:
            lock, name = self._lock(key), key.hex()
            if lock is None or lock.lock_version != request.start_version:
                return kv.CommitResponse(error=kv.KeyError(retryable="Error(Txn(Error(Mvcc(Error(TxnLockNotFound)))))"))
            records[_LOCKS + name] = None
            if lock.lock_type != kv.Lock:
                value = None if lock.lock_type == kv.Del else self._locked_value(key).hex()
                records[_ROWS + name] = json.dumps([*self._versions(key), [request.commit_version, value]]).encode()
        self._node.engine.put_meta(records)
        return kv.CommitResponse(commit_version=request.commit_version)

    def scan(self, request: kv.ScanRequest) -> kv.ScanResponse:
        """Rows at a version; in the place of a row that is locked, the lock."""
        region = self._region(request.context, "scan", request.start_key, request.end_key)
        pairs = (self._pair(key, request) for key in self._keys(region, request.start_key, request.end_key))
        found = itertools.islice((pair for pair in pairs if pair is not None), request.limit)
        return kv.ScanResponse(pairs=found)

    def scan_lock(self, request: kv.ScanLockRequest) -> kv.ScanLockResponse:
        region = self._region(request.context, "scan_lock", request.start_key, request.end_key)
        locks = map(self._lock, self._keys(region, request.start_key, request.end_key))
        old = (lock for lock in locks if lock is not None and lock.lock_version <= request.max_version)
        return kv.ScanLockResponse(locks=itertools.islice(old, request.limit or None))

    def _pair(self, key: bytes, request: kv.ScanRequest) -> kv.KvPair | None:
        lock = self._lock(key)
        if lock is not None and lock.lock_version <= request.version and lock.lock_type != kv.Lock:
            return kv.KvPair(error=kv.KeyError(locked=lock))
        values = [value for commit_ts, value in self._versions(key) if commit_ts <= request.version]
        if not values or values[-1] is None:
            return None
        return kv.KvPair(key=key, value=b"" if request.key_only else bytes.fromhex(values[-1]))

    def _keys(self, region: Region, start: bytes, end: bytes) -> Iterator[bytes]:
        """The keys of [start, end) in a region with a row or a lock, in order."""
        names = {name.partition("/")[2] for kind in (_LOCKS, _ROWS) for name, _ in self._node.engine.list_meta(kind)}
        for key in sorted(map(bytes.fromhex, names)):
            if start <= key and (not end or key < end) and region.contains(codec.encode(key)):
                yield key

    def _lock(self, key: bytes) -> kv.LockInfo | None:
        record = self._node.engine.get_meta(_LOCKS + key.hex())
        return None if record is None else kv.LockInfo.FromString(record[4 + int.from_bytes(record[:4]) :])

    def _locked_value(self, key: bytes) -> bytes:
        record = self._node.engine.get_meta(_LOCKS + key.hex()) or bytes(4)
        return record[4 : 4 + int.from_bytes(record[:4])]

    def _versions(self, key: bytes) -> list[list[Any]]:
        """Commit ts and value in hex (None = deleted) of each version."""
        return list(json.loads(self._node.engine.get_meta(_ROWS + key.hex()) or b"[]"))

    def _check_keys(self, context: kv.Context, command: str, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._checks.keys(context, command, keys, TXN_MODE)
        check_within(self._checks.region_to_write(context), map(codec.encode, keys))

    def _region(self, context: kv.Context, command: str, start: bytes, end: bytes) -> Region:
        self._checks.ranges(context, command, [(start, end or None)], TXN_MODE)
        return self._checks.region(context, read=True)
