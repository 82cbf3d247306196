"""Drills of ``point-in-time``, against all versions that the source's RocksDB holds."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import tikv_br.formats.order
from tests.integration.backup.data import when
from tests.integration.drill.conftest import assert_nothing_left
from tests.integration.drill.killing import Host, killed_at, killed_within
from tests.support import history
from tests.support.background import Background
from tests.support.forks import Forks
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.logs import write_log
from tikv_br.archive.log import LogSource
from tikv_br.backup.run import backup
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.drill import point
from tikv_br.drill.history import read_past_drills
from tikv_br.drill.ledger import EntryKind, read_ledgers
from tikv_br.drill.objectives import Objectives
from tikv_br.drill.options import DrillOptions, PointChoice, Scenario
from tikv_br.drill.playground import PlaygroundTarget
from tikv_br.drill.run import drill, drill_steps
from tikv_br.drill.targets import ClusterTarget
from tikv_br.errors import (
    DifferencesFound,
    LogDamaged,
    OutsideRestoreWindow,
    TikvBrError,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.incremental.backup import back_up_changes
from tikv_br.progress_events import StepFinished
from tikv_br.report.facts import DrillVerdict
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

SCRATCH = 7
KEYS = 300
TTL = 3600


def key(number: int) -> bytes:
    """A key."""
    return b"row%04d" % number


@dataclass(frozen=True)
class World:
    """A source, two backups of it and an increment, a log, and every version that it has held."""

    source: LiveCluster
    folder: Path
    log: LogSource
    inexact: tuple[int, int]
    versions: history.History

    def place(self, name: str) -> StorageLocation:
        """Location of a backup."""
        return parse(str(self.folder / "backups" / name))

    def sources(self, name: str) -> MergeSources:
        """A backup with the log."""
        return MergeSources.open(self.place(name), self.log)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Rows are overwritten, deleted, written again and expire, before, between and after the backups."""
    folder = tmp_path_factory.mktemp("world")
    with live_cluster(folder / "source", ApiVersion.V2, stores=1, ts_ahead=0.0, resolved_ts_interval=0.1) as source:
        raw, pd = source.raw(), source.cluster.pd
        raw.batch_put({key(number): b"at first" for number in range(KEYS)})
        start_ts = pd.tso()
        for name in ("first", "second"):
            options = BackupOptions(
                source.config, parse(str(folder / "backups" / name)), executor="driver", safe_interval=0
            )
            backup(options)
            for number in range(0, KEYS, 3):
                raw.put(key(number), b"%s %d" % (name.encode(), number))
            raw.batch_put({key(number): b"expires" for number in range(1, KEYS, 9)}, ttl=TTL)
            raw.batch_delete([key(number) for number in range(2, KEYS, 7)])
            raw.batch_put({key(KEYS + number): name.encode() for number in range(9)})
            raw.put(key(2), b"written again")
        third = BackupOptions(
            source.config, parse(str(folder / "backups" / "third")), executor="driver", safe_interval=0
        )
        back_up_changes(third, parse(str(folder / "backups" / "second")))
        raw.batch_put({key(number): b"third" for number in range(50, KEYS, 50)})
        raw.delete(key(7))
        middle = pd.tso()
        raw.put(key(5), b"last")
        inexact = (middle, pd.tso())
        raw.put(key(6), b"last")
        ends = [middle, inexact[1], pd.tso()]
        versions = history.read(folder / "source", folder / "scratch")
        place = parse(str(folder / "log"))
        log = write_log(place, source.cluster.cluster_id, start_ts, ends, versions, [inexact])
        yield World(source, folder, log, inexact, versions)


@pytest.fixture
def options(world: World, tmp_path: Path) -> Iterator[DrillOptions]:
    """A drill into a keyspace of the source itself, which it leaves empty."""
    yield DrillOptions(
        backups=parse(str(world.folder / "backups")),
        home=parse(str(tmp_path / "drills")),
        target=ClusterTarget(world.source.config, str(SCRATCH)),
        scenario=Scenario.POINT_IN_TIME,
        source=world.source.config,
        point=PointChoice(world.log),
    )
    assert contents(world.source, SCRATCH) == {}
    assert read_ledgers(open_store(parse(str(tmp_path / "drills")))) == []


def at(options: DrillOptions, ts: int) -> DrillOptions:
    """The drill of a time."""
    assert options.point is not None
    return replace(options, point=replace(options.point, ts=ts))


