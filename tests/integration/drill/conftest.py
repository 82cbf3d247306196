"""A cluster to back up, a host that runs playgrounds, as the command line has one, and what a drill must leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.backup.data import hard_rows, load
from tests.integration.drill.killing import Host
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill.ledger import EntryKind, read_ledgers
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = hard_rows(count=600)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V1 cluster of several regions that holds `ROWS`."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V1, stores=1) as live:
        load(live, ROWS)
        live.split(*sorted(ROWS)[:: len(ROWS) // 6][1:6])
        yield live


@pytest.fixture
def options(source: LiveCluster, tmp_path: Path) -> DrillOptions:
    """A drill that makes a backup and restores it into a playground of one store, all below the test's own folder."""
    backups, target = (
        parse(str(tmp_path / "backups")),
        PlaygroundTarget(Host(), tmp_path / "targets", stores=1),
    )
    return DrillOptions(
        backups=backups,
        home=parse(str(tmp_path / "drills")),
        target=target,
        backup=BackupOptions(cluster=source.config, storage=backups, executor="driver"),
        removers={EntryKind.PLAYGROUND: target},
    )


def assert_nothing_left(options: DrillOptions) -> None:
    """No playground, no copy and no page of the ledger is left."""
    home = open_store(options.home)
    assert read_ledgers(home) == []
    assert isinstance(options.target, PlaygroundTarget)
    assert not list(options.target.parent.glob("*"))
    assert {info.name.partition("/")[0] for info in home.list()} <= {"reports", "index.html"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Return a process that forks drills to be killed."""
    with Forks("tikv_br.drill.run", "tikv_br.cli.drill_cmd") as forks:
        yield forks
