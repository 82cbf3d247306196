"""Each command while PD's leader resigns and dies again and again: it ends with 0, and what it promises is there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.truth.calls import CALLS
from tests.integration.truth.conftest import ROWS, Ended, made, tikv_br
from tests.integration.truth.proofs import PROOFS, with_more
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.live_txn_backups import write_rows
from tikv_br.cli.command import CommandPath
from tikv_br.formats.api_version import ApiVersion

KILL_EVERY = 3
PAUSE = 2.0
"""Seconds from the end of a change to the next one."""


class LeaderChanges:
    """Leader changes of one cluster; some of them are deaths."""

    def __init__(self, live: LiveCluster) -> None:
        self._live = live
        self._numbers = itertools.count(1)

    def step(self) -> None:
        """One change, unless the last one is not over."""
        kill = next(self._numbers) % KILL_EVERY == 0
        self._live.change_pd_leader(kill=kill, seconds=1.5 if kill else 0.5)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V2 cluster with three members of PD, rows, and rows of transactions."""
    with live_cluster(tmp_path_factory.mktemp("led"), ApiVersion.V2, stores=1, pd_members=3) as led:
        write_rows(led, ROWS)
        yield led


@pytest.fixture
def changing(live: LiveCluster) -> Iterator[LiveCluster]:
    """Return it while its PD has another leader again and again, from the first request of a test."""
    live.raw().batch_put(ROWS)
    changes = LeaderChanges(live)
    changes.step()
    with Background([(changes.step, PAUSE)]):
        yield live
    live.await_pd()


def call(live: LiveCluster, *words: str) -> Ended:
    """Run a command in this process, with success."""
    ended = tikv_br(*words, "--pd", live.pd, "--executor", "driver", "--output", "json")
    assert ended.code == 0, ended
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scan", "store"])
def test_backups_and_restores_by_another_leader(engine: str, changing: LiveCluster, tmp_path: Path) -> None:
    """A backup, its increment, checks and a restore after a mass delete give all rows."""
    place = str(tmp_path / "backup")
    made = call(changing, "backup", "raw", "-s", place, "--engine", engine, "--safe-interval", "0s", "--checksum")
    assert made.last["total_kvs"] == len(ROWS)
    call(changing, "verify", place, "--level", "restore")
    call(changing, "diff", "--storage", place)
    changing.raw().batch_delete(list(ROWS))
    call(changing, "restore", "raw", "-s", place)
    assert contents(changing) == ROWS


def test_exports_by_another_leader(changing: LiveCluster, tmp_path: Path) -> None:
    """Each row is a line."""
    call(changing, "export", "raw", "-s", str(tmp_path / "rows"), "--format", "jsonl")
    files = (tmp_path / "rows").rglob("*.jsonl")
    assert sum(len(path.read_text().splitlines()) for path in files) == len(ROWS)


def test_transactions_by_another_leader(changing: LiveCluster, tmp_path: Path) -> None:
    """A backup of transactions has them all, at a timestamp that the next leader's do not precede."""
    made = call(changing, "backup", "txn", "-s", str(tmp_path / "txn"))
    assert made.last["total_kvs"] == len(ROWS)
    assert changing.cluster.pd.tso() > made.last["backup_ts"]


@pytest.mark.slow
def test_timestamps_and_safe_points_outlive_leaders(live: LiveCluster) -> None:
    """Timestamps ascend over five changes, and a service's safe point stays."""
    last = live.cluster.pd.tso()
    live.cluster.pd.update_service_safe_point("led", 600, last)
    for kill in (False, True, False, True, False):
        assert live.change_pd_leader(kill=kill, seconds=1.0)
        live.await_pd()
        assert live.safe_points()["led"] == last
        now = live.cluster.pd.tso()
        assert now > last
        live.cluster.pd.update_service_safe_point("led", 600, now)
        last = now
    live.cluster.pd.update_service_safe_point("led", 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_survive_changes_of_pds_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order in which each finds what it needs; in peace those that ask no PD."""
    with made(tmp_path, retry_budget=30.0, pd_members=3) as world:
        with_more(world, monkeypatch)
        changes = [LeaderChanges(live) for live in (world.source, world.target)]
        unfit = {("prune",), ("backup", "abort")}
        for command in [path for path in PROOFS if path not in unfit and path[0] not in {"playground", "spark"}]:
            instead = {"pd": world.target.pd} if command == ("raw", "import") else {}
            disturbed = changes if asks_pd(command) else []
            with Background([(change.step, PAUSE) for change in disturbed]):
                for change in disturbed:
                    change.step()
                ended = world.call(command, "--output", "json", **instead)
            assert ended.code == 0, (command, ended)
            for live in (world.source, world.target):
                live.await_pd()
            assert PROOFS[command](world, ended), (command, ended)


def asks_pd(command: CommandPath) -> bool:
    """Whether its call names a cluster."""
    return "{pd}" in CALLS[command] or "{target}" in CALLS[command]
