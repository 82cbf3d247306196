"""The regions of a playground: who covers which keys, who leads, and what becomes of them by split, merge and move.

There is no Raft behind it: one table, shared by PD and all stores, is the truth at once. It is kept in the engine, so it
survives a SIGKILL as the data do.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from tikv_br.cluster.pb import errorpb_pb2, kvrpcpb_pb2, metapb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground import region_errors
from tikv_br.playground.engine import Engine
from tikv_br.playground.region import Peer, Region

_RECORD: Final = "region/"
_NEXT_ID: Final = "next_id"
_MAX_SIBLINGS: Final = 10

RegionListener = Callable[[Region], None]
"""Called with a region after it got a new leader (also when it is new, or has swallowed another)."""
ChangeListener = Callable[[Sequence[Region], Sequence[Region]], None]
"""Called with regions as they were and what took their place: pieces, the merged one, or the one with a new leader."""


class RegionTable:
    """All regions of the cluster, ordered by key without hole or overlap. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
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

    # -- identity -----------------------------------------------------------------------------------------------

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
        """Forget everything: for a bootstrap that was cut off before anybody could know of it."""
        with self._lock:
            self._apply(self.all(), [])
            self._next_id = 1
            self._engine.put_meta({_NEXT_ID: None})

    def on_new_leader(self, listener: RegionListener) -> None:
        """Have ``listener`` called, outside the lock, whenever a region gets a (new) leader, or splits before it is synced."""
        self._listeners.append(listener)

    def on_change(self, listener: ChangeListener) -> None:
        """Have ``listener`` called, outside the lock, after every split, merge and change of leader."""
        self._change_listeners.append(listener)

    # -- looking ------------------------------------------------------------------------------------------------

    def get(self, region_id: int) -> Region | None:
        """The region of that id, None if there is none."""
        with self._lock:
            return self._by_id.get(region_id)

    def all(self) -> list[Region]:
        """Every region in key order."""
        with self._lock:
            return [self._by_id[region_id] for region_id in self._ids]

    def locate(self, bound: bytes) -> Region:
        """The region that holds a physical key. Raises `PlaygroundError` before bootstrap."""
        with self._lock:
            if not self._ids:
                raise PlaygroundError("the cluster is not bootstrapped")
            return self._by_id[self._ids[bisect.bisect_right(self._starts, bound) - 1]]

    def overlapping(self, start: bytes, end: bytes, limit: int = 0) -> list[Region]:
        """The regions that meet [start, end) in key order; ``end`` b"" unbounded, ``limit`` 0 = all."""
        with self._lock:
            first = max(bisect.bisect_right(self._starts, start) - 1, 0)
            last = bisect.bisect_left(self._starts, end) if end else len(self._ids)
            ids = self._ids[first:last]
            return [self._by_id[region_id] for region_id in (ids[:limit] if limit > 0 else ids)]

    def previous(self, bound: bytes) -> Region | None:
        """The region left of the one that holds ``bound``, None at the left edge."""
        with self._lock:
            index = bisect.bisect_right(self._starts, bound) - 2
            return self._by_id[self._ids[index]] if index >= 0 else None

    # -- changing -----------------------------------------------------------------------------------------------

    def split(self, region_id: int, keys: Iterable[bytes], ids: Sequence[Sequence[int]] = ()) -> list[Region]:
        """Split at physical keys and return the pieces from left to right; the original id keeps the rightmost.

        Keys at or outside the bounds are dropped; with none left the region comes back alone, unchanged.
        ``ids`` may give (region id, peer ids…) for each new piece, allocated otherwise.
        """
        with self._lock:
            region = self._must_get(region_id)
            cuts = sorted({key for key in keys if key > region.start and region.contains(key)})
            if not cuts:
                return [region]
            pieces = self._pieces(region, cuts, ids)
            unsynced = region.id in self._unsynced
            self._apply([region], pieces)
            if unsynced:
                self._unsynced.update(piece.id for piece in pieces)
        self._changed([region], pieces)
        if unsynced:  # whoever is about to sync the region knows nothing of its pieces
            for piece in pieces:
                self._announce(piece)
        return pieces

    def merge(self, source_id: int, target_id: int) -> Region:
        """Let the neighbour ``target_id`` swallow ``source_id``. Raises `PlaygroundError` when they do not touch."""
        with self._lock:
            source, target = self._must_get(source_id), self._must_get(target_id)
            left, right = sorted((source, target), key=lambda region: region.start)
            if left.end != right.start or not left.end:
                raise PlaygroundError(f"regions {source_id} and {target_id} are no neighbours")
            version = max(source.version, target.version) + 1
            merged = replace(target, start=left.start, end=right.end, version=version)
            self._apply([source, target], [merged])
            self._unsynced.add(merged.id)
        self._changed([source, target], [merged])
        self._announce(merged)
        return merged

    def transfer_leader(self, region_id: int, store_id: int) -> Region:
        """Let the peer on ``store_id`` lead. Raises `PlaygroundError` when there is none."""
        with self._lock:
            region = self._must_get(region_id)
            if region.peer_on(store_id) is None:
                raise PlaygroundError(f"region {region_id} has no peer on store {store_id}")
            if region.leader_store == store_id:
                return region
            before, region = region, replace(region, leader_store=store_id)
            self._apply([region], [region])
            self._unsynced.add(region.id)
        self._changed([before], [region])
        self._announce(region)
        return region

    def add_peer(self, region_id: int, store_id: int) -> Region:
        """Add a voter on a store that has none; the epoch's conf_ver grows by two (learner, voter)."""
        with self._lock:
            region = self._must_get(region_id)
            if region.peer_on(store_id) is not None:
                raise PlaygroundError(f"region {region_id} has a peer on store {store_id} already")
            peers = (*region.peers, Peer(self.alloc_id(), store_id))
            region = replace(region, peers=peers, conf_ver=region.conf_ver + 2)
            self._apply([region], [region])
            return region

    def move(self, region_id: int, from_store: int, to_store: int) -> Region:
        """Move one peer to a store that has none; the epoch's conf_ver grows by two (add, remove)."""
        with self._lock:
            region = self._must_get(region_id)
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
            self._changed([before], [region])
            self._announce(region)
        return region

    # -- leadership and life of stores --------------------------------------------------------------------------

    def mark_synced(self, region_id: int) -> None:
        """The region's leader has flushed its causal timestamps: V2 writes may go on."""
        with self._lock:
            self._unsynced.discard(region_id)

    def is_synced(self, region_id: int) -> bool:
        """Whether the leader takes V2 writes (it does not right after it came to lead)."""
        with self._lock:
            return region_id not in self._unsynced

    def set_store_down(self, store_id: int, *, down: bool) -> None:
        """A down store's peers do not count as leaders in the answers of the others."""
        with self._lock:
            (self._down_stores.add if down else self._down_stores.discard)(store_id)

    def led_by(self, store_id: int) -> list[Region]:
        """The regions that a store leads, in key order."""
        return [region for region in self.all() if region.leader_store == store_id]

    # -- the checks before every request ------------------------------------------------------------------------

    def check(
        self, context: kvrpcpb_pb2.Context, store_id: int, *, exact_epoch: bool = False, read: bool = False
    ) -> errorpb_pb2.Error | None:
        """What a store answers before it looks at a request's keys, None when all fits.

        Order as in TiKV: store, region, (leader for writes,) peer, epoch, (leader for reads). The epoch's version
        is compared; with ``exact_epoch`` (split, ingest) conf_ver too. Keys are checked by the caller with
        `region_errors.key_not_in_region`.
        """
        if context.peer.store_id != store_id:
            return region_errors.store_not_match(context.peer.store_id, store_id)
        with self._lock:
            region = self._by_id.get(context.region_id)
            mine = region.peer_on(store_id) if region else None
            if region is None or mine is None:
                return region_errors.region_not_found(context.region_id, read=read)
            leading = region.leader_store == store_id
            if not leading and not read:
                return self.not_leader(region)
            if context.peer.id != mine.id:
                return region_errors.mismatch_peer_id(context.peer.id, mine.id)
            epoch = context.region_epoch
            if epoch.version != region.version or (exact_epoch and epoch.conf_ver != region.conf_ver):
                return region_errors.epoch_not_match(region, epoch, self.siblings(region, epoch))
            return None if leading else self.not_leader(region)

    def siblings(self, region: Region, sent: metapb_pb2.RegionEpoch) -> list[Region]:
        """The region and, for a caller behind, the regions left of it that may have split off since then."""
        with self._lock:
            found = [region]
            newest, wanted = region.version, region.version - sent.version
            index = bisect.bisect_left(self._starts, region.start)
            while wanted > 0 and index > 0 and len(found) <= _MAX_SIBLINGS:
                index -= 1
                sibling = self._by_id[self._ids[index]]
                wanted -= 1
                if sibling.version >= newest:
                    wanted += sibling.version - newest
                    newest = sibling.version
                found.append(sibling)
            return found

    def not_leader(self, region: Region) -> errorpb_pb2.Error:
        """What a store that only follows answers, with a hint at the leader if that lives."""
        leader = None if region.leader_store in self._down_stores else region.leader
        return region_errors.not_leader(region.id, leader)

    # -- inside -------------------------------------------------------------------------------------------------

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

    def _must_get(self, region_id: int) -> Region:
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

    def _changed(self, old: Sequence[Region], new: Sequence[Region]) -> None:
        for listener in self._change_listeners:
            listener(old, new)

    def _announce(self, region: Region) -> None:
        for listener in self._listeners:
            listener(region)
