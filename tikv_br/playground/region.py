"""Regions as values, and their sizes."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Final

from tikv_br.cluster.pb import metapb_pb2
from tikv_br.formats.keys.codec import DATA_PREFIX
from tikv_br.playground.engine import RocksEngine


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica: its id and its store."""

    id: int
    store_id: int

    def to_pb(self) -> metapb_pb2.Peer:
        return metapb_pb2.Peer(id=self.id, store_id=self.store_id)


@dataclass(frozen=True, slots=True)
class Region:
    """Bounds are physical (as PD and ``metapb.Region`` have them: V2 memcomparable); b"" is unbounded."""

    id: int
    start: bytes
    end: bytes
    conf_ver: int
    version: int
    peers: tuple[Peer, ...]
    leader_store: int

    @property
    def leader(self) -> Peer:
        return next(peer for peer in self.peers if peer.store_id == self.leader_store)

    def peer_on(self, store_id: int) -> Peer | None:
        return next((peer for peer in self.peers if peer.store_id == store_id), None)

    def contains(self, bound: bytes) -> bool:
        return self.start <= bound and (not self.end or bound < self.end)

    def data_range(self) -> tuple[bytes, bytes]:
        """[start, end) as data keys for `RocksEngine.iterate`; b"" as end is the end of all data."""
        return DATA_PREFIX + self.start, DATA_PREFIX + self.end if self.end else b""

    def to_pb(self) -> metapb_pb2.Region:
        return metapb_pb2.Region(
            id=self.id,
            start_key=self.start,
            end_key=self.end,
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=self.conf_ver, version=self.version),
            peers=[peer.to_pb() for peer in self.peers],
        )

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "id": self.id,
                "start": self.start.hex(),
                "end": self.end.hex(),
                "conf_ver": self.conf_ver,
                "version": self.version,
                "peers": [[peer.id, peer.store_id] for peer in self.peers],
                "leader_store": self.leader_store,
            }
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Region:
        fields = json.loads(text)
        return cls(
            id=fields["id"],
            start=bytes.fromhex(fields["start"]),
            end=bytes.fromhex(fields["end"]),
            conf_ver=fields["conf_ver"],
            version=fields["version"],
            peers=tuple(Peer(*peer) for peer in fields["peers"]),
            leader_store=fields["leader_store"],
        )


_RECOUNT_SHARE: Final = 8
"""A region is counted again after an eighth of its size was written."""


@dataclass(frozen=True, slots=True)
class RegionSize:
    """Rows (all versions) and bytes of keys and values of a region."""

    rows: int
    size: int


class RegionSizes:
    """The approximate sizes that PD and the split checker use. Thread-safe."""

    def __init__(self, engine: RocksEngine, weight: int = 1) -> None:
        """Each byte counts ``weight`` times."""
        self._engine = engine
        self._weight = weight
        self._lock = threading.Lock()
        self._counts: dict[int, tuple[tuple[bytes, bytes], RegionSize]] = {}  # with the bounds counted
        self._written: dict[int, int] = {}
        self.total_written = 0
        """Bytes written to all regions since the start."""

    def written(self, region_id: int, size: int) -> None:
        """Count ``size`` bytes written to a region; after an ingest, the size of the files."""
        with self._lock:
            self._written[region_id] = self._written.get(region_id, 0) + size * self._weight
            self.total_written += size

    def forget(self, region_id: int) -> None:
        """Count the region again before its size is used: its data were removed in bulk."""
        with self._lock:
            self._counts.pop(region_id, None)

    def at_most(self, region: Region) -> int:
        """An upper bound of a region's bytes; cheap once it was counted in its current bounds."""
        with self._lock:
            bounds, counted = self._counts.get(region.id, (None, None))
            if counted is not None and bounds == region.data_range():
                return counted.size + self._written.get(region.id, 0)
        return self.of(region).size

    def of(self, region: Region) -> RegionSize:
        bounds = region.data_range()
        with self._lock:
            counted_bounds, counted = self._counts.get(region.id, (None, None))
            written = self._written.get(region.id, 0)
        if counted is not None and counted_bounds == bounds and written * _RECOUNT_SHARE <= counted.size:
            return counted
        rows = size = 0
        for key, value in self._engine.iterate_data(*bounds):
            rows += 1
            size += len(key) + len(value)
        counted = RegionSize(rows, size * self._weight)
        with self._lock:
            self._counts[region.id] = bounds, counted
            self._written[region.id] = max(0, self._written.get(region.id, 0) - written)
        return counted
