"""A playground for tests: started as a process of its own, steered by its admin API, stopped and checked for fatal_requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.playground_admin import AdminRefused, PlaygroundAdmin
from tests.support.waiting import PATIENCE, eventually
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import launcher


class LiveCluster(PlaygroundAdmin):
    """A running playground, its admin API, and a client of it."""

    def __init__(self, state: dict[str, Any], config: ClusterConfig) -> None:
        self.pd: str = ",".join(state["pd_members"])
        super().__init__(self.pd)
        self.store_ids: list[int] = [store["id"] for store in state["stores"]]
        self.config = config
        self.cluster = Cluster.connect(config)

    def raw(self, keyspace_id: int = 0) -> RawClient:
        """Return a client of one keyspace."""
        return self.cluster.raw(keyspace_id)

    def change_pd_leader(self, *, kill: bool, seconds: float) -> bool:
        """Have PD's leader resign, or die and come back; False while the last change is not over."""
        try:
            if kill:
                self.run("kill-pd-leader", seconds=seconds, lease=seconds / 2)
            else:
                self.run("move-pd-leader", seconds=seconds)
        except AdminRefused:
            return False
        return True

    def await_pd(self) -> None:
        """Wait until all members of PD are there and one leads, and no change that was asked for is yet to begin."""

        def is_well() -> bool:
            try:
                return all(member["health"] for member in self.get("/pd/api/v1/health"))
            except AdminRefused:
                return False

        eventually(is_well)
        time.sleep(0.5)  # a kill begins after 0.2 s, so that the admin API can answer
        eventually(is_well)

    def heal(self) -> None:
        """Disarm all failpoints, restart dead stores, and wait for PD."""
        self.await_pd()
        self.disarm()
        for store_id in self.store_ids:
            self.run("restart-store", store_id=store_id)


@contextlib.contextmanager
def live_cluster(directory: Path, api_version: ApiVersion, **settings: object) -> Iterator[LiveCluster]:
    """Run a playground for the length of the block; a request that would have killed a real store fails the test."""
    settings = {"api_version": api_version.value, "keyspace_split_delay": 0.0, "balance": False, **settings}
    started = launcher.start(directory, settings, detached=False)
    try:
        live = LiveCluster(
            started.state,
            ClusterConfig(pd=tuple(started.state["pd_members"]), connect_timeout=PATIENCE, retry_budget=10.0),
        )
        with live.cluster:
            yield live
            live.assert_innocent()
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE)


def contents(live: LiveCluster, keyspace_id: int = 0) -> dict[bytes, bytes]:
    """All rows of a keyspace."""
    raw = live.raw(keyspace_id)
    found: dict[bytes, bytes] = {}
    for page in raw.scan_pages(raw.codec.rpc_range()):
        keys = (raw.codec.user_key(key) for key in page.keys.to_pylist())
        found.update(zip(keys, page.values.to_pylist(), strict=True))
    return found
