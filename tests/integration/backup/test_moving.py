"""Regions split, merge and move and stores die while a backup reads them: it ends whole and equal, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.backup.conftest import Options
from tests.integration.backup.data import hard_rows
from tests.integration.backup.moving import (
    READ_FIRST,
    healed_late,
    impatient,
    merge,
    moving_cluster,
    patient,
    region_at,
    restless,
    split,
    spread_and_healed,
    transfer_leader,
)
from tests.integration.backup.reading import rocksdb_rows, stored
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.errors import ClusterUnreachable, RetryBudgetExhausted
from tikv_br.formats.api_version import ApiVersion


@pytest.fixture(scope="module")
def rows() -> dict[bytes, bytes]:
    """Return what the cluster holds."""
    return hard_rows(count=4000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, rows: dict[bytes, bytes]) -> Iterator[LiveCluster]:
    """Run the cluster."""
    with moving_cluster(tmp_path_factory.mktemp("moving"), rows) as live:
        yield live


@pytest.fixture
def live(cluster: LiveCluster) -> Iterator[LiveCluster]:
    """Return it as at first; what a test has broken is healed after it."""
    with spread_and_healed(cluster) as live:
        yield live


def check_equal(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], scratch: Path, engine: str = "scan"
) -> None:
    """Back up as V2 and compare with the rows."""
    wanted = options(live, cluster=patient(live), dst_api_version=ApiVersion.V2, concurrency=1, engine=engine)
    backup(wanted)
    expected = stored({key: (value, 0) for key, value in rows.items()}, ApiVersion.V2, ts=1)
    assert rocksdb_rows(Path(wanted.storage.path), scratch) == expected


@pytest.mark.parametrize("command", [split, merge, transfer_leader])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_region_that_moves_under_the_scan(
    command: Callable[[LiveCluster], dict[str, Any]],
    skip: int,
    live: LiveCluster,
    options: Options,
    rows: dict[bytes, bytes],
    tmp_path: Path,
) -> None:
    """Before a page of the region is answered, the region is no longer what it was: no row is lost or twice."""
    region = region_at(live, READ_FIRST)
    moving = live.fail("RawScan", {"command": command(live)}, region_id=region["id"], skip=skip)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(moving) == 1


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize("every", [997, 401, 89])
def test_regions_that_never_rest(
    every: int, engine: str, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Regions split and leaders move all the while, few or many: each of several backups is whole."""
    with moving_cluster(tmp_path / "cluster", rows) as live, restless(live, sorted(rows)[::every]) as moved:
        while len(moved) < 3:
            check_equal(live, options, rows, tmp_path, engine)
        check_equal(live, options, rows, tmp_path, engine)


def test_a_store_that_dies_is_outlived(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """A store is killed in the middle of the scan; others take the lead, and the backup is whole."""
    killing = live.fail("RawScan", {"kill_store": {}}, skip=3)
    check_equal(live, options, rows, tmp_path)
    assert live.hits(killing) == 1


def test_a_cluster_that_comes_back_is_waited_for(
    live: LiveCluster, options: Options, rows: dict[bytes, bytes], tmp_path: Path
) -> None:
    """All stores die and come back seconds later, within the budget of one call: the backup is whole."""
    killing = [live.fail("RawScan", {"kill_store": {}}, skip=1, store_id=store_id) for store_id in live.store_ids]
    with healed_late(live, killing):
        check_equal(live, options, rows, tmp_path)


def test_a_cluster_that_stays_away_leaves_nothing_behind(live: LiveCluster, options: Options) -> None:
    """No backup, file or lock remains: the path can be used again, and the error has the cause."""
    for store_id in live.store_ids:
        live.fail("RawScan", {"kill_store": {}}, skip=1, store_id=store_id)
    wanted = options(live, cluster=impatient(live), concurrency=1)
    with pytest.raises((RetryBudgetExhausted, ClusterUnreachable), match="task"):
        backup(wanted)
    assert not [path for path in Path(wanted.storage.path).rglob("*") if path.is_file()]
    live.heal()
    assert backup(wanted).summary.total_kvs == live.raw().checksum().total_kvs
