"""Incremental backups on a playground: a chain restores what the source held, at the backup-ts of any of its backups."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.integration.restore.points import rows_of
from tests.support import history
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.logs import write_log
from tikv_br.archive.log import LogArchive
from tikv_br.backup.merge import MergeOptions, merge_backup
from tikv_br.backup.run import backup
from tikv_br.backupset import prune
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.coverage import codec_of
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.index import Index
from tikv_br.backupset.rows import read_rows
from tikv_br.dataflow.options import BackupOptions
from tikv_br.dataflow.read import MergeSources
from tikv_br.dataflow.run import BackupSummary, abort_backup
from tikv_br.datasource import TikvBackupDataSource
from tikv_br.errors import (
    BackupDamaged,
    BackupNotFound,
    BackupUnsupported,
    ClusterFollowed,
    ClusterUnfit,
    ClusterUnreachable,
    Failure,
    Interrupted,
    OutsideRestoreWindow,
    ResumeRefused,
    SafePointError,
    StorageUnreachable,
    TargetNotEmpty,
    Terminated,
    TikvBrError,
    UsageError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.incremental.backup import back_up_changes
from tikv_br.point_in_time import PointOptions, restore_to_point
from tikv_br.progress_events import Event, Notice, Reporter, StepStarted, silent
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

KEYS = 300


def key_of(number: int) -> bytes:
    """The key of a number below `KEYS`."""
    return b"key%04d" % number


def options(live: LiveCluster, place: StorageLocation, **more: object) -> BackupOptions:
    """Options of a backup on threads, with a backup-ts of this moment."""
    return BackupOptions(live.config, place, executor="driver", safe_interval=0.0, **more)  # type: ignore[arg-type]


class Chain:
    """A full backup and two increments of a cluster that was written to between them."""

    def __init__(self, folder: Path, live: LiveCluster) -> None:
        self.live = live
        self._folder = folder
        self.histories: list[history.History] = []
        self.places = [parse(f"local://{folder / name}") for name in ("full", "monday", "tuesday")]
        full, monday, tuesday = self.places
        raw = live.raw()
        raw.batch_put({key_of(number): b"first %d" % number for number in range(KEYS)})
        live.split(raw.codec.bound(raw.codec.rpc_key(key_of(100))))
        self.rows = [self._backed_up(lambda: backup(options(live, full)))]
        raw.batch_put({key_of(number): b"second %d" % number for number in range(0, KEYS, 3)})
        raw.batch_delete([key_of(number) for number in range(1, KEYS, 3)])
        raw.put(b"new", b"on monday")
        self.rows.append(self._backed_up(lambda: back_up_changes(options(live, monday), full)))
        live.split(raw.codec.bound(raw.codec.rpc_key(key_of(200))))
        raw.batch_put({key_of(number): b"third %d" % number for number in range(1, KEYS, 6)})
        raw.delete(b"new")
        raw.put(b"short", b"expires", ttl=1)
        raw.put(b"long", b"stays", ttl=5000)
        time.sleep(2)
        self.rows.append(self._backed_up(lambda: back_up_changes(options(live, tuesday), monday)))

    def _backed_up(self, action: Callable[[], object]) -> dict[bytes, bytes]:
        found = contents(self.live)
        self.histories.append(history.read(self._folder / "source", self._folder / f"scratch-{len(self.histories)}"))
        action()
        return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """A chain of backups and its live source."""
    folder = tmp_path_factory.mktemp("chain")
    with live_cluster(folder / "source", ApiVersion.V2, stores=3) as live:
        yield Chain(folder, live)


@pytest.mark.parametrize("last", [1, 2])
def test_a_chain_restores_what_the_source_held(chain: Chain, tmp_path: Path, last: int) -> None:
    """Into another cluster; the temporary backup is gone afterwards."""
    with live_cluster(tmp_path / "target", ApiVersion.V2) as target:
        wanted = RestoreOptions(target.config, chain.places[last])
        done = restore_to_point(PointOptions(wanted, None, 0, work=parse(f"local://{tmp_path / 'work'}")))
        assert contents(target) == chain.rows[last]
    assert done.restored is not None
    assert done.restored.verified
    assert not list(open_store(parse(f"local://{tmp_path / 'work'}")).list())


def failing_at(step: str, error: Failure) -> Reporter:
    """Raises the error at the beginning of a step."""

    def report(event: Event) -> None:
        if isinstance(event, StepStarted) and event.name == step:
            raise error

    return report


@pytest.fixture(scope="module")
def empty_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster into which no test restores a row in the end."""
    with live_cluster(tmp_path_factory.mktemp("target"), ApiVersion.V2, stores=1) as target:
        yield target


