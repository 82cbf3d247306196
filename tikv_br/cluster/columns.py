"""Writes whole columns of rows: kernels cut requests out of Arrow's buffers, with no Python object a row."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from formats.keys import KeyCodec
from formats.rawput import Deletes, Puts
from tikv_br.cluster.batches import BATCH_BYTES, BATCH_ITEMS, send_what_fits
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.region_errors import check_answer
from tikv_br.cluster.regions import Region
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from formats.columns import Numbers, Offsets

Send = Callable[[Region, StoreClient, Sequence[int]], None]
"""Sends these rows, neighbours, to a region."""


class ColumnWriter:
    """Puts and deletes rows of columns, routed, cut and tried again as `RawClient` does it. Keys ascend, each once.

    Raises as `RawClient`.
    """

    def __init__(
        self,
        router: Router,
        codec: KeyCodec,
        context: Callable[[Region], kvrpcpb_pb2.Context],
        fence: Callable[[], object],
        batch_rows: int = BATCH_ITEMS,
    ) -> None:
        """`context` is that of a request, which takes `batch_rows` at most; for `fence` see `RawClient`."""
        self._router = router
        self._codec = codec
        self._context = context
        self._fence = fence
        self._batch_rows = batch_rows

    def put(
        self, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, expire_ts: Numbers | None = None, ttl: int = 0
    ) -> None:
        """Write pairs. `expire_ts`, shape (rows,), is in seconds since the epoch by this machine's clock.

        What is left of a row's time is reckoned at each try: waiting for a busy store lengthens no life. Rows of expiry 0
        get `ttl`, in seconds; 0 is never. Raises `UsageError` where the cluster keeps no TTLs.
        """
        if expire_ts is None:
            expire_ts = np.zeros(len(keys), np.uint64)
        expiring = bool(ttl) or bool(expire_ts.any())
        if expiring and not self._codec.api_version.has_ttl:
            raise UsageError("this cluster keeps no TTLs (API V1 without storage.enable-ttl)")
        puts = Puts(self._codec.prefix, keys, values)

        def send(region: Region, store: StoreClient, rows: Sequence[int]) -> None:
            first, stop = rows[0], rows[-1] + 1
            ttls = _ttls(expire_ts[first:stop], ttl) if expiring else None
            head = kvrpcpb_pb2.RawBatchPutRequest(context=self._context(region)).SerializeToString()
            self._fence()
            check_answer(store.call(store.batch_put, head + puts.fields(first, stop, ttls)))

        self._send_all(keys, puts.sizes, send, "RawBatchPut")

    def delete(self, keys: pa.LargeBinaryArray) -> None:
        """Remove keys."""
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
            return send_what_fits(range(done, stop), lambda rows: send(region, store, rows))

        while done < len(keys):
            done += self._router.call(bound_of(done), send_next, what, unknown_passes=True)


def _stop(ends: Offsets, first: int, batch_rows: int) -> int:
    """Where a batch ends that begins with a row, `ends` being where rows end in bytes: one row at least."""
    start = ends[first - 1] if first else 0
    most = ends[first : first + batch_rows]
    return first + max(int(np.searchsorted(most, start + BATCH_BYTES, "right")), 1)


def _ttls(expire_ts: Numbers, ttl: int) -> Numbers:
    """What is left at this moment: 0 would be never, so what has just expired gets its last second. Without expiry: `ttl`.

    Unsigned: with the longest TTLs that clients give, rows expire beyond 2^63.
    """
    now = np.uint64(int(time.time()))
    left = np.maximum(expire_ts, now + np.uint64(1)) - now
    return np.where(expire_ts > 0, left, np.uint64(ttl))
