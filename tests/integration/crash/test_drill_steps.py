"""Drills of every scenario broken at every boundary of their steps, and the next one.

The target is a cluster that is lent, so that a drill takes no second; playgrounds of its own are killed in tests/integration/drill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import load
from tests.integration.crash.cells import CODES, Cell, Kind, end_by_itself, ending, fail
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.operations import (
    BACKUP,
    SCRATCH,
    Variant,
    check_whole,
    chosen_drills,
    drill_options,
)
from tests.integration.crash.world import Files, Rival, disturbed, files, forget_safe_points
from tests.integration.incremental import forked_sync  # noqa: F401 - loads the kernels
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.logs import write_log
from tikv_br.backup.run import backup
from tikv_br.backupset.index import Index
from tikv_br.drill.history import read_past_drills
from tikv_br.drill.ledger import EntryKind, read_ledgers
from tikv_br.drill.options import DrillOptions
from tikv_br.drill.run import drill, report_steps
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Reporter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Run a V1 cluster that holds the same rows."""
    with live_cluster(tmp_path_factory.mktemp("v1"), ApiVersion.V1, stores=1) as running:
        load(running, ROWS)
        yield running


@pytest.fixture
def source(variant: Variant, request: pytest.FixtureRequest) -> LiveCluster:
    """Return the cluster that is backed up."""
    found: LiveCluster = request.getfixturevalue("live" if variant.source is ApiVersion.V2 else "old")
    return found


@pytest.fixture(scope="module")
def made(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of the source, in a folder with an index, and a log that continues it."""
    folder = tmp_path_factory.mktemp("made")
    place = StorageLocation("local", str(folder / "backups/backup"))
    made = backup(structs.replace(BACKUP, cluster=cluster.config, storage=place)).summary
    log = StorageLocation("local", str(folder / "backups/log"))
    write_log(log, cluster.cluster.cluster_id, made.backup_ts, [cluster.cluster.pd.tso()])
    forget_safe_points(cluster)
    return folder


def run_drill(options: DrillOptions, reporter: Reporter) -> None:
    """Run a drill."""
    drill(options, reporter)


@pytest.mark.parametrize(("variant", "cell"), chosen_drills(), ids=str)
def test_a_drill_broken_at_a_boundary(
    variant: Variant,
    cell: Cell,
    source: LiveCluster,
    target: LiveCluster,
    made: Path,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """Its creations are gone at once, or with the next drill after a kill; that one passes."""
    options = drill_options(variant, tmp_path, source.config, target.config)
    if not variant.makes_backup:
        options = replace(options, backups=StorageLocation("local", str(made / "backups")))
    if options.point is not None:
        log = replace(options.point.log, storage=options.backups.child("log"))
        options = replace(options, point=replace(options.point, log=log))
    operation = partial(run_drill, options)
    break_at(cell, operation, options, World(source, target), forks)
    if cell.kind in {Kind.EXCEPTION, Kind.SIGTERM}:
        assert_nothing_left(options, source, target, unreported=True)
    assert ending(operation, lambda _: None) == 0
    assert_nothing_left(options, source, target)
    past = read_past_drills(open_store(options.home))
    assert past[-1].verdict == "passed"
    if variant.makes_backup and variant.source is ApiVersion.V2:
        check_backups(options, source)
    forget_safe_points(source)


@dataclass(frozen=True)
class World:
    """Everything that a drill could change, except its own folder."""

    source: LiveCluster
    target: LiveCluster

    def look(self) -> list[object]:
        """Rows of both clusters, and the services that hold GC."""
        rows = [contents(self.source), contents(self.target), contents(self.target, SCRATCH)]
        return [rows, sorted(self.source.safe_points())]


def break_at(cell: Cell, operation: partial[None], options: DrillOptions, world: World, forks: Forks) -> None:
    """Run a drill into its cell, and see how it ends; once it has lost its lease it changes nothing."""
    if cell.kind is Kind.EXCEPTION:
        assert ending(operation, cell.reporter(fail)) == CODES[cell.kind]
    elif cell.kind is not Kind.LOST_LEASE:
        forks.start(partial(end_by_itself, operation, cell))
        assert forks.wait() == CODES[cell.kind]
    else:
        home, seen = Path(options.home.path), list[object]()
        rival = Rival(home)

        def take() -> None:
            rival.take()
            seen.append(world.look())

        code = ending(operation, cell.reporter(take))
        after_all = cell.step == report_steps()[-1].name and cell.when == "after"
        assert code == (0 if after_all else CODES[cell.kind])
        assert after_all or (settled(files(home.parent)), seen) == (settled(rival.found), [world.look()])
        rival.leave()


def settled(found: Files) -> Files:
    """State without what a tail writes until the drill learns that the lease is lost."""
    return {name: each for name, each in found.items() if "/sync/" not in name}


def assert_nothing_left(
    options: DrillOptions, source: LiveCluster, target: LiveCluster, *, unreported: bool = False
) -> None:
    """The cluster that was lent is empty, no copy and no page of the ledger is left, nothing is disturbed.

    A finished backup that no report tells of stands in the ledger, until the next drill has written one.
    """
    left = {made.kind for page in read_ledgers(open_store(options.home)) for made in page.creations}
    assert left <= ({EntryKind.MADE_BACKUP} if unreported else set())
    assert not list((Path(options.home.path).parent / "targets").glob("*"))
    assert contents(target) == contents(target, SCRATCH) == {}
    # An earlier drill's safe point expires: only the ledger names it.
    assert all(name.startswith("tikv-br-sync-drill-") for name in source.safe_points() if "sync" in name)
    assert disturbed(target) == []
    names = {name.partition("/")[0] for name in files(Path(options.home.path), but="//") if not name.endswith("/")}
    assert names <= {"reports", "index.html", *(["ledger"] if left else [])}


def check_backups(options: DrillOptions, live: LiveCluster) -> None:
    """Each backup that is left is whole and in the index, and has a safe point of its own."""
    folder = Path(options.backups.path)
    places = sorted(path for path in folder.iterdir() if path.name != "tikv-br-index")
    for place in places:
        check_whole(live, place)
    listed = Index(open_store(options.backups)).read()
    assert sorted(each.entry.path for each in listed) == [place.name for place in places]
    assert len(live.safe_points()) <= len(places)
