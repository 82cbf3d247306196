"""Finds the regions of the holes of a span, and their leaders' stores, without keeping the feed waiting for PD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from incremental.feed.inbox import Inbox
from incremental.feed.stream import Arrived, Ended
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.regions import Region
from tikv_br.cluster.store import StoreClient
from tikv_br.errors import ClusterError, RequestRefused

Place = tuple[Region, StoreClient]
KeyRange = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to one search: what was found, and the error that kept the rest from being found."""

    places: tuple[Place, ...]
    error: ClusterError | None = None


class Locator:
    """One search at a time, in a thread of its own."""

    def __init__(self, cluster: Cluster, inbox: Inbox[Arrived | Ended | Located]) -> None:
        self._cluster = cluster
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed-locator")
        self._asked_for_all = False
        self._search_under_way: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is due."""
        return self._search_under_way is not None

    def search(self, holes: Sequence[KeyRange]) -> None:
        """Look for the regions of these physical ranges; `Located` comes through the inbox."""
        self._search_under_way = self._pool.submit(self._search, holes)

    def answered(self) -> None:
        """To be called for each `Located`. Raises what the search met beside a `ClusterError`."""
        if self._search_under_way is not None:
            self._search_under_way.result()
        self._search_under_way = None

    def close(self) -> None:
        """Wait for a search under way: no longer than PD's retry budget."""
        self._pool.shutdown(cancel_futures=True)

    def _search(self, holes: Sequence[KeyRange]) -> None:
        places: list[Place] = []
        error: ClusterError | None = None
        try:
            error = self._fill(places, holes)
        except ClusterError as met:
            error = met
        finally:
            self._inbox.put_now(Located(tuple(places), error))

    def _fill(self, places: list[Place], holes: Sequence[KeyRange]) -> ClusterError | None:
        """Add the places of the holes; a region whose store is unknown is left out, and that error returned."""
        refusal: ClusterError | None = None
        if not self._asked_for_all:  # thousands of regions: by pages, not one by one
            self._cluster.regions.update(self._cluster.pd.scan_regions(holes[0][0], holes[-1][1]))
            self._asked_for_all = True
        for hole in holes:
            for region in self._regions(*hole):
                try:
                    places.append((region, self._cluster.store(region.leader.store_id)))
                except RequestRefused as error:
                    self._cluster.regions.invalidate(region.id)
                    refusal = error
        return refusal

    def _regions(self, start: bytes, end: bytes) -> Iterator[Region]:
        while start < end:
            region = self._cluster.regions.locate(start)
            yield region
            start = region.end or end
