"""Restores to points in time, against all versions that the source's RocksDB holds."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from tests.e2e.command import PROGRAM, environment
from tests.integration.incremental.workload import FEED_FAULTS, KEYS, Commotion, Writer, key_of
from tests.integration.restore import points
from tests.integration.restore.points import times_in
from tests.integration.restore.restores import forge_checkpoint
from tests.support import history
from tests.support.background import Background
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import PATIENCE, eventually
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.log import LogArchive, LogSource
from tikv_br.archive.records import Segment
from tikv_br.backup.merge import MergeOptions, merge_backup
from tikv_br.backup.run import backup
from tikv_br.backupset import layout
from tikv_br.cluster.cluster import Cluster
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.errors import (
    ClusterUnfit,
    LogDamaged,
    OutsideRestoreWindow,
    StorageUnreachable,
    TargetNotEmpty,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.limits import RowLimits
from tikv_br.incremental.backup import back_up_changes
from tikv_br.point_in_time import PointOptions, merge_output, restore_to_point, temporary_location
from tikv_br.restore.options import RestoreOptions
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

SEED = 20
TIMES = 50
WRITERS = 3
WRITE_SECONDS = 12.0
KILLS = 3
SEGMENTS = 4
"""That there are after the full backup, at least, each with changes that no other has."""
LOG_ID = "main"


@dataclass(frozen=True, slots=True)
class Recorded:
    """State of a source, and the backups and logs of it."""

    source: LiveCluster
    log: LogSource
    history: history.History
    full: StorageLocation
    increment: StorageLocation

    def check(self, folder: Path, newest: StorageLocation, log: LogSource | None, ts: int) -> None:
        """Fail unless the rows merged for a timestamp are those of the source at that time."""
        points.check(folder, newest, log, ts, self.history)


def indispensable(log: LogArchive, after_ts: int) -> list[Segment]:
    """Segments with rows whose `from_ts` can be restored and is after a timestamp, and that overlap no other in time."""
    inexact = log.inexact_windows()
    return [
        each
        for each in log.segments
        if each.files
        and each.from_ts > after_ts
        and not any(start < each.from_ts < end for start, end in inexact)
        and not any(
            other.from_ts < each.to_ts and each.from_ts < other.to_ts for other in log.segments if other != each
        )
    ]


class Follower:
    """A process that writes the log, killed and started again."""

    def __init__(self, source: LiveCluster, folder: Path) -> None:
        self.source = source
        self.log = LogSource(parse(f"local://{folder / 'log'}"), LOG_ID)
        address = f"{self.log.storage.redacted()}?id={LOG_ID}&flush-interval=0.5s"
        self._command: list[str] = [
            str(PROGRAM),
            "sync",
            "--id",
            LOG_ID,
            "--pd",
            source.pd,
            "--sink",
            address,
            "--start-ts",
            "now",
        ]
        self._command += ["--hold-back", "0.5s", "--scratch-dir", str(folder)]
        self._output = folder / "follower.log"
        self._process = self._start()

    def kill(self) -> None:
        """End the process at once, and start another."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def end_ts(self) -> int:
        """End of the log so far."""
        assert self._process.poll() is None, self._output.read_text()[-3000:]
        try:
            return LogArchive.open(open_store(self.log.storage), LOG_ID).end_ts()
        except Exception:  # noqa: BLE001 - it is just being made
            return 0

    def catch_up(self) -> None:
        """Wait until the log has everything that was written until now."""
        ts = self.source.cluster.pd.tso()

        def has_come() -> bool:
            for store_id in self.source.store_ids:  # or their cached timestamps would be waited for
                self.source.flush(store_id)
            return self.end_ts() >= ts

        eventually(has_come, PATIENCE)

    def stop(self) -> None:
        """End the process in order."""
        self._process.terminate()
        assert self._process.wait(PATIENCE) == 143, self._output.read_text()[-3000:]

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(self._command, stdout=output, stderr=output, env=environment(), cwd="/")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A source that was written to while its regions moved, a log whose writer was killed, a full backup and an increment."""
    folder = tmp_path_factory.mktemp("recorded")
    quick = {"election_timeout": 0.5, "resolved_ts_interval": 0.1, "ts_ahead": 0.3}
    with live_cluster(folder / "source", ApiVersion.V2, stores=3, **quick) as source:
        codec = source.raw().codec
        source.split(*(codec.bound(codec.rpc_key(key_of(number))) for number in range(0, KEYS, 40)))
        source.raw().batch_put({key_of(number): b"at first" for number in range(KEYS)})
        follower = Follower(source, folder)
        eventually(lambda: follower.end_ts() > 0, PATIENCE)
        writers = [Writer(source.raw(), SEED, number) for number in range(WRITERS)]
        commotion = Commotion(source, SEED, range(9, 20), FEED_FAULTS)
        places = [parse(f"local://{folder / name}") for name in ("full", "increment")]
        patient = replace(source.config, retry_budget=PATIENCE)  # of stores that are dead for seconds, or longer
        options = [BackupOptions(patient, each, executor="driver", safe_interval=0.0) for each in places]
        with Background([*((writer.step, 0.01) for writer in writers), (commotion.step, 0.3)]):
            for kill in range(KILLS):
                time.sleep(WRITE_SECONDS / KILLS / 2)
                if kill == 1:
                    backup(options[0])
                if kill == 2:
                    back_up_changes(options[1], places[0])
                follower.kill()
                time.sleep(WRITE_SECONDS / KILLS / 2)
            scanned_ts = MergeSources.open(places[0], follower.log).window()[0]
            store = open_store(follower.log.storage)
            eventually(lambda: len(indispensable(LogArchive.open(store, LOG_ID), scanned_ts)) >= SEGMENTS, PATIENCE)
        source.heal()
        follower.catch_up()
        follower.stop()
        found = history.read(folder / "source", folder / "scratch")
        yield Recorded(source, follower.log, found, *places)


def test_rows_of_any_time_are_those_of_the_source(recorded: Recorded, tmp_path: Path) -> None:
    """From a full backup and a log."""
    for ts in times_in(MergeSources.open(recorded.full, recorded.log), TIMES, random.Random(SEED)):
        recorded.check(tmp_path, recorded.full, recorded.log, ts)


def test_increments_and_a_log_give_the_same_rows(recorded: Recorded, tmp_path: Path) -> None:
    """The log from the end of the last increment on."""
    for ts in times_in(MergeSources.open(recorded.increment, recorded.log), 10, random.Random(SEED)):
        recorded.check(tmp_path, recorded.increment, recorded.log, ts)


@pytest.mark.parametrize("executor", ["driver", "spark"])
def test_a_compacted_log_gives_the_same_rows(
    executor: Literal["driver", "spark"], recorded: Recorded, tmp_path: Path
) -> None:
    """At all times that could be restored exactly before, and at no others; the replaced segments are gone."""
    before = MergeSources.open(recorded.full, recorded.log)
    assert before.log is not None
    shutil.copytree(recorded.log.storage.path, tmp_path / "log")
    log = LogSource(parse(f"local://{tmp_path / 'log'}"), LOG_ID)
    size = sum(file.total_bytes for segment in before.log.segments for file in segment.files)
    done = compact(
        CompactionOptions(
            log.storage,
            LOG_ID,
            grace=0.0,
            executor=executor,
            spark_master="local[2]",
            task_bytes=size // 3,
            file_bytes=size // 12,
        )
    )
    assert (done.executor, done.removed_segments) == (executor, done.segments)
    # One that fills a task alone may be left as it is.
    assert 1 < done.new_segments < done.segments <= len(before.log.segments)
    assert done.new_files > done.new_segments
    after = MergeSources.open(recorded.full, log)
    assert after.log is not None
    assert after.window() == before.window()
    assert after.log.inexact_windows() == before.log.inexact_windows()
    for ts in times_in(after, TIMES if executor == "driver" else 5, random.Random(SEED + 1)):
        recorded.check(tmp_path, recorded.full, log, ts)


def test_a_cluster_gets_the_rows_of_a_time(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trace of the temporary backup; rows that had expired at that time are gone, others still expire. Rows that no client could replace are refused."""
    ts = times_in(MergeSources.open(recorded.full, recorded.log), 3, random.Random(SEED))[1]
    with live_cluster(tmp_path / "target", ApiVersion.V2) as target:
        work = parse(f"local://{tmp_path / 'work'}")
        options = PointOptions(RestoreOptions(target.config, recorded.full), recorded.log, ts, work=work)
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "row_limits", lambda *_: RowLimits(key=1))
            with pytest.raises(ClusterUnfit, match="no client could overwrite or delete it"):
                restore_to_point(options)
        assert contents(target) == {}
        assert not list(open_store(work).list())
        done = restore_to_point(options)
        now = target.cluster.pd.tso()
        expired_since = history.rows_at(recorded.history, ts).keys() - contents(target).keys()
        found = history.read(tmp_path / "target", tmp_path / "scratch")
    assert done.ts == ts
    assert {key: versions[-1].value for key, versions in found.items()} == history.rows_at(recorded.history, ts)
    assert all(0 < found[key][-1].expire_ts <= now >> 18 for key in expired_since)
    assert not list(open_store(work).list())


