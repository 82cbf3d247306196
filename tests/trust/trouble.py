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
PD_KILLS = 0.3
"""The part of the changes of PD's leader that are deaths."""


class Trouble(Commotion):
    """Splits, merges, moves, transfers, failing calls; a store gone for a while; changes of PD's leader."""

    def __init__(self, live: LiveCluster, seed: object, gone: float, pd_gone: float = 0.0) -> None:
        """``gone`` is for how many seconds a killed store stays away; it is back for three times as long.

        ``pd_gone`` is for how many seconds PD is gone once.
        """
        super().__init__(live, hash_of(seed), REGIONS, FAULTS)
        self._gone, self._pd_gone = gone, pd_gone
        self._next = time.monotonic() + self._chance.uniform(0, 1)
        self._next_election = time.monotonic() + self._chance.uniform(0, 2)

    def step(self) -> None:
        """One thing; now and then PD's leader resigns or dies besides, and there is none for up to a second."""
        super().step()
        if time.monotonic() < self._next_election:
            return
        kill, seconds, kind = self._chance.random() < PD_KILLS, self._chance.uniform(0.2, 1), "new PD leader"
        if self._pd_gone and self.done[kind]:
            kill, seconds, kind = False, self._pd_gone, "PD gone"
        if self._live.change_pd_leader(kill=kill, seconds=2 * seconds if kill else seconds):
            self.done["killed PD leader" if kill else kind] += 1
            self._pd_gone = 0.0 if kind == "PD gone" else self._pd_gone
        self._next_election = time.monotonic() + seconds + self._chance.uniform(2, 5)

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
