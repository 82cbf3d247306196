"""A region as a value: bounds, epoch, peers and who leads it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from formats.keys import DATA_PREFIX
from tikv_br.cluster.pb import metapb_pb2


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica's seat: its own id and the store it is on."""

    id: int
    store_id: int

    def to_pb(self) -> metapb_pb2.Peer:
        """As `metapb.Peer`."""
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
        """The peer that leads."""
        return next(peer for peer in self.peers if peer.store_id == self.leader_store)

    def peer_on(self, store_id: int) -> Peer | None:
        """This region's peer on a store, None if it has none there."""
        return next((peer for peer in self.peers if peer.store_id == store_id), None)

    def contains(self, bound: bytes) -> bool:
        """Whether a physical key lies in [start, end)."""
        return self.start <= bound and (not self.end or bound < self.end)

    def data_range(self) -> tuple[bytes, bytes]:
        """[start, end) as data keys for `Engine.iterate`; b"" as end is the end of all data."""
        return DATA_PREFIX + self.start, DATA_PREFIX + self.end if self.end else b""

    def to_pb(self) -> metapb_pb2.Region:
        """As `metapb.Region`."""
        return metapb_pb2.Region(
            id=self.id,
            start_key=self.start,
            end_key=self.end,
            region_epoch=metapb_pb2.RegionEpoch(conf_ver=self.conf_ver, version=self.version),
            peers=[peer.to_pb() for peer in self.peers],
        )

    def to_json(self) -> bytes:
        """As it is kept on disk."""
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
        """The inverse of `to_json`."""
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