def test_a_full_target_is_refused_before_anything_is_merged(chain: Chain, tmp_path: Path) -> None:
    """The temporary backup is not even begun, and leaves nothing behind."""
    begun: list[Event] = []
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        target.raw().put(key_of(7), b"of somebody")
        wanted = RestoreOptions(target.config, chain.places[2])
        point = PointOptions(wanted, None, 0, work=parse(f"local://{tmp_path / 'work'}"))
        with pytest.raises(TargetNotEmpty):
            restore_to_point(point, begun.append)
        other = structs.replace(point, restore=structs.replace(wanted, span=KeyRange(key_of(8), b"")))
        assert restore_to_point(other).restored is not None
    assert not [event for event in begun if isinstance(event, StepStarted)]
    assert not list(open_store(parse(f"local://{tmp_path / 'work'}")).list())


@pytest.mark.parametrize(
    ("step", "error", "kept"),
    [
        ("plan", Interrupted("interrupted"), False),
        ("merge", BackupDamaged("a file is damaged"), False),
        ("verify coverage", Terminated("terminated"), False),
        ("look for rows", Terminated("terminated"), False),
        ("announce the ingest", ClusterFollowed("a sync follows"), False),
        ("commit", Interrupted("interrupted"), False),
        ("commit", StorageUnreachable("no answer"), True),
        ("announce the ingest", ClusterUnreachable("no answer"), True),
        ("ingest", Interrupted("interrupted"), True),
    ],
)
def test_merged_rows_go_with_a_failure(
    chain: Chain, empty_target: LiveCluster, tmp_path: Path, step: str, error: TikvBrError, *, kept: bool
) -> None:
    """Unless the target has changed, or the same command resumes after an outage."""
    folder = parse(f"local://{tmp_path / 'work'}")
    wanted = RestoreOptions(empty_target.config, chain.places[2])
    with pytest.raises(type(error)) as raised:
        restore_to_point(PointOptions(wanted, None, 0, work=folder), failing_at(step, error))
    assert bool(list(open_store(folder).list())) is kept
    assert ("The finished part is kept" in raised.value.hint) is (kept and step == "commit")
    assert contents(empty_target) == {}


def test_a_begun_restore_with_its_state_elsewhere_keeps_its_rows(chain: Chain, tmp_path: Path) -> None:
    """Until the same command has restored them: the record of the restore is at ``--state``."""
    folder = parse(f"local://{tmp_path / 'work'}")
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        wanted = RestoreOptions(target.config, chain.places[2], state=parse(f"local://{tmp_path / 'state'}"))
        point = PointOptions(wanted, None, 0, work=folder)
        with pytest.raises(Interrupted):
            restore_to_point(point, interrupt_at("compare checksums"))
        assert contents(target) == chain.rows[2]
        again = restore_to_point(point)
    assert again.merged is None
    assert again.restored is not None
    assert not list(open_store(folder).list())


@pytest.mark.parametrize("last", [0, 1, 2])
def test_spark_reads_a_chain_as_it_is_restored(chain: Chain, last: int) -> None:
    """The source of backups gives the rows of the whole chain, without those that were deleted or have expired."""
    source = TikvBackupDataSource({"path": chain.places[last].path})
    reader: Any = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert len(rows) == len(chain.rows[last])
    assert {row["key"]: row["value"] for row in rows} == chain.rows[last]


def test_an_increment_has_the_newest_changes_only(chain: Chain) -> None:
    """As the source's RocksDB has them; tombstones too."""
    for parent, child in ((0, 1), (1, 2)):
        since = BackupSet.open(open_store(chain.places[parent])).backup_ts
        found = BackupSet.open(open_store(chain.places[child]))
        newest = {key: versions[-1] for key, versions in chain.histories[child].items()}
        expected = {key: (each.ts, each.value) for key, each in newest.items() if each.ts > since}
        rows = [
            row
            for file in found.files
            for batch in read_rows(found.store, file, codec_of(ApiVersion.V2, file.key_range))
            for row in batch.to_pylist()
        ]
        assert {row["key"]: (row["ts"], None if row["deleted"] else row["value"]) for row in rows} == expected
        assert len(rows) == len(expected)


def test_a_rate_limit_is_reported_as_without_effect(chain: Chain, tmp_path: Path) -> None:
    """Nothing limits a change feed."""
    seen: list[Event] = []
    wanted = options(chain.live, parse(f"local://{tmp_path / 'limited'}"), rate_limit=1 << 20, dry_run=True)
    back_up_changes(wanted, chain.places[0], seen.append)
    assert [event for event in seen if isinstance(event, Notice) and "--ratelimit" in event.message]


