"""The safe points of GC and of all services: who they belong to, how old they are, and which one holds GC back.

Removes a service safe point that no living run renews any more.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.cluster import safepoint
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, GcBarrier, GcStatus, ServiceSafePoint, gc_status
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import ClusterError, SafePointInUse, UsageError

if TYPE_CHECKING:
    from tikv_br.cluster.locks import LiveLock


FOREVER = (1 << 63) - 1
"""The TTL of ``gc_worker``, and its expiry: never. PD takes no other."""
_NEVER = 1 << 40
"""Seconds since the epoch from which on an expiry means never."""


class OwnerKind(enum.StrEnum):
    """Kind of owner of a service safe point."""

    BACKUP = "backup"
    """A backup of tikv-br; its name is the id of the run."""
    SYNC = "sync"
    """A sync, a changefeed or a log archive of tikv-br, by its id: they share one namespace."""
    DRILL = "drill"
    GO_BR = "br"
    """A backup of the Go TiKV-BR, or of TiDB's BR."""
    CDC = "cdc"
    """Changefeed of TiKV-CDC or TiCDC."""
    GLOBAL_BARRIER = "global_barrier"
    """A GC barrier for all keyspaces, which any program may have set."""
    KEYSPACE_BARRIER = "keyspace_barrier"
    """A GC barrier of a keyspace that has a GC of its own; its name is the keyspace's id."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SafePointOwner:
    """Owner of a service safe point, according to its name."""

    kind: OwnerKind
    name: str
    """Within its kind; of `OwnerKind.OTHER` the whole name of the service."""

    @property
    def is_ours(self) -> bool:
        """Return whether a run of tikv-br made it."""
        return self.kind in {OwnerKind.BACKUP, OwnerKind.SYNC, OwnerKind.DRILL}

    def __str__(self) -> str:
        if self.kind is OwnerKind.CDC and self.name.startswith(
            CREATING
        ):  # held for ten minutes, until the changefeed has its own
            return (
                f"create or resume of changefeed {self.name.removeprefix(CREATING)} of TiKV-CDC; expires automatically"
            )
        return _TEXTS[self.kind].format(self.name)


_TEXTS = {
    OwnerKind.BACKUP: "backup {}",
    OwnerKind.SYNC: "sync, changefeed or log {}",
    OwnerKind.DRILL: "drill {}",
    OwnerKind.GO_BR: "backup of the Go TiKV-BR or of BR",
    OwnerKind.CDC: "TiKV-CDC or TiCDC",
    OwnerKind.GLOBAL_BARRIER: "all keyspaces: a global GC barrier",
    OwnerKind.KEYSPACE_BARRIER: "keyspace {}: a barrier of its own GC",
    OwnerKind.OTHER: "not known",
}
CREATING = "-creating-"
_PREFIXES = {
    "tikv-br-backup-": OwnerKind.BACKUP,
    "tikv-br-sync-": OwnerKind.SYNC,
    "tikv-br-drill-": OwnerKind.DRILL,
    "br-": OwnerKind.GO_BR,
    "native_br": OwnerKind.GO_BR,
    "tikvcdc": OwnerKind.CDC,
    "ticdc": OwnerKind.CDC,
}


def owner_of(service: str) -> SafePointOwner:
    """Return the owner of a service safe point, as far as its name shows it."""
    for prefix, kind in _PREFIXES.items():
        if service.startswith(prefix):
            return SafePointOwner(kind, service.removeprefix(prefix))
    return SafePointOwner(OwnerKind.OTHER, service)


def followers(cluster: Cluster) -> list[str]:
    """The safe points in PD of what follows the cluster, or did within the TTL; none if PD does not list them."""
    with contextlib.suppress(ClusterError):
        found = [each.service for each in gc_status(cluster.pd_http).services if each.expires > cluster.clock.now()]
        return [service for service in found if owner_of(service).kind in {OwnerKind.SYNC, OwnerKind.CDC}]
    return []


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """A service safe point at one moment."""

    service: str
    owner: SafePointOwner
    safe_point: int
    lag: float
    """Seconds from the time of the safe point to PD's time."""
    ttl: float | None
    """Seconds until PD drops it unless it is renewed; not above 0 if it has expired; None = never."""

    @property
    def has_expired(self) -> bool:
        """Return whether GC no longer waits for it; PD still lists it until its next update."""
        return self.ttl is not None and self.ttl <= 0


