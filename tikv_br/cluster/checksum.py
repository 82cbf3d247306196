"""Checksums of transactional rows, which the stores compute: the same sums as those of the files of a backup."""

from __future__ import annotations

from dataclasses import dataclass

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.locks import SnapshotLocks
from tikv_br.cluster.pb import coprocessor_pb2, kvrpcpb_pb2, tipb_pb2
from tikv_br.cluster.region_errors import check_error_text, check_region_error
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.txn_calls import TxnCalls
from tikv_br.cluster.txnkv import scan_key
from tikv_br.errors import RetryBudgetExhausted
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import KeyRange, middle_key
from tikv_br.retry import NOT_READY, Backoffer

CHECKSUM = 105
"""``tp`` of the coprocessor's requests for a checksum."""
LAST_KEY = b"\xff" * 64
"""End of a range without one: below an empty end, stores count nothing."""
STORE_SECONDS = 60.0
"""Seconds after which a store ends a request with an error (``coprocessor.end-point-request-max-handle-duration``)."""
_TOO_SLOW = "exceeding the deadline"
"""Substring of its error text then, which is a region error or, in older versions, another error."""


@dataclass(frozen=True, slots=True)
class PrefixRule:
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
