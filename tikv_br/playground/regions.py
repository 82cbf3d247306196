"""The regions of a playground: their bounds, replicas and leaders, and how splits, merges and moves change them.

There is no Raft: PD and all stores share one table. It is saved in the engine, so it survives a SIGKILL as the data do.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from tikv_br.cluster.pb import errorpb_pb2, metapb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground import region_errors
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.region import Peer, Region

_RECORD: Final = "region/"
_NEXT_ID: Final = "next_id"
_MAX_SIBLINGS: Final = 10

RegionListener = Callable[[Region], None]
"""Called with a region after it got a new leader, or was merged."""
ChangeListener = Callable[[Sequence[Region], Sequence[Region]], None]
"""Called with regions as they were and what replaced them: pieces, the merged one, or the one with a new leader."""


class RegionTable:
    """All regions of the cluster, ordered by key without gap or overlap. Thread-safe."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._by_id: dict[int, Region] = {}
        self._starts: list[bytes] = []
        self._ids: list[int] = []  # same order as _starts
        self._unsynced: set[int] = set()
        self._down_stores: set[int] = set()
        self._listeners: list[RegionListener] = []
        self._change_listeners: list[ChangeListener] = []
        for _, record in engine.list_meta(_RECORD):
            self._insert(Region.from_json(record))
        self._next_id = int(engine.get_meta(_NEXT_ID) or b"1")

    def alloc_id(self, count: int = 1) -> int:
        """Allocate ``count`` cluster-wide ids (stores, regions, peers share them) and return the last."""
        with self._lock:
            self._next_id += count
            self._engine.put_meta({_NEXT_ID: str(self._next_id).encode()})
            return self._next_id - 1

    def bootstrap(self, store_id: int) -> Region:
        """Create the first region, over the whole key space, with its one voter on a store."""
        with self._lock:
            if self._by_id:
                raise PlaygroundError("the cluster is bootstrapped already")
            region_id = self.alloc_id()
            region = Region(region_id, b"", b"", 1, 1, (Peer(self.alloc_id(), store_id),), store_id)
            self._apply([], [region])
            return region

    def clear(self) -> None:
        """Remove everything: after a bootstrap that was interrupted."""
        with self._lock:
            self._apply(self.all(), [])
            self._next_id = 1
            self._engine.put_meta({_NEXT_ID: None})

    def on_new_leader(self, listener: RegionListener) -> None:
        """Call ``listener``, outside the lock, for each region with a new leader, and pieces of one that is not synced."""
        self._listeners.append(listener)

    def on_change(self, listener: ChangeListener) -> None:
        """Call ``listener``, outside the lock, after every split, merge and change of leader."""
        self._change_listeners.append(listener)

    def get(self, region_id: int) -> Region | None:
        with self._lock:
            return self._by_id.get(region_id)

    def all(self) -> list[Region]:
        with self._lock:
            return [self._by_id[region_id] for region_id in self._ids]

    def locate(self, bound: bytes) -> Region:
        """The region that contains a physical key. Raises `PlaygroundError` before bootstrap."""
        with self._lock:
            if not self._ids:
                raise PlaygroundError("the cluster is not bootstrapped")
            return self._by_id[self._ids[bisect.bisect_right(self._starts, bound) - 1]]

    def overlapping(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """The regions that overlap [start, end), in key order; ``end`` b"" unbounded, ``limit`` 0 = all."""
        with self._lock:
            first = max(bisect.bisect_right(self._starts, start) - 1, 0)
            last = bisect.bisect_left(self._starts, end) if end else len(self._ids)
            ids = self._ids[first:last]
            return [self._by_id[region_id] for region_id in (ids[:limit] if limit > 0 else ids)]

    def previous(self, bound: bytes) -> Region | None:
        """The region left of the one that contains ``bound``, None at the left edge."""
        with self._lock:
            index = bisect.bisect_right(self._starts, bound) - 2
            return self._by_id[self._ids[index]] if index >= 0 else None

    def led_by(self, store_id: int) -> list[Region]:
        return [region for region in self.all() if region.leader_store == store_id]

    def split(self, region_id: int, keys: Iterable[bytes], ids: Sequence[Sequence[int]] = ()) -> list[Region]:
        """Split at physical keys and return the pieces from left to right; the original id keeps the rightmost.

        Keys at or outside the bounds are ignored. ``ids`` may give (region id, peer ids…) for each new piece.
        """
        with self._lock:
            region = self._get_or_raise(region_id)
            cuts = sorted({key for key in keys if key > region.start and region.contains(key)})
            if not cuts:
                return [region]
            pieces = self._pieces(region, cuts, ids)
            unsynced = region.id in self._unsynced
            self._apply([region], pieces)
            if unsynced:
                self._unsynced.update(piece.id for piece in pieces)
        self._changed([region], pieces, pieces if unsynced else ())  # the pending sync covers only the original id
        return pieces

    def merge(self, source_id: int, target_id: int) -> Region:
        """Merge ``source_id`` into its neighbour ``target_id``. Raises `PlaygroundError` if they are not neighbours."""
        with self._lock:
            source, target = self._get_or_raise(source_id), self._get_or_raise(target_id)
            left, right = sorted((source, target), key=lambda region: region.start)
            if left.end != right.start or not left.end:
                raise PlaygroundError(f"regions {source_id} and {target_id} are no neighbours")
            version = max(source.version, target.version) + 1
            merged = replace(target, start=left.start, end=right.end, version=version)
            self._apply([source, target], [merged])
            self._unsynced.add(merged.id)
        self._changed([source, target], [merged], [merged])
        return merged

    def transfer_leader(self, region_id: int, store_id: int) -> Region:
        """Make the peer on ``store_id`` leader. Raises `PlaygroundError` if there is none."""
        with self._lock:
            region = self._get_or_raise(region_id)
            if region.peer_on(store_id) is None:
                raise PlaygroundError(f"region {region_id} has no peer on store {store_id}")
            if region.leader_store == store_id:
                return region
            before, region = region, replace(region, leader_store=store_id)
            self._apply([region], [region])
            self._unsynced.add(region.id)
        self._changed([before], [region], [region])
        return region

    def add_peer(self, region_id: int, store_id: int) -> Region:
        """Add a voter on a store that has none; the epoch's conf_ver grows by two (learner, voter)."""
        with self._lock:
            region = self._get_or_raise(region_id)
            if region.peer_on(store_id) is not None:
                raise PlaygroundError(f"region {region_id} has a peer on store {store_id} already")
            peers = (*region.peers, Peer(self.alloc_id(), store_id))
            region = replace(region, peers=peers, conf_ver=region.conf_ver + 2)
            self._apply([region], [region])
            return region

    def move(self, region_id: int, from_store: int, to_store: int) -> Region:
        """Move one peer to a store that has none; the epoch's conf_ver grows by two (add, remove)."""
        with self._lock:
            region = self._get_or_raise(region_id)
            if region.peer_on(from_store) is None or region.peer_on(to_store) is not None:
                raise PlaygroundError(f"region {region_id} cannot move from store {from_store} to {to_store}")
            newcomer = Peer(self.alloc_id(), to_store)
            peers = tuple(newcomer if peer.store_id == from_store else peer for peer in region.peers)
            led = region.leader_store == from_store
            leader_store = to_store if led else region.leader_store
            before = region
            region = replace(region, peers=peers, leader_store=leader_store, conf_ver=region.conf_ver + 2)
            self._apply([region], [region])
            if led:
                self._unsynced.add(region.id)
        if led:
            self._changed([before], [region], [region])
        return region

    def scatter(self, region_ids: Iterable[int], stores: Sequence[int]) -> list[int]:
        """Make the stores leaders in turn, moving the leader's replica if necessary; returns the ids of missing regions."""
        missing = []
        for turn, region_id in enumerate(region_ids):
            region, store_id = self.get(region_id), stores[turn % len(stores)]
            if region is None:
                missing.append(region_id)
            elif region.peer_on(store_id):
                self.transfer_leader(region_id, store_id)
            else:
                self.move(region_id, region.leader_store, store_id)
        return missing

    def mark_synced(self, region_id: int) -> None:
        """The region's leader has flushed its causal timestamps: it accepts V2 writes."""
        with self._lock:
            self._unsynced.discard(region_id)

    def is_synced(self, region_id: int) -> bool:
        """Return whether the leader accepts V2 writes; a new one does not at first."""
        with self._lock:
            return region_id not in self._unsynced

    def set_store_down(self, store_id: int, *, down: bool) -> None:
        """The other stores do not name peers of a down store as leaders."""
        with self._lock:
            (self._down_stores.add if down else self._down_stores.discard)(store_id)

    def siblings(self, region: Region, sent: metapb_pb2.RegionEpoch) -> list[Region]:
        """The region and, for a caller with an older epoch, the regions left of it that may have split off since."""
        with self._lock:
            found = [region]
            newest, missing = region.version, region.version - sent.version
            index = bisect.bisect_left(self._starts, region.start)
            while missing > 0 and index > 0 and len(found) <= _MAX_SIBLINGS:
                index -= 1
                sibling = self._by_id[self._ids[index]]
                missing -= 1
                if sibling.version >= newest:
                    missing += sibling.version - newest
                    newest = sibling.version
                found.append(sibling)
            return found

    def not_leader(self, region: Region) -> errorpb_pb2.Error:
        """The error of a store that does not lead, with the leader if that is alive."""
        leader = None if region.leader_store in self._down_stores else region.leader
        return region_errors.not_leader(region.id, leader)

    def _pieces(self, region: Region, cuts: Sequence[bytes], ids: Sequence[Sequence[int]]) -> list[Region]:
        version = region.version + len(cuts)
        pieces = []
        start = region.start
        for index, cut in enumerate(cuts):
            region_id, *peer_ids = ids[index] if index < len(ids) else self._new_ids(len(region.peers))
            peers = tuple(Peer(new, peer.store_id) for new, peer in zip(peer_ids, region.peers, strict=True))
            pieces.append(replace(region, id=region_id, start=start, end=cut, version=version, peers=peers))
            start = cut
        return [*pieces, replace(region, start=start, version=version)]

    def _new_ids(self, peers: int) -> list[int]:
        last = self.alloc_id(1 + peers)
        return list(range(last - peers, last + 1))

    def _get_or_raise(self, region_id: int) -> Region:
        region = self._by_id.get(region_id)
        if region is None:
            raise PlaygroundError(f"there is no region {region_id}")
        return region

    def _apply(self, old: Iterable[Region], new: Iterable[Region]) -> None:
        """Replace regions on disk in one batch, then in memory."""
        records: dict[str, bytes | None] = {f"{_RECORD}{region.id}": None for region in old}
        records.update({f"{_RECORD}{region.id}": region.to_json() for region in new})
        self._engine.put_meta(records)
        for region in old:
            self._remove(region.id)
        for region in new:
            self._insert(region)

    def _insert(self, region: Region) -> None:
        index = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(index, region.start)
        self._ids.insert(index, region.id)
        self._by_id[region.id] = region

    def _remove(self, region_id: int) -> None:
        region = self._by_id.pop(region_id)
        index = bisect.bisect_left(self._starts, region.start)
        del self._starts[index], self._ids[index]
        self._unsynced.discard(region_id)

    def _changed(self, old: Sequence[Region], new: Sequence[Region], unsynced: Sequence[Region]) -> None:
        for change_listener in self._change_listeners:
            change_listener(old, new)
        for region in unsynced:
            for listener in self._listeners:
                listener(region)
