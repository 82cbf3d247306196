"""The first key of a range that may be cut into very many regions: many of them are asked at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from formats.errors import DamagedBytes
from formats.keys import KeyCodec
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.regions import Region

THREADS = 16
WINDOW = 2 * THREADS
"""Regions that are asked, or wait to be, behind the first one without an answer: so many are asked in vain at most."""
REGION_PAGE = 4096
"""Regions of which PD is asked at a time."""


def first_rpc_key(cluster: Cluster, keyspace_id: int, start: bytes, end: bytes) -> bytes | None:
    """The first RPC key of [start, end), a range of one keyspace; None when there is none. An empty end is no end.

    As `RawClient.first_rpc_key`, but by `THREADS` requests at a time, with regions fetched from PD by pages. Regions may
    split, merge and move meanwhile. Raises as `RawClient`.
    """
    raw = cluster.raw(keyspace_id)
    asked: deque[Future[bytes | None]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="first-key") as pool:
        try:
            for part in _parts(cluster, raw.codec, start, end):
                asked.append(pool.submit(raw.first_rpc_key, *part))
                if len(asked) == WINDOW and (found := asked.popleft().result()) is not None:
                    return found
            return next((found for each in asked if (found := each.result()) is not None), None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _parts(cluster: Cluster, codec: KeyCodec, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The range, cut where PD says that regions end: parts of RPC keys, in order and without a hole."""
    last, more = codec.bound(end), True
    while more:
        page = cluster.pd.scan_regions(codec.bound(start), last, REGION_PAGE)
        cluster.regions.update(page)
        cuts = [cut for cut in (_cut(codec, region, last) for region in page) if cut > start]
        for cut in cuts:
            yield start, cut
            start = cut
        more = bool(cuts) and _is_before(page[-1], last)
    yield start, end


def _cut(codec: KeyCodec, region: Region, last: bytes) -> bytes:
    """Where a region ends within the range; ``b""`` where it does not, or at what is no key: its part says so when asked."""
    try:
        return codec.from_bound(region.end) if _is_before(region, last) else b""
    except DamagedBytes:
        return b""


def _is_before(region: Region, last: bytes) -> bool:
    """Whether a region ends before a bound, an empty one being the end of all."""
    return bool(region.end) and (not last or region.end < last)
