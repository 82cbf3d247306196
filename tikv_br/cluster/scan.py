"""Scans a range page by page, across regions. Pages are the bytes as received; `Prefetcher` fetches the next one in a thread while one is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError
from msgspec import Struct

from tikv_br.cancellation import inherit
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.region_errors import check_pairs, check_region_error
from tikv_br.cluster.regions import Region
from tikv_br.cluster.router import Router
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterUnreachable, RequestRefused
from tikv_br.formats import rawscan
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.rawscan import RawPage

T = TypeVar("T")

SendPart = Callable[[StoreClient, kvrpcpb_pb2.Context, bytes, bytes], T]
"""Sends a request for a part [start, end) of the range that lies in one region; raises `RegionErrorSeen`."""


class RangeWalk:
    """The rest of an RPC range [start, end); an empty end, possible before V2 only, is no end. For one thread."""

    def __init__(self, router: Router, codec: KeyCodec, cluster_id: int, start: bytes, end: bytes) -> None:
        self._router = router
        self._codec = codec
        self._cluster_id = cluster_id
        self._end = end
        self.cursor = start
        """Start of the remaining range."""
        self.done = bool(end) and start >= end
        """True once nothing remains."""

    def send_part(self, send: SendPart[T], what: str) -> tuple[T, bytes]:
        """Send for the first part of the rest, as `Router.call` does; returns the answer and the end of that part.

        The cursor stays: `advance` moves it, as far as the answer went. Raises as `Router.call`, and `BoundInsideKey`.
        """

        def send_to(region: Region, store: StoreClient) -> tuple[T, bytes]:
            end = region.end_within(self._codec, KeyRange(self.cursor, self._end))
            context = region.context(self._codec.api_version, self._cluster_id)
            return send(store, context, self.cursor, end), end

        return self._router.call(self._codec.bound(self.cursor), send_to, what, retry_unknown=True)

    def advance(self, to: bytes) -> None:
        """Move the cursor to a key, or with an empty one to the end of a range without end."""
        self.done = not to or bool(self._end and to >= self._end)
        self.cursor = to


PAGE_BYTES = 4 << 20
"""Target size of a page: large enough to hide the round trip, small enough to hold a few."""
FIRST_ROWS = 64
"""Rows of the first page: even values of 1 MiB then fit into memory."""
GROWTH = 8
"""Largest growth from one page to the next, as a factor."""


class PageSizer(Struct):
    """Chooses the rows of the next page by the weight of the last: stores have no limit by bytes."""

    most: int
    rows: int = FIRST_ROWS
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        self.rows = min(self.rows, self.most)

    def record_page(self, rows: int, size: int) -> None:
        """Note that a page of `rows` rows weighed `size` bytes."""
        if rows:
            fitting = self.page_bytes * rows // max(size, 1)
            self.rows = max(1, min(fitting, self.rows * GROWTH, self.most))

    def shrink(self) -> None:
        """Note that a page was not answered."""
        self.rows = max(1, self.rows // GROWTH)


def scan_pages(
    walk: RangeWalk, page_rows: int, *, key_only: bool = False, rate_limit: RateLimit | None = None
) -> Iterator[RawPage]:
    """Pages of RPC keys and user values of the walk's range, ascending; none is empty.

    `page_rows` is the most rows of a page; large values make smaller pages. Each page is its region's state at that
    moment: this is no snapshot. With a ``rate_limit`` a page weighs no more than a second's share. Raises as `Router.call`
    does.
    """
    sizer = PageSizer(page_rows)
    if rate_limit:
        sizer.page_bytes = min(PAGE_BYTES, rate_limit.bytes_per_second)

    def scan(store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> tuple[RawPage, bool]:
        """A page, and whether the region's part may have more rows."""
        limit = sizer.rows
        request = kvrpcpb_pb2.RawScanRequest(
            context=context, start_key=start, end_key=end, limit=limit, key_only=key_only
        )
        try:
            data = store.raw_scan(request)
        except ClusterUnreachable:
            # Rows may have become so large that the page cannot be made, taken, or read in time.
            sizer.shrink()
            raise
        if rate_limit is not None:
            rate_limit.spend(store.store.id, len(data))
        page = rawscan.measure(data) or measure_with_protobuf(data)
        return page, page.rows >= limit

    while not walk.done:
        (page, full), end = walk.send_part(scan, "RawScan")
        sizer.record_page(page.rows, len(page.data))
        walk.advance(page.last_key + b"\0" if full else end)
        if page.rows:
            yield page


def measure_with_protobuf(data: bytes) -> RawPage:
    """The page of an answer that `tikv_br.formats.rawscan` could not read.

    Raises `RegionErrorSeen`, what its errors mean, or `RequestRefused` for damaged bytes.
    """
    try:
        answer = kvrpcpb_pb2.RawScanResponse.FromString(data)
    except DecodeError as error:
        raise RequestRefused(f"cannot decode a store's RawScan response: {error}") from None
    check_region_error(answer)
    check_pairs(answer.kvs)
    pairs = [kvrpcpb_pb2.KvPair(key=pair.key, value=pair.value) for pair in answer.kvs]
    page = rawscan.measure(kvrpcpb_pb2.RawScanResponse(kvs=pairs).SerializeToString())
    if page is None:
        raise RequestRefused("a store's RawScan response is not valid")
    return page


class Prefetcher(Generic[T]):
    """Iterates over ``items`` in a separate thread, one item ahead of the consumer.

    Errors of ``items`` are raised in the consumer. A consumer that stops early waits for the item in progress.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.seconds = 0.0
        """Time spent producing items, in their thread."""
        self.seconds_waiting = 0.0
        """Time that the consumer has waited for items."""
        self._items = items
        self._stopped = False

    def stop(self) -> None:
        """Produce no further items after the one in progress."""
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
            fetch_next = inherit(self._next)
            pending: Future[T | None] | None = pool.submit(fetch_next)
            while pending is not None and (item := self._wait(pending)) is not None:
                pending = None if self._stopped else pool.submit(fetch_next)
                yield item

    def _wait(self, pending: Future[T | None]) -> T | None:
        began = time.perf_counter()
        try:
            return pending.result()
        finally:
            self.seconds_waiting += time.perf_counter() - began

    def _next(self) -> T | None:
        began = time.perf_counter()
        try:
            return next(self._items, None)
        finally:
            self.seconds += time.perf_counter() - began
