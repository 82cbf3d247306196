"""Reads of transactional data: gets, scans, locks and checksums.

Physical removals of transactional data: range deletes, and GC.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from fastcrc import crc64

from tikv_br.cluster.pb import coprocessor_pb2, errorpb_pb2, tipb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.formats.mvcc import DELETE, PUT
from tikv_br.playground.encoding import data_range, memcomparable
from tikv_br.playground.engine import COLUMN_FAMILIES, DEFAULT, WRITE, Change, RocksEngine
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import RegionFault, RequestFault, check_within, key_outside
from tikv_br.playground.txn.mvcc import DefaultNotFound, Snapshot, VisibleRow, decode_record
from tikv_br.playground.txn.state import TxnCommands, TxnState, locked

_CHECKSUM: Final = 105
"""``tp`` of the coprocessor's requests for a checksum."""


class TxnReads(TxnCommands):
    """KvGet, KvBatchGet, KvScan, KvScanLock and the coprocessor's checksum."""

    def get(self, request: kv.GetRequest) -> kv.GetResponse:
        self._region_of_keys(request.context, "kv_get", [request.key])
        pair = self._get(request.key, self._snapshot(request.context, request.version))
        if pair is None:
            return kv.GetResponse(not_found=True)
        return kv.GetResponse(value=pair.value, error=pair.error if pair.HasField("error") else None)

    def batch_get(self, request: kv.BatchGetRequest) -> kv.BatchGetResponse:
        """The keys that are found, and an error for each that is locked."""
        self._region_of_keys(request.context, "kv_batch_get", request.keys)
        snapshot = self._snapshot(request.context, request.version)
        pairs = (self._get(key, snapshot) for key in request.keys)
        return kv.BatchGetResponse(pairs=[pair for pair in pairs if pair is not None])

    def scan(self, request: kv.ScanRequest) -> kv.ScanResponse:
        """Rows of one region: [start, end), in reverse from start (exclusive) down to end; in the place of a locked row its lock."""
        start, end = request.start_key, request.end_key
        region = self._region_of_range(request.context, "scan", start, end)
        if request.reverse:
            start, end = end, start
        snapshot = self._snapshot(request.context, request.version)
        rows = self._reader.scan(*_bounds(region, start, end), snapshot, reverse=request.reverse)
        pairs = (pair for row in rows if (pair := self._pair(row, key_only=request.key_only)) is not None)
        return kv.ScanResponse(pairs=itertools.islice(pairs, request.limit))

    def scan_lock(self, request: kv.ScanLockRequest) -> kv.ScanLockResponse:
        """The locks up to a start ts, of any type. Neither API version nor bounds are checked: TiDB's GC asks region by region."""
        region = self._checks.region(request.context, read=True)
        self._state.observe(request.max_version)
        locks = self._reader.locks(*_bounds(region, request.start_key, request.end_key))
        old = (lock.info for lock in locks if lock.ts <= request.max_version)
        return kv.ScanLockResponse(locks=itertools.islice(old, request.limit or None))

    def coprocessor(self, request: coprocessor_pb2.Request) -> coprocessor_pb2.Response:
        """XOR of CRC-64/XZ(key ‖ value), number and bytes of the rows of the ranges; with a rule, as under its old prefix."""
        if request.tp != _CHECKSUM:
            raise RequestFault(f"unsupported tp {request.tp}")
        region = self._checks.region(request.context, read=True)
        rule = tipb_pb2.ChecksumRequest.FromString(request.data).rule
        old, new = rule.old_prefix, rule.new_prefix
        crc, kvs, size = 0, 0, 0
        try:
            for key, value in self._rows(region, request):
                if not key.startswith(new):
                    raise RequestFault(f"Wrong prefix expect: {new.hex().upper()} found: {key.hex().upper()}")
                pair = old + key[len(new) :] + value
                crc ^= crc64.xz(pair)
                kvs += 1
                size += len(pair)
        except DefaultNotFound as missing:
            raise RequestFault(f"default not found: key:{missing}") from missing
        sums = tipb_pb2.ChecksumResponse(checksum=crc, total_kvs=kvs, total_bytes=size)
        return coprocessor_pb2.Response(data=sums.SerializeToString())

    def _rows(self, region: Region, request: coprocessor_pb2.Request) -> Iterator[tuple[bytes, bytes]]:
        snapshot = self._snapshot(request.context, request.start_ts)
        for each in request.ranges:
            # An empty end is a key like any other here: nothing is below it.
            first, last = memcomparable(each.start), memcomparable(each.end)
            for row in self._reader.scan(*_clip(region, first, last), snapshot):
                if row.lock is not None:
                    raise locked(row.lock)
                if row.record.kind == PUT:
                    yield row.key, self._reader.value(row)

    def _snapshot(self, context: kv.Context, ts: int) -> Snapshot:
        self._state.observe(ts)
        return Snapshot.of(context, ts)

    def _get(self, key: bytes, snapshot: Snapshot) -> kv.KvPair | None:
        row = self._reader.get(key, snapshot)
        return None if row is None else self._pair(row)

    def _pair(self, row: VisibleRow, *, key_only: bool = False) -> kv.KvPair | None:
        """A row as responses carry it, None for a delete; of a locked key only the error."""
        if row.lock is not None:
            return kv.KvPair(error=locked(row.lock).error)
        if row.record.kind != PUT:
            return None
        try:
            return kv.KvPair(key=row.key, value=b"" if key_only else self._reader.value(row))
        except DefaultNotFound as missing:
            text = f"Error(Txn(Error(Mvcc(Error(DefaultNotFound {{ key: {missing} }})))))"
            return kv.KvPair(error=kv.KeyError(abort=text))


