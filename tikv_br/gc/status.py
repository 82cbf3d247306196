"""The safe points of GC and of all services: who they belong to, how old they are, and which one holds GC back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pd import PdClient
from tikv_br.cluster.pd_http import GC_WORKER, GcStatus, PdHttp, ServiceSafePoint, gc_status
from tikv_br.cluster.timestamps import physical_ms

FOREVER = (1 << 63) - 1
"""The TTL of ``gc_worker``, and its expiry: never. PD takes no other."""
_NEVER = 1 << 40
"""Seconds since the epoch from which on an expiry means never."""


class Kind(enum.StrEnum):
    """What a service safe point belongs to."""

    BACKUP = "backup"
    """A backup of tikv-br; its name is the id of the run."""
    SYNC = "sync"
    """A sync, a changefeed or a log archive of tikv-br, by its id: they share one namespace."""
    DRILL = "drill"
    GO_BR = "br"
    """A backup of the Go TiKV-BR, or of TiDB's BR."""
    CDC = "cdc"
    """TiKV-CDC or TiCDC."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Owner:
    """What a service safe point belongs to, by its name."""

    kind: Kind
    name: str
    """Within its kind; of `Kind.OTHER` the whole name of the service."""

    @property
    def is_ours(self) -> bool:
        """Whether a run of tikv-br made it."""
        return self.kind in {Kind.BACKUP, Kind.SYNC, Kind.DRILL}

    def __str__(self) -> str:
        match self.kind:
            case Kind.BACKUP:
                return f"backup {self.name}"
            case Kind.SYNC:
                return f"sync, changefeed or log {self.name}"
            case Kind.DRILL:
                return f"drill {self.name}"
            case Kind.GO_BR:
                return "backup of the Go TiKV-BR or of BR"
            case Kind.CDC if self.name.startswith(CREATING):
                # Held for ten minutes, until the changefeed has its own.
                return (
                    f"create or resume of changefeed {self.name.removeprefix(CREATING)} of TiKV-CDC; expires by itself"
                )
            case Kind.CDC:
                return "TiKV-CDC or TiCDC"
            case Kind.OTHER:
                return "not known"


CREATING = "-creating-"
_PREFIXES = {
    "tikv-br-backup-": Kind.BACKUP,
    "tikv-br-sync-": Kind.SYNC,
    "tikv-br-drill-": Kind.DRILL,
    "br-": Kind.GO_BR,
    "native_br": Kind.GO_BR,
    "tikvcdc": Kind.CDC,
    "ticdc": Kind.CDC,
}


def owner_of(service: str) -> Owner:
    """What a service belongs to, as far as its name says."""
    for prefix, kind in _PREFIXES.items():
        if service.startswith(prefix):
            return Owner(kind, service.removeprefix(prefix))
    return Owner(Kind.OTHER, service)


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """A service safe point at one moment."""

    service: str
    owner: Owner
    safe_point: int
    lag: float
    """Seconds from the time of the safe point to PD's time."""
    ttl: float | None
    """Seconds until PD drops it unless it is renewed; not above 0 if it has expired; None = never."""

    @property
    def has_expired(self) -> bool:
        """Whether GC no longer waits for it; PD still lists it until its next update."""
        return self.ttl is not None and self.ttl <= 0


@dataclass(frozen=True, slots=True)
class GcReport:
    """How far GC is at one moment, and what stops it."""

    now_ms: int
    """PD's time."""
    safe_point: int
    """Up to which versions may have been removed; 0 = GC has never run."""
    worker_safe_point: int
    """Up to which the last GC worker wanted to remove versions; 0 = there has been none."""
    services: tuple[ServiceReport, ...]
    """Without GC itself, the oldest safe point first."""

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
        oldest = next((each for each in self.services if not each.has_expired), None)
        return oldest if oldest is not None and oldest.safe_point < self.worker_safe_point else None

    @property
    def held_seconds(self) -> float:
        """By how many seconds the holder keeps GC behind the worker; 0 without a holder."""
        holder = self.holder
        return 0.0 if holder is None else (physical_ms(self.worker_safe_point) - physical_ms(holder.safe_point)) / 1000

    @property
    def held_since_ms(self) -> int:
        """Since when the holder has stopped GC, by PD's clock, if it has not moved since; 0 without a holder."""
        return self.now_ms - round(self.held_seconds * 1000) if self.holder is not None else 0

    def _age(self, ts: int) -> float:
        return (self.now_ms - physical_ms(ts)) / 1000


def read_report(config: ClusterConfig) -> GcReport:
    """Ask PD; the stores are not needed. Raises `ClusterError`."""
    with PdClient(config) as pd:
        return report(gc_status(PdHttp(pd.connection)), pd.tso())


def report(status: GcStatus, now_ts: int) -> GcReport:
    """The report of a status that PD has just given; `now_ts` is a timestamp of PD."""
    now_ms = physical_ms(now_ts)
    services = sorted(status.services, key=lambda each: (each.safe_point, each.service))
    return GcReport(now_ms, status.safe_point, status.worker, tuple(_service(each, now_ms) for each in services))


def _service(item: ServiceSafePoint, now_ms: int) -> ServiceReport:
    lag = (now_ms - physical_ms(item.safe_point)) / 1000
    ttl = None if item.expires >= _NEVER else item.expires - now_ms / 1000
    return ServiceReport(item.service, owner_of(item.service), item.safe_point, lag, ttl)


__all__ = ["FOREVER", "GC_WORKER", "GcReport", "Kind", "Owner", "ServiceReport", "owner_of", "read_report", "report"]
