"""Clusters to back up and to write to, and a process that forks operations to be killed: one for all operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.integration.crash.world import forget_safe_points
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY

ROWS = hard_rows(count=20)
REGIONS = 3


MODULES = (
    "tests.integration.crash.warm",
    "tests.integration.crash.test_backup_changes",
    "tests.integration.crash.test_compaction_steps",
    "tests.integration.crash.test_restore_steps",
    "tests.integration.crash.test_drill_steps",
    "tests.integration.crash.sync_cells",
)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster of a few regions, which holds `ROWS`; it is the same for all operations."""
    with live_cluster(tmp_path_factory.mktemp("v2"), ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as running:
        load(running, ROWS)
        codec = running.raw().codec
        keys = sorted(ROWS)[:: len(ROWS) // REGIONS][1:REGIONS]
        running.split(*(codec.bound(codec.rpc_key(key)) for key in keys))
        yield running


@pytest.fixture
def live(cluster: LiveCluster) -> Iterator[LiveCluster]:
    """Return the cluster, and forget what safe points a test leaves in it."""
    yield cluster
    forget_safe_points(cluster)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster to write to."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1, resolved_ts_interval=0.1) as running:
        yield running


@pytest.fixture
def target(empty: LiveCluster) -> Iterator[LiveCluster]:
    """Return it, as empty as it is before each test."""
    yield empty
    empty.raw().delete_range(EVERY_KEY)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return a process that forks operations to be killed."""
    with Forks(*MODULES) as running:
        yield running