@pytest.mark.core("backup")
def test_merged_rows_are_those_of_the_source(chain: Chain, tmp_path: Path) -> None:
    """In Parquet or SSTs, and the result is a full backup."""
    for kind in FileKind:
        place = parse(f"local://{tmp_path / kind}")
        merge_backup(MergeOptions(options(chain.live, place, file_kind=kind), chain.places[2]))
        assert rows_of(place) == chain.rows[2]
        BackupSet.open(open_store(place)).require_full()


def test_an_unfinished_merge_is_not_resumed_for_another_time(chain: Chain, tmp_path: Path) -> None:
    """Its intervals have the rows of its own time."""
    newest, place = chain.places[0], parse(f"local://{tmp_path / 'merged'}")
    first, second = (chain.live.cluster.pd.tso() + (number << 18) for number in (1000, 2000))
    log = write_log(parse(f"local://{tmp_path / 'log'}"), chain.live.cluster.cluster_id, backup_ts(newest), [second])

    def merge_to(ts: int, report: Reporter = silent) -> BackupSummary:
        return merge_backup(MergeOptions(options(chain.live, place), newest, log, ts), report).summary

    with pytest.raises(Interrupted):
        merge_to(first, interrupt_at("commit"))
    with pytest.raises(ResumeRefused, match="the unfinished merge at") as refused:
        merge_to(second)
    assert str(first) in refused.value.message
    assert refused.value.hint == "Pass that time, or --no-resume to remove its files and start over."
    assert merge_to(0).backup_ts == first, "no time: that of the unfinished one"
    assert rows_of(place) == chain.rows[0]


def test_the_end_of_a_log_in_a_scan_window(chain: Chain, tmp_path: Path) -> None:
    """Only inexact rows can be had there, and the nearest exact time is named; the log may have ended in a disaster."""
    newest, place = chain.places[0], parse(f"local://{tmp_path / 'merged'}")
    exact, inexact, end, later = (chain.live.cluster.pd.tso() + (number << 18) for number in (1000, 2000, 3000, 4000))
    source = chain.live.cluster.cluster_id
    log = write_log(parse(f"local://{tmp_path / 'log'}"), source, backup_ts(newest), [end], inexact=[(exact, later)])
    assert MergeSources.open(newest, log).window()[1] == exact
    with pytest.raises(OutsideRestoreWindow, match="not all rows are known") as refused:
        merge_backup(MergeOptions(options(chain.live, place), newest, log, inexact))
    assert f"Pass {exact}, the nearest" in refused.value.hint
    with pytest.raises(OutsideRestoreWindow, match="outside the restorable window"):
        merge_backup(MergeOptions(options(chain.live, place), newest, log, later, allow_inexact=True))
    with pytest.raises(Interrupted):
        merge_backup(MergeOptions(options(chain.live, place), newest, log, allow_inexact=True), interrupt_at("commit"))
    with pytest.raises(OutsideRestoreWindow, match="not all rows are known"):
        merge_backup(MergeOptions(options(chain.live, place), newest, log))
    abort_backup(place, None)
    for ts in (inexact, 0):
        done = merge_backup(MergeOptions(options(chain.live, place, dry_run=True), newest, log, ts, allow_inexact=True))
        assert done.summary.backup_ts == (ts or end)


def test_a_log_that_starts_with_a_scan_window(chain: Chain, tmp_path: Path) -> None:
    """The window starts where the scan window ends; before it only inexact rows can be had, before that time none at all."""
    newest, folder = chain.places[-1], parse(f"local://{tmp_path / 'log'}")
    start, scanned = backup_ts(newest), MergeSources.open(newest, None).window()[0]
    exact, end = (scanned + (number << 18) for number in (1000, 2000))
    log = write_log(folder, chain.live.cluster.cluster_id, start, [exact - 1, end], inexact=[(start, exact)])
    sources = MergeSources.open(newest, log)
    assert sources.window() == (exact, end)
    assert sources.window(allow_inexact=True) == (scanned, end)
    sources.check(exact)
    sources.check(scanned, allow_inexact=True)
    with pytest.raises(OutsideRestoreWindow, match="not all rows are known") as refused:
        sources.check(scanned)
    assert f"Pass {exact}, the nearest" in refused.value.hint
    with pytest.raises(OutsideRestoreWindow, match=f"outside the restorable window, .*{exact}.* to "):
        sources.check(scanned - 1)
    ended = replace(sources, log=replace(log_of(sources), segments=log_of(sources).segments[:1]))
    with pytest.raises(OutsideRestoreWindow, match="before the first time that can be restored"):
        ended.check(exact - 1)


