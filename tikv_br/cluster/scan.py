"""Scans a range page by page, across regions: pages are the bytes on the wire, measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from formats import rawscan
from formats.rawscan import RawPage
from tikv_br.cluster.pb import kvrpcpb_pb2
from tikv_br.cluster.ranges import RangeWalk
from tikv_br.cluster.region_errors import check_pairs, check_region_error
from tikv_br.cluster.store import StoreClient
from tikv_br.cluster.throttle import Throttle
from tikv_br.errors import ClusterUnreachable, RequestRefused

PAGE_BYTES = 4 << 20
"""What a page should weigh: enough to hide the round trip, little enough to hold a few."""
FIRST_ROWS = 64
"""Rows of the first page: even values of 1 MiB then fit into memory."""
GROWTH = 8
"""How much larger the next page may be at most."""


@dataclass(slots=True)
class PageSizer:
    """Chooses the rows of the next page by the weight of the last: stores have no limit by bytes."""

    most: int
    rows: int = FIRST_ROWS
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        self.rows = min(self.rows, self.most)

    def learn(self, rows: int, size: int) -> None:
        """Note that a page of `rows` rows weighed `size` bytes."""
        if rows:
            fitting = self.page_bytes * rows // max(size, 1)
            self.rows = max(1, min(fitting, self.rows * GROWTH, self.most))

    def shrink(self) -> None:
        """Note that a page was not answered."""
        self.rows = max(1, self.rows // GROWTH)


def scan_pages(
    walk: RangeWalk, page_rows: int, *, key_only: bool = False, throttle: Throttle | None = None
) -> Iterator[RawPage]:
    """Pages of RPC keys and user values of the walk's range, ascending; none is empty.

    `page_rows` is the most rows of a page; large values make smaller pages. Each page is its region's state at that
    moment: this is no snapshot. With a ``throttle`` a page weighs no more than a second's share. Raises as `Router.call`
    does.
    """
    sizer = PageSizer(page_rows)
    if throttle is not None:
        sizer.page_bytes = min(PAGE_BYTES, throttle.bytes_per_second)
    while not walk.done:
        answer, end = walk.send_part(_Scan(sizer, key_only, throttle), "RawScan")
        page = answer.page
        sizer.learn(page.rows, len(page.data))
        walk.advance(page.last_key + b"\0" if answer.full else end)
        if page.rows:
            yield page


@dataclass(frozen=True, slots=True)
class _Answer:
    page: RawPage
    full: bool
    """Whether the region's part may have more rows."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """Sends one RawScan; a `SendPart`."""

    sizer: PageSizer
    key_only: bool
    throttle: Throttle | None

    def __call__(self, store: StoreClient, context: kvrpcpb_pb2.Context, start: bytes, end: bytes) -> _Answer:
        limit = self.sizer.rows
        request = kvrpcpb_pb2.RawScanRequest(
            context=context, start_key=start, end_key=end, limit=limit, key_only=self.key_only
        )
        try:
            data = store.raw_scan(request)
        except ClusterUnreachable:
            # Rows may have become so large that the page cannot be made, taken, or read in time.
            self.sizer.shrink()
            raise
        if self.throttle is not None:
            self.throttle.spend(store.store.id, len(data))
        page = rawscan.measure(data) or measure_with_protobuf(data)
        return _Answer(page, full=page.rows >= limit)


def measure_with_protobuf(data: bytes) -> RawPage:
    """The page of an answer that `formats.rawscan` did not take.

    Raises `RegionErrorSeen`, what its errors mean, or `RequestRefused` for damaged bytes.
    """
    try:
        answer = kvrpcpb_pb2.RawScanResponse.FromString(data)
    except DecodeError as error:
        raise RequestRefused(f"a store's page of rows does not decode: {error}") from None
    check_region_error(answer)
    check_pairs(answer.kvs)
    pairs = [kvrpcpb_pb2.KvPair(key=pair.key, value=pair.value) for pair in answer.kvs]
    page = rawscan.measure(kvrpcpb_pb2.RawScanResponse(kvs=pairs).SerializeToString())
    if page is None:
        raise RequestRefused("a store's page of rows that no page can be made of")
    return page
