"""PD's garbage collection: safe points and barriers, and the RPCs about them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.playground.engine import RocksEngine

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
        """Global barriers, and barriers of keyspaces that have their own GC, by name and keyspace."""
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


BARRIERS: Final = frozenset(
    {"SetGCBarrier", "DeleteGCBarrier", "SetGlobalGCBarrier", "GetGCState", "GetAllKeyspacesGCStates"}
)
"""RPCs that only PDs with a GC state manager have."""
_NULL_KEYSPACE: Final = 0xFFFF_FFFF


class GcCalls:
    """Answers the RPCs about GC."""

    def __init__(self, gc: GcState) -> None:
        self._gc = gc

    def by_name(self) -> dict[str, Callable[[Any], Message]]:
        gc = self._gc
        return {
            "GetGCSafePoint": lambda _: pdpb_pb2.GetGCSafePointResponse(safe_point=gc.safe_point),
            "UpdateGCSafePoint": lambda request: pdpb_pb2.UpdateGCSafePointResponse(
                new_safe_point=gc.advance(request.safe_point)
            ),
            "UpdateServiceGCSafePoint": self._update_service_safe_point,
            "SetGCBarrier": self._set_barrier,
            "DeleteGCBarrier": self._delete_barrier,
            "SetGlobalGCBarrier": self._set_global_barrier,
            "GetGCState": self._gc_state,
            "GetAllKeyspacesGCStates": self._all_gc_states,
        }

    def _update_service_safe_point(
        self, request: pdpb_pb2.UpdateServiceGCSafePointRequest
    ) -> pdpb_pb2.UpdateServiceGCSafePointResponse:
        gc = self._gc
        service, lowest = gc.update_service(request.service_id.decode(), request.TTL, request.safe_point)
        return pdpb_pb2.UpdateServiceGCSafePointResponse(
            service_id=service.encode(), TTL=lowest.expires - gc.now(), min_safe_point=lowest.ts
        )

    def _set_barrier(self, request: pdpb_pb2.SetGCBarrierRequest) -> pdpb_pb2.SetGCBarrierResponse:
        barrier, ts, ttl = request.barrier_id, request.barrier_ts, request.ttl_seconds
        keyspace_id = request.keyspace_scope.keyspace_id if request.HasField("keyspace_scope") else _NULL_KEYSPACE
        if keyspace_id == _NULL_KEYSPACE:
            self._gc.set_barrier(barrier, ts, ttl)
        else:
            self._gc.set_other_barrier(barrier, ts, ttl, keyspace_id)
        info = pdpb_pb2.GCBarrierInfo(barrier_id=barrier, barrier_ts=ts, ttl_seconds=ttl)
        return pdpb_pb2.SetGCBarrierResponse(new_barrier_info=info)

    def _set_global_barrier(self, request: pdpb_pb2.SetGlobalGCBarrierRequest) -> pdpb_pb2.SetGlobalGCBarrierResponse:
        barrier, ts, ttl = request.barrier_id, request.barrier_ts, request.ttl_seconds
        self._gc.set_other_barrier(barrier, ts, ttl, None)
        info = pdpb_pb2.GlobalGCBarrierInfo(barrier_id=barrier, barrier_ts=ts, ttl_seconds=ttl)
        return pdpb_pb2.SetGlobalGCBarrierResponse(new_barrier_info=info)

    def _delete_barrier(self, request: pdpb_pb2.DeleteGCBarrierRequest) -> pdpb_pb2.DeleteGCBarrierResponse:
        removed = self._gc.delete_barrier(request.barrier_id)
        if removed is None:
            return pdpb_pb2.DeleteGCBarrierResponse()
        ttl = removed.expires - self._gc.now()
        info = pdpb_pb2.GCBarrierInfo(barrier_id=request.barrier_id, barrier_ts=removed.ts, ttl_seconds=ttl)
        return pdpb_pb2.DeleteGCBarrierResponse(deleted_barrier_info=info)

    def _gc_state(self, request: pdpb_pb2.GetGCStateRequest) -> pdpb_pb2.GetGCStateResponse:
        gc = self._gc
        services = gc.services()
        worker = services.pop("gc_worker")
        barriers = [
            pdpb_pb2.GCBarrierInfo(barrier_id=name, barrier_ts=safe_point.ts, ttl_seconds=safe_point.expires - gc.now())
            for name, safe_point in sorted(services.items())
        ]
        return pdpb_pb2.GetGCStateResponse(
            gc_state=pdpb_pb2.GCState(
                keyspace_scope=pdpb_pb2.KeyspaceScope(keyspace_id=_NULL_KEYSPACE),
                txn_safe_point=worker.ts,
                gc_safe_point=gc.safe_point,
                gc_barriers=[] if request.exclude_gc_barriers else barriers,
            )
        )

    def _all_gc_states(self, _: pdpb_pb2.GetAllKeyspacesGCStatesRequest) -> pdpb_pb2.GetAllKeyspacesGCStatesResponse:
        now, keyspaces = self._gc.now(), dict[int, pdpb_pb2.GCState]()
        response = pdpb_pb2.GetAllKeyspacesGCStatesResponse(
            gc_states=[self._gc_state(pdpb_pb2.GetGCStateRequest()).gc_state]
        )
        for (name, keyspace_id), each in sorted(self._gc.other_barriers().items(), key=str):
            if keyspace_id is None:
                response.global_gc_barriers.add(barrier_id=name, barrier_ts=each.ts, ttl_seconds=each.expires - now)
            else:
                if keyspace_id not in keyspaces:
                    scope = pdpb_pb2.KeyspaceScope(keyspace_id=keyspace_id)
                    keyspaces[keyspace_id] = pdpb_pb2.GCState(keyspace_scope=scope, is_keyspace_level_gc=True)
                keyspaces[keyspace_id].gc_barriers.add(
                    barrier_id=name, barrier_ts=each.ts, ttl_seconds=each.expires - now
                )
        response.gc_states.extend(keyspaces.values())
        return response
