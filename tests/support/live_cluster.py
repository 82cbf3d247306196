"""A playground for tests: started as a process of its own, steered by its admin API, stopped and checked for fatal_requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import real_servers
from tests.support.playground_admin import AdminRefused, PlaygroundAdmin
from tests.support.waiting import PATIENCE, eventually
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig, TlsFiles
from tikv_br.cluster.rawkv import RawClient
from tikv_br.formats.api_version import ApiVersion
from tikv_br.playground import launcher
from tikv_br.playground.settings import TlsSettings

KEYSPACES = tuple(
    f"ks{each}={each}"
    for each in (
        *range(1, 40),
        70,
        77,
        *range(100, 111),
        *range(200, 212),
        300,
        400,
        401,
        *range(500, 504),
        *range(4241, 4244),
        0xFFFFFE,
        0xFFFFFF,
    )
)
"""Keyspaces of the ids that tests use. Real PD chooses ids itself."""


class LiveCluster(PlaygroundAdmin):
    """A running playground, its admin API, and a client of it. What it shares with real servers is in `ClusterContract`."""

    def __init__(self, state: dict[str, Any], config: ClusterConfig) -> None:
        self.state = state
        self.pd: str = ",".join(state["pd_members"])
        super().__init__(self.pd, config.tls.ssl_context() if config.tls.enabled else None)
        self.store_ids: list[int] = [store["id"] for store in state["stores"]]
        self.config = config
        self.cluster = Cluster.connect(config)
        self.disturbed = False
        """Whether the next test must not get this cluster: its servers were killed or stopped, for instance."""

    def raw(self, keyspace_id: int = 0) -> RawClient:
        """Return a client of one keyspace."""
        return self.cluster.raw(keyspace_id)

    def merge(self, source: int, target: int) -> None:
        """Merge a region into its neighbour ``target``."""
        self.run("merge", source=source, target=target)

    def transfer_leader(self, region_id: int, store_id: int) -> None:
        """Let the region's replica on this store lead."""
        self.run("transfer-leader", region_id=region_id, store_id=store_id)

    def move_peer(self, region_id: int, from_store: int, to_store: int) -> None:
        """Move a replica to a store that has none."""
        self.run("move-peer", region_id=region_id, from_store=from_store, to_store=to_store)

    def scatter(self) -> None:
        """Spread leaders over the stores."""
        self.run("scatter")

    def flush(self, store_id: int) -> None:
        """Have a store drop its cached timestamps."""
        self.run("flush", store_id=store_id)

    def kill_store(self, store_id: int) -> None:
        """Kill a store as SIGKILL does."""
        self.run("kill-store", store_id=store_id)

    def restart_store(self, store_id: int) -> None:
        """Start a store again, unless it runs."""
        self.run("restart-store", store_id=store_id)

    @contextlib.contextmanager
    def frozen_store(self, store_id: int) -> Iterator[None]:
        """Let a store answer nothing for the length of the block; here the calls that it got end with their deadlines."""
        failpoint = self.fail("*", {"delay": {"seconds": 3600}}, store_id=store_id, count=-1)
        try:
            yield
        finally:
            self.relent(failpoint)

    @contextlib.contextmanager
    def frozen_pd(self) -> Iterator[None]:
        """Let PD answer nothing for the length of the block."""
        failpoint = self.fail("*", {"delay": {"seconds": 3600}}, store_id=0, count=-1)
        try:
            yield
        finally:
            self.relent(failpoint)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all servers with SIGSTOP for the length of the block."""
        os.kill(self.state["pid"], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.state["pid"], signal.SIGCONT)

    def kill_pd(self, seconds: float) -> None:
        """Kill all members of PD, and start them again after so many seconds."""
        self.run("kill-pd", seconds=seconds)

    def move_pd_leader(self, seconds: float) -> None:
        """Have PD's leader resign; for about so many seconds nobody leads."""
        self.run("move-pd-leader", seconds=seconds)

    def kill_pd_leader(self, seconds: float, lease: float = 1.0) -> None:
        """Kill PD's leader, and start it again after so many seconds; another one leads after its lease."""
        self.run("kill-pd-leader", seconds=seconds, lease=lease)

    def change_pd_leader(self, *, kill: bool, seconds: float) -> bool:
        """Have PD's leader resign, or die and come back; False while the last change is not over."""
        try:
            if kill:
                self.kill_pd_leader(seconds, lease=seconds / 2)
            else:
                self.move_pd_leader(seconds)
        except AdminRefused:
            return False
        return True

    def await_pd(self) -> None:
        """Wait until all members of PD are there and one leads, and no change that was asked for is yet to begin."""

        def is_well() -> bool:
            try:
                return all(member["health"] for member in self.get("/pd/api/v1/health"))
            except (AdminRefused, OSError, http.client.HTTPException):
                return False

        eventually(is_well)
        time.sleep(0.5)  # a kill begins after 0.2 s, so that the admin API can answer
        eventually(is_well)

    def heal(self) -> None:
        """Disarm all failpoints, restart dead stores, and wait for PD."""
        self.await_pd()
        self.disarm()
        for store_id in self.store_ids:
            self.restart_store(store_id)


@contextlib.contextmanager
def live_cluster(directory: Path, api_version: ApiVersion, **settings: object) -> Iterator[LiveCluster]:
    """Run a cluster for the length of the block; a request that killed a store, or would have killed a real one, fails the test.

    It is a playground with these of its `Settings`, or, if the environment names programs of real servers, a cluster of them,
    empty, in which case `tests.support.real_servers.Shape` lists the settings that there are.
    """
    if real_servers.CHOSEN is not None:
        from tests.support import real_cluster

        with real_cluster.POOL.lease(api_version, **settings) as real:
            yield real
        return
    if api_version is ApiVersion.V2:
        settings = {"keyspaces": KEYSPACES, **settings}
    settings = {"api_version": api_version.value, "keyspace_split_delay": 0.0, "balance": False, **settings}
    started = launcher.start(directory, settings, detached=False)
    try:
        live = LiveCluster(started.state, config_of(started.state["pd_members"], settings.get("tls")))
        with live.cluster:
            yield live
            live.assert_innocent()
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE)


def config_of(members: Sequence[str], tls: object) -> ClusterConfig:
    """How tests connect: patient with a busy machine."""
    files = TlsFiles(tls.ca, tls.cert, tls.key) if isinstance(tls, TlsSettings) else TlsFiles()
    return ClusterConfig(pd=tuple(members), tls=files, connect_timeout=PATIENCE, retry_budget=10.0)


def make_keyspaces(live: LiveCluster, last: int) -> None:
    """Create keyspaces in a cluster that has none of other tests: PD counts ids upwards, so ``ks7`` has the id 7."""
    for number in range(1, last + 1):
        assert live.create_keyspace(f"ks{number}") == number


def contents(live: LiveCluster, keyspace_id: int = 0) -> dict[bytes, bytes]:
    """All rows of a keyspace."""
    raw = live.raw(keyspace_id)
    found: dict[bytes, bytes] = {}
    for page in raw.scan_pages(raw.codec.rpc_range()):
        keys = (raw.codec.user_key(key) for key in page.keys.to_pylist())
        found.update(zip(keys, page.values.to_pylist(), strict=True))
    return found