def _bounds(region: Region, start: bytes, end: bytes) -> tuple[bytes, bytes]:
    """The physical bounds of a range's part in a region; empty keys are no bounds."""
    return _clip(region, memcomparable(start) if start else b"", memcomparable(end) if end else b"")


def _clip(region: Region, first: bytes, last: bytes) -> tuple[bytes, bytes]:
    return max(first, region.start), min(filter(None, (last, region.end)), default=b"")


class RangeDeletes(TxnCommands):
    """KvDeleteRange and UnsafeDestroyRange: all versions and locks of a range, in all column families."""

    def delete_range(self, request: kv.DeleteRangeRequest) -> kv.DeleteRangeResponse:
        """Delete a range of one region, unless the request only announces that."""
        region = self._region_of_range(request.context, "delete_range", request.start_key, request.end_key)
        start, end = memcomparable(request.start_key), memcomparable(request.end_key)
        if start >= end:
            raise RegionFault(errorpb_pb2.Error(message="invalid delete range command"))
        check_within(region, [start])
        if region.end and end > region.end:
            raise key_outside(region, end)
        if not request.notify_only:
            self._delete(start, end)
        return kv.DeleteRangeResponse()

    def unsafe_destroy_range(self, request: kv.UnsafeDestroyRangeRequest) -> kv.UnsafeDestroyRangeResponse:
        """Delete a range of the whole store, whatever its regions; here that is the range of all stores."""
        self._delete(memcomparable(request.start_key), memcomparable(request.end_key))
        return kv.UnsafeDestroyRangeResponse()

    def _delete(self, start: bytes, end: bytes) -> None:
        with self._state.latch:
            self._node.engine.delete_range(*data_range(start, end), COLUMN_FAMILIES)
            self._state.latch.notify_all()
        for region in self._node.regions.overlapping(start, end):
            self._node.sizes.forget(region.id)


def collect_garbage(engine: RocksEngine, state: TxnState, safe_point: int) -> None:
    """Remove what no reader at or above the safe point sees. Locks stay: who moves the safe point has resolved them."""
    changes: list[Change] = []
    with state.latch:
        rows = engine.iterate(b"", b"", family=WRITE)
        for place, versions in itertools.groupby(rows, key=lambda row: row[0][:-8]):
            is_covered = False
            for data_key, stored in versions:
                if MAX_TS - int.from_bytes(data_key[-8:], "big") > safe_point:
                    continue
                record = decode_record(stored)
                if record.kind == PUT and not is_covered:
                    is_covered = True
                    continue
                is_covered |= record.kind == DELETE
                changes.append((WRITE, data_key, None))
                if record.kind == PUT and record.value is None:
                    changes.append((DEFAULT, place + (MAX_TS - record.start_ts).to_bytes(8, "big"), None))
        engine.apply(changes)