def on_playground(options: DrillOptions, folder: Path) -> DrillOptions:
    """The drill with a playground of its own."""
    target = PlaygroundTarget(Host(), folder / "targets", stores=1)
    return replace(options, target=target, removers={EntryKind.PLAYGROUND: target})


def test_a_random_time_is_restored(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """Into a playground, from the newest backup that is older; the figures are there, all else is gone."""
    asked = on_playground(replace(options, objectives=Objectives(rpo=3600, rto=3600, min_keys=200)), tmp_path)
    report = drill(asked)
    assert report.verdict is DrillVerdict.PASSED
    assert report.point is not None
    assert report.point.seed is not None
    assert report.value("keys") == len(history.rows_at(world.versions, report.point.restore_ts))
    assert 0 < (report.value("RTO") or 0) < report.seconds
    assert 0 <= (report.value("RPO") or -1) < 3600
    assert any(f"--until {report.point.restore_ts}" in notice for notice in report.notices)
    assert_nothing_left(asked)
    assert report.to_json()["point"]["restore_ts"] == report.point.restore_ts


def test_rows_are_those_of_the_source(options: DrillOptions, world: World) -> None:
    """At random times, at both ends of the window, and at a requested one; the same seed chooses the same time."""
    seen: dict[bytes, bytes] = {}
    look = when(StepFinished, "verify", lambda: seen.update(contents(world.source, SCRATCH)))
    first, last = world.sources("first").window()
    chosen = []
    for asked in [
        *(replace(options, seed=seed) for seed in (1, 2, 1)),
        *(at(options, ts) for ts in (first, last, 0, world.inexact[0], world.inexact[1])),
    ]:
        seen.clear()
        report = drill(asked, look)
        assert report.point is not None
        assert seen == history.rows_at(world.versions, report.point.restore_ts)
        assert (report.compared[0].keys, report.value("keys")) == (len(seen), len(seen))
        chosen.append(report.point.restore_ts)
    assert chosen[0] == chosen[2] != chosen[1]
    assert chosen[3:] == [first, last, last, *world.inexact]
    assert {each.command for each in world.source.cluster.ingests.read()} == {"drill run"}


def test_the_newest_backup_before_the_time_is_used(options: DrillOptions, world: World) -> None:
    """In a folder the newest one counts, also an increment; a named one is used as it is."""
    second, third = (world.sources(name).window()[0] for name in ("second", "third"))
    for ts, name in ((second - 1, "first"), (second, "second"), (third - 1, "second"), (third, "third"), (0, "third")):
        report = drill(at(options, ts))
        assert report.backup is not None
        assert report.backup.place == world.place(name).redacted()
    named = drill(replace(at(options, ts), existing=world.place("first")))
    assert named.backup is not None
    assert named.backup.place == world.place("first").redacted()


def without_a_row(rows: pa.RecordBatch) -> pa.RecordBatch:
    """All rows but the last one."""
    return rows.slice(0, rows.num_rows - 1)


def with_another_value(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The first row has another value."""
    first = {**rows.slice(0, 1).to_pylist()[0], "value": b"wrong"}
    return pa.concat_batches([pa.RecordBatch.from_pylist([first], SCHEMA), rows.slice(1)])


def with_a_deleted_row(rows: pa.RecordBatch) -> pa.RecordBatch:
    """A row that was deleted is there again."""
    row = {"key": b"zzz", "value": b"deleted", "expire_ts": 0, "ts": 1, "deleted": False}
    return pa.concat_batches([rows, pa.RecordBatch.from_pylist([row], SCHEMA)])


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(without_a_row, "is absent"), (with_another_value, "has another value"), (with_a_deleted_row, "is extra")],
)
def test_rows_that_are_merged_wrongly_fail_the_drill(
    options: DrillOptions,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pa.RecordBatch], pa.RecordBatch],
    problem: str,
) -> None:
    """The restore finds its target equal to what it merged; the drill does not."""
    right = tikv_br.formats.order.rows_at
    monkeypatch.setattr(
        tikv_br.formats.order, "rows_at", lambda *arguments: [fault(pa.concat_batches(right(*arguments)))]
    )
    with pytest.raises(DifferencesFound, match=problem) as caught:
        drill(options)
    assert "Report: " in caught.value.hint
    assert [each.verdict for each in read_past_drills(open_store(options.home))] == ["failed"]


def test_a_change_of_the_log_that_is_not_chosen_fails_the_drill(
    options: DrillOptions, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore leaves out a file of the log; the drill reads all of them."""
    right = MergeSources.log_files
    monkeypatch.setattr(MergeSources, "log_files", lambda sources, ts: right(sources, ts)[1:])
    asked = replace(at(options, 0), existing=world.place("first"))
    with pytest.raises(DifferencesFound):
        drill(asked)


def test_a_row_that_others_write_to_the_target_fails_the_drill(options: DrillOptions, world: World) -> None:
    """After the restore, before the comparison."""
    meddle = when(StepFinished, "restore", lambda: world.source.raw(SCRATCH).put(key(1), b"foreign"))
    with pytest.raises(DifferencesFound, match=f"key {key(1).hex()}"):
        drill(options, meddle)


def with_source(options: DrillOptions, log: LogSource | None = None) -> DrillOptions:
    """The drill that compares with the source as well, at the first time that can be restored."""
    assert options.point is not None
    return replace(options, point=replace(options.point, log=log or options.point.log, compare_source=True))


def test_the_source_has_changed_as_the_log_says(options: DrillOptions, world: World) -> None:
    """Rows that were overwritten, deleted or added since the restored time are no difference."""
    for ts in world.sources("first").window():
        report = drill(with_source(at(options, ts)))
        restored, now = history.rows_at(world.versions, ts), contents(world.source)
        changed = sum(restored.get(each) != now.get(each) for each in {*restored, *now})
        assert (changed > 0) is (ts < world.inexact[1])
        found = report.compared[1]
        assert (found.what, found.keys) == ("source and restored rows", len(restored))
        assert f" {changed} key" in found.how


class RunningLog:
    """Continues a log up to now, again and again."""

    def __init__(self, world: World, log: LogSource, end_ts: int, folder: Path) -> None:
        self._world, self._log, self._end_ts, self._folder = world, log, end_ts, folder

    def step(self) -> None:
        """Write what was changed since the last time."""
        # Stores may still give new writes cached timestamps of up to 3 s ago.
        end_ts = minus_seconds(self._world.source.cluster.pd.tso(), 4)
        if end_ts <= self._end_ts:
            return
        versions = history.read(self._world.folder / "source", self._folder / f"scratch-{end_ts}")
        write_log(self._log.storage, self._world.source.cluster.cluster_id, self._end_ts, [end_ts], versions)
        self._end_ts = end_ts


def test_the_source_changes_while_it_is_compared(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """The log has these changes soon; one that is not written any more is a failure with a reason."""
    log, _ = copied_log(world, tmp_path)
    raw, last = world.source.raw(), world.sources("first").window()[1]
    asked = with_source(at(options, last), log)

    def change() -> None:
        raw.put(key(4), b"changed later")
        raw.put(b"new", b"row")

    try:
        with Background([(RunningLog(world, log, last, tmp_path).step, 0.1)]):
            report = drill(asked, when(StepFinished, "restore", change))
        assert " 2 keys " in report.compared[1].how
    finally:
        raw.put(key(4), b"at first")
        raw.delete(b"new")


def test_a_log_that_is_not_written_cannot_be_compared_with_the_source(
    options: DrillOptions, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key has changed since the end of the log."""
    monkeypatch.setattr(point, "PATIENCE", 0.0)
    raw = world.source.raw()
    try:
        with pytest.raises(OutsideRestoreWindow, match="the log did not reach"):
            drill(with_source(options), when(StepFinished, "restore", lambda: raw.put(key(4), b"changed later")))
    finally:
        raw.put(key(4), b"at first")


def test_a_change_that_the_log_never_received_fails_the_drill(
    options: DrillOptions, world: World, tmp_path: Path
) -> None:
    """The log lacks one row that only the source has: backup and log agree without it."""
    lost = {**world.versions, key(6): world.versions[key(6)][:-1]}
    start_ts, end_ts = world.sources("first").base.backup_ts - 1, world.sources("first").window()[1]
    log = write_log(parse(str(tmp_path / "log")), world.source.cluster.cluster_id, start_ts, [end_ts], lost)
    asked = at(with_source(options, log), end_ts)
    assert asked.point is not None
    assert drill(replace(asked, point=replace(asked.point, compare_source=False))).verdict is DrillVerdict.PASSED
    running = RunningLog(world, log, end_ts, tmp_path)
    with (
        Background([(running.step, 0.1)]),
        pytest.raises(DifferencesFound, match=f" 1 key, the first is {key(6).hex()}"),
    ):
        drill(asked)


def copied_log(world: World, folder: Path) -> tuple[LogSource, Path]:
    """A copy of the log, and its folder."""
    shutil.copytree(world.log.storage.path, folder / "log")
    return replace(world.log, storage=parse(str(folder / "log"))), folder / "log" / world.log.id


def refuse(options: DrillOptions, log: LogSource, error: type[TikvBrError], match: str) -> None:
    """Run a drill that fails for this reason, with a report and before a target is made."""
    assert options.point is not None
    with pytest.raises(error, match=match):
        drill(replace(options, point=replace(options.point, log=log)))
    assert [each.verdict for each in read_past_drills(open_store(options.home))] == ["failed"]


def test_a_log_with_a_missing_segment_fails_the_drill(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """Also if the time before the gap could be restored."""
    log, folder = copied_log(world, tmp_path)
    sorted((folder / "segments").iterdir())[1].unlink()
    refuse(options, log, LogDamaged, "has no changes of")


def test_a_log_with_a_damaged_file_fails_the_drill(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """Cut short."""
    log, folder = copied_log(world, tmp_path)
    victim = max((folder / "data").rglob("*.parquet"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    refuse(options, log, LogDamaged, victim.name)


def test_a_log_of_another_cluster_fails_the_drill(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """Named as such."""
    log = write_log(parse(str(tmp_path / "log")), 99, 1, [world.source.cluster.pd.tso()])
    refuse(options, log, UsageError, "the log is of cluster 99")


def test_a_log_that_has_not_reached_the_backup_fails_the_drill(
    options: DrillOptions, world: World, tmp_path: Path
) -> None:
    """There is nothing to choose from."""
    end = world.sources("first").base.backup_ts + 1
    log = write_log(parse(str(tmp_path / "log")), world.source.cluster.cluster_id, 1, [end])
    refuse(
        replace(options, existing=world.place("first")), log, OutsideRestoreWindow, "first time that can be restored"
    )


def test_a_log_that_starts_after_the_backup_fails_the_drill(
    options: DrillOptions, world: World, tmp_path: Path
) -> None:
    """Changes between them are nowhere."""
    tso = world.source.cluster.pd.tso()
    log = write_log(parse(str(tmp_path / "log")), world.source.cluster.cluster_id, tso - 1, [tso])
    refuse(options, log, UsageError, "starts at")


def test_a_backup_from_before_the_log_does_not_matter(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """The log continues the newer backups only; those of the year before stay in the folder, as does one that is damaged."""
    second = world.sources("second")
    log = write_log(
        parse(str(tmp_path / "log")),
        world.source.cluster.cluster_id,
        second.base.backup_ts,
        [second.window()[1]],
        world.versions,
    )
    assert options.point is not None
    found = drill(replace(options, point=replace(options.point, log=log)))
    assert found.verdict is DrillVerdict.PASSED


def test_times_that_cannot_be_restored_are_refused(options: DrillOptions, world: World) -> None:
    """Outside the window, and where the log lacks versions."""
    first, last = world.sources("first").window()
    for ts in (first - 1, last + 1, world.inexact[0] + 1):
        with pytest.raises(OutsideRestoreWindow, match=str(ts)):
            drill(at(options, ts))


def test_a_source_without_timestamps_is_refused(options: DrillOptions, world: World, tmp_path: Path) -> None:
    """API V1."""
    with live_cluster(tmp_path / "v1", ApiVersion.V1, stores=1) as old:
        old.raw().put(b"key", b"value")
        place = parse(str(tmp_path / "backups" / "old"))
        backup(BackupOptions(old.config, place, executor="driver"))
        with pytest.raises(UsageError, match="--pd is cluster"):
            drill(replace(with_source(options), source=old.config))
    for asked in (replace(options, existing=place), replace(options, backups=parse(str(tmp_path / "backups")))):
        with pytest.raises(UsageError, match=r"point-in-time.*no backup-ts"):
            drill(asked)


def test_the_next_drill_removes_the_creations_of_a_killed_one(
    options: DrillOptions, world: World, forks: Forks, tmp_path: Path
) -> None:
    """Killed at the start of each step, and within the merge and the restore; the last drill removes all."""
    asked = on_playground(options, tmp_path)
    inside = [partial(killed_within, asked, name) for name in ("merge", "commit", "save the restore checkpoint")]
    for kill in [*(partial(killed_at, asked, step.name) for step in drill_steps(asked)), *inside]:
        forks.start(kill)
        assert forks.wait() == -signal.SIGKILL, kill
    assert len(read_ledgers(open_store(asked.home))) == 1
    assert drill(asked).verdict is DrillVerdict.PASSED
    assert_nothing_left(asked)
