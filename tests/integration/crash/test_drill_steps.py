"""Drills of every scenario broken at every boundary of their steps, and the next one.

The target is a cluster that is lent, so that a drill takes no second; playgrounds of its own are killed in tests/integration/drill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from incremental.feed.options import FeedOptions
from incremental.rehearsal import SourceTail
from tests.forks import Forks
from tests.integration.backup.data import load
from tests.integration.crash.cells import CODES, FULL, Cell, Kind, cells, end_by_itself, ending, fail, some
from tests.integration.crash.conftest import ROWS
from tests.integration.crash.test_backup_steps import EXAMPLE, check_whole
from tests.integration.crash.world import Files, Rival, disturbed, files, forget_safe_points, safe_points
from tests.integration.incremental import forked_sync  # noqa: F401 - loads the kernels
from tests.live_cluster import LiveCluster, contents, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.index import Index
from tikv_br.cluster.cluster import Cluster
from tikv_br.cluster.config import ClusterConfig
from tikv_br.drill.history import read_past
from tikv_br.drill.ledger import Kind as Made
from tikv_br.drill.ledger import left_behind
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.run import _ending_steps, drill
from tikv_br.drill.scratch import ClusterTarget
from tikv_br.drill.steps import drill_steps
from tikv_br.drill.tail import TailOptions
from tikv_br.drill.target import PlaygroundTarget
from tikv_br.progress_events import Reporter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation


@dataclass(frozen=True)
class Lender:
    """Lends a running cluster instead of starting one; it is empty again when it is given back."""

    pd: str

    def start(self, folder: Path, _api_version: ApiVersion, _stores: int) -> str:
        """Lend it."""
        folder.mkdir()
        return self.pd

    def stop(self, folder: Path) -> None:
        """Take it back."""
        if folder.exists():
            with Cluster.connect(ClusterConfig(pd=(self.pd,))) as cluster:
                cluster.raw(0).delete_range(b"", b"")


@dataclass(frozen=True)
class Variant:
    """A kind of drill."""

    scenario: Scenario
    makes_backup: bool = False
    """Else it takes one that is there."""
    tail: bool = False
    """Whether it follows the source, into a scratch keyspace; else it restores into a cluster that is lent."""
    source: ApiVersion = ApiVersion.V2

    def __str__(self) -> str:
        return f"tail-of-{self.source.label}" if self.tail else self.scenario


VARIANTS = (
    Variant(Scenario.DELETED_RANGE),
    Variant(Scenario.LOST_CLUSTER, makes_backup=True),
    Variant(Scenario.CORRUPT_BACKUP),
    # It moves GC of the cluster that is lent for good: each drill's backup must be younger than that.
    Variant(Scenario.STALE_SAFE_POINT, makes_backup=True),
    Variant(Scenario.LOST_CLUSTER, tail=True),
    Variant(Scenario.LOST_CLUSTER, tail=True, makes_backup=True, source=ApiVersion.V1),
)
READS_ONLY = {
    "check the target",
    "choose the backup",
    "see that the backup has a timestamp",
    "see that the source can be followed",
    "see that a sync can begin at the backup",
}
"""Steps that are only broken with `FULL`, or in no variant."""
SCRATCH = 7
"""The keyspace that a tail goes to."""
CANARY = b"zz/canary"


def options_for(variant: Variant, folder: Path, source: ClusterConfig, target: ClusterConfig) -> DrillOptions:
    """A drill below a folder."""
    backups = StorageLocation("local", str(folder / "backups"))
    lent = PlaygroundTarget(Lender(target.pd[0]), folder / "targets")
    tail = SourceTail(source, folder, FeedOptions(hold_back=0.1), interval=0.1)
    asked = replace(EXAMPLE, cluster=source, storage=backups, dst_api_version=ApiVersion.V2)
    return DrillOptions(
        backups=backups,
        home=StorageLocation("local", str(folder / "drills")),
        target=ClusterTarget(target, str(SCRATCH)) if variant.tail else lent,
        backup=asked if variant.makes_backup else None,
        source=source,
        tail=TailOptions(tail, 0.2, lag=60.0, canary=CANARY) if variant.tail else None,
        removers={Made.PLAYGROUND: lent, Made.TAIL: tail},
        scenario=variant.scenario,
        start=b"row" if variant.scenario is Scenario.DELETED_RANGE else b"",
    )


def steps_of(variant: Variant) -> list[Cell]:
    """The cells of a drill, up to the last step of its ending."""
    options = options_for(variant, Path("/nobody"), EXAMPLE.cluster, EXAMPLE.cluster)
    return cells([*drill_steps(options), *_ending_steps()])


def chosen() -> list[tuple[Variant, Cell]]:
    """With `FULL` all cells of all variants; else of each only the steps that those before it have not."""
    found: list[tuple[Variant, Cell]] = []
    known = set(READS_ONLY)
    for number, variant in enumerate(VARIANTS):
        mine = some(steps_of(variant), offset=number)
        if not os.environ.get(FULL):
            mine = [cell for cell in mine if cell.step not in known]
        known |= {cell.step for cell in mine}
        found += [(variant, cell) for cell in mine]
    return found


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
    """A backup of the source, in a folder with an index."""
    folder = tmp_path_factory.mktemp("made")
    backup(replace(EXAMPLE, cluster=cluster.config, storage=StorageLocation("local", str(folder / "backups/backup"))))
    forget_safe_points(cluster)
    return folder


def run_drill(options: DrillOptions, reporter: Reporter) -> None:
    """Run a drill."""
    drill(options, reporter)


@pytest.mark.parametrize(("variant", "cell"), chosen(), ids=str)
def test_a_drill_broken_at_a_boundary(
    variant: Variant,
    cell: Cell,
    source: LiveCluster,
    target: LiveCluster,
    made: Path,
    forks: Forks,
    tmp_path: Path,
) -> None:
    """What it made is gone at once, or with the next drill after a kill; that one passes."""
    options = options_for(variant, tmp_path, source.config, target.config)
    if not variant.makes_backup:
        options = replace(options, backups=StorageLocation("local", str(made / "backups")))
    operation = partial(run_drill, options)
    break_at(cell, operation, options, World(source, target), forks)
    if cell.kind in {Kind.EXCEPTION, Kind.SIGTERM}:
        assert_nothing_left(options, source, target, unreported=True)
    assert ending(operation, lambda _: None) == 0
    assert_nothing_left(options, source, target)
    past = read_past(open_store(options.home))
    assert past[-1].verdict == "passed"
    if variant.makes_backup and variant.source is ApiVersion.V2:
        check_backups(options, source)
    forget_safe_points(source)


@dataclass(frozen=True)
class World:
    """What a drill could change, but for its own folder."""

    source: LiveCluster
    target: LiveCluster

    def look(self) -> list[object]:
        """Rows of both clusters, and who holds GC back. Of what a tail does not write any more, nothing comes."""
        rows = [contents(self.source), contents(self.target), contents(self.target, SCRATCH)]
        for each in rows:
            each.pop(CANARY, None)  # it may be on its way
        return [rows, sorted(safe_points(self.source))]


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
        after_all = cell.step == _ending_steps()[-1].name and cell.when == "after"
        assert code == (0 if after_all else CODES[cell.kind])
        assert after_all or (settled(files(home.parent)), seen) == (settled(rival.found), [world.look()])
        rival.leave()


def settled(found: Files) -> Files:
    """Without what a tail writes by itself, until the drill learns that the lease is lost."""
    return {name: each for name, each in found.items() if "/sync/" not in name and "/journal/" not in name}


def assert_nothing_left(
    options: DrillOptions, source: LiveCluster, target: LiveCluster, *, unreported: bool = False
) -> None:
    """The cluster that was lent is empty, no copy and no page of the ledger is left, nothing is disturbed.

    A finished backup that no report tells of stands in the ledger, until the next drill has written one.
    """
    left = {made.kind for page in left_behind(open_store(options.home)) for made in page.creations}
    assert left <= ({Made.MADE_BACKUP} if unreported else set())
    assert not list((Path(options.home.path).parent / "targets").glob("*"))
    assert contents(target) == contents(target, SCRATCH) == {}
    assert source.raw().get(CANARY) is None
    assert not [name for name in safe_points(source) if "sync" in name]
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
    assert len(safe_points(live)) <= len(places)