def log_of(sources: MergeSources) -> LogArchive:
    """The log of sources that have one."""
    assert sources.log is not None
    return sources.log


def backup_ts(place: StorageLocation) -> int:
    """That of a backup."""
    return BackupSet.open(open_store(place)).backup_ts


def interrupt_at(step: str) -> Reporter:
    """Interrupt the command when it begins a step."""
    return failing_at(step, Interrupted("interrupted"))


def test_on_spark(chain: Chain, tmp_path: Path) -> None:
    """The changes, and the merge: tasks find their cluster and storage by themselves."""
    spark = {"executor": "spark", "spark_master": "local[2]"}
    increment, merged = (parse(f"local://{tmp_path / name}") for name in ("increment", "merged"))
    done = back_up_changes(structs.replace(options(chain.live, increment), **spark), chain.places[0])
    assert done.summary.executor == "spark"
    merge_backup(MergeOptions(structs.replace(options(chain.live, merged), **spark), increment))
    assert rows_of(merged) == contents(chain.live)


def test_an_increment_alone_is_not_restored(chain: Chain, tmp_path: Path) -> None:
    """Its rows are only changes."""
    with (
        live_cluster(tmp_path / "target", ApiVersion.V2) as target,
        pytest.raises(BackupUnsupported, match="incremental"),
    ):
        restore(RestoreOptions(target.config, chain.places[1]))


def test_a_parent_that_is_gone_or_another_is_named(chain: Chain, tmp_path: Path) -> None:
    """A chain that was copied elsewhere finds its own parents, or none."""
    moved = [parse(f"local://{tmp_path / Path(place.path).name}") for place in chain.places]
    for place in (1, 2):
        shutil.copytree(chain.places[place].path, moved[place].path)
    with pytest.raises(BackupNotFound, match="full"):
        BackupSet.open(open_store(moved[2])).chain()
    shutil.copytree(chain.places[1].path, moved[0].path)
    with pytest.raises(BackupDamaged, match="is another backup"):
        BackupSet.open(open_store(moved[2])).chain()
    shutil.rmtree(moved[0].path)
    shutil.copytree(chain.places[0].path, moved[0].path)
    assert [each.store.location for each in BackupSet.open(open_store(moved[2])).chain()] == moved


def test_unusable_bases_are_refused(chain: Chain, tmp_path: Path) -> None:
    """Other clusters, clusters without timestamps, and bases that GC has passed."""
    place = parse(f"local://{tmp_path / 'next'}")
    with live_cluster(tmp_path / "v1", ApiVersion.V1) as other, pytest.raises(ClusterUnfit, match="API V2"):
        back_up_changes(options(other, place), chain.places[2])
    with live_cluster(tmp_path / "v2", ApiVersion.V2) as other:
        with pytest.raises(UsageError, match="cluster"):
            back_up_changes(options(other, place), chain.places[2])
        base = parse(f"local://{tmp_path / 'base'}")
        other.raw().put(b"key", b"value")
        backup(options(other, base, gc_ttl=0))
        pd = other.cluster.pd
        pd.update_service_safe_point("gc_worker", (1 << 63) - 1, pd.tso())
        with pytest.raises(SafePointError, match="cannot continue"):
            back_up_changes(options(other, place), base)
    assert not list(open_store(place).list())


def test_prune_keeps_the_parents_of_what_it_keeps(chain: Chain, tmp_path: Path) -> None:
    """Also below a root that was copied from elsewhere."""
    shutil.copytree(
        Path(chain.places[0].path).parent, tmp_path / "root", ignore=shutil.ignore_patterns("source", "*-scratch")
    )
    root = Index(open_store(parse(f"local://{tmp_path / 'root'}")))
    decisions = prune.plan(root, prune.Policy(last=1)).decisions
    kept = {each.listed.entry.path: each.reasons for each in decisions}
    assert kept["tuesday"] == ("last",)
    assert all("parent of" in kept[path][0] for path in ("monday", "full"))


@pytest.mark.parametrize("level", [Level.FILES, Level.DATA])
def test_verify_checks_the_parents(chain: Chain, tmp_path: Path, level: Level) -> None:
    """One that is gone is a finding, whatever the state of the increment itself."""
    assert verify(VerifyOptions(chain.places[2], level)).files_checked
    shutil.copytree(chain.places[2].path, tmp_path / "tuesday")
    findings: list[Finding] = []
    with pytest.raises(BackupDamaged, match="1 finding"):
        verify(VerifyOptions(parse(f"local://{tmp_path / 'tuesday'}"), level), on_finding=findings.append)
    assert "monday" in findings[0].cause
