"""Writes rows of Arrow columns: kernels make RawBatchPut and RawBatchDelete requests of one region each from the buffers.

Fields of a protobuf message may be concatenated, so the rows follow a serialized request that has only its context.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tikv_br.cluster.clock import no_clock
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_answer
from tikv_br.cluster.regions import Region
from tikv_br.cluster.router import BATCH_BYTES, BATCH_ITEMS, Router, send_in_halves
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import UsageError
from tikv_br.formats import columns
from tikv_br.formats.errors import FormatError
from tikv_br.formats.kernels import rawput as kernels
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst.coding import encode_varint

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.cluster.rate_limit import RateLimit
    from tikv_br.formats.columns import Flags, Numbers, Offsets


TAG_TTLS = b"\x32"  # RawBatchPutRequest.ttls = 6, packed


class Puts:
    """Rows that are put, from which any part can be taken. Both columns are checked once, here (`tikv_br.formats.columns.view`)."""

    def __init__(self, prefix: bytes, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray) -> None:
        """Each key goes with the prefix in front. Raises `FormatError` for columns of different lengths."""
        if len(keys) != len(values):
            raise FormatError(f"{len(keys)} keys with {len(values)} values")
        self._prefix = columns.from_bytes(prefix)
        self._keys, self._values = columns.view(keys), columns.view(values)
        self.sizes = np.diff(self._keys[0]) + np.diff(self._values[0]) + len(prefix)
        """Bytes of each row's RPC key and value, shape (rows,)."""

    def fields(self, first: int, stop: int, ttls: Numbers | None = None, skip: Flags | None = None) -> bytes:
        """The pairs [first, stop), which must lie within the rows, and their TTLs, shape (pairs,), if any.

        Rows whose flag is set in `skip`, shape (stop - first,), are left out, and have no TTL in `ttls`.
        """
        runs = [(first, stop)] if skip is None or not skip.any() else _runs(first, ~skip)
        parts: list[bytes | memoryview] = [
            kernels.pairs(*self._keys, *self._values, self._prefix, *run).data for run in runs
        ]
        if ttls is not None and len(ttls):
            packed = kernels.packed(ttls)
            parts += [TAG_TTLS, encode_varint(len(packed)), packed.data]
        return b"".join(parts)


