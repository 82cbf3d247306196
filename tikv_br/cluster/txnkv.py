"""Looks for transactional rows and locks, without reading their values.

Checksums of transactional rows, which the stores compute: the same sums as a backup's files have.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from msgspec import Struct

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import coprocessor_pb2, kvrpcpb_pb2, tipb_pb2
from tikv_br.cluster.region_errors import check_error_text, check_region_error
from tikv_br.cluster.regions import BoundInsideKey
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.errors import ClusterUnfit, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import TXN_MODE, TXN_MODE_END, KeyCodec, KeyMode, last_key
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange, middle_key
from tikv_br.progress_events import Notice, Reporter
from tikv_br.retry import NOT_READY, Backoffer

REGIONS_LOOKED_AT = 16
"""Regions in which a range of raw keys is searched for transactional data, so that the search takes milliseconds."""


def first_txn_key(cluster: Cluster, span: KeyRange, ts: int) -> bytes | None:
    """The RPC key of the first row at ``ts`` in an RPC range, or of a lock that hides whether there is one before; None = neither.

    ``ts`` must not be above PD's. Asks region by region. Raises as `Router.call`.
    """
    walk = TxnCalls(cluster).walk(span)
    while not walk.done:
        key, reached = walk.send_part(partial(scan_key, ts=ts), "KvScan")
        if key is not None:
            return key
        walk.advance(reached)
    return None


def has_transactions(cluster: Cluster) -> bool:
    """Whether a cluster of API V2 has transactional rows or locks, in any keyspace.

    Asks region by region for one of each, up to the first one that has any. Raises as `Router.call`.
    """
    return _find_any(cluster, KeyMode.TXN.keys, cluster.pd.tso())


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
            if _find_any(cluster, bounds, ts):
                return True
        except (DamagedBytes, BoundInsideKey):
            continue  # a bound of raw data, before or after a split that PD has yet to report
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


def _find_any(cluster: Cluster, span: KeyRange, ts: int) -> bool:
    walk = TxnCalls(cluster).walk(span)
    while not walk.done:
        found, reached = walk.send_part(partial(_has_any, ts), "KvScan")
        if found:
            return True
        walk.advance(reached)
    return False


def _has_any(ts: int, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bool:
    if scan_key(store, context, start, end, ts) is not None:
        return True
    asked = kvrpcpb_pb2.ScanLockRequest(context=context, start_key=start, end_key=end, limit=1, max_version=ts)
    locks = store.call(store.kv.KvScanLock, asked)
    check_region_error(locks)
    check_error_text(locks.error.abort or locks.error.retryable)
    return bool(locks.locks)


CHECKSUM = 105
"""``tp`` of the coprocessor's requests for a checksum."""
LAST_KEY = b"\xff" * 64
"""End of a range without one: below an empty end, stores count nothing."""
STORE_SECONDS = 60.0
"""Seconds after which a store ends a request with an error (``coprocessor.end-point-request-max-handle-duration``)."""
_TOO_SLOW = "exceeding the deadline"
"""Substring of its error text then, which is a region error or, in older versions, another error."""


class PrefixRule(Struct, frozen=True):
    """The prefix that rows have in the cluster, and the one that they had before: stores compute the checksum with that."""

    old: bytes
    new: bytes


def txn_checksum(cluster: Cluster, span: KeyRange, locks: SnapshotLocks, rule: PrefixRule | None = None) -> Checksum:
    """The checksum of the rows of an RPC range that a reader at `locks.ts` sees, region by region.

    Resolves the locks in its way. A range that a store does not finish in `STORE_SECONDS` is halved. It cannot show that GC has
    removed rows: see `SafePointKeeper.confirm`. Raises as `Router.call` and `SnapshotLocks.clear`.
    """
    reader = _Reader(cluster, locks, rule)
    total, backoffer = Checksum(), reader.backoffer()
    parts = [span]
    while parts:
        part = parts.pop()
        walk = reader.walk(part)
        if walk.done:
            continue
        try:
            sums, reached = walk.send_part(reader.send, "Coprocessor")
        except _Locked as seen:
            locks.clear(seen.span)
            backoffer.wait(NOT_READY, f"locked key in {seen.span}")
            parts.append(part)
        except _TooSlow as slow:
            middle = reader.middle(slow.span)
            parts += [KeyRange(middle, part.end), KeyRange(part.start, middle)]
        else:
            total, backoffer = total + sums, reader.backoffer()
            if reached != part.end:
                parts.append(KeyRange(reached, part.end))
    return total


class _Unfinished(Exception):
    def __init__(self, span: KeyRange) -> None:
        self.span = span


class _Locked(_Unfinished):
    """A lock in the range is in the way of its reader."""


class _TooSlow(_Unfinished):
    """The store has given up the range."""


class _Reader:
    """Requests of one checksum."""

    def __init__(self, cluster: Cluster, locks: SnapshotLocks, rule: PrefixRule | None) -> None:
        self.walk = TxnCalls(cluster).walk
        self._config, self._locks = cluster.config, locks
        request = tipb_pb2.ChecksumRequest(scan_on=tipb_pb2.Table, algorithm=tipb_pb2.Crc64_Xor)
        if rule is not None:
            request.rule.old_prefix, request.rule.new_prefix = rule.old, rule.new
        self._data = request.SerializeToString()

    def backoffer(self) -> Backoffer:
        """Waits before a range is requested again whose locks were resolved: some are not seen by those who resolve them."""
        return Backoffer("Coprocessor", self._config.retry)

    def send(self, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> Checksum:
        context.resolved_locks.extend(sorted(self._locks.resolved))
        request = coprocessor_pb2.Request(context=context, tp=CHECKSUM, start_ts=self._locks.ts, data=self._data)
        request.ranges.add(start=start, end=end or LAST_KEY)
        answer = store.call(store.kv.Coprocessor, request, timeout=max(store.long_timeout, 2 * STORE_SECONDS))
        if _TOO_SLOW in answer.region_error.message or _TOO_SLOW in answer.other_error:
            raise _TooSlow(KeyRange(start, end))
        check_region_error(answer)
        if answer.HasField("locked"):
            raise _Locked(KeyRange(start, end))
        check_error_text(answer.other_error)
        sums = tipb_pb2.ChecksumResponse.FromString(answer.data)
        return Checksum(sums.checksum, sums.total_kvs, sums.total_bytes)

    def middle(self, span: KeyRange) -> bytes:
        """A key that cuts the rows of a range, of its first region at least, into two parts, neither empty."""
        middle, _ = self.walk(span).send_part(self._scan_middle, "KvScan")
        if middle is None:
            raise RetryBudgetExhausted(f"a store cannot compute the checksum of {span} within {STORE_SECONDS:g} s")
        return middle

    def _scan_middle(self, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> bytes | None:
        context.resolved_locks.extend(sorted(self._locks.resolved))
        first, last = (scan_key(store, context, start, end, self._locks.ts, reverse=each) for each in (False, True))
        return None if first is None or last is None else middle_key(first, last)
