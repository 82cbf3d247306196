"""Looks for transactional rows and locks, without reading their values."""

from __future__ import annotations

from functools import partial

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_error_text, check_region_error
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange


def first_txn_key(cluster: Cluster, span: KeyRange, ts: int) -> bytes | None:
    """The RPC key of the first row at ``ts`` in an RPC range, or of a lock that hides whether there is one before; None = neither.

    ``ts`` must not be above PD's. Asks region by region. Raises as `Router.call`.
    """
    walk = TxnCalls(cluster).walk(span)
    while not walk.done:
        key, reached = walk.send_part(partial(_first_key, ts), "KvScan")
        if key is not None:
            return key
        walk.advance(reached)
    return None


def has_transactions(cluster: Cluster) -> bool:
    """Whether a cluster of API V2 has transactional rows or locks, in any keyspace.

    Asks region by region for one of each, up to the first one that has any. Raises as `Router.call`.
    """
    ts, walk = cluster.pd.tso(), TxnCalls(cluster).walk(KeyMode.TXN.keys)
    while not walk.done:
        found, reached = walk.send_part(partial(_has_any, ts), "KvScan")
        if found:
            return True
        walk.advance(reached)
    return False


def _first_key(ts: int, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bytes | None:
    return scan_key(store, kvrpcpb_pb2.ScanRequest(context=context, start_key=start, end_key=end, version=ts))


def scan_key(store: StoreClient, request: kvrpcpb_pb2.ScanRequest) -> bytes | None:
    """The first key that a scan comes to, of a row or of a lock that is in its way; None = it finds neither."""
    request.limit, request.key_only = 1, True
    rows = store.call(store.kv.KvScan, request)
    check_region_error(rows)
    for error in (rows.error, *(pair.error for pair in rows.pairs)):
        if error.HasField("locked"):
            return error.locked.key
        check_error_text(error.abort or error.retryable)
    return rows.pairs[0].key if rows.pairs else None


def _has_any(ts: int, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bool:
    if _first_key(ts, store, context, start, end) is not None:
        return True
    asked = kvrpcpb_pb2.ScanLockRequest(context=context, start_key=start, end_key=end, limit=1, max_version=ts)
    locks = store.call(store.kv.KvScanLock, asked)
    check_region_error(locks)
    check_error_text(locks.error.abort or locks.error.retryable)
    return bool(locks.locks)
