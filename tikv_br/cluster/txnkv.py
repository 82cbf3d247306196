"""Looks for transactional rows and locks, without reading their values."""

from __future__ import annotations

from functools import partial
from itertools import islice

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_error_text, check_region_error
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.errors import ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import TXN_MODE, TXN_MODE_END, KeyCodec, KeyMode, last_key
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.progress_events import Notice, Reporter

REGIONS_LOOKED_AT = 16
"""Regions in which a range of raw keys is searched for transactional data, so that the search takes milliseconds."""


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


def find_transactions(cluster: Cluster, span: KeyRange = EVERY_KEY) -> bool:
    """Whether a range of raw keys also has transactional rows or locks. Looks at its first regions only. Raises as `Router.call`.

    Only API V1 can mix them. A raw command sees parts of such rows as raw ones, and what it writes or deletes there breaks transactions.
    """
    if cluster.api_version is not ApiVersion.V1:
        return False
    codec, ts = KeyCodec(ApiVersion.V1, mode=KeyMode.TXN), cluster.pd.tso()
    for region in islice(cluster.pd.each_region(span.start, span.end), REGIONS_LOOKED_AT):
        try:
            bounds = KeyRange(codec.from_bound(region.start), codec.from_bound(region.end))
        except DamagedBytes:
            continue  # a bound of raw data
        walk = TxnCalls(cluster).walk(bounds)
        while not walk.done:
            found, reached = walk.send_part(partial(_has_any, ts), "KvScan")
            if found:
                return True
            walk.advance(reached)
    return False


def notice_transactions(cluster: Cluster, reporter: Reporter, span: KeyRange = EVERY_KEY) -> None:
    """Report transactional data, which a command that reads raw rows leaves out."""
    if find_transactions(cluster, span):
        reporter(
            Notice(
                "the cluster also has transactional data, as of JuiceFS or SurrealDB, which this leaves out: `tikv-br backup txn` backs them up",
                warning=True,
            )
        )


def refuse_transactions(cluster: Cluster, span: KeyRange = EVERY_KEY) -> None:
    """Raise `ClusterUnfit` for transactional data in a range where a command writes or deletes raw rows."""
    if find_transactions(cluster, span):
        raise ClusterUnfit(
            f"{','.join(cluster.config.pd)} also has transactional data, as of JuiceFS or SurrealDB, which raw writes and deletes would break",
            hint="Use a cluster of raw data. `tikv-br backup txn` and `tikv-br restore txn` copy transactional data.",
        )


def _first_key(ts: int, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bytes | None:
    return scan_key(store, context, start, end, ts)


def scan_key(
    store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes, ts: int, *, reverse: bool = False
) -> bytes | None:
    """The first key that a scan comes to, of a row or of a lock that is in its way; None = it finds neither.

    Stores of API V2 refuse an end outside the mode: its last key stands for it.
    """
    if context.api_version == kvrpcpb_pb2.V2 and end == TXN_MODE_END:
        end = last_key(TXN_MODE)
    bounds = (end or last_key(), start) if reverse else (start, end)
    request = kvrpcpb_pb2.ScanRequest(
        context=context, start_key=bounds[0], end_key=bounds[1], version=ts, limit=1, key_only=True, reverse=reverse
    )
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
