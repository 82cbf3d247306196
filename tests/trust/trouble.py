"""A cluster that is never at rest, for whatever job: what is done to its regions, stores, connections and PD, by a seed."""

from __future__ import annotations

import time
from typing import Any

from tests.integration.incremental.workload import Commotion, Faults
from tests.support.live_cluster import LiveCluster
from tests.support.playground_admin import AdminRefused

REGIONS = range(3, 7)
_CALLS = ("RawScan", "RawBatchPut", "RawBatchGet", "RawChecksum", "Backup", "Download", "Ingest", "SplitRegion")
_REGION_ERRORS: tuple[dict[str, Any], ...] = (
    {"server_is_busy": {"reason": "on purpose", "backoff_ms": 50}},
    {"epoch_not_match": {}},
    {"not_leader": {}},
    {"region_not_found": {}},
    {"stale_command": {}},
)
_PD_CALLS = ("GetRegion", "ScanRegions", "GetRegionByID", "GetAllStores", "Tsop", "Tso", "UpdateServiceGCSafePoint")
FAULTS: Faults = [
    *((call, {"region_error": error}) for call in (*_CALLS, "backup.region") for error in _REGION_ERRORS),
    *((call, {"drop": {}}) for call in (*_CALLS, "EventFeed", "EventFeedV2") for _ in range(3)),
    *((call, {"delay": {"seconds": 0.2}}) for call in _CALLS),
]
"""Each may strike one call, soon."""
NEW_PD_LEADER = {"abort": {"code": "UNAVAILABLE", "details": "not leader"}}
"""What every call to PD is answered while its members elect a new leader."""


class Trouble(Commotion):
    """Splits, merges, moves, transfers, failing calls; a store gone for a while; PD without a leader for a moment."""

    def __init__(self, live: LiveCluster, seed: object, gone: float) -> None:
        """``gone`` is for how many seconds a killed store stays away; it is back for three times as long."""
        super().__init__(live, hash_of(seed), REGIONS, FAULTS)
        self._gone = gone
        self._next = time.monotonic() + self._chance.uniform(0, 1)
        self._election = 0
        """The failpoint while PD has no leader."""
        self._next_election = time.monotonic() + self._chance.uniform(0, 2)

    def step(self) -> None:
        """One thing; now and then PD has no leader besides, for up to a second."""
        super().step()
        if time.monotonic() < self._next_election:
            return
        if self._election:
            self._live.relent(self._election)
            self._election, pause = 0, self._chance.uniform(2, 5)
        else:
            self._election, pause = self._live.fail("*", NEW_PD_LEADER, store_id=0, count=-1), self._chance.random()
            self.done["new PD leader"] += 1
        self._next_election = time.monotonic() + pause

    def _is_time_to_kill_or_restart(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._gone * self._chance.uniform(0.6, 1) * (3 if self._dead else 1)
        return True

    def _merge(self, regions: list[Any]) -> None:
        try:
            super()._merge(regions)
        except AdminRefused as error:  # a restore has split one of them since they were listed
            if "are no neighbours" not in str(error):
                raise
            self.done["merge"] -= 1

    def _do(self, kind: str, regions: list[Any]) -> None:
        if kind == "fault":
            rpc, action = self._chance.choice(list(self._faults))
            [name] = action
            [which] = action["region_error"] if name == "region_error" else [name]
            self.done[f"{which} at {rpc}"] += 1
            self.done[kind] -= 1
            self._live.fail(rpc, action)
        else:
            super()._do(kind, regions)


def hash_of(seed: object) -> int:
    """A number for a seed of any form, the same in every process."""
    return int.from_bytes(str(seed).encode(), "big")
