"""Physical removals of transactional data: range deletes, and GC."""

from __future__ import annotations

import itertools

from tikv_br.cluster.pb import errorpb_pb2
from tikv_br.cluster.pb import kvrpcpb_pb2 as kv
from tikv_br.formats.keys.codec import MAX_TS
from tikv_br.formats.mvcc import DELETE, PUT
from tikv_br.playground.encoding import data_range, memcomparable
from tikv_br.playground.engine import COLUMN_FAMILIES, DEFAULT, WRITE, Change, RocksEngine
from tikv_br.playground.request_checks import RegionFault, check_within, key_outside
from tikv_br.playground.txn.commands import TxnCommands
from tikv_br.playground.txn.mvcc import decode_record
from tikv_br.playground.txn.state import TxnState


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
