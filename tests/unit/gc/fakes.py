"""The GC state of a PD without servers: that of the playground; and an etcd of leases and keys with revisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.etcd_values import Compare, KeyValue, Listing, Operation, Put, TxnResult
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, GcStatus, ServiceSafePoint
from tikv_br.cluster.timestamps import compose
from tikv_br.errors import EtcdLeaseExpired
from tikv_br.gc.status import FOREVER
from tikv_br.playground.engine import RocksEngine
from tikv_br.playground.pd_gc import GcState


class Memory:
    """What `GcState` needs of an `RocksEngine`."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def get_meta(self, name: str) -> bytes | None:
        """See `RocksEngine`."""
        return self._records.get(name)

    def put_meta(self, records: Mapping[str, bytes]) -> None:
        """See `RocksEngine`."""
        self._records |= records


class FakePd(PdClient):
    """A PD whose clock the test moves."""

    def __init__(self, *, barriers: bool = False) -> None:
        self.seconds = 1_800_000_000.0
        self.state = GcState(cast("RocksEngine", Memory()), barriers=barriers, clock=lambda: self.seconds)
        self.updates: list[int] = []
        """Requested GC safe points."""
        self.failure: Exception | None = None

    def ago(self, seconds: float) -> int:
        """A timestamp of so long ago."""
        return compose(round((self.seconds - seconds) * 1000))

    def tso(self) -> int:
        """See `PdClient`."""
        if self.failure is not None:
            raise self.failure
        return self.ago(0)

    def update_service_safe_point(self, service_id: str, ttl_seconds: int, safe_point: int) -> int:
        """See `PdClient`."""
        return self.state.update_service(service_id, ttl_seconds, safe_point)[1].ts

    def update_gc_safe_point(self, safe_point: int) -> int:
        """See `PdClient`."""
        self.updates.append(safe_point)
        return self.state.advance(safe_point)

    def gc_safe_point(self) -> int:
        """See `PdClient`."""
        return self.state.safe_point

    def gc_status(self) -> GcStatus:
        """See `PdClient`."""
        services = self.state.services()
        worker = services.pop(GC_WORKER).ts
        held = tuple(ServiceSafePoint(name, each.ts, each.expires) for name, each in services.items())
        return GcStatus(self.state.safe_point, held, worker)

    @property
    def worker(self) -> int:
        """The safe point of gc_worker."""
        return self.state.services()[GC_WORKER].ts

    def set_worker(self, ts: int) -> None:
        """As another GC worker does it."""
        self.state.update_service(GC_WORKER, FOREVER, ts)


class FakeEtcd(Etcd):
    """Etcd in memory; leases end only by `expire`."""

    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.revision = 0
        self.leases: dict[int, int] = {}
        """TTL by id."""
        self.failure: Exception | None = None

    def grant(self, ttl_seconds: int) -> int:
        """See `Etcd`."""
        self._answer()
        self.revision += 1
        self.leases[self.revision] = ttl_seconds
        return self.revision

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """See `Etcd`."""
        self._answer()
        if lease not in self.leases:
            raise EtcdLeaseExpired("gone")
        return self.leases[lease]

    def revoke(self, lease: int) -> None:
        """See `Etcd`."""
        self.expire(lease)

    def expire(self, lease: int) -> None:
        """End a lease and remove its keys."""
        self.leases.pop(lease, None)
        self.items = {key: item for key, item in self.items.items() if item.lease != lease}

    def range(self, prefix: str) -> Listing:
        """See `Etcd`."""
        self._answer()
        found = (item for key, item in sorted(self.items.items()) if key.startswith(prefix))
        return Listing(tuple(found), self.revision)

    def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
        *,
        repeatable: bool = False,
    ) -> TxnResult:
        """See `Etcd`; only what it needs."""
        self._answer()
        for compare in compares:
            item = self.items.get(compare.key)
            if (item.create_revision if item else 0) != compare.revision:
                return TxnResult(succeeded=False, revision=self.revision, listings=())
        self.revision += 1
        for put in then:
            assert isinstance(put, Put)
            if put.lease not in self.leases:
                raise EtcdLeaseExpired("gone")
            self.items[put.key] = KeyValue(put.key, put.value, self.revision, self.revision, put.lease)
        return TxnResult(succeeded=True, revision=self.revision, listings=())

    def _answer(self) -> None:
        if self.failure is not None:
            raise self.failure
