"""Drills in an empty cluster or an empty keyspace that they own: what is outside of it is never touched."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.backup.data import hard_rows, load, when
from tests.integration.drill.killing import killed_at, killed_within
from tests.support.damage import Victim, cases, kind_of, read_objects
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster, make_keyspaces
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.config import ClusterConfig
from tikv_br.dataflow.options import BackupOptions
from tikv_br.drill.history import read_past_drills
from tikv_br.drill.ledger import Creation, EntryKind, Ledger, OwnedRows, read_ledgers
from tikv_br.drill.objectives import Objectives
from tikv_br.drill.options import DrillOptions, Scenario
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.drill.run import drill
from tikv_br.drill.targets import ClusterTarget, mark_rows
from tikv_br.errors import BackupDamaged, ObjectivesMissed, TargetNotEmpty, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import MAX_KEYSPACE, KeyCodec
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.playground import launcher
from tikv_br.progress_events import StepStarted
from tikv_br.report.facts import DrillVerdict
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

ROWS = hard_rows(count=400)
SCRATCH = 7
BESIDE = {6: {b"six": b"6", b"\xff\xff": b"last"}, 8: {b"": b"first", b"eight": b"8"}}
"""Foreign rows, in the keyspaces on both sides of the scratch one."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A V2 cluster with `ROWS` in its default keyspace, and others' rows on both sides of the drill's keyspace."""
    with live_cluster(tmp_path_factory.mktemp("source"), ApiVersion.V2, stores=1) as live:
        make_keyspaces(live, SCRATCH + 1)
        load(live, ROWS)
        for keyspace, rows in BESIDE.items():
            live.raw(keyspace).batch_put(rows)
        yield live


