"""Outcomes of a backup: complete on success, no remains on failure, and GC blocked in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import hard_rows, load, when
from tests.integration.backup.reading import ts_of
from tests.support.live_cluster import LiveCluster, live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.safepoint import service_id
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import (
    BackupDamaged,
    BackupPathInUse,
    CoverageError,
    Interrupted,
    LeaseHeld,
    NothingMatched,
    SafePointError,
    TikvBrError,
)
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted
from tikv_br.storage.open import open_store

V1, V2 = ApiVersion.V1, ApiVersion.V2


@pytest.fixture(scope="module")
def v2(clusters: Clusters) -> LiveCluster:
    """Return a V2 cluster with rows in several regions."""
    live = clusters(V2)
    load(live, hard_rows(count=1000))
    codec = live.raw().codec
    live.split(*(codec.bound(codec.rpc_key(key)) for key in (b"row00100", b"row005")))
    return live


def files_at(place: str) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(str(path.relative_to(place)) for path in Path(place).rglob("*") if path.is_file())


def test_backup_ts_is_protected_from_before_the_scan_until_after_the_end(v2: LiveCluster, options: Options) -> None:
    """At the scan's first moment and after the end PD holds backup-ts - 1 under the run's name, as the manifest says it."""
    during: list[dict[str, int]] = []
    before = v2.cluster.pd.tso()
    wanted = options(v2, safe_interval=90)
    summary = backup(wanted, when(StepStarted, "copy", lambda: during.append(v2.safe_points()))).summary
    after = v2.cluster.pd.tso()
    held = {service_id(summary.run_id, wanted.storage): summary.backup_ts - 1}
    assert during == [held]
    assert v2.safe_points() == held
    assert physical_ms(before) - 90_000 <= physical_ms(summary.backup_ts) <= physical_ms(after) - 90_000
    kept = BackupSet.open(open_store(wanted.storage))
    assert kept.backup_ts == summary.backup_ts
    assert {(file.min_ts, file.max_ts) for file in kept.files} == {(summary.backup_ts, summary.backup_ts)}
    v2.cluster.pd.update_service_safe_point(service_id(summary.run_id, wanted.storage), 0, 0)


def test_an_interruption_after_the_commit_promises_no_resume(v2: LiveCluster, options: Options) -> None:
    """The backup is complete, and its path in use."""
    wanted = options(v2)

    def interrupt() -> None:
        raise Interrupted("interrupted")

    with pytest.raises(Interrupted) as interrupted:
        backup(wanted, when(StepStarted, "hand over the safe point", interrupt))
    assert "resumes the backup" not in interrupted.value.hint
    with pytest.raises(BackupPathInUse):
        backup(wanted)
    for name in v2.safe_points():
        v2.cluster.pd.update_service_safe_point(name, 0, 0)


def test_gcttl_zero_leaves_no_safe_point(v2: LiveCluster, options: Options) -> None:
    """With a TTL of 0 there is no tail."""
    backup(options(v2, gc_ttl=0))
    assert v2.safe_points() == {}


def test_writes_after_backup_ts_was_chosen_get_a_larger_ts(v2: LiveCluster, options: Options, tmp_path: Path) -> None:
    """The stores' cached timestamps are flushed: with no safe interval at all, a later write is still above backup-ts."""
    v2.raw().put(b"row00001", b"fills the cache of the leader")
    time.sleep(0.3)
    write = when(StepFinished, "choose backup-ts", lambda: v2.raw().put(b"row00001", b"later"))
    summary = backup(options(v2, safe_interval=0, gc_ttl=0), write).summary
    assert ts_of(v2, b"row00001", tmp_path) > summary.backup_ts


def test_gc_that_has_passed_is_refused(options: Options, tmp_path: Path) -> None:
    """The backup does not start if versions that a tail would need are gone."""
    with live_cluster(tmp_path / "cluster", V2, stores=1) as live:
        live.raw().put(b"key", b"value")
        live.cluster.pd.update_service_safe_point("gc_worker", 2**63 - 1, live.cluster.pd.tso())
        wanted = options(live, safe_interval=60)
        with pytest.raises(SafePointError, match="passed"):
            backup(wanted)
        assert live.safe_points() == {}
    assert files_at(wanted.storage.path) == []


def tamper(step: str, act: Callable[[Path], object], place: str) -> Callable[[Event], None]:
    """Return a reporter that does something to the storage when a step has ended."""
    return when(StepFinished, step, lambda: act(Path(place)))


