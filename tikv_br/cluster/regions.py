"""Regions as values, and the cache that routes requests to them."""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from tikv_br.cluster.pb import kvrpcpb_pb2, metapb_pb2
from tikv_br.errors import ClusterUnfit
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.errors import DamagedBytes
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.formats.keys.text import show_key


class BoundInsideKey(ClusterUnfit):
    """A region ends where none of the rows that are read begins: at another kind of key, or between two versions of a key."""

    default_hint = (
        "Raw rows may lie beside transactional ones of API V1: then choose ranges without them. Or PD was made to split inside a key: "
        "then merge the region with its neighbour, as by `pd-ctl operator add merge-region`."
    )


class Peer(Struct, frozen=True):
    """One copy of a region on a store."""

    id: int
    store_id: int
    voter: bool = True

    @classmethod
    def of(cls, peer: metapb_pb2.Peer) -> Peer:
        return cls(peer.id, peer.store_id, voter=peer.role != metapb_pb2.Learner)


class Region(Struct, frozen=True):
    """A range of keys [start, end) as PD knows it: physical bounds (V2: memcomparable), an empty end is no end."""

    id: int
    start: bytes
    end: bytes
    conf_ver: int
    version: int
    leader: Peer
    """A guess when PD does not know: a store that does not lead says who does."""
    peers: tuple[Peer, ...]

    @classmethod
    def of(cls, region: metapb_pb2.Region, leader: metapb_pb2.Peer | None = None) -> Region:
        """Convert a region from the wire; without a leader the first voter counts as leader."""
        peers = tuple(Peer.of(peer) for peer in region.peers)
        guess = next((peer for peer in peers if peer.voter), Peer(0, 0))
        return cls(
            id=region.id,
            start=region.start_key,
            end=region.end_key,
            conf_ver=region.region_epoch.conf_ver,
            version=region.region_epoch.version,
            leader=Peer.of(leader) if leader is not None and leader.id else guess,
            peers=peers,
        )

    def contains(self, bound: bytes) -> bool:
        return self.start <= bound and (not self.end or bound < self.end)

    def overlaps(self, other: Region) -> bool:
        return (not other.end or self.start < other.end) and (not self.end or other.start < self.end)

    def end_within(self, codec: KeyCodec, rest: KeyRange) -> bytes:
        """The end of the part that lies in this region, of a range of RPC keys that begins in it. Raises `BoundInsideKey`."""
        if not self.end or (rest.end and codec.bound(rest.end) <= self.end):
            return rest.end
        try:
            end = codec.from_bound(self.end)
        except DamagedBytes as error:
            raise BoundInsideKey(
                f"region {self.id} ends at {show_key(self.end)}, which is not a valid key: {error}"
            ) from None
        if end <= rest.start:
            raise BoundInsideKey(f"region {self.id} ends at {show_key(self.end)}, between two versions of a key")
        return end

    def with_leader_on(self, store_id: int) -> Region:
        """The same region with the peer on this store as leader, or unchanged when there is none."""
        peer = next((peer for peer in self.peers if peer.store_id == store_id), self.leader)
        return replace(self, leader=peer)

    def context(self, api_version: ApiVersion, cluster_id: int, max_execution_ms: int = 0) -> kvrpcpb_pb2.Context:
        """The context of a request to the leader. Clients say V1 to a V1TTL store, which refuses its own name.

        `max_execution_ms` limits how long the store may hold the request back; 0 = no limit.
        """
        version = kvrpcpb_pb2.V2 if api_version is ApiVersion.V2 else kvrpcpb_pb2.V1
        return kvrpcpb_pb2.Context(
            region_id=self.id,
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=self.conf_ver, version=self.version),
            peer=metapb_pb2.Peer(id=self.leader.id, store_id=self.leader.store_id),
            api_version=version,
            cluster_id=cluster_id,
            max_execution_duration_ms=max_execution_ms,
        )


class RegionColumns(Struct, frozen=True):
    """Start keys and approximate sizes of regions in key order, without an object for each region.

    Not as Arrow columns: the import of Arrow takes longer than a plan.
    """

    keys: bytes
    """The starts, one after another, as PD encodes them; an empty one = unbounded."""
    bounds: array[int]
    """Offset in `keys` of each start key, and the end of the last one."""
    sizes: array[int]
    """Approximate size of each region, in bytes."""

    @classmethod
    def of(cls, pages: Iterable[tuple[list[bytes], list[int]]]) -> RegionColumns:
        """Collect pages of start keys and sizes; only one page is held as objects."""
        keys, bounds, sizes = bytearray(), array("q", [0]), array("q")
        for page_starts, page_sizes in pages:
            for start in page_starts:
                keys += start
                bounds.append(len(keys))
            sizes.extend(page_sizes)
        return cls(bytes(keys), bounds, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    def start(self, index: int) -> bytes:
        return self.keys[self.bounds[index] : self.bounds[index + 1]]

    def overlapping(self, start: bytes, end: bytes) -> RegionColumns:
        """The regions that overlap ``[start, end)`` (as PD encodes them, ``end`` ``b""`` = unbounded), if there is no gap between them."""
        everything = range(len(self))
        first = max(bisect.bisect_right(everything, start, key=self.start) - 1, 0)
        last = bisect.bisect_left(everything, end, key=self.start) if end else len(self)
        last = max(first, last)
        return RegionColumns(self.keys, self.bounds[first : last + 1], self.sizes[first:last])


class RegionCache:
    """Regions by their keys, fetched from PD when unknown. Thread-safe."""

    def __init__(self, fetch: Callable[[bytes], Region]) -> None:
        """`fetch` asks PD for the region of a physical key."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._starts: list[tuple[bytes, int]] = []

    def locate(self, bound: bytes) -> Region:
        """The region of a physical key. Raises `ClusterError` when PD cannot say."""
        with self._lock:
            found = self._find(bound)
        if found is not None:
            return found
        region = self._fetch(bound)
        self.update([region])
        return region

    def update(self, regions: Iterable[Region]) -> None:
        """Add these regions, and drop those that they overlap."""
        with self._lock:
            for region in regions:
                self._drop_overlapping(region)
                self._regions[region.id] = region
                bisect.insort(self._starts, (region.start, region.id))

    def invalidate(self, region_id: int) -> None:
        """Forget a region; the next `locate` asks PD."""
        with self._lock:
            self._drop(region_id)

    def switch_leader(self, region_id: int, leader: Peer) -> None:
        """Note a new leader, if the region has such a peer; else forget the region."""
        with self._lock:
            region = self._regions.get(region_id)
            if region is None:
                return
            if any(peer.id == leader.id for peer in region.peers):
                self._regions[region_id] = replace(region, leader=leader)
            else:
                self._drop(region_id)

    def _find(self, bound: bytes) -> Region | None:
        after = bisect.bisect_right(self._starts, bound, key=lambda entry: entry[0])
        if after == 0:
            return None
        region = self._regions[self._starts[after - 1][1]]
        return region if region.contains(bound) else None

    def _drop_overlapping(self, region: Region) -> None:
        self._drop(region.id)
        at = bisect.bisect_right(self._starts, region.start, key=lambda entry: entry[0])
        first = max(at - 1, 0)
        stale = []
        for _start, region_id in self._starts[first:]:
            other = self._regions[region_id]
            if region.overlaps(other):
                stale.append(region_id)
            elif other.start > region.start:
                break
        for region_id in stale:
            self._drop(region_id)

    def _drop(self, region_id: int) -> None:
        region = self._regions.pop(region_id, None)
        if region is not None:
            del self._starts[bisect.bisect_left(self._starts, (region.start, region_id))]
