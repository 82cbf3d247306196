"""State of PD, shared by its gRPC services and its HTTP API: keyspaces, safe points, stores."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tikv_br.cluster.pb import metapb_pb2, pdpb_pb2
from tikv_br.errors import PlaygroundError
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.node import StoreNode
from tikv_br.playground.pd_etcd import EtcdState
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

    def __init__(self, engine: RocksEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        saved = json.loads(engine.get_meta(_KEYSPACES_RECORD) or b"[]")
        self._by_name = {each["name"]: KeyspaceRecord(**each) for each in saved}
        if not self._by_name:
            self._add("DEFAULT")

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

    def _add(self, name: str) -> KeyspaceRecord:
        next_id = max((keyspace.id for keyspace in self._by_name.values()), default=-1) + 1
        self._by_name[name] = KeyspaceRecord(next_id, name, int(time.time()))
        record = json.dumps([asdict(keyspace) for keyspace in self._by_name.values()])
        self._engine.put_meta({_KEYSPACES_RECORD: record.encode()})
        return self._by_name[name]


GC_WORKER: Final = "gc_worker"
FOREVER: Final = (1 << 63) - 1
"""A TTL or an expiry that never comes."""
_GC_RECORD: Final = "gc"


class GcRefusal(Exception):
    """PD refuses a GC request; the text is PD's."""


@dataclass(frozen=True, slots=True)
class ServiceSafePoint:
    """A service's safe point, or a barrier: data at and above ``ts`` must stay until ``expires`` (unix seconds)."""

    ts: int
    expires: int