@pytest.fixture(scope="module")
def made(source: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> DrillOptions:
    """A drill in the drill's keyspace of its source, with the backup that a first one has made."""
    folder = tmp_path_factory.mktemp("drills")
    options = in_scratch(source, folder)
    assert drill(options).verdict is DrillVerdict.PASSED
    return replace(options, backup=None)


def in_scratch(source: LiveCluster, folder: Path) -> DrillOptions:
    """A drill that makes a backup, and restores it into the drill's keyspace."""
    backups = parse(str(folder / "backups"))
    return DrillOptions(
        backups=backups,
        home=parse(str(folder / "home")),
        target=ClusterTarget(source.config, str(SCRATCH)),
        backup=BackupOptions(cluster=source.config, storage=backups, executor="driver", safe_interval=0.0),
    )


@pytest.fixture
def options(made: DrillOptions, tmp_path: Path) -> DrillOptions:
    """The drill, with a home of its own."""
    return replace(made, home=parse(str(tmp_path / "home")))


@pytest.fixture(autouse=True)
def others_are_untouched(source: LiveCluster) -> Iterator[None]:
    """Rows beside the drill's keyspace are as they were, and so is the source."""
    before = contents(source)
    yield
    assert contents(source) == before
    for keyspace, rows in BESIDE.items():
        assert contents(source, keyspace) == rows
    source.raw(SCRATCH).delete_range(EVERY_KEY)


def assert_nothing_left(options: DrillOptions, source: LiveCluster) -> None:
    """No row, no copy and no page of the ledger is left."""
    assert contents(source, SCRATCH) == {}
    home = open_store(options.home)
    assert read_ledgers(home) == []
    assert {info.name.partition("/")[0] for info in home.list()} <= {"reports", "index.html"}


@pytest.mark.parametrize("scenario", [Scenario.LOST_CLUSTER, Scenario.DELETED_RANGE, Scenario.CORRUPT_BACKUP])
def test_a_drill_in_a_scratch_keyspace_leaves_it_empty(
    options: DrillOptions, source: LiveCluster, scenario: Scenario
) -> None:
    """Each scenario passes in a keyspace of the source itself, proves the renamed rows, and removes them."""
    asked = Objectives(rto=3600, max_age=36000, min_keys=len(ROWS))
    ranged, corrupt = scenario is Scenario.DELETED_RANGE, scenario is Scenario.CORRUPT_BACKUP
    found = drill(
        replace(
            options,
            scenario=scenario,
            objectives=Objectives() if corrupt else asked,
            span=KeyRange(b"row00100", b"row00300") if ranged else EVERY_KEY,
        )
    )
    assert found.verdict is DrillVerdict.PASSED
    assert found.target == f"keyspace {SCRATCH} of the cluster at {source.pd}"
    if not corrupt:
        assert found.value("keys") == len(ROWS)
    assert_nothing_left(options, source)


def test_a_missed_objective_is_one_in_a_scratch_keyspace_too(options: DrillOptions, source: LiveCluster) -> None:
    """The rows are removed all the same."""
    with pytest.raises(ObjectivesMissed, match="missed keys"):
        drill(replace(options, objectives=Objectives(min_keys=len(ROWS) + 1)))
    assert_nothing_left(options, source)


def test_a_place_that_is_somebody_elses_is_refused(options: DrillOptions, source: LiveCluster) -> None:
    """One foreign key in the keyspace, the source's own keyspace, the source itself, GC of a cluster: all refused."""
    source.raw(SCRATCH).put(b"precious", b"x")
    with pytest.raises(TargetNotEmpty, match="is not empty"):
        drill(options)
    assert contents(source, SCRATCH) == {b"precious": b"x"}
    with pytest.raises(UsageError, match="one that was backed up"):
        drill(replace(options, target=ClusterTarget(source.config, "0")))
    with pytest.raises(UsageError, match="the cluster that was backed up"):
        drill(replace(options, target=ClusterTarget(source.config)))
    with pytest.raises(UsageError, match="on a playground only"):
        drill(replace(options, scenario=Scenario.STALE_SAFE_POINT))
    assert read_ledgers(open_store(options.home)) == []


def test_a_recovery_cluster_gets_the_rows_and_loses_them(options: DrillOptions, tmp_path: Path) -> None:
    """Rows keep their names there; nothing may be there before, in no keyspace, and a backup can be named by its URL."""
    entry = next(iter(sorted(Path(options.backups.path).glob("drill-*"))))
    with live_cluster(tmp_path / "recovery", ApiVersion.V2, stores=1) as recovery:
        asked = replace(options, target=ClusterTarget(recovery.config), existing=parse(str(entry)))
        found = drill(asked)
        assert (found.verdict, found.value("keys")) == (DrillVerdict.PASSED, len(ROWS))
        assert found.backup is not None
        assert found.backup.place == f"local://{entry}"
        assert contents(recovery) == {}
        with pytest.raises(ObjectivesMissed, match="missed backup age"):
            drill(replace(asked, objectives=Objectives(max_age=0.0)))
        for keyspace in (0, SCRATCH, MAX_KEYSPACE):
            recovery.raw(keyspace).put(b"row", b"x")
            with pytest.raises(TargetNotEmpty, match="first key of the cluster"):
                drill(asked)
            assert contents(recovery, keyspace) == {b"row": b"x"}
            recovery.raw(keyspace).delete_range(EVERY_KEY)


@pytest.mark.parametrize("step", ["verify", "clean up"])
def test_the_keyspace_of_a_killed_drill_is_emptied_by_the_next_in_it(
    options: DrillOptions, source: LiveCluster, forks: Forks, tmp_path: Path, step: str
) -> None:
    """Killed after the restore: a drill with another target deletes no row and reports them, one with the same deletes them."""
    forks.start(partial(killed_at, options, step))
    assert forks.wait() == -signal.SIGKILL
    assert len(contents(source, SCRATCH)) == len(ROWS)
    [page] = read_ledgers(open_store(options.home))
    assert page.creations[-1].rows is not None
    playground = PlaygroundTarget(launcher, tmp_path / "targets", stores=1)
    elsewhere = replace(options, removers={EntryKind.PLAYGROUND: playground})
    for target in (playground, ClusterTarget(source.config, "9")):
        found = drill(replace(elsewhere, target=target))
        assert found.verdict is DrillVerdict.PASSED
        assert any(f"rows of drill {page.drill} remain in keyspace {SCRATCH}" in notice for notice in found.notices)
        assert len(contents(source, SCRATCH)) == len(ROWS)
    assert drill(options).verdict is DrillVerdict.PASSED
    assert_nothing_left(options, source)
    verdicts = [past.verdict for past in read_past_drills(open_store(options.home))]
    assert verdicts == ["interrupted", "passed", "passed", "passed"]


def test_rows_that_may_be_a_recovery_stay(
    options: DrillOptions, source: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """Under the names of the source a killed drill's rows go only while the source answers and has rows of its own."""
    with (
        live_cluster(tmp_path / "recovery", ApiVersion.V2, stores=1) as recovery,
        live_cluster(tmp_path / "rebuilt", ApiVersion.V2, stores=1) as rebuilt,
    ):
        asked = replace(options, target=ClusterTarget(recovery.config), source=source.config)
        forks.start(partial(killed_at, asked, "clean up"))
        assert forks.wait() == -signal.SIGKILL
        for lost in (None, rebuilt.config, ClusterConfig(pd=("127.0.0.1:1",))):
            with pytest.raises(TargetNotEmpty):
                drill(replace(asked, source=lost))
            assert len(contents(recovery)) == len(ROWS)
        assert drill(asked).verdict is DrillVerdict.PASSED
        assert contents(recovery) == {}
        assert read_ledgers(open_store(asked.home)) == []


def test_the_same_rows_restored_by_others_are_theirs(options: DrillOptions, source: LiveCluster, forks: Forks) -> None:
    """Others restore the same backup while a drill has only looked, and it is killed: neither it nor the next one claims the rows."""
    forks.start(partial(killed_at, options, "restore"))
    assert forks.wait() == -signal.SIGKILL
    [page] = read_ledgers(open_store(options.home))
    assert [each.kind for each in page.creations] == [EntryKind.COPY]
    backup = next(iter(sorted(Path(options.backups.path).glob("drill-*"))))
    theirs = RestoreOptions(source.config, parse(str(backup)), to_keyspace=str(SCRATCH))

    def come(_event: object = None) -> None:
        restore(theirs)

    with pytest.raises(TargetNotEmpty):
        drill(options, when(StepStarted, "restore", come))
    assert len(contents(source, SCRATCH)) == len(ROWS)
    assert read_ledgers(open_store(options.home)) == []


@pytest.mark.parametrize("step", ["split and scatter", "compare checksums"])
def test_the_next_drill_removes_rows_of_a_killed_one(
    options: DrillOptions, source: LiveCluster, forks: Forks, step: str
) -> None:
    """Killed just after it has claimed the drill's keyspace, and when all rows are there: the next drill empties it."""
    forks.start(partial(killed_within, options, step))
    assert forks.wait() == -signal.SIGKILL
    [page] = read_ledgers(open_store(options.home))
    assert page.creations[-1].kind is EntryKind.ROWS
    assert drill(options).verdict is DrillVerdict.PASSED
    assert_nothing_left(options, source)


def rows_entry(source: LiveCluster, keyspace: int | None, *owned: int, secret: str = "") -> Creation:
    """The ledger entry of a drill that owns whole keyspaces."""
    ranges = tuple(KeyCodec(ApiVersion.V2, each).rpc_range() for each in owned)
    rows = OwnedRows(source.cluster.cluster_id, ApiVersion.V2, keyspace, ranges, secret=secret)
    return Creation(EntryKind.ROWS, "the target", rows=rows)


def test_a_forged_ledger_deletes_no_row(options: DrillOptions, source: LiveCluster) -> None:
    """Ranges of other keyspaces, also by a drill that has a mark, and rows of the drill's own keyspace that no drill wrote."""
    home = open_store(options.home)
    Ledger(home, "unmarked").add(rows_entry(source, SCRATCH, 0, 6, 8))
    mark_rows(source.config, "marked", rows_entry(source, SCRATCH, SCRATCH, secret="s" * 32))
    Ledger(home, "marked").add(rows_entry(source, SCRATCH, 0, SCRATCH, secret="s" * 32))
    elsewhere = rows_entry(source, SCRATCH, 6, secret="t" * 32)
    mark_rows(source.config, "elsewhere", elsewhere)
    Ledger(home, "elsewhere").add(elsewhere)
    found = drill(options)
    assert found.verdict is DrillVerdict.PASSED
    for name in ("unmarked", "marked", "elsewhere"):
        assert any(f"drill {name} owns by its ledger" in notice for notice in found.notices)
    Ledger(home, "own").add(rows_entry(source, SCRATCH, SCRATCH))
    whole = rows_entry(source, SCRATCH, SCRATCH, secret="u" * 32)
    assert whole.rows is not None
    part = KeyCodec(ApiVersion.V2, SCRATCH).rpc_range(KeyRange(b"", b"p"))
    mark_rows(source.config, "narrow", structs.replace(whole, rows=structs.replace(whole.rows, ranges=(part,))))
    Ledger(home, "narrow").add(whole)
    source.raw(SCRATCH).put(b"precious", b"x")
    with pytest.raises(TargetNotEmpty):
        drill(options)
    assert contents(source, SCRATCH) == {b"precious": b"x"}


def test_a_ledger_that_comes_back_deletes_no_row(
    options: DrillOptions, source: LiveCluster, forks: Forks, tmp_path: Path
) -> None:
    """A ledger is put back after its drill's rows are gone: the mark went with them. Nor does it empty a recovery cluster."""
    forks.start(partial(killed_at, options, "verify"))
    assert forks.wait() == -signal.SIGKILL
    home = open_store(options.home)
    [name] = [info.name for info in home.list("ledger")]
    ledger = home.get(name)
    assert drill(options).verdict is DrillVerdict.PASSED
    home.put(name, ledger)
    source.raw(SCRATCH).put(b"precious", b"x")
    with pytest.raises(TargetNotEmpty):
        drill(options)
    assert contents(source, SCRATCH) == {b"precious": b"x"}
    with live_cluster(tmp_path / "recovery", ApiVersion.V2, stores=1) as recovery:
        recovery.raw(3).put(b"precious", b"x")
        Ledger(home, "whole").add(rows_entry(recovery, None, 0, 3))
        with pytest.raises(TargetNotEmpty):
            drill(replace(options, target=ClusterTarget(recovery.config), source=source.config))
        assert contents(recovery, 3) == {b"precious": b"x"}


def test_by_a_damaged_ledger_no_row_goes(options: DrillOptions, source: LiveCluster) -> None:
    """The page of a drill that was killed says whose rows lie there: one that is not as it was written ends the next drill, by its name."""
    home = open_store(options.home)
    drill(options)
    [path] = Path(options.backups.path).glob("drill-*")
    backup = BackupSet.open(open_store(parse(str(path))))
    assert isinstance(options.target, ClusterTarget)
    page = Ledger(home, "dead")
    creation = options.target.plan("dead", backup)
    page.add(creation)
    mark_rows(source.config, "dead", creation)
    other = Ledger(home, "other")
    other.add(Creation(EntryKind.COPY, "copies/other"))
    source.raw(SCRATCH).batch_put(ROWS)
    objects = {name: data for name, data in read_objects(Path(options.home.path)).items() if name.startswith("ledger/")}
    victim = Victim(Path(options.home.path), objects)
    for case in cases(objects, {}, lambda _kind: 1):
        if case.damage in {"missing", "short of a byte"}:
            continue
        victim.damage(case)
        with pytest.raises(BackupDamaged, match="ledger/") as caught:
            drill(options)
        assert (caught.value.exit_code, contents(source, SCRATCH)) == (32, ROWS), str(case)
        victim.mend(case)
    assert drill(options).verdict is DrillVerdict.PASSED
    assert_nothing_left(options, source)
    assert {kind_of(name) for name in read_objects(Path(options.home.path))} == {"drill report", "drill page"}
