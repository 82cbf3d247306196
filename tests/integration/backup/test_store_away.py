"""A backup while one of three stores is down: shortly, so that PD still calls it Up, or for good."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.integration.backup.conftest import Options
from tests.integration.backup.data import hard_rows, load
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.cluster.config import ClusterConfig
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Event, StepStarted

AWAY = 3.0
"""Seconds for which the store is away; PD calls it Up for twice as long."""
STEPS = ["connect", "choose backup-ts", "plan", "copy", "compare checksums"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Return a V2 cluster of three stores with rows in several regions."""
    settings = {"stores": 3, "election_timeout": 1.0, "disconnect_delay": 2 * AWAY}
    with live_cluster(tmp_path_factory.mktemp("away"), ApiVersion.V2, **settings) as live:
        load(live, hard_rows(count=300))
        codec = live.raw().codec
        live.split(*(codec.bound(codec.rpc_key(key)) for key in (b"row00100", b"row00200", b"\x90")))
        yield live


@pytest.fixture(autouse=True)
def healed(live: LiveCluster) -> Iterator[None]:
    """Spread the leaders, and have all stores back afterwards."""
    live.scatter()
    yield
    live.heal()


_numbers = itertools.count()


def unconnected(live: LiveCluster) -> ClusterConfig:
    """Return a config of its own: a process keeps the connection, and what it knows of the cluster, for each config."""
    return replace(live.config, retry_budget=60.0 + next(_numbers) / 1000)


def kill(live: LiveCluster, step: str, returns: threading.Timer | None) -> Callable[[Event], None]:
    """Return a reporter that kills a store as a step begins."""

    def report(event: Event) -> None:
        if isinstance(event, StepStarted) and event.name == step:
            live.kill_store(live.store_ids[1])
            if returns is not None:
                returns.start()

    return report


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize("step", STEPS)
def test_a_store_that_is_away_for_a_moment(step: str, engine: str, live: LiveCluster, options: Options) -> None:
    """Its status port refuses while PD calls it Up: the backup is whole all the same."""
    wanted = options(live, engine=engine, cluster=unconnected(live), checksum=True)
    returns = threading.Timer(AWAY, live.restart_store, [live.store_ids[1]])
    summary = backup(wanted, kill(live, step, returns)).summary
    returns.join()
    assert summary.total_kvs == live.raw().checksum().total_kvs


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_a_store_that_stays_away(engine: str, live: LiveCluster, options: Options) -> None:
    """Its timestamps are waited for until PD calls it Disconnected; the others have all of its rows."""
    wanted = options(live, engine=engine, cluster=unconnected(live), checksum=True)
    summary = backup(wanted, kill(live, "connect", None)).summary
    assert summary.total_kvs == live.raw().checksum().total_kvs