@dataclass(frozen=True, slots=True)
class GcReport:
    """Progress of GC at one moment, and the services that limit it."""

    now_ms: int
    """Time of PD."""
    safe_point: int
    """Timestamp up to which versions may have been removed; 0 = GC has never run."""
    worker_safe_point: int
    """Timestamp up to which the last GC worker wanted to remove versions; 0 = there has been none."""
    services: tuple[ServiceReport, ...]
    """Services without GC itself, the oldest safe point first; including global and keyspace-level GC barriers."""
    has_barriers: bool = False
    """True if PD has GC barriers: the worker's safe point then stops at the oldest one."""
    unlisted: str = ""
    """Reason why global and keyspace-level barriers are missing from `services`; empty if they are not."""
    lock: LiveLock | None = None
    """The lock of the oldest live transaction, which the GC worker that made this report has found below its safe point."""

    @property
    def lag(self) -> float | None:
        """Age of the GC safe point in seconds; None if GC has never run."""
        return self._age(self.safe_point) if self.safe_point else None

    @property
    def worker_lag(self) -> float | None:
        """Age of the worker's safe point in seconds: its life time, and the time since its last round; None if there was none."""
        return self._age(self.worker_safe_point) if self.worker_safe_point else None

    @property
    def holder(self) -> ServiceReport | None:
        """The service that GC waits for: the oldest one, if the worker would pass it."""
        holders = (each for each in self.services if each.owner.kind is not OwnerKind.KEYSPACE_BARRIER)
        oldest = next((each for each in holders if not each.has_expired), None)
        # A worker that waits for a barrier stands at it.
        reached = self.worker_safe_point + self.has_barriers
        return oldest if oldest is not None and oldest.safe_point < reached else None

    @property
    def held_seconds(self) -> float:
        """Seconds by which the holder keeps GC behind the worker; 0 without a holder, and for a PD with GC barriers."""
        holder = self.holder
        return 0.0 if holder is None else (physical_ms(self.worker_safe_point) - physical_ms(holder.safe_point)) / 1000

    @property
    def held_since_ms(self) -> int:
        """Time of PD at which the holder stopped GC, if it has not moved since; 0 without a holder."""
        return self.now_ms - round(self.held_seconds * 1000) if self.holder is not None else 0

    def _age(self, ts: int) -> float:
        return (self.now_ms - physical_ms(ts)) / 1000


def read_report(config: ClusterConfig) -> GcReport:
    """Ask PD; the stores are not needed. Raises `ClusterError`."""
    with PdClient(config) as pd:
        return report(pd.gc_status(), pd.tso())


def report(status: GcStatus, now_ts: int) -> GcReport:
    """The report of a status that PD has just given; `now_ts` is a timestamp of PD."""
    now_ms = physical_ms(now_ts)
    services = [
        _service(each.service, owner_of(each.service), each.safe_point, each.expires, now_ms)
        for each in status.services
    ]
    services += [
        _service(each.name, _owner(each), each.ts, now_ms // 1000 + each.ttl, now_ms) for each in status.barriers
    ]
    services.sort(key=lambda each: (each.safe_point, each.service))
    return GcReport(now_ms, status.safe_point, status.worker, tuple(services), status.has_barriers, status.unlisted)


def _owner(barrier: GcBarrier) -> SafePointOwner:
    if barrier.keyspace_id is None:
        return SafePointOwner(OwnerKind.GLOBAL_BARRIER, barrier.name)
    return SafePointOwner(OwnerKind.KEYSPACE_BARRIER, str(barrier.keyspace_id))


def _service(name: str, owner: SafePointOwner, safe_point: int, expires: int, now_ms: int) -> ServiceReport:
    lag = (now_ms - physical_ms(safe_point)) / 1000
    return ServiceReport(name, owner, safe_point, lag, None if expires >= _NEVER else expires - now_ms / 1000)


WATCH_SECONDS = safepoint.RENEW_SECONDS + 15.0
"""Seconds within which every live run of tikv-br renews its safe point."""
POLL_SECONDS = 1.0


def find(pd: PdClient, service: str) -> ServiceSafePoint:
    """The safe point of a service. Raises `UsageError` if there is none, or if it is GC's own."""
    if service == GC_WORKER:
        raise UsageError(
            f"{GC_WORKER} is the safe point of GC itself", hint="It never expires, and PD does not remove it."
        )
    found = _look(pd, service)
    if found is None:
        raise UsageError(f"PD has no service safe point {service}", hint="`tikv-br gc status` lists all of them.")
    return found


def release_unused(
    pd: PdClient,
    before: ServiceSafePoint,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Remove a safe point, found `before`, if nobody renews it for `seconds`. It may already be gone.

    Raises `SafePointInUse` if it is renewed, and leaves it as it is; `ClusterError`.
    """
    end = clock() + seconds
    while True:
        now = _look(pd, before.service)
        if now is None:
            return
        if now != before:
            owner = owner_of(before.service)
            what = f" ({owner})" if owner.is_ours else ""
            raise SafePointInUse(f"{before.service}{what} was just renewed: what it belongs to is running")
        left = end - clock()
        if left <= 0:
            break
        sleep(min(POLL_SECONDS, left))
    safepoint.release(pd, before.service)
    if _look(pd, before.service) is not None:
        raise SafePointInUse(f"{before.service} was removed, and at once registered again")


def _look(pd: PdClient, service: str) -> ServiceSafePoint | None:
    return next((each for each in pd.gc_status().services if each.service == service), None)
