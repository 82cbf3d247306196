"""State of PD, shared by its gRPC services and its HTTP API: keyspaces, safe points, stores."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Final

from tikv_br.cluster.pb import metapb_pb2, pdpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_etcd import EtcdState
from tikv_br.playground.pd_gc import GcState
from tikv_br.playground.region import RegionSizes
from tikv_br.playground.regions import RegionTable
from tikv_br.playground.settings import Settings
from tikv_br.playground.timestamps import Tso

_KEYSPACES_RECORD: Final = "keyspaces"


@dataclass(frozen=True, slots=True)
class KeyspaceRecord:
    """One keyspace; ``created_at`` in unix seconds."""

    id: int
    name: str
    created_at: int


class Keyspaces:
    """All keyspaces by name. Thread-safe."""

    def __init__(self, engine: RocksEngine, wanted: Iterable[str] = ()) -> None:
        """``wanted``: see `Settings.keyspaces`."""
        self._engine = engine
        self._lock = threading.Lock()
        saved = json.loads(engine.get_meta(_KEYSPACES_RECORD) or b"[]")
        self._by_name = {each["name"]: KeyspaceRecord(**each) for each in saved}
        if not self._by_name:
            self._add("DEFAULT")
        for name, _, keyspace_id in (each.partition("=") for each in wanted):
            if name not in self._by_name:
                self._add(name, int(keyspace_id) if keyspace_id else None)

    def load(self, name: str) -> KeyspaceRecord | None:
        with self._lock:
            return self._by_name.get(name)

    def all(self) -> list[KeyspaceRecord]:
        with self._lock:
            return sorted(self._by_name.values(), key=lambda keyspace: keyspace.id)

    def create(self, name: str) -> KeyspaceRecord:
        """Create a keyspace with the next id. Raises `PlaygroundError` when the name is taken."""
        with self._lock:
            if name in self._by_name:
                raise PlaygroundError(f"keyspace {name} exists already")
            return self._add(name)

    def _add(self, name: str, keyspace_id: int | None = None) -> KeyspaceRecord:
        if keyspace_id is None:
            used = {keyspace.id for keyspace in self._by_name.values()}
            keyspace_id = next(each for each in count() if each not in used)
        self._by_name[name] = KeyspaceRecord(keyspace_id, name, int(time.time()))
        record = json.dumps([asdict(keyspace) for keyspace in self._by_name.values()])
        self._engine.put_meta({_KEYSPACES_RECORD: record.encode()})
        return self._by_name[name]


NAME: Final = "pd1"
_GLOBAL_CONFIG: Final = "global_config"


@dataclass(slots=True)
class PdState:
    """State that all members of PD share."""

    settings: Settings
    cluster_id: int
    engine: RocksEngine
    regions: RegionTable
    sizes: RegionSizes
    tso: Tso
    gc: GcState
    keyspaces: Keyspaces
    etcd: EtcdState
    nodes: Mapping[int, StoreNode]
    addresses: list[str] = field(default_factory=list)
    """host:port of each member, known once its port is open."""
    leader: int | None = 0
    """Index of the leader; None = there is none."""
    named: int | None = 0
    """Index of the leader according to the others: still the dead one, or already one that does not serve yet."""
    former: int | None = None
    """Index of the previous leader."""
    died: int | None = None
    """Index of the member that is down."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    _config_lock: threading.Lock = field(default_factory=threading.Lock)

    def end_leadership(self) -> None:
        """End the leadership; other members still name the former leader."""
        self.tso.available = False
        self.former, self.leader = self.leader, None

    def lead(self, index: int) -> None:
        """The member leads, with timestamps above all earlier ones."""
        self.tso.sync()
        self.leader = self.named = index

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def member_id(self) -> int:
        """An id that stays the same for a playground."""
        return self.cluster_id ^ 0x5A5A_5A5A_5A5A_5A5A

    @property
    def client_url(self) -> str:
        return self._url(self.address)

    def members(self) -> list[pdpb_pb2.Member]:
        return [
            pdpb_pb2.Member(
                name=NAME if index == 0 else f"pd{index + 1}",
                member_id=self.member_id + index,
                peer_urls=[self._url(address)],
                client_urls=[self._url(self.settings.pd_advertises or address)],
            )
            for index, address in enumerate(self.addresses)
        ]

    def _url(self, address: str) -> str:
        return f"{'https' if self.settings.tls else 'http'}://{address}"

    def store(self, node: StoreNode) -> metapb_pb2.Store:
        """A store as PD lists it: PD does not take it off its list when it is down."""
        return metapb_pb2.Store(
            id=node.store_id,
            address=node.address,
            version=self.settings.release.tikv,
            peer_address=node.address,
            status_address=node.status_address,
            git_hash="Unknown git hash",
            start_timestamp=self.started_at,
            deploy_path=str(node.data_dir),
        )

    def store_global_config(self, path: str, changes: Mapping[str, str | None]) -> None:
        """Set (or, with None, delete) named values under a path."""
        with self._config_lock:
            everything = self._global_config()
            values = everything.setdefault(path, {})
            for name, value in changes.items():
                if value is None:
                    values.pop(name, None)
                else:
                    values[name] = value
            self.engine.put_meta({_GLOBAL_CONFIG: json.dumps(everything).encode()})

    def load_global_config(self, path: str) -> dict[str, str]:
        with self._config_lock:
            return dict(self._global_config().get(path, {}))

    def _global_config(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self.engine.get_meta(_GLOBAL_CONFIG) or b"{}")
        return kept