def _runs(first: int, wanted: Flags) -> list[tuple[int, int]]:
    """The rows [begin, end) of each run of flags that are set; `first` is the row of the first flag."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8))) + first
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


class Deletes:
    """Keys that are deleted, from which any part can be taken."""

    def __init__(self, prefix: bytes, keys: pa.LargeBinaryArray) -> None:
        """Each key goes with the prefix in front."""
        self._prefix = columns.from_bytes(prefix)
        self._keys = columns.view(keys)
        self.sizes = np.diff(self._keys[0]) + len(prefix)
        """Bytes of each RPC key, shape (rows,)."""

    def fields(self, first: int, stop: int) -> bytes:
        """The keys [first, stop), which must lie within the rows."""
        return kernels.names(*self._keys, self._prefix, first, stop).tobytes()


Send = Callable[[Region, StoreClient, Sequence[int]], None]
"""Sends these rows, neighbours, to a region."""


class ColumnWriter:
    """Puts and deletes rows of columns, routed and retried as by `RawClient`. Keys are user keys and ascend, each once.

    Raises as `RawClient`.
    """

    def __init__(
        self,
        router: Router,
        codec: KeyCodec,
        context: Callable[[Region], kvrpcpb_pb2.Context],
        fence: Callable[[], object],
        batch_rows: int = BATCH_ITEMS,
        rate_limit: RateLimit | None = None,
        now: Callable[[], int] = no_clock,
    ) -> None:
        """`context` makes the context of a request, which takes `batch_rows` at most; for `fence` and `now` see `RawClient`. `rate_limit` is for puts."""
        self._router = router
        self._codec = codec
        self._context = context
        self._fence = fence
        self._batch_rows = batch_rows
        self._rate_limit = rate_limit
        self.now = now

    def put(
        self, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, expire_ts: Numbers | None = None, ttl: int = 0
    ) -> Flags:
        """Write pairs. `expire_ts`, shape (rows,), is in seconds since the epoch by PD's clock.

        The remaining TTL is computed for each request, and again for each retry of it. Rows that have expired by then
        are left out, because a TTL of 0 would keep them forever; returns which rows, shape (rows,). Stores count the
        TTL from when they execute the request, so a row may live longer by the request's own duration. Rows of expiry
        0 get `ttl`, in seconds; 0 is never. Raises `UsageError` if the cluster keeps no TTLs.
        """
        expired = np.zeros(len(keys), np.bool_)
        if expire_ts is None:
            expire_ts = np.zeros(len(keys), np.uint64)
        timed = bool(expire_ts.any())
        expiring = bool(ttl) or timed
        if expiring and not self._codec.api_version.has_ttl:
            raise UsageError("this cluster does not support TTLs (API V1 without storage.enable-ttl)")
        puts = Puts(self._codec.prefix, keys, values)

        def send(region: Region, store: StoreClient, rows: Sequence[int]) -> None:
            first, stop = rows[0], rows[-1] + 1
            head = kvrpcpb_pb2.RawBatchPutRequest(context=self._context(region)).SerializeToString()
            self._fence()
            ttls = None
            if expiring:
                ttls, expired[first:stop] = _remaining(expire_ts[first:stop], ttl, self.now() if timed else 0)
                if not len(ttls):
                    return
            request = head + puts.fields(first, stop, ttls, expired[first:stop])
            check_answer(store.call(store.batch_put, request))
            if self._rate_limit is not None:
                self._rate_limit.spend(store.store.id, len(request))

        self._send_all(keys, puts.sizes, send, "RawBatchPut")
        return expired

    def put_rows(self, rows: pa.RecordBatch, ttl: int = 0) -> Flags:
        """Call `put` with the columns ``key``, ``value`` and ``expire_ts``."""
        return self.put(rows["key"], rows["value"], columns.numbers(rows["expire_ts"]), ttl)

    def delete(self, keys: pa.LargeBinaryArray) -> None:
        deletes = Deletes(self._codec.prefix, keys)

        def send(region: Region, store: StoreClient, rows: Sequence[int]) -> None:
            head = kvrpcpb_pb2.RawBatchDeleteRequest(context=self._context(region)).SerializeToString()
            self._fence()
            check_answer(store.call(store.batch_delete, head + deletes.fields(rows[0], rows[-1] + 1)))

        self._send_all(keys, deletes.sizes, send, "RawBatchDelete")

    def _send_all(self, keys: pa.LargeBinaryArray, sizes: Offsets, send: Send, what: str) -> None:
        """Send all rows in batches that follow the regions as they are at that moment."""
        ends = np.cumsum(sizes)
        done, prefix = 0, self._codec.prefix

        def bound_of(row: int) -> bytes:
            return self._codec.bound(prefix + keys[row].as_py())

        def send_next(region: Region, store: StoreClient) -> int:
            stop = _stop(ends, done, self._batch_rows)
            if not region.contains(bound_of(stop - 1)):
                stop = done + 1 + bisect.bisect_left(range(done + 1, stop), region.end, key=bound_of)
            return send_in_halves(range(done, stop), lambda rows: send(region, store, rows))

        while done < len(keys):
            done += self._router.call(bound_of(done), send_next, what, retry_unknown=True)


def _stop(ends: Offsets, first: int, batch_rows: int) -> int:
    """Return the end of the batch that starts at row `first`: at least one row.

    `ends` are the rows' end offsets in bytes.
    """
    start = ends[first - 1] if first else 0
    most = ends[first : first + batch_rows]
    return first + max(int(np.searchsorted(most, start + BATCH_BYTES, "right")), 1)


def _remaining(expire_ts: Numbers, ttl: int, now: int) -> tuple[Numbers, Flags]:
    """The TTLs now of the rows that have not expired, and which rows have. Without expiry the TTL is `ttl`.

    Unsigned: with the longest TTLs that clients give, rows expire beyond 2^63.
    """
    expired = (expire_ts > 0) & (expire_ts <= np.uint64(now))
    kept = expire_ts[~expired]
    return np.where(kept > 0, kept - np.uint64(now), np.uint64(ttl)), expired
