"""PD's configuration: the schedule and replication sections, and paused schedulers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tikv_br.errors import PlaygroundError
from tikv_br.playground.engine import RocksEngine

SCHEDULERS: Final = (
    "balance-leader-scheduler",
    "balance-hot-region-scheduler",
    "evict-slow-store-scheduler",
    "balance-region-scheduler",
)
_RECORD: Final = "pd_config"
_SCHEDULE: Final[Mapping[str, Any]] = {
    "max-snapshot-count": 64,
    "max-pending-peer-count": 64,
    "max-merge-region-size": 54,
    "max-merge-region-keys": 540000,
    "split-merge-interval": "1h0m0s",
    "switch-witness-interval": "1h0m0s",
    "enable-one-way-merge": "false",
    "enable-cross-table-merge": "true",
    "patrol-region-interval": "10ms",
    "max-store-down-time": "30m0s",
    "max-store-preparing-time": "48h0m0s",
    "leader-schedule-limit": 4,
    "leader-schedule-policy": "count",
    "region-schedule-limit": 2048,
    "witness-schedule-limit": 4,
    "replica-schedule-limit": 64,
    "merge-schedule-limit": 0,
    "hot-region-schedule-limit": 4,
    "hot-region-cache-hits-threshold": 3,
    "store-limit": {},
    "tolerant-size-ratio": 0,
    "low-space-ratio": 0.8,
    "high-space-ratio": 0.7,
    "region-score-formula-version": "v2",
    "scheduler-max-waiting-operator": 5,
    "enable-remove-down-replica": "true",
    "enable-replace-offline-replica": "true",
    "enable-make-up-replica": "true",
    "enable-remove-extra-replica": "true",
    "enable-location-replacement": "true",
    "enable-debug-metrics": "false",
    "enable-joint-consensus": "true",
    "enable-tikv-split-region": "true",
    "enable-heartbeat-breakdown-metrics": "true",
    "enable-heartbeat-concurrent-runner": "true",
    "schedulers-v2": [
        {"type": kind, "args": None, "disable": False, "args-payload": ""}
        for kind in ("balance-region", "balance-leader", "hot-region", "evict-slow-store")
    ],
    "hot-regions-write-interval": "10m0s",
    "hot-regions-reserved-days": 7,
    "max-movable-hot-peer-size": 512,
    "enable-diagnostic": "true",
    "enable-witness": "false",
    "slow-store-evicting-affected-store-ratio-threshold": 0.3,
    "store-limit-version": "v1",
    "patrol-region-worker-count": 1,
}


class PdConfig:
    """The schedule and replication sections, and which schedulers are paused. Thread-safe.

    Values with a TTL are lost at a restart, others are saved. Only the pauses affect what the playground does.
    """

    def __init__(
        self, engine: RocksEngine, *, replicas: int, stores: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        limits = {str(store): {"add-peer": 15, "remove-peer": 15} for store in range(1, stores + 1)}
        self._schedule: dict[str, Any] = {**_SCHEDULE, "store-limit": limits}
        self._schedule.update(json.loads(engine.get_meta(_RECORD) or b"{}"))
        self._temporary: dict[str, tuple[Any, float]] = {}
        self._paused: dict[str, float] = {}
        self.replication: Mapping[str, Any] = {
            "max-replicas": replicas,
            "location-labels": "",
            "strictly-match-label": "false",
            "enable-placement-rules": "true",
            "enable-placement-rules-cache": "false",
            "isolation-level": "",
        }

    def schedule(self) -> dict[str, Any]:
        with self._lock:
            now = self._clock()
            self._temporary = {name: kept for name, kept in self._temporary.items() if kept[1] > now}
            return {**self._schedule, **{name: value for name, (value, _) in self._temporary.items()}}

    def set_schedule(self, values: Mapping[str, Any], ttl: float | None = None) -> None:
        """Change values for good, or for ``ttl`` seconds; a ``ttl`` of 0 ends temporary values.

        Raises `PlaygroundError` for a name that PD does not know.
        """
        if unknown := [name for name in values if name not in self._schedule]:
            raise PlaygroundError(f"config item {unknown[0]} not found")
        with self._lock:
            if ttl is None:
                self._schedule.update(values)
                lasting = {name: value for name, value in self._schedule.items() if _SCHEDULE.get(name) != value}
                self._engine.put_meta({_RECORD: json.dumps(lasting).encode()})
            for name, value in values.items():
                if ttl:
                    self._temporary[name] = (value, self._clock() + ttl)
                else:
                    self._temporary.pop(name, None)

    def pause(self, scheduler: str, seconds: float) -> None:
        """Pause a scheduler, or resume it with 0. Raises `PlaygroundError` for an unknown one."""
        if scheduler not in SCHEDULERS:
            raise PlaygroundError("[PD:scheduler:ErrSchedulerNotFound]scheduler not found")
        with self._lock:
            self._paused[scheduler] = self._clock() + seconds

    def is_paused(self, scheduler: str) -> bool:
        with self._lock:
            return self._paused.get(scheduler, 0.0) > self._clock()
