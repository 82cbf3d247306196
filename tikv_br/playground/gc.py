"""PD's GC safe points: the cluster's own, those of services, and (as an option) GC barriers of newer PDs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tikv_br.playground.engine import Engine

GC_WORKER: Final = "gc_worker"
FOREVER: Final = (1 << 63) - 1
"""A TTL or an expiry that never comes."""
_RECORD: Final = "gc"


class GcRefusal(Exception):
    """PD refuses a GC request; the text is PD's."""


@dataclass(frozen=True, slots=True)
class SafePoint:
    """A service's claim (or a barrier's): data at and above ``ts`` must stay until ``expires`` (unix seconds)."""

    ts: int
    expires: int

    def ttl(self, now: int) -> int:
        """Seconds left."""
        return self.expires - now


class GcState:
    """Safe points as PD 8.5.2 keeps them, or, with ``barriers``, as PDs with a GC state manager do. Thread-safe."""

    def __init__(self, engine: Engine, *, barriers: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self.has_barriers = barriers
        self._clock = clock
        self._lock = threading.Lock()
        kept = json.loads(engine.get_meta(_RECORD) or b"{}")
        self._safe_point: int = kept.get("safe_point", 0)
        self._services = {name: SafePoint(*claim) for name, claim in kept.get("services", {}).items()}
        self._services.setdefault(GC_WORKER, SafePoint(0, FOREVER))

    @property
    def safe_point(self) -> int:
        """Up to where GC may have removed versions."""
        with self._lock:
            return self._safe_point

    def advance(self, ts: int) -> int:
        """Move the safe point up to ``ts``, never down; returns where it is."""
        with self._lock:
            if ts > self._safe_point:
                self._safe_point = ts
                self._save()
            return self._safe_point

    def services(self) -> dict[str, SafePoint]:
        """The claims that have not expired, by service."""
        with self._lock:
            return dict(self._living())

    def update_service(self, service: str, ttl: int, ts: int) -> tuple[str, SafePoint]:
        """Set or (TTL of 0 or less) remove a claim; returns the lowest claim then, with its owner.

        A claim below the lowest is not set and not an error: the caller sees it from the answer.
        Raises `GcRefusal`.
        """
        if service == GC_WORKER and ttl != FOREVER:
            raise GcRefusal("TTL of gc_worker's service safe point must be infinity")
        with self._lock:
            self._claim(service, ttl, ts)
            self._save()
            return self._lowest()

    def set_barrier(self, barrier: str, ts: int, ttl: int) -> SafePoint:
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
            self._services[barrier] = SafePoint(ts, self._expiry(ttl))
            self._save()
            return self._services[barrier]

    def delete_barrier(self, barrier: str) -> SafePoint | None:
        """Remove a barrier and return it, None if there was none."""
        with self._lock:
            removed = self._services.pop(barrier, None) if barrier != GC_WORKER else None
            self._save()
            return removed

    def _claim(self, service: str, ttl: int, ts: int) -> None:
        if ttl <= 0:
            self._services.pop(service, None)
        elif self.has_barriers and service == GC_WORKER:
            lowest = min((claim.ts for name, claim in self._living().items() if name != GC_WORKER), default=ts)
            self._services[service] = SafePoint(max(self._services[service].ts, min(ts, lowest)), FOREVER)
        elif ts >= self._lowest()[1].ts:
            self._services[service] = SafePoint(ts, self._expiry(ttl))

    def _lowest(self) -> tuple[str, SafePoint]:
        if self.has_barriers:
            return GC_WORKER, self._services[GC_WORKER]
        return min(sorted(self._living().items()), key=lambda item: item[1].ts)

    def _living(self) -> dict[str, SafePoint]:
        now = self.now()
        self._services = {name: claim for name, claim in self._services.items() if claim.expires > now}
        return self._services

    def _expiry(self, ttl: int) -> int:
        return min(self.now() + ttl, FOREVER)

    def now(self) -> int:
        """Unix seconds by which claims expire."""
        return int(self._clock())

    def _save(self) -> None:
        services = {name: [claim.ts, claim.expires] for name, claim in self._services.items()}
        record = json.dumps({"safe_point": self._safe_point, "services": services})
        self._engine.put_meta({_RECORD: record.encode()})