class GcState:
    """Safe points as PD 8.5.2 keeps them, or, with ``barriers``, as PDs with a GC state manager do. Thread-safe."""

    def __init__(self, engine: RocksEngine, *, barriers: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self.has_barriers = barriers
        self._clock = clock
        self._lock = threading.Lock()
        saved = json.loads(engine.get_meta(_GC_RECORD) or b"{}")
        self._safe_point: int = saved.get("safe_point", 0)
        self._services = {name: ServiceSafePoint(*safe_point) for name, safe_point in saved.get("services", {}).items()}
        self._services.setdefault(GC_WORKER, ServiceSafePoint(0, FOREVER))
        self._barriers = {
            (name, keyspace_id): ServiceSafePoint(ts, expires)
            for name, keyspace_id, ts, expires in saved.get("barriers", [])
        }

    @property
    def safe_point(self) -> int:
        """Timestamp up to which GC may have removed versions."""
        with self._lock:
            return self._safe_point

    def advance(self, ts: int) -> int:
        """Move the safe point up to ``ts``, never down; returns where it is. Raises `GcRefusal`, with barriers only."""
        with self._lock:
            if self.has_barriers and ts > max(self._safe_point, limit := self._services[GC_WORKER].ts):
                raise GcRefusal(
                    "[PD:gc:ErrGCSafePointExceedsTxnSafePoint]trying to update GC safe point to a too large value, "
                    f"by which the GC safe point would exceed the txn safe point, old GC safe point {self._safe_point}, "
                    f"attempted GC safe point {ts}, txn safe point {limit}"
                )
            if ts > self._safe_point:
                self._safe_point = ts
                self._save()
            return self._safe_point

    def services(self) -> dict[str, ServiceSafePoint]:
        """The safe points that have not expired, by service."""
        with self._lock:
            return dict(self._unexpired())

    def update_service(self, service: str, ttl: int, ts: int) -> tuple[str, ServiceSafePoint]:
        """Set or (TTL of 0 or less) remove a service's safe point; returns the lowest one then, with its owner.

        One below the lowest is not set, which is no error: the caller sees it from the answer. Raises `GcRefusal`.
        """
        if service == GC_WORKER and ttl != FOREVER:
            raise GcRefusal("TTL of gc_worker's service safe point must be infinity")
        with self._lock:
            self._set_service(service, ttl, ts)
            self._save()
            return self._lowest()

    def set_barrier(self, barrier: str, ts: int, ttl: int) -> ServiceSafePoint:
        """Set a GC barrier. Raises `GcRefusal` for one behind the transaction safe point or of a reserved name."""
        if barrier in {"", GC_WORKER}:
            raise GcRefusal(f"[PD:gc:ErrReservedGCBarrierID]trying to set a GC barrier with reserved id {barrier!r}")
        with self._lock:
            behind = self._services[GC_WORKER].ts
            if ts < behind:
                raise GcRefusal(
                    "[PD:gc:ErrGCBarrierTSBehindTxnSafePoint]trying to set a GC barrier with ts "
                    f"{ts} which is already behind the txn safe point {behind}"
                )
            self._services[barrier] = ServiceSafePoint(ts, self._expiry(ttl))
            self._save()
            return self._services[barrier]

    def set_other_barrier(self, barrier: str, ts: int, ttl: int, keyspace_id: int | None) -> None:
        """Set a GC barrier of a keyspace that has its own GC, or a global one. Raises `GcRefusal` for a global one that GC has passed."""
        with self._lock:
            behind = self._services[GC_WORKER].ts
            if keyspace_id is None and ts < behind:
                raise GcRefusal(
                    "[PD:gc:ErrGlobalGCBarrierTSBehindTxnSafePoint]trying to set a global GC barrier with ts "
                    f"{ts} which is already behind the txn safe point {behind}"
                )
            self._barriers[barrier, keyspace_id] = ServiceSafePoint(ts, self._expiry(ttl))
            self._save()

    def other_barriers(self) -> dict[tuple[str, int | None], ServiceSafePoint]:
        """Global barriers, and those of keyspaces that have their own GC, by name and keyspace."""
        with self._lock:
            now = self.now()
            self._barriers = {key: each for key, each in self._barriers.items() if each.expires > now}
            return dict(self._barriers)

    def delete_barrier(self, barrier: str) -> ServiceSafePoint | None:
        """Remove a barrier and return it, None if there was none."""
        with self._lock:
            removed = self._services.pop(barrier, None) if barrier != GC_WORKER else None
            self._save()
            return removed

    def _set_service(self, service: str, ttl: int, ts: int) -> None:
        if ttl <= 0:
            self._services.pop(service, None)
        elif self.has_barriers and service == GC_WORKER:
            now = self.now()
            held = [
                each.ts
                for (_, keyspace_id), each in self._barriers.items()
                if keyspace_id is None and each.expires > now
            ]
            held += [safe_point.ts for name, safe_point in self._unexpired().items() if name != GC_WORKER]
            lowest = min(held, default=ts)
            self._services[service] = ServiceSafePoint(max(self._services[service].ts, min(ts, lowest)), FOREVER)
        elif ts >= self._lowest()[1].ts:
            self._services[service] = ServiceSafePoint(ts, self._expiry(ttl))

    def _lowest(self) -> tuple[str, ServiceSafePoint]:
        if self.has_barriers:
            return GC_WORKER, self._services[GC_WORKER]
        return min(sorted(self._unexpired().items()), key=lambda item: item[1].ts)

    def _unexpired(self) -> dict[str, ServiceSafePoint]:
        now = self.now()
        self._services = {name: safe_point for name, safe_point in self._services.items() if safe_point.expires > now}
        return self._services

    def _expiry(self, ttl: int) -> int:
        return min(self.now() + ttl, FOREVER)

    def now(self) -> int:
        return int(self._clock())

    def _save(self) -> None:
        services = {name: [safe_point.ts, safe_point.expires] for name, safe_point in self._services.items()}
        barriers = [[*key, each.ts, each.expires] for key, each in self._barriers.items()]
        record = json.dumps({"safe_point": self._safe_point, "services": services, "barriers": barriers})
        self._engine.put_meta({_GC_RECORD: record.encode()})


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
        """host:port of the first member."""
        return self.addresses[0]

    @property
    def member_id(self) -> int:
        """An id that stays the same for a playground."""
        return self.cluster_id ^ 0x5A5A_5A5A_5A5A_5A5A

    @property
    def client_url(self) -> str:
        return self._url(self.address)

    def members(self) -> list[pdpb_pb2.Member]:
        """All members."""
        return [
            pdpb_pb2.Member(
                name=NAME if index == 0 else f"pd{index + 1}",
                member_id=self.member_id + index,
                peer_urls=[self._url(address)],
                client_urls=[self._url(address)],
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