def remove(pattern: str) -> Callable[[Path], object]:
    """Return an act that removes one file."""
    return lambda place: next(iter(sorted(place.glob(pattern)))).unlink()


def shorten(pattern: str) -> Callable[[Path], object]:
    """Return an act that cuts the last byte off one file."""

    def act(place: Path) -> None:
        path = next(iter(sorted(place.glob(pattern))))
        path.write_bytes(path.read_bytes()[:-1])

    return act


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (remove("tikv-br/ledger/*.json"), CoverageError),
        (remove("sst/*.sst"), BackupDamaged),
        (shorten("sst/*.sst"), BackupDamaged),
    ],
)
def test_a_loss_before_the_commit_is_detected(
    act: Callable[[Path], object], error: type[TikvBrError], clusters: Clusters, options: Options
) -> None:
    """A missing or cut record or file prevents the commit; the same command makes up for the loss."""
    live = clusters(V1)
    load(live, {b"k%d" % number: b"v" for number in range(100)})
    wanted = options(live)
    with pytest.raises(error):
        backup(wanted, tamper("copy", act, wanted.storage.path))
    assert "backupmeta" not in files_at(wanted.storage.path)
    assert backup(wanted).summary.total_kvs == live.raw().checksum().total_kvs
    BackupSet.open(open_store(wanted.storage))


def test_another_backup_at_the_path_is_left_alone(clusters: Clusters, options: Options) -> None:
    """A finished backup, and one under way, are refused before anything is written, and not a byte of them changes."""
    live = clusters(V1)
    load(live, hard_rows(count=100))
    wanted = options(live)
    backup(wanted)
    place = Path(wanted.storage.path)
    before = {name: (place / name).read_bytes() for name in files_at(str(place))}
    with pytest.raises(BackupPathInUse):
        backup(wanted)
    assert {name: (place / name).read_bytes() for name in files_at(str(place))} == before
    under_way = options(live)
    inner: list[type[BaseException]] = []

    def start_another() -> None:
        try:
            backup(under_way)
        except LeaseHeld as error:
            inner.append(type(error))

    backup(under_way, when(StepStarted, "copy", start_another))
    assert inner == [LeaseHeld]
    assert "backupmeta" in files_at(under_way.storage.path)


def test_a_dry_run_writes_nothing_anywhere(v2: LiveCluster, options: Options) -> None:
    """It plans, and neither the storage nor PD knows of it."""
    wanted = options(v2, dry_run=True)
    report = backup(wanted)
    assert report.summary.dry_run
    assert report.plan[0].span.start == b"r\0\0\0"
    assert report.plan[-1].span.end == b"r\0\0\1"
    assert v2.safe_points() == {}
    assert not Path(wanted.storage.path).exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_range_or_keyspace_without_a_row_is_refused(v2: LiveCluster, options: Options, dry_run: bool) -> None:
    """The bounds are shown as text and in hex, and nothing is written; ranges beside one that has rows are reported only."""
    wanted = options(v2, ranges=(KeyRange(b"nokey\0", b"nokey\1"),), gc_ttl=0, dry_run=dry_run)
    with pytest.raises(NothingMatched) as raised:
        backup(wanted)
    assert r'no row from "nokey\x00" (hex:6e6f6b657900) to "nokey\x01" (hex:6e6f6b657901)' in raised.value.message
    keyspace = v2.create_keyspace("ks77")
    with pytest.raises(NothingMatched, match=f"keyspace {keyspace}"):
        backup(options(v2, keyspaces=("ks77",), dry_run=dry_run))
    assert not Path(wanted.storage.path).exists()
    notices: list[Event] = []
    backup(
        options(v2, ranges=(KeyRange(b"", b"nokey"), KeyRange(b"nokey", b"nokez")), gc_ttl=0, dry_run=dry_run),
        notices.append,
    )
    assert any(isinstance(event, Notice) and "(hex:6e6f6b6579)" in event.message for event in notices)


def test_an_empty_keyspace_makes_an_empty_backup_if_that_is_allowed(v2: LiveCluster, options: Options) -> None:
    """No rows, no files, yet a backup that covers the range."""
    keyspace = v2.create_keyspace("ks77")
    wanted = options(v2, keyspaces=("ks77",), gc_ttl=0, allow_empty=True)
    summary = backup(wanted).summary
    kept = BackupSet.open(open_store(wanted.storage))
    assert (summary.total_kvs, summary.files, kept.files) == (0, 0, ())
    assert [part.start for part in kept.ranges] == [b"r" + keyspace.to_bytes(3, "big")]