@pytest.mark.parametrize("began", [False, True])
def test_latest_is_found_again_until_a_restore_has_begun(*, began: bool, recorded: Recorded, tmp_path: Path) -> None:
    """Rows merged by a run that ended before it changed the target are merged again; a begun restore is finished as it began. A forged one overwrites nothing."""
    sources = MergeSources.open(recorded.full, recorded.log)
    latest, older = sources.window()[1], times_in(sources, 3, random.Random(SEED))[1]
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        wanted = RestoreOptions(target.config, recorded.full)
        options = PointOptions(wanted, recorded.log, 0, work=parse(f"local://{tmp_path / 'work'}"))
        work = temporary_location(options, sources)
        output = merge_output(options, work)
        merge_backup(MergeOptions(output, recorded.full, recorded.log, older, listed=False))
        if began:
            open_store(work).put(f"{layout.RESTORE}/1/checkpoint.json", b"of another cluster")
            forge_checkpoint(target, work)
            target.raw().put(b"theirs", b"x")
            with pytest.raises(TargetNotEmpty):
                restore_to_point(options)
            assert contents(target) == {b"theirs": b"x"}
            target.raw().delete(b"theirs")
        done = restore_to_point(options)
    assert done.ts == (older if began else latest)
    assert older < latest


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_interrupted_removal_is_finished(
    count: int, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command, after any deletion of the temporary backup."""
    ts = times_in(MergeSources.open(recorded.full, recorded.log), 1, random.Random(SEED))[0]
    removed: list[str] = []
    delete = LocalObjectStore.delete

    def interrupted(store: LocalObjectStore, name: str) -> None:
        if removed and len(removed) > count:
            raise StorageUnreachable("interrupted")
        delete(store, name)
        if removed or name == layout.META:
            removed.append(name)

    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        work = parse(f"local://{tmp_path / 'work'}")
        options = PointOptions(RestoreOptions(target.config, recorded.full), recorded.log, ts, work=work)
        monkeypatch.setattr(LocalObjectStore, "delete", interrupted)
        with pytest.raises(StorageUnreachable):
            restore_to_point(options)
        monkeypatch.setattr(LocalObjectStore, "delete", delete)
        assert restore_to_point(options).restored is not None
    assert not list(open_store(work).list())


def test_times_outside_the_window_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    """With the window, and before anything is written."""
    sources = MergeSources.open(recorded.full, recorded.log)
    (first, last), (scanned, _) = sources.window(), sources.window(allow_inexact=True)
    for ts in (1, scanned - 1, last + 1, last + (3600 * 1000 << 18)):
        place = parse(f"local://{tmp_path / 'merged'}")
        output = BackupOptions(recorded.source.config, place, executor="driver")
        with pytest.raises((OutsideRestoreWindow, UsageError), match=f"{first} .* to {last} "):
            merge_backup(MergeOptions(output, recorded.full, recorded.log, ts))
        assert not list(open_store(place).list())
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_backup(MergeOptions(output, recorded.full))


def test_a_log_with_a_gap_restores_nothing_behind_it(recorded: Recorded, tmp_path: Path) -> None:
    """The window ends before the gap; a time behind it names the gap."""
    whole = MergeSources.open(recorded.full, recorded.log)
    assert whole.log is not None
    found = indispensable(whole.log, whole.window()[0])
    missing = found[len(found) // 2]
    shutil.copytree(recorded.log.storage.path, tmp_path / "log")
    (tmp_path / "log" / missing.name).unlink()
    log = LogSource(parse(f"local://{tmp_path / 'log'}"), LOG_ID)
    assert MergeSources.open(recorded.full, log).window() == (whole.window()[0], missing.from_ts)
    recorded.check(tmp_path, recorded.full, log, missing.from_ts)
    said: list[str] = []
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        wanted = RestoreOptions(cluster=target.config, storage=recorded.full, dry_run=True)
        latest = restore_to_point(PointOptions(wanted, log, 0), lambda event: said.append(str(event)))
    assert latest.ts == missing.from_ts
    assert any(
        "the last time before the log lacks changes" in each and "later changes are not restored" in each
        for each in said
    )
    place = parse(f"local://{tmp_path / 'merged'}")
    with pytest.raises(LogDamaged, match=str(missing.from_ts)):
        merge_backup(MergeOptions(BackupOptions(recorded.source.config, place), recorded.full, log, missing.to_ts))
    assert not list(open_store(place).list())
