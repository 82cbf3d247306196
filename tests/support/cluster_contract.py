"""What a test may ask of a cluster, be it a playground or real servers.

A test that uses nothing else of its clusters runs on both, which `tests.support.both` finds out by itself. Everything else of
`LiveCluster`, as failpoints, counts of calls or settings that only a playground has, is for tests of one provider.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.rawkv import RawClient


class ClusterContract(Protocol):
    """A running cluster, which has no rows when a test gets it. All verbs return once they have taken effect.

    How it starts: ``live_cluster(directory, api_version, ...)`` with these settings.

    - ``stores``, ``replicas`` (voters of each region; by default up to three, as there are stores), ``pd_members``,
    - ``regions``: split so often by first byte,
    - ``tls``: certificates of all servers, as `TlsSettings`,
    - ``resolved_ts_interval``, ``election_timeout``, ``ts_ahead``: at most so many seconds; real servers have a least value,
    - ``disconnect_delay``: after so many seconds PD calls a dead store Disconnected; a real one after 20,
    - ``keyspaces``: names of keyspaces, with ids from 1 upwards,
    - ``balance``: whether PD moves replicas and leaders by itself,
    - ``pd_port``: the port of PD.

    A verb that cannot be done, as it names a region that is gone, raises `AdminRefused`.
    """

    pd: str
    """Addresses of PD's members, with commas between."""
    config: ClusterConfig
    cluster: Cluster
    """A connection, which closes with the cluster."""
    store_ids: list[int]
    """PD's ids of the stores, dead ones too, in the order in which they were started."""

    def raw(self, keyspace_id: int = 0) -> RawClient:
        """Return a client of one keyspace."""

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON of a path of PD's HTTP API, such as ``/pd/api/v1/stores``."""

    def create_keyspace(self, name: str) -> int:
        """Create a keyspace, or find it; its id."""

    def safe_points(self) -> dict[str, int]:
        """Return what PD holds for services, by name, but for GC's own."""

    def regions(self) -> list[dict[str, Any]]:
        """Return all regions by key: id, start, end (hex of physical keys), version, conf_ver, peers (id and store), leader_store."""

    def split(self, *bounds: bytes) -> object:
        """Make each of these physical keys the start of a region."""

    def merge(self, source: int, target: int) -> None:
        """Merge a region into its neighbour ``target``, which keeps its id."""

    def transfer_leader(self, region_id: int, store_id: int) -> None:
        """Let the region's replica on this store lead."""

    def move_peer(self, region_id: int, from_store: int, to_store: int) -> None:
        """Move a replica to a store that has none."""

    def scatter(self) -> None:
        """Spread leaders over the stores that are alive."""

    def flush(self, store_id: int) -> None:
        """Have a store, and maybe others, drop cached timestamps: later puts have timestamps above those that PD has given so far."""

    def kill_store(self, store_id: int) -> None:
        """Kill a store as SIGKILL does: its connections break, and its address refuses new ones."""

    def frozen_store(self, store_id: int) -> AbstractContextManager[None]:
        """Let a store answer nothing for the length of the block, without refusing connections, as SIGSTOP does."""

    def frozen_pd(self) -> AbstractContextManager[None]:
        """Let all members of PD answer no call for the length of the block."""

    def restart_store(self, store_id: int) -> None:
        """Start a store again on its address, with its data, unless it runs."""

    def kill_pd(self, seconds: float) -> None:
        """Kill all members of PD in a moment; they are started again after about so many seconds."""

    def move_pd_leader(self, seconds: float) -> None:
        """Have PD's leader resign. A playground has no leader for so many seconds, PD as long as it takes."""

    def kill_pd_leader(self, seconds: float, lease: float = 1.0) -> None:
        """Kill PD's leader in a moment, and start it again after so many seconds; another member leads before."""

    def change_pd_leader(self, *, kill: bool, seconds: float) -> bool:
        """Do one of the last two; False while the last change is not over."""

    def await_pd(self) -> None:
        """Wait until all members of PD are there, and no change is under way."""

    def heal(self) -> None:
        """Restart what is dead, and wait for PD."""

    def assert_innocent(self) -> None:
        """Fail if a store has died by itself; a playground also counts requests that would have killed a real one."""
