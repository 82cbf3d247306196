"""Start-ts and safe point, at a playground."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from formats.api_version import ApiVersion
from incremental.handover import FromBackup, FromNow, FromTs, protect, resolve, service_id
from tests.integration.backup.test_outcomes import ts_of
from tests.integration.incremental.conftest import Clusters
from tests.live_cluster import LiveCluster, live_cluster
from tests.waiting import eventually
from tikv_br.backup import backup_ts
from tikv_br.backup.options import BackupOptions
from tikv_br.backup.run import backup
from tikv_br.backupset.coverage import KeyRange
from tikv_br.cluster.safepoint import release
from tikv_br.cluster.timestamp import minus_seconds
from tikv_br.errors import ClusterUnfit, SafePointError, UsageError
from tikv_br.storage.url import StorageLocation

V2 = ApiVersion.V2


@pytest.fixture
def v2(clusters: Clusters) -> Iterator[LiveCluster]:
    """A V2 cluster with rows and without safe points, before and afterwards."""
    live = clusters(V2)
    for name in safe_points(live):
        release(live.cluster.pd, name)
    live.raw().delete_range(b"", b"")
    live.raw().batch_put({b"k%03d" % at: b"v" for at in range(100)})
    yield live
    for name in safe_points(live):
        release(live.cluster.pd, name)


def safe_points(live: LiveCluster) -> dict[str, int]:
    """What PD holds for services other than GC itself."""
    points = live.get("/pd/api/v1/gc/safepoint")["service_gc_safe_points"]
    return {point["service_id"]: point["safe_point"] for point in points if point["service_id"] != "gc_worker"}


def keyspace(live: LiveCluster, start: bytes = b"", end: bytes = b"") -> KeyRange:
    """RPC keys of keyspace 0."""
    return KeyRange(*live.raw().codec.rpc_range(start, end))


def options(live: LiveCluster, place: Path, **changes: object) -> BackupOptions:
    """A backup by scan, here."""
    usual = BackupOptions(cluster=live.config, storage=StorageLocation("local", str(place)), engine="scan")
    return replace(usual, executor="driver", concurrency=1, **changes)  # type: ignore[arg-type]


def test_at_every_instant_some_safe_point_holds_backup_ts(v2: LiveCluster, tmp_path: Path) -> None:
    """From the backup's first scan until the sync stands alone, PD always holds a safe point at backup-ts - 1 or below."""
    seen: list[dict[str, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(safe_points(v2))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = backup(options(v2, tmp_path / "b", gc_ttl=600)).summary
        ts = resolve(FromBackup(StorageLocation("local", str(tmp_path / "b"))), v2.cluster, keyspace(v2))
        assert ts == done.backup_ts > 0
        keeper = protect(v2.cluster.pd, "one", ts)
        release(v2.cluster.pd, backup_ts.service_id(done.run_id))
        looks = len(seen)
        eventually(lambda: len(seen) > looks + 1, 60)  # the second of them has begun since
    finally:
        stop.set()
        watcher.join()
    keeper.stop()
    held = [any(point <= ts - 1 for point in points.values()) for points in seen]
    assert held.index(True) < len(held) - 1
    assert all(held[held.index(True) :])
    assert list(seen[-1]) == [service_id("one")]


def test_now_misses_no_write_that_follows(v2: LiveCluster, tmp_path: Path) -> None:
    """The next write has a ts above the start, even with no interval: cached timestamps are flushed."""
    v2.raw().put(b"k000", b"fills the cache of the leader")
    time.sleep(0.3)
    start = resolve(FromNow(safe_interval=0), v2.cluster, keyspace(v2))
    v2.raw().put(b"k000", b"later")
    assert ts_of(v2, b"k000", tmp_path) > start


def test_a_ts_that_stores_may_still_undercut_is_refused(v2: LiveCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ts of this moment or of the future is refused with a way out; one old enough is taken."""
    now = v2.cluster.pd.tso()
    monkeypatch.setattr(v2.cluster.pd, "tso", lambda: now)  # it stays now, however slow the machine is
    for ts in (0, now, now + (1 << 40), minus_seconds(now, 3)):
        with pytest.raises(UsageError, match="start-ts"):
            resolve(FromTs(ts), v2.cluster, keyspace(v2))
    old = minus_seconds(now, 10)
    assert resolve(FromTs(old), v2.cluster, keyspace(v2)) == old


def test_a_backup_of_less_or_of_another_cluster_is_refused(v2: LiveCluster, clusters: Clusters, tmp_path: Path) -> None:
    """The span must lie in the backup's; V1 has no ts, neither as source nor in its backup."""
    backup(options(v2, tmp_path / "part", ranges=((b"k010", b"k020"),), gc_ttl=0))
    part = FromBackup(StorageLocation("local", str(tmp_path / "part")))
    assert resolve(part, v2.cluster, keyspace(v2, b"k010", b"k015")) > 0
    with pytest.raises(UsageError, match="lacks"):
        resolve(part, v2.cluster, keyspace(v2, b"k010", b"k021"))
    v1 = clusters(ApiVersion.V1)
    v1.raw().put(b"a", b"b")
    backup(options(v1, tmp_path / "v1"))
    old = FromBackup(StorageLocation("local", str(tmp_path / "v1")))
    with pytest.raises(UsageError, match="is of cluster"):
        resolve(old, v2.cluster, keyspace(v2))
    with pytest.raises(ClusterUnfit, match="no timestamps") as refused:
        resolve(old, v1.cluster, keyspace(v1))
    assert "--mode diff" in refused.value.hint


def test_a_start_that_gc_has_passed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Behind PD's safe points nothing is registered, and the hint says how to begin anew."""
    with live_cluster(tmp_path, V2, stores=1) as live:  # of its own: GC never goes back
        passed = live.cluster.pd.tso()
        live.cluster.pd.update_service_safe_point("gc_worker", (1 << 63) - 1, passed)
        with pytest.raises(SafePointError, match="has passed") as refused:
            protect(live.cluster.pd, "late", passed - 10)
        assert "new backup" in refused.value.hint
        assert service_id("late") not in safe_points(live)
        protect(live.cluster.pd, "in-time", passed + 1).stop()
        assert safe_points(live)[service_id("in-time")] == passed
